// The GPU drivers: which wave runs which role, with a barrier between two phases of the prologue.
#pragma once

#include "../kernel/prologue.h"
#include "../kernel/schedule.h"
#include "../kernel/target.h"
#include "vendor.h"

#if defined(__CUDACC__)
#define KDA_PARAMETER const __grid_constant__  // read where it lies, not copied to each thread
#else
#define KDA_PARAMETER const
#endif

namespace kda {
inline namespace KDA_ISA {

template <class Tiles>
KDA_FN int wave_index() {
  // The same in all lanes of a wave; said so, that what depends on it is scalar.
#if defined(__CUDACC__)
  return __shfl_sync(~0u, int(threadIdx.x) / Tiles::kWave, 0);
#else
  return __builtin_amdgcn_readfirstlane(int(threadIdx.x) / Tiles::kWave);
#endif
}

// The one state of a wave that walks a single slice.
template <class State>
struct OneState {
  State state;
  KDA_FN State& operator()(int) { return state; }
};

// One block for each (chunk of the slab, head), one wave for each 16 tokens.
template <class Tiles, class Policy, int K, int C, bool Unbounded>
__global__ void __launch_bounds__(C / kTile * Tiles::kWave)
    prologue_kernel(KDA_PARAMETER Problem p, int slab_first) {
  using P = Prologue<Tiles, Policy, K, C, Unbounded>;
  extern __shared__ __attribute__((aligned(64))) char memory[];
  auto& shared = *reinterpret_cast<typename P::Shared*>(memory);
  const Schedule<Tiles, Policy, K, C> s{p, slab_first, p.NC};
  const int64_t chunk = slab_first + blockIdx.x / p.H;
  const int head = int(blockIdx.x % p.H), wave = wave_index<Tiles>();
  const ChunkRow row = s.chunk_row(chunk);
  if (row.sequence < 0) return;  // padding; the whole block leaves
  auto* blob = s.blob(chunk, head);
  typename P::Wave w;
  P::load(p, row, head, wave, w, shared);
  __syncthreads();
  P::factors(wave, P::NT, w, shared, blob, s.decay(chunk, head));
  __syncthreads();
  P::scores(wave, w, shared, blob);
  __syncthreads();
  P::solve(p, row, head, wave, shared, blob);
}

// One wave for each (sequence, head, slice). Waves do not talk to each other.
constexpr int kWalkWaves = 4;

template <class Tiles, class Policy, int K, int C>
__global__ void __launch_bounds__(kWalkWaves* Tiles::kWave)
    walk_kernel(KDA_PARAMETER Problem p, int slab_first, int slab_last) {
  using S = Schedule<Tiles, Policy, K, C>;
  const S s{p, slab_first, slab_last};
  const int slices = p.V / kTile;
  const int64_t i = int64_t(blockIdx.x) * kWalkWaves + wave_index<Tiles>();
  if (i >= p.N * p.H * slices) return;
  OneState<typename S::State> state;
  const int slice = int(i % slices);
  s.walk_slab(state, i / slices / p.H, int(i / slices % p.H), slice, slice + 1);
}

// The same with the operands of a chunk brought to shared memory while the chunk before it is worked
// on; the waves of a block take neighbouring slices of one head and share them.
template <class Tiles, int K, int C, int Waves>
struct WalkStage {
  using Storage = typename Tiles::Storage;
  using Layout = Blob<K, C>;
  static constexpr int kTilesOfSlice = C / kTile * kTileElements;
  alignas(128) Storage operands[Layout::u(0, 0)];
  alignas(128) Storage u[Waves * kTilesOfSlice];
  alignas(128) float decay[K];

  KDA_FN void fetch(const Storage* blob, const float* chunk_decay, int slice) {
    copy(operands, blob, sizeof operands);
    copy(u, blob + Layout::u(slice, 0), sizeof u);
    copy(decay, chunk_decay, sizeof decay);
    Tiles::commit_copies();
  }
  static KDA_FN void copy(void* to, const void* from, int bytes) {
    for (int i = 16 * int(threadIdx.x); i < bytes; i += 16 * Waves * Tiles::kWave)
      Tiles::copy16(static_cast<char*>(to) + i, static_cast<const char*>(from) + i);
  }
};

template <class Tiles, class Policy, int K, int C, int Waves>
__global__ void __launch_bounds__(Waves* Tiles::kWave)
    staged_walk_kernel(KDA_PARAMETER Problem p, int slab_first, int slab_last) {
  using S = Schedule<Tiles, Policy, K, C>;
  using Stage = WalkStage<Tiles, K, C, Waves>;
  extern __shared__ __attribute__((aligned(128))) char memory[];
  auto* stages = reinterpret_cast<Stage*>(memory);
  const S s{p, slab_first, slab_last};
  const int parts = p.V / kTile / Waves, wave = wave_index<Tiles>();
  const int head = int(blockIdx.x / parts % p.H), first_slice = int(blockIdx.x % parts) * Waves;
  const int64_t seq = blockIdx.x / parts / p.H;
  const int slice = first_slice + wave;
  const typename S::Range range = s.range_in_slab(seq);
  if (range.first >= range.last) return;
  typename S::State state;
  stages[0].fetch(s.blob(range.first, head), s.decay(range.first, head), first_slice);
  s.enter(state, seq, head, slice, range.from_start);
  for (int64_t c = range.first; c < range.last; ++c) {
    const int64_t next = c + 1 < range.last ? c + 1 : c;  // the last one fetches itself again
    Stage& stage = stages[(c - range.first) & 1];
    stages[(c + 1 - range.first) & 1].fetch(s.blob(next, head), s.decay(next, head), first_slice);
    Tiles::template wait_copies<1>();
    __syncthreads();
    const ChunkRow chunk = s.chunk_row(c);
    S::W::step(p, chunk, head, slice, state, stage.operands,
               stage.u + wave * Stage::kTilesOfSlice, stage.decay);
    s.save_checkpoint(state, chunk, head, slice);
    __syncthreads();
  }
  Tiles::template wait_copies<0>();
  s.leave(state, seq, head, slice);
}

constexpr int kGroupFirst = 1, kGroupScan = 2, kGroupSecond = 3;  // stages, in order

template <class Tiles, class Policy, int K, int C, int Stage>
__global__ void __launch_bounds__(kWalkWaves* Tiles::kWave) group_kernel(KDA_PARAMETER Problem p) {
  using S = Schedule<Tiles, Policy, K, C>;
  const S s{p, 0, p.NC};
  const int slices = p.V / kTile, between = Stage == kGroupScan ? 1 : p.groups - 1;
  const int per_group = Stage == kGroupFirst ? slices + K / kTile : slices;
  const int64_t i = int64_t(blockIdx.x) * kWalkWaves + wave_index<Tiles>();
  const int slice = int(i % per_group), group = int(i / per_group % between);
  const int64_t row = i / per_group / between, seq = row / p.H;
  const int head = int(row % p.H);
  if (seq >= p.N || s.seq_row(seq).num_chunks <= 0) return;
  OneState<typename S::State> state;
  if constexpr (Stage == kGroupFirst) {
    s.walk_group_first(state, seq, head, group, slice);
  } else if constexpr (Stage == kGroupScan) {
    GroupScan<Tiles, Policy, K, C>::scan(s.slots(), seq, head, slice);
  } else {
    s.walk_group_second(state, seq, head, group, slice);
  }
}

// What no chunk writes: rows of no sequence, padded states, final states of empty sequences. XLA does
// not clear results. Grid: x over elements, y over what: N final states, M checkpoints, the rows.
constexpr int kFillThreads = 256;

template <class Tiles>
__global__ void __launch_bounds__(kFillThreads) fill_kernel(KDA_PARAMETER Problem p) {
  const auto* seqs = reinterpret_cast<const SeqRow*>(p.seqs);
  const int64_t size = int64_t(p.H) * p.K * p.V, step = int64_t(gridDim.x) * kFillThreads;
  const int64_t from = int64_t(blockIdx.x) * kFillThreads + threadIdx.x, what = blockIdx.y;
  if (what < p.N) {
    const SeqRow row = seqs[what];
    if (row.num_chunks > 0) return;
    const bool keep =
        row.length == 0 && p.initial_state && (!p.has_initial_state || p.has_initial_state[what]);
    for (int64_t i = from; i < size; i += step)
      p.final_state[what * size + i] = keep ? p.initial_state[what * size + i] : 0.0f;
  } else if (what < p.N + p.M) {
    const int64_t m = what - p.N;
    if (p.checkpoints[2 * m] >= 0) return;
    for (int64_t i = from; i < size; i += step) p.checkpoint_state[m * size + i] = 0.0f;
  } else {
    const SeqRow last = seqs[p.N - 1];  // sequences lie one after the other; padding has length -1
    const int64_t used = last.first + (last.length > 0 ? last.length : 0);
    const int64_t width = int64_t(p.H) * p.V;
    auto* out = static_cast<uint16_t*>(p.out);
    for (int64_t i = used * width + from; i < p.T * width; i += step) out[i] = 0;
  }
}

}  // namespace KDA_ISA
}  // namespace kda
