// The prologue with its inputs brought to shared memory while the chunk before is worked on: a few blocks stay on
// each multiprocessor and take the (chunk, head)s in turn.
#pragma once

#include "kernels.h"
#include "nvidia_async.h"

namespace kda {
inline namespace KDA_ISA {

// q, k and g of a (chunk, head). Rows lie without padding; in every other pair of rows the two halves of 128
// bytes change places, so that the eight rows of a load do not meet in the same banks.
template <class Tiles, int K, int C>
struct InputStage {
  static constexpr int kPieces = K / 8;  // of 16 bytes, in a row
  alignas(128) uint16_t x[3][C][K];

  static KDA_FN int place(int row, int piece) { return (piece ^ (row << 1 & 4)) * 8; }

  // By all threads of a block; rows without a token become zeros.
  KDA_FN void fetch(const Problem& p, const ChunkRow& chunk, int head) {
    const int piece = int(threadIdx.x) % kPieces, first = int(threadIdx.x) / kPieces;
    const int step = int(blockDim.x) / kPieces;
    const int64_t stride = int64_t(p.H) * K;
    const int64_t at = row_offset(chunk.first + first, head, p.H, K) + piece * 8;
    const void* const sources[3] = {p.q.data, p.k.data, p.g.data};
    KDA_UNROLL
    for (int a = 0; a < 3; ++a) {
      const auto* from = static_cast<const uint16_t*>(sources[a]) + at;
      KDA_UNROLL
      for (int i = 0; i < C * kPieces / (C / kTile * Tiles::kWave); ++i) {
        const int row = first + i * step;
        copy16(&x[a][row][place(row, piece)], row < chunk.valid ? from : sources[a],
               row < chunk.valid);
        from += step * stride;
      }
    }
    CopyByAll::commit();
  }
  static KDA_FN void copy16(void* to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
  }

  struct Block {  // a row block of it
    const InputStage& stage;
    int block;
    using Raw = typename Tiles::Raw;
    KDA_FN void load(Raw& a, Raw& b, int which, int t) const {
      KDA_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int row = block * kTile + Tiles::token_row(2 * i);
        const uint4 v = *reinterpret_cast<const uint4*>(
            &stage.x[which][row][place(row, t * 2 + Tiles::quarter())]);
        a.r[i] = v.x, a.r[i + 2] = v.y, b.r[i] = v.z, b.r[i + 2] = v.w;
      }
    }
    KDA_FN void q(Raw& a, Raw& b, int t) const { load(a, b, 0, t); }
    KDA_FN void k(Raw& a, Raw& b, int t) const { load(a, b, 1, t); }
    KDA_FN void g(typename Tiles::Acc& a, typename Tiles::Acc& b, int t) const {
      Raw x, y;
      load(x, y, 2, t);
      Tiles::widen(a, x), Tiles::widen(b, y);
    }
  };
};

// On a multiprocessor. Three fit with the gates alone in shared memory and 168 registers, and are slower.
constexpr int kPrologueBlocks = 2;

template <class Tiles, class Policy, int K, int C, bool Unbounded>
struct StagedPrologueMemory {
  typename Prologue<Tiles, Policy, K, C, Unbounded>::Shared shared;
  InputStage<Tiles, K, C> inputs;
};

template <class Tiles, class Policy, int K, int C, bool Unbounded>
__global__ void __launch_bounds__(C / kTile * Tiles::kWave, kPrologueBlocks)
    staged_prologue_kernel(KDA_PARAMETER Problem p, int slab_first, int slab_last) {
  using P = Prologue<Tiles, Policy, K, C, Unbounded>;
  using Stage = InputStage<Tiles, K, C>;
  extern __shared__ __attribute__((aligned(128))) char memory[];
  auto& m = *reinterpret_cast<StagedPrologueMemory<Tiles, Policy, K, C, Unbounded>*>(memory);
  const Schedule<Tiles, Policy, K, C> s{p, slab_first, slab_last};
  if (slab_first == 0) clear_status(s);
  const int tasks = (slab_last - slab_first) * p.H, wave = wave_index<Tiles>();
  int task = blockIdx.x;
  if (task >= tasks) return;
  ChunkRow row = s.chunk_row(slab_first + task / p.H);
  if (row.sequence < 0) return;  // padding, and all that follows
  m.inputs.fetch(p, row, task % p.H);
  while (true) {
    const int next = task + gridDim.x;
    ChunkRow next_row{-1, 0, 0, -1};
    if (next < tasks) next_row = s.chunk_row(slab_first + next / p.H);
    CopyByAll::wait<0>();
    __syncthreads();
    prologue_of<P>(s, row, slab_first + task / p.H, task % p.H, wave,
                   typename Stage::Block{m.inputs, wave}, m.shared, [&] {
                     if (next_row.sequence >= 0) m.inputs.fetch(p, next_row, next % p.H);
                   });
    if (next_row.sequence < 0) break;
    task = next, row = next_row;
  }
}

}  // namespace KDA_ISA
}  // namespace kda
