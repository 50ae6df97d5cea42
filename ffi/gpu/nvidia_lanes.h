// Tiles over the lanes of an NVIDIA warp, and what needs no matrix unit. The tile layer is nvidia_tiles.h.
//
// Lane l = 4 g + t holds of every 16 x 16 tile the rows g and g + 8 and the columns 2t, 2t + 1, 2t + 8
// and 2t + 9. Element e = 0..7 of a lane: row g + 8 (e / 2 % 2), column 2t + e % 2 + 8 (e / 4). That is
// two m16n8 accumulators side by side; packed in pairs it is an m16k16 left operand, and two k16n8 right
// operands of the transpose.
//
// Which token or channel such a row or column stands for is free, as long as both operands of a product
// agree. Here a lane's places are neighbours in the caller's arrays, so that it moves 8 or 16 bytes at a
// time: its rows are the tokens 2g and 2g + 1, its columns the channels 4t..4t + 3 of a single tile, 8t..8t + 7
// of a pair of tiles.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../kernel/ops.h"
#include "../kernel/target.h"
#include "vendor.h"

namespace kda {
inline namespace KDA_ISA {

struct NvidiaLanes {
  static constexpr int kWave = 32;

  struct Acc {
    float x[8];
  };
  template <class Op>
  struct Operand {
    uint32_t r[4];
  };
  // The same as right operand: rows 0..7 and their two halves, then rows 8..15, as the instruction takes them.
  template <class Op>
  struct RightOperand {
    uint32_t r[4];
  };
  template <class Op>  // float32 operands stay accumulators
  using Left = std::conditional_t<std::is_same_v<Op, F32>, Acc, Operand<Op>>;
  template <class Op>
  using Right = std::conditional_t<std::is_same_v<Op, F32>, Acc, RightOperand<Op>>;
  struct RowVec {
    float x[2];
  };
  struct ColVec {
    float x[4];
  };

  static KDA_FN int lane() { return threadIdx.x & 31; }
  static KDA_FN int group() { return lane() >> 2; }
  static KDA_FN int quarter() { return lane() & 3; }
  // Places of element e in a tile that is not reordered.
  static KDA_FN int row(int e) { return group() + 8 * (e >> 1 & 1); }
  static KDA_FN int col(int e) { return 2 * quarter() + (e & 1) + 8 * (e >> 2); }
  // The token of a row or a column, the channel of a row of a single tile.
  static KDA_FN int token_row(int e) { return 2 * group() + (e >> 1 & 1); }
  static KDA_FN int token_col(int e) { return 4 * quarter() + 2 * (e & 1) + (e >> 2); }
  static KDA_FN int value_row(int i) { return 4 * (group() >> 1) + (group() & 1) + 2 * i; }
  static KDA_FN float shuffle(float x, int from) { return __shfl_sync(~0u, x, from); }
  static KDA_FN void sync_wave() { __syncwarp(); }

  static KDA_FN float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static KDA_FN float rcp(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static KDA_FN float rsqrt(float x) { return rsqrtf(x); }

  static KDA_FN void zero(Acc& a) {
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) a.x[e] = 0;
  }
  template <class Op>
  static KDA_FN void zero(Operand<Op>& a) {
    a = {{0, 0, 0, 0}};
  }
  template <class Op>
  static KDA_FN void zero(RightOperand<Op>& a) {
    a = {{0, 0, 0, 0}};
  }
  // Two tiles of neighbouring channels: 1 where the channel is row + offset.
  static KDA_FN void set_identity2(Acc& a, Acc& b, int offset) {
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) {
      const int c = 8 * quarter() + (e & 1) + 2 * (e >> 2), r = value_row(e >> 1 & 1) + offset;
      a.x[e] = c == r ? 1.0f : 0.0f;
      b.x[e] = c + 4 == r ? 1.0f : 0.0f;
    }
  }
  static KDA_FN void set_identity(Acc& a) {
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) a.x[e] = row(e) == col(e) ? 1.0f : 0.0f;
  }

