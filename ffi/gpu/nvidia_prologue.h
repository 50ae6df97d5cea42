// The prologue with its inputs brought to shared memory while the chunk before is worked on: a few blocks stay on
// each multiprocessor and take the (chunk, head)s in turn.
#pragma once

#include "kernels.h"
#include "nvidia_async.h"

namespace kda {
inline namespace KDA_ISA {

// A row of q, k or g is 256 bytes without padding; in every other pair of rows the two halves change places, so that
// the eight rows of a load do not meet in the same banks.
template <class Tiles, int K, int C>
struct InputStage {
  static constexpr int kPieces = K / 8;  // of 16 bytes, in a row
  using Rows = uint16_t[C][K];

  static KDA_FN int place(int row, int piece) { return (piece ^ (row << 1 & 4)) * 8; }

  // What a thread copies of each array: every fourth piece of some rows; those without a token become zeros.
  struct Copies {
    static constexpr int kThreads = C / kTile * Tiles::kWave, kStep = kThreads / 4, kRows = C / kStep;
    int64_t from[kRows];  // elements
    int bytes[kRows];
    int to[2];  // for even and odd steps of four pieces

    KDA_FN Copies(const Problem& p, const ChunkRow& chunk, int head) {
      const int piece = int(threadIdx.x) & 3, row = int(threadIdx.x) >> 2;
      KDA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const bool valid = row + i * kStep < chunk.valid;
        bytes[i] = valid ? 16 : 0;
        from[i] = valid ? row_offset(chunk.first + row + i * kStep, head, p.H, K) + 8 * piece : 0;
      }
      to[0] = row * K + place(row, piece), to[1] = row * K + place(row, piece + 4) - 32;
    }
    KDA_FN void fetch(Rows& rows, const Tensor& x) const {
      KDA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const auto* source = static_cast<const uint16_t*>(x.data) + from[i];
        KDA_UNROLL
        for (int j = 0; j < kPieces / 4; ++j)
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                           shared_address(&rows[i * kStep][to[j & 1] + 32 * j])),
                       "l"(source + 32 * j), "r"(bytes[i])
                       : "memory");
      }
    }
  };
  static_assert(Copies::kStep % 4 == 0, "rows so far apart change places alike");

  struct Block {  // a row block
    static constexpr bool kAgain = true;
    const Rows &q_rows, &k_rows, &g_rows;
    int block;
    using Raw = typename Tiles::Raw;
    KDA_FN void load(Raw& a, Raw& b, const Rows& x, int t) const {
      KDA_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int row = block * kTile + Tiles::token_row(2 * i);
        const uint4 v =
            *reinterpret_cast<const uint4*>(&x[row][place(row, t * 2 + Tiles::quarter())]);
        a.r[i] = v.x, a.r[i + 2] = v.y, b.r[i] = v.z, b.r[i + 2] = v.w;
      }
    }
    KDA_FN void q(Raw& a, Raw& b, int t) const { load(a, b, q_rows, t); }
    KDA_FN void k(Raw& a, Raw& b, int t) const { load(a, b, k_rows, t); }
    KDA_FN void g(typename Tiles::Acc& a, typename Tiles::Acc& b, int t) const {
      Raw x, y;
      load(x, y, g_rows, t);
      Tiles::widen(a, x), Tiles::widen(b, y);
    }
  };
};

constexpr int kPrologueBlocks = 3;  // on a multiprocessor

template <class Tiles, class Policy, int K, int C, bool Unbounded>
struct StagedPrologueMemory {
  using Rows = typename InputStage<Tiles, K, C>::Rows;
  using Shared = typename Prologue<Tiles, Policy, K, C, Unbounded>::Shared;
  Shared shared;
  alignas(128) Rows q, k;
  // g is where the decayed keys will be.
  KDA_FN Rows& g() { return reinterpret_cast<Rows&>(shared.keys); }
  static_assert(sizeof(Rows) <= sizeof(Shared::keys), "");
};

template <class Tiles, class Policy, int K, int C, bool Unbounded>
__global__ void __launch_bounds__(C / kTile * Tiles::kWave, kPrologueBlocks)
    staged_prologue_kernel(KDA_PARAMETER Problem p, int slab_first, int slab_last) {
  using P = Prologue<Tiles, Policy, K, C, Unbounded>;
  using Stage = InputStage<Tiles, K, C>;
  extern __shared__ __attribute__((aligned(128))) char memory[];
  auto& m = *reinterpret_cast<StagedPrologueMemory<Tiles, Policy, K, C, Unbounded>*>(memory);
  const Schedule<Tiles, Policy, K, C> s{p, slab_first, slab_last};
  after_previous();
  if (slab_first == 0) clear_status(s);
  const int tasks = (slab_last - slab_first) * p.H, wave = wave_index<Tiles>();
  int task = blockIdx.x;
  if (task >= tasks) return;
  ChunkRow row = s.chunk_row(slab_first + task / p.H);
  if (row.sequence < 0) return;  // padding, and all that follows
  {
    const typename Stage::Copies copies(p, row, task % p.H);
    copies.fetch(m.q, p.q), copies.fetch(m.k, p.k), copies.fetch(m.g(), p.g);
  }
  while (true) {
    const int next = task + gridDim.x;
    ChunkRow next_row{-1, 0, 0, -1};
    if (next < tasks) next_row = s.chunk_row(slab_first + next / p.H);
    CopyByAll::commit();
    CopyByAll::wait<0>();
    __syncthreads();
    prologue_of<P>(
        s, row, slab_first + task / p.H, task % p.H, wave,
        typename Stage::Block{m.q, m.k, m.g(), wave}, m.shared,
        [&] {
          if (next_row.sequence < 0) return;
          const typename Stage::Copies copies(p, next_row, next % p.H);
          copies.fetch(m.q, p.q), copies.fetch(m.k, p.k);
        },
        [&] {
          if (next_row.sequence >= 0)
            typename Stage::Copies(p, next_row, next % p.H).fetch(m.g(), p.g);
        });
    if (next_row.sequence < 0) break;
    task = next, row = next_row;
  }
}

}  // namespace KDA_ISA
}  // namespace kda
