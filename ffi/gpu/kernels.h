// The GPU drivers: which wave runs which role, with barriers between phases of the prologue.
#pragma once

#include "../kernel/prologue.h"
#include "../kernel/schedule.h"
#include "../kernel/solve.h"
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

// The kernels of a call follow each other closely (Driver::launch): a block may start while the launch before is at
// work, and waits here before it reads or writes what that one writes.
KDA_FN void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
KDA_FN void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
KDA_FN void after_previous() {
  let_next_start();
  wait_for_previous();
}

// A value that the compiler does not know: what follows from it is computed where it is used, not kept in registers
// (or, worse, in memory) through a loop.
KDA_FN int hidden(int x) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// The one state of a wave that walks a single slice.
template <class State>
struct OneState {
  State state;
  KDA_FN State& operator()(int) { return state; }
};

// What no chunk writes: rows of no sequence, padded states, final states of empty sequences. XLA does
// not clear results.
template <class S>
KDA_FN void fill(const S& s) {
  const Problem& p = s.p;
  const int64_t size = int64_t(p.H) * p.K * p.V;
  auto clear = [&](float* to, const float* from) {
    for (int64_t i = threadIdx.x; i < size; i += blockDim.x) to[i] = from ? from[i] : 0.0f;
  };
  for (int64_t n = blockIdx.x; n < p.N; n += gridDim.x) {
    if (s.leaves_final_state(n)) continue;
    const int64_t row = live_row(p, n);
    const bool keep = s.seq_row(n).length == 0 && s.starts_from_state(n);
    clear(p.final_state + row * size, keep ? p.initial_state + row * size : nullptr);
  }
  for (int64_t m = blockIdx.x; m < p.M && !p.in_pool; m += gridDim.x)
    if (p.checkpoints[2 * m] < 0) clear(p.checkpoint_state + m * size, nullptr);
  int64_t used = 0;
  if (p.N > 0) {  // sequences lie one after the other; padding has length -1
    const SeqRow last = s.seq_row(p.N - 1);
    used = last.first + (last.length > 0 ? last.length : 0);
  }
  const int64_t width = int64_t(p.H) * p.V, step = int64_t(gridDim.x) * blockDim.x;
  auto* out = static_cast<uint16_t*>(p.out);
  for (int64_t i = used * width + int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.T * width;
       i += step)
    out[i] = 0;
}

// The first pass clears the status of the call, before any walk writes it.
template <class S>
KDA_FN void clear_status(const S& s) {
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < S::status_bytes(s.p) / 4;
       i += int64_t(gridDim.x) * blockDim.x)
    s.status()[i] = 0;
}

struct alignas(16) PrologueTask {
  ChunkRow row;
  int chunk, head;
};

// The barrier behind the factors, where it is not in two halves.
struct WholeBarrier {
  static constexpr bool kHalves = false;
  KDA_FN void arrive() const {}
  KDA_FN void wait() const { __syncthreads(); }
};

// The roles of one task, one wave for each 16 tokens. `task()` may be in shared memory: it is read wherever it is needed.
// `loaded` runs in a while and `met` behind the barrier that follows; `factored` when this wave does not read q and k any
// more, `scored` when nobody reads `shared.keys`. The first wave has most to do for the factors, the last one for the
// scores: between two halves of the barrier `keys_there` each does what needs no other.
template <class P, class S, class Task, class Inputs, class Barrier, class A, class B, class D, class E>
KDA_FN void prologue_of(const S& s, Task task, int wave, const Inputs& inputs, typename P::Shared& shared,
                        Barrier keys_there, A loaded, B met, D factored, E scored) {
  using Tiles = typename P::Tiles;
  typename P::Wave w;
  P::load(s.p, ChunkRow(task().row), task().head, wave, inputs, w, shared);
  loaded();
  __syncthreads();
  met();
  P::channels(wave, P::NT, shared, s.decay(task().chunk, task().head));
  Tiles::sync_wave();
  P::factors(hidden(wave), P::NT, inputs, w, shared, s.blob(task().chunk, task().head));
  keys_there.arrive();
  Tiles::sync_wave();
  factored();
  auto diagonal = [&] {
    P::diagonal(hidden(wave), task().row.first, w, shared, s.blob(task().chunk, task().head));
  };
  if constexpr (Barrier::kHalves) diagonal();
  keys_there.wait();
  P::scores(hidden(wave), w, shared, s.blob(task().chunk, task().head));
  if constexpr (!Barrier::kHalves) diagonal();  // fewer registers
  __syncthreads();
  scored();
  Solve<P>::solve(ChunkRow(task().row), hidden(wave), w, shared, s.blob(task().chunk, task().head),
                  s.beyond(task().chunk, task().head));
}

