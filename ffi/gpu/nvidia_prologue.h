// The prologue with its gates brought to shared memory while the chunk before is worked on: a few blocks stay on
// each multiprocessor and take the (chunk, head)s in turn. q and k come straight to registers, where the work on
// the gates hides their way.
#pragma once

#include "kernels.h"
#include "nvidia_async.h"

namespace kda {
inline namespace KDA_ISA {

// g of a (chunk, head). Rows lie without padding; in every other pair of rows the two halves of 128 bytes change
// places, so that the eight rows of a load do not meet in the same banks.
template <class Tiles, int K, int C>
struct GateStage {
  static constexpr int kPieces = K / 8;  // of 16 bytes, in a row
  alignas(128) uint16_t g[C][K];

  static KDA_FN int place(int row, int piece) { return (piece ^ (row << 1 & 4)) * 8; }

  // By all threads of a block; rows without a token become zeros.
  KDA_FN void fetch(const Problem& p, const ChunkRow& chunk, int head) {
    const int piece = int(threadIdx.x) % kPieces, first = int(threadIdx.x) / kPieces;
    constexpr int kThreads = C / kTile * Tiles::kWave, kStep = kThreads / kPieces;
    const int64_t stride = int64_t(p.H) * K;
    const auto* from = static_cast<const uint16_t*>(p.g.data) +
                       row_offset(chunk.first + first, head, p.H, K) + piece * 8;
    KDA_UNROLL
    for (int i = 0; i < C / kStep; ++i) {
      const int row = first + i * kStep;
      const bool valid = row < chunk.valid;
      copy16(&g[row][place(row, piece)], valid ? from : p.g.data, valid);
      from += kStep * stride;
    }
    CopyByAll::commit();
  }
  static KDA_FN void copy16(void* to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
  }
  // Channel tiles t and t + 1 of a row block.
  KDA_FN void load(typename Tiles::Acc& a, typename Tiles::Acc& b, int block, int t) const {
    typename Tiles::Raw x, y;
    KDA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = block * kTile + Tiles::token_row(2 * i);
      const uint4 v =
          *reinterpret_cast<const uint4*>(&g[row][place(row, t * 2 + Tiles::quarter())]);
      x.r[i] = v.x, x.r[i + 2] = v.y, y.r[i] = v.z, y.r[i + 2] = v.w;
    }
    Tiles::unpack(a, x), Tiles::unpack(b, y);
  }
};

constexpr int kPrologueBlocks = 3;  // on a multiprocessor: as many as registers allow, nearly without spills

template <class Tiles, class Policy, int K, int C, bool Unbounded>
struct StagedPrologueMemory {
  typename Prologue<Tiles, Policy, K, C, Unbounded>::Shared shared;
  GateStage<Tiles, K, C> gates;
};

template <class Tiles, class Policy, int K, int C, bool Unbounded>
__global__ void __launch_bounds__(C / kTile * Tiles::kWave, kPrologueBlocks)
    staged_prologue_kernel(KDA_PARAMETER Problem p, int slab_first, int slab_last) {
  using P = Prologue<Tiles, Policy, K, C, Unbounded>;
  struct Inputs : P::Direct {
    const GateStage<Tiles, K, C>& gates;
    int block;
    KDA_FN void g(typename Tiles::Acc& a, typename Tiles::Acc& b, int t) const {
      gates.load(a, b, block, t);
    }
  };
  extern __shared__ __attribute__((aligned(128))) char memory[];
  auto& m = *reinterpret_cast<StagedPrologueMemory<Tiles, Policy, K, C, Unbounded>*>(memory);
  const Schedule<Tiles, Policy, K, C> s{p, slab_first, slab_last};
  if (slab_first == 0) clear_status(s);
  const int tasks = (slab_last - slab_first) * p.H, wave = wave_index<Tiles>();
  int task = blockIdx.x;
  if (task >= tasks) return;
  ChunkRow row = s.chunk_row(slab_first + task / p.H);
  if (row.sequence < 0) return;  // padding, and all that follows
  m.gates.fetch(p, row, task % p.H);
  while (true) {
    const int next = task + gridDim.x;
    ChunkRow next_row{-1, 0, 0, -1};
    if (next < tasks) next_row = s.chunk_row(slab_first + next / p.H);
    CopyByAll::wait<0>();
    __syncthreads();
    prologue_of<P>(s, row, slab_first + task / p.H, task % p.H, wave,
                   Inputs{{p, row, task % p.H, wave}, m.gates, wave}, m.shared, [&] {
                     if (next_row.sequence >= 0) m.gates.fetch(p, next_row, next % p.H);
                   });
    if (next_row.sequence < 0) break;
    task = next, row = next_row;
  }
}

}  // namespace KDA_ISA
}  // namespace kda