  // ---- conversions ---------------------------------------------------------------------------
  template <class Op>
  static KDA_FN uint32_t pack(float lo, float hi) {
    uint32_t r;
    if constexpr (std::is_same_v<Op, BF16>) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    }
    return r;
  }
  static KDA_FN uint32_t pack_clamped(float lo, float hi) {  // to fp16; what is beyond becomes the largest
    uint32_t r;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
  }
  template <class Op>
  static KDA_FN float unpack(uint32_t r, int half) {
    if constexpr (std::is_same_v<Op, BF16>) {
      return __uint_as_float(half ? r & 0xffff0000u : r << 16);
    } else {
      return __half2float(__ushort_as_half(uint16_t(half ? r >> 16 : r)));
    }
  }

  // ---- element-wise ----------------------------------------------------------------------------
  static KDA_FN float at(const Acc& a, int e) { return a.x[e]; }
  template <class Op>
  static KDA_FN float at(const Operand<Op>& a, int e) {
    return unpack<Op>(a.r[e >> 1], e & 1);
  }
  static KDA_FN float at(const RowVec& v, int e) { return v.x[e >> 1 & 1]; }
  static KDA_FN float at(const ColVec& v, int e) { return v.x[(e >> 2) * 2 + (e & 1)]; }
  template <class F, class... In>
  static KDA_FN void apply(Acc& out, F f, const In&... in) {
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) out.x[e] = f(at(in, e)...);
  }
  template <class F, class... In>
  static KDA_FN void apply(ColVec& out, F f, const In&... in) {
    KDA_UNROLL
    for (int i = 0; i < 4; ++i) out.x[i] = f(in.x[i]...);
  }
  template <class F, class... In>
  static KDA_FN void apply(RowVec& out, F f, const In&... in) {
    KDA_UNROLL
    for (int i = 0; i < 2; ++i) out.x[i] = f(in.x[i]...);
  }
  template <class Keep>
  static KDA_FN void select(Acc& a, Keep keep) {
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) a.x[e] = keep(token_row(e), token_col(e)) ? a.x[e] : 0.0f;
  }
  static KDA_FN void mask_rows(RowVec& v, int valid) {
    KDA_UNROLL
    for (int i = 0; i < 2; ++i) v.x[i] = token_row(2 * i) < valid ? v.x[i] : 0.0f;
  }
  static KDA_FN void add_diagonal(Acc& a, const RowVec& d) {
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) a.x[e] += row(e) == col(e) ? at(d, e) : 0.0f;
  }

  // `first` = the smallest `token` + column (`Rows`: row) where |a| is beyond the limit; NaN is let pass.
  template <bool Rows = false>
  static KDA_FN void first_beyond(int32_t& first, const Acc& a, float limit, int32_t token) {
    float most = 0;
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) most = fmaxf(most, fabsf(a.x[e]));
    if (most <= limit) return;
    KDA_UNROLL
    for (int e = 0; e < 8; ++e)
      if (fabsf(a.x[e]) > limit)
        first = min(first, token + (Rows ? token_row(e) : token_col(e)));
  }
  static KDA_FN int32_t wave_min(int32_t x) { return __reduce_min_sync(~0u, x); }
  static KDA_FN void atomic_max(int32_t* p, int32_t value) { atomicMax(p, value); }
  static KDA_FN RowVec row_numbers() {
    return {{float(token_row(0)), float(token_row(2))}};
  }

  // ---- across rows and columns -------------------------------------------------------------------
  static KDA_FN RowVec row_sums(const Acc& a) {
    RowVec v{{a.x[0] + a.x[1] + a.x[4] + a.x[5], a.x[2] + a.x[3] + a.x[6] + a.x[7]}};
    KDA_UNROLL
    for (int i = 0; i < 2; ++i) {
      v.x[i] += __shfl_xor_sync(~0u, v.x[i], 1);
      v.x[i] += __shfl_xor_sync(~0u, v.x[i], 2);
    }
    return v;
  }
  // Down the tokens, inclusive. A lane adds its two tokens to the sum of those before them; what a shuffle
  // brings from no lane is multiplied with 0.
  static KDA_FN void cumsum_rows(Acc& a) {
    const float has[3] = {lane() >= 4 ? 1.0f : 0.0f, lane() >= 8 ? 1.0f : 0.0f,
                          lane() >= 16 ? 1.0f : 0.0f};
    KDA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int e = (i & 1) + 4 * (i >> 1);
      float before = has[0] * __shfl_up_sync(~0u, a.x[e] + a.x[e + 2], 4);
      KDA_UNROLL
      for (int level = 0; level < 3; ++level)
        before += has[level] * __shfl_up_sync(~0u, before, 4 << level);
      a.x[e] += before;
      a.x[e + 2] += a.x[e];
    }
  }
  template <class Source>
  static KDA_FN Acc gather_rows(const Acc& a, Source source) {
    Acc out;
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) {
      const int from = source(token_row(e)), l = (from >> 1) * 4 + quarter();
      const float low = shuffle(a.x[e & ~2], l), high = shuffle(a.x[e | 2], l);
      out.x[e] = from & 1 ? high : low;
    }
    return out;
  }
  static KDA_FN ColVec last_row(const Acc& a) {
    const int l = 28 + quarter();
    return {{shuffle(a.x[2], l), shuffle(a.x[3], l), shuffle(a.x[6], l), shuffle(a.x[7], l)}};
  }
  // Row j of a block of N x N tokens on the diagonal is final after step j: broadcast it, and subtract its share from
  // the rows below. N = 8: what lies between two blocks stays 0.
  template <int N = kTile>
  static KDA_FN Acc unit_lower_inverse(const Acc& a) {
    Acc t;
    set_identity(t);
    const int half = N == kTile ? 0 : lane() >> 4;
    KDA_UNROLL
    for (int j = 0; j < N - 1; ++j) {
      const int l = ((j >> 1) + 4 * half) * 4 + quarter(), c = (j >> 1 & 1) + 4 * (j & 1);
      const int holder = (lane() & ~3) + (j >> 2) + 2 * half;  // lane of this row that holds column j
      float factor[2] = {shuffle(a.x[c], holder), shuffle(a.x[c + 2], holder)};
      KDA_UNROLL
      for (int i = 0; i < 2; ++i) factor[i] = token_row(2 * i) % N > j ? factor[i] : 0.0f;
      float done[4];
      KDA_UNROLL
      for (int i = 0; i < 4; ++i)
        done[i] = shuffle(t.x[(i & 1) + 4 * (i >> 1) + 2 * (j & 1)], l);
      KDA_UNROLL
      for (int e = 0; e < 8; ++e)
        t.x[e] -= factor[e >> 1 & 1] * done[(e >> 2) * 2 + (e & 1)];
    }
    return t;
  }
};

}  // namespace KDA_ISA
}  // namespace kda