// A second pass nearly always has nothing to do. On NVIDIA it is a few blocks that would loop; CDNA's compiler
// would keep too much in scalar registers over such a loop.
template <class Tiles, class Policy>
constexpr bool loops = Policy::kSecond && Tiles::kLoops;

// A task by a block; false: padding, and so is all that follows.
template <class P, class S>
KDA_FN bool prologue_task(const S& s, int chunk, int head, int wave, typename P::Shared& shared) {
  const ChunkRow row = s.chunk_row(chunk);
  if (row.sequence < 0) return false;
  if (s.has_to(row.sequence, head))
    prologue_of<P>(s, [=] { return PrologueTask{row, chunk, head}; }, wave, typename P::Direct(s.p, row, head, wave),
                   shared, WholeBarrier{}, [] {}, [] {}, [] {}, [] {});
  return true;
}

// One block for each (chunk of the slab, head), unless it loops. The second pass fills, too.
template <class Tiles, class Policy, int K, int C, bool Unbounded>
__global__ void __launch_bounds__(C / kTile * Tiles::kWave)
    prologue_kernel(KDA_PARAMETER Problem p, int slab_first, int slab_last) {
  using P = Prologue<Tiles, Policy, K, C, Unbounded>;
  extern __shared__ __attribute__((aligned(128))) char memory[];
  auto& shared = *reinterpret_cast<typename P::Shared*>(memory);
  const Schedule<Tiles, Policy, K, C> s{p, slab_first, slab_last};
  after_previous();
  if (slab_first == 0) {
    if constexpr (Policy::kSecond) {
      fill(s);
    } else {
      clear_status(s);
    }
  }
  if constexpr (Tiles::kOverlaps && !Policy::kSecond)
    if (blockIdx.x == 0 && threadIdx.x == 0) s.progress().clear_for_followers();
  if (Policy::kSecond && *s.status() == 0) return;
  const int tasks = (slab_last - slab_first) * p.H, wave = wave_index<Tiles>();
  int i = blockIdx.x;
  if (i >= tasks) return;
  do {
    if (!prologue_task<P>(s, slab_first + i / p.H, i % p.H, wave, shared)) return;
    if (loops<Tiles, Policy>) __syncthreads();
    i += gridDim.x;
  } while (loops<Tiles, Policy> && i < tasks);
}

// One wave for each (sequence, head, slice). Waves do not talk to each other.
constexpr int kWalkWaves = 4;

template <class S>
KDA_FN void walk_slice(const S& s, int64_t i) {
  OneState<typename S::State> state;
  const int slices = s.p.V / kTile, slice = int(i % slices), head = int(i / slices % s.p.H);
  if (s.has_to(i / slices / s.p.H, head)) s.walk_slab(state, i / slices / s.p.H, head, slice, slice + 1);
}

template <class Tiles, class Policy, int K, int C>
__global__ void __launch_bounds__(kWalkWaves* Tiles::kWave)
    walk_kernel(KDA_PARAMETER Problem p, int slab_first, int slab_last) {
  using S = Schedule<Tiles, Policy, K, C>;
  const S s{p, slab_first, slab_last};
  after_previous();
  if (Policy::kSecond && *s.status() == 0) return;
  const int slices = p.V / kTile;
  const int64_t all = p.N * p.H * slices;
  int64_t i = int64_t(blockIdx.x) * kWalkWaves + wave_index<Tiles>();
  if (i >= all) return;
  do {
    walk_slice(s, i);
    i += int64_t(gridDim.x) * kWalkWaves;
  } while (loops<Tiles, Policy> && i < all);
}

constexpr int kGroupFirst = 1, kGroupScan = 2, kGroupSecond = 3;  // stages, in order

template <class Tiles, class Policy, int K, int C, int Stage>
__global__ void __launch_bounds__(kWalkWaves* Tiles::kWave) group_kernel(KDA_PARAMETER Problem p) {
  using S = Schedule<Tiles, Policy, K, C>;
  const S s{p, 0, p.NC};
  after_previous();
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

}  // namespace KDA_ISA
}  // namespace kda
