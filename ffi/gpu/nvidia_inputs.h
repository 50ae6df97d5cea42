// The inputs of the prologue in shared memory (nvidia_prologue.h).
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

  // What a thread copies of each array: every fourth piece of some rows; those without a token become zeros. The rows
  // are those of its own warp, so that nobody else waits for them.
  struct Copies {
    static constexpr int kThreads = C / kTile * Tiles::kWave, kStep = Tiles::kWave / 4, kRows = kTile / kStep;
    int64_t from[kRows];  // elements
    int bytes[kRows];
    int to[2];  // for even and odd steps of four pieces

    KDA_FN Copies(const Problem& p, const PrologueTask& task) {
      const ChunkRow chunk = task.row;
      const int head = task.head, piece = Tiles::quarter(), row = int(threadIdx.x) / Tiles::kWave * kTile + Tiles::group();
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

  // A task's q, k and g come to the cache: half a row by each thread.
  static KDA_FN void ask(const Problem& p, const PrologueTask& task) {
    static_assert(C * K == 64 * Copies::kThreads, "");
    const int row = int(threadIdx.x) >> 1;
    if (row >= task.row.valid) return;
    const int64_t at = row_offset(task.row.first + row, task.head, p.H, K) + 64 * (int(threadIdx.x) & 1);
    for (const void* x : {p.q.data, p.k.data, p.g.data})
      asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const uint16_t*>(x) + at));
  }

  struct Block {  // a row block
    static constexpr bool kAgain = true, kSums = true;
    const Rows &q_rows, &k_rows;
    Rows& g_rows;
    const uint32_t (&betas)[C];
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
    // Sums of the rows' squares: the diagonal of x x^T, so that which channels are contracted in a step may differ from row
    // to row. Of row r of an 8 x 8 matrix, token 2 r or 2 r + 1, it is the 16 bytes number (2 t + slot) ^ r, as they lie in
    // memory: rows are 256 bytes apart and begin at multiples of 128, so the eight are in the eight groups of banks. Each
    // matrix comes twice, since the registers of a left and of a right operand follow each other in different orders.
    KDA_FN typename Tiles::RowVec squares(const Rows& x) const {
      using Op = typename Tiles::IoType;
      const int r = Tiles::lane() & 7, low = Tiles::lane() >> 3 & 1, high = Tiles::lane() >> 4;
      auto matrix = [&](int half, int slot) {  // rows 8 half .., contracted columns 8 slot ..
        return shared_address(&x[block * kTile + 2 * r + half][8 * (slot ^ r)]);
      };
      const unsigned left = matrix(low, high), right = matrix(high, low);
      typename Tiles::Acc sums;
      Tiles::zero(sums);
      KDA_UNROLL
      for (int t = 0; t < kPieces / 2; ++t) {
        const auto a = matrices((left ^ t % 4 * 32) + t / 4 * 128), b = matrices((right ^ t % 4 * 32) + t / 4 * 128);
        Tiles::template mma8<Op>(sums.x, a, b.r[0], b.r[1]);
        Tiles::template mma8<Op>(sums.x + 4, a, b.r[2], b.r[3]);
      }
      return Tiles::diagonal(sums);
    }
    static KDA_FN Raw matrices(unsigned address) {
      Raw a;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(a.r[0]), "=r"(a.r[1]), "=r"(a.r[2]), "=r"(a.r[3])
                   : "r"(address));
      return a;
    }
    KDA_FN typename Tiles::RowVec q_squares() const { return squares(q_rows); }
    KDA_FN typename Tiles::RowVec k_squares() const { return squares(k_rows); }
    KDA_FN typename Tiles::RowVec beta(const Problem& p, int64_t, int, int) const {
      typename Tiles::RowVec v;
      KDA_UNROLL
      for (int i = 0; i < 2; ++i) {
        const uint32_t raw = betas[block * kTile + Tiles::token_row(2 * i)];
        v.x[i] = p.beta.type == DType::kF32 ? __uint_as_float(raw) : Tiles::widen(raw, 0);
      }
      return v;
    }
    struct Gates {  // of a head, asked for early
      float rate;
      float2 bias[2];
      KDA_FN void load(float of_head, const float* dt_bias) {
        rate = of_head;
        for (int half = 0; half < 2; ++half)
          bias[half] = *reinterpret_cast<const float2*>(dt_bias + 64 * half + 2 * Tiles::lane());
      }
    };
    // Bounded gates in units, summed down the tokens: a lane takes a pair of channels of each half, so that it only adds;
    // the sums then go to where tiles have them by way of where g was. Of g a lane reads 4 bytes of a row, of the sums it
    // stores 8 and loads 16; in every other pair of rows neighbours of 16 bytes change places.
    KDA_FN void sums(typename Tiles::Acc (&sum)[K / kTile], float* total, const Gates& gates, float unit, int valid) const {
      static_assert(K == 128, "");
      const int lane = Tiles::lane(), g = Tiles::group(), quarter = Tiles::quarter();
      uint32_t raw[2][kTile];
      KDA_UNROLL
      for (int half = 0; half < 2; ++half)
        KDA_UNROLL
        for (int r = 0; r < kTile; ++r) {
          const int row = block * kTile + r;
          raw[half][r] =
              *reinterpret_cast<const uint32_t*>(&g_rows[row][place(row, 8 * half + lane / 4) + 2 * (lane % 4)]);
        }
      __syncwarp();
      auto* scratch = reinterpret_cast<float*>(&g_rows[block * kTile][0]);
      KDA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const float rate = gates.rate;
        const float2 bias = {rate * gates.bias[half].x, rate * gates.bias[half].y};
        float2 x = {0, 0};
        KDA_UNROLL
        for (int r = 0; r < kTile; ++r) {
          const float a = gate_units<Tiles>(Gate::kBounded, Tiles::widen(raw[half][r], 0), rate, bias.x);
          const float b = gate_units<Tiles>(Gate::kBounded, Tiles::widen(raw[half][r], 1), rate, bias.y);
          const float counts = __saturatef(float(valid) - float(r));  // 0 or 1
          x = {fmaf(a, counts, x.x), fmaf(b, counts, x.y)};
          *reinterpret_cast<float2*>(scratch + 64 * r + 4 * (lane / 2 ^ (r >> 1 & 1)) + 2 * (lane & 1)) = x;
        }
        *reinterpret_cast<float2*>(total + 64 * half + 32 * (lane / 16) + 16 * (lane / 2 & 1) + 8 * (lane & 1) +
                                   2 * (lane / 4 % 4)) = {unit * x.x, unit * x.y};
        __syncwarp();
        KDA_UNROLL
        for (int pair = 0; pair < 2; ++pair)
          KDA_UNROLL
          for (int i = 0; i < 2; ++i)
            KDA_UNROLL
            for (int j = 0; j < 2; ++j)
              Tiles::set_row(sum[4 * half + 2 * pair + j], i,
                             *reinterpret_cast<const float4*>(scratch + 64 * (2 * g + i) + 32 * pair +
                                                              4 * ((2 * quarter + j) ^ (g & 1))));
        __syncwarp();
      }
    }
  };
};

}  // namespace KDA_ISA
}  // namespace kda
