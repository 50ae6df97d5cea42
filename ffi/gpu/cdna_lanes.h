// Tiles over the lanes of a CDNA wave, and what needs no matrix unit. The tile layer is cdna_tiles.h.
//
// Lane l holds of every 16 x 16 tile row l % 16 and columns 4 (l / 16) .. + 3. A matrix unit's result
// lies the other way round (four rows, one column a lane), so products are issued transposed:
// D^T = right left^T. Then result, left and right operand all have this one layout, and an accumulator
// becomes either operand in place. Operands in memory: 8 bytes a lane. Of a pair of channel tiles a lane
// holds eight neighbouring channels, 8 (l / 16) .. + 7, so that it moves 16 bytes at a time; which channel a
// column stands for is free, as long as both operands of a product agree.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "../kernel/ops.h"
#include "../kernel/target.h"
#include "vendor.h"

namespace kda {
inline namespace KDA_ISA {

typedef float Float4 __attribute__((ext_vector_type(4)));
typedef short Short4 __attribute__((ext_vector_type(4)));
typedef __bf16 Bf16x4 __attribute__((ext_vector_type(4)));
typedef __bf16 Bf16x8 __attribute__((ext_vector_type(8)));
typedef _Float16 Half4 __attribute__((ext_vector_type(4)));
typedef _Float16 Half8 __attribute__((ext_vector_type(8)));

struct CdnaLanes {
  static constexpr int kWave = 64;

  template <class Op>
  using Vector = std::conditional_t<std::is_same_v<Op, BF16>, Bf16x4, Half4>;

  struct Acc {
    Float4 x;
  };
  template <class Op>
  struct Operand {
    Vector<Op> x;
  };
  template <class Op>  // float32 operands stay accumulators
  using Left = std::conditional_t<std::is_same_v<Op, F32>, Acc, Operand<Op>>;
  template <class Op>
  using Right = Left<Op>;
  struct RowVec {
    float x;
  };
  struct ColVec {
    Float4 x;
  };

  static KDA_FN int lane() { return int(threadIdx.x) & 63; }
  static KDA_FN int row() { return lane() & 15; }
  static KDA_FN int col(int e) { return 4 * (lane() >> 4) + e; }
  static KDA_FN void sync_wave() {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
  }
  static KDA_FN float shuffle(float x, int from) {
    return __builtin_bit_cast(
        float, __builtin_amdgcn_ds_bpermute(4 * from, __builtin_bit_cast(int, x)));
  }
  // Within the 16 lanes of a column: DPP. What has no source becomes 0.
  template <int Control>
  static KDA_FN float dpp(float x) {
    return __builtin_bit_cast(float, __builtin_amdgcn_update_dpp(
                                         0, __builtin_bit_cast(int, x), Control, 0xf, 0xf, false));
  }
  static constexpr int kRowShiftRight = 0x110, kRowBroadcast = 0x150;

  static KDA_FN float exp2(float x) { return __builtin_amdgcn_exp2f(x); }
  static KDA_FN float rcp(float x) { return __builtin_amdgcn_rcpf(x); }
  static KDA_FN float rsqrt(float x) { return __builtin_amdgcn_rsqf(x); }

  static KDA_FN void zero(Acc& a) { a.x = Float4{0, 0, 0, 0}; }
  static KDA_FN void set_identity(Acc& a) {
    KDA_UNROLL
    for (int e = 0; e < 4; ++e) a.x[e] = row() == col(e) ? 1.0f : 0.0f;
  }

  // Two tiles of neighbouring channels: 1 where the channel is row + offset.
  static KDA_FN void set_identity2(Acc& a, Acc& b, int offset) {
    KDA_UNROLL
    for (int e = 0; e < 4; ++e) {
      a.x[e] = row() + offset == 2 * col(0) + e ? 1.0f : 0.0f;
      b.x[e] = row() + offset == 2 * col(0) + 4 + e ? 1.0f : 0.0f;
    }
  }

  // ---- element-wise ----------------------------------------------------------------------------
  static KDA_FN float at(const Acc& a, int e) { return a.x[e]; }
  template <class Op>
  static KDA_FN float at(const Operand<Op>& a, int e) { return float(a.x[e]); }
  static KDA_FN float at(const RowVec& v, int) { return v.x; }
  static KDA_FN float at(const ColVec& v, int e) { return v.x[e]; }
  template <class F, class... In>
  static KDA_FN void apply(Acc& out, F f, const In&... in) {
    KDA_UNROLL
    for (int e = 0; e < 4; ++e) out.x[e] = f(at(in, e)...);
  }
  template <class F, class... In>
  static KDA_FN void apply(ColVec& out, F f, const In&... in) {
    KDA_UNROLL
    for (int e = 0; e < 4; ++e) out.x[e] = f(in.x[e]...);
  }
  template <class F, class... In>
  static KDA_FN void apply(RowVec& out, F f, const In&... in) {
    out.x = f(in.x...);
  }
  template <class Keep>
  static KDA_FN void select(Acc& a, Keep keep) {
    KDA_UNROLL
    for (int e = 0; e < 4; ++e) a.x[e] = keep(row(), col(e)) ? a.x[e] : 0.0f;
  }
  static KDA_FN void mask_rows(RowVec& v, int valid) { v.x = row() < valid ? v.x : 0.0f; }
  static KDA_FN void add_diagonal(Acc& a, const RowVec& d) {
    KDA_UNROLL
    for (int e = 0; e < 4; ++e) a.x[e] += row() == col(e) ? d.x : 0.0f;
  }

  // `first` = the smallest `token` + column (`Rows`: row) where |a| is not within the limit.
  template <bool Rows = false>
  static KDA_FN void first_beyond(int32_t& first, const Acc& a, float limit, int32_t token) {
    unsigned most = 0;  // as an integer, since NaN then is the largest
    KDA_UNROLL
    for (int e = 0; e < 4; ++e) {
      const float x = a.x[e];  // clang-22 casts the first element instead of a[e] without this copy
      const unsigned bits = __builtin_bit_cast(unsigned, x) & 0x7fffffffu;
      most = bits > most ? bits : most;
    }
    if (most <= __builtin_bit_cast(unsigned, limit)) return;
    KDA_UNROLL
    for (int e = 3; e >= 0; --e) {
      const int at = token + (Rows ? row() : col(e));
      if (!(__builtin_fabsf(a.x[e]) <= limit) && at < first) first = at;
    }
  }
  static KDA_FN int32_t wave_min(int32_t x) {  // said to be scalar, so that what depends on it is, too
    KDA_UNROLL
    for (int d = 1; d < kWave; d *= 2) {
      const int32_t other = __builtin_amdgcn_ds_bpermute(4 * (lane() ^ d), x);
      x = other < x ? other : x;
    }
    return __builtin_amdgcn_readfirstlane(x);
  }
  static KDA_FN void atomic_max(int32_t* p, int32_t value) { atomicMax(p, value); }
  static KDA_FN RowVec row_numbers() { return {float(row())}; }

  // ---- across rows and columns -------------------------------------------------------------------
  static KDA_FN RowVec row_sums(const Acc& a) {
    float s = (a.x[0] + a.x[1]) + (a.x[2] + a.x[3]);
    s += shuffle(s, lane() ^ 16);
    s += shuffle(s, lane() ^ 32);
    return {s};
  }
  static KDA_FN void cumsum_rows(Acc& a) {
    KDA_UNROLL
    for (int e = 0; e < 4; ++e) {
      a.x[e] += dpp<kRowShiftRight + 1>(a.x[e]);
      a.x[e] += dpp<kRowShiftRight + 2>(a.x[e]);
      a.x[e] += dpp<kRowShiftRight + 4>(a.x[e]);
      a.x[e] += dpp<kRowShiftRight + 8>(a.x[e]);
    }
  }
  template <class Source>
  static KDA_FN Acc gather_rows(const Acc& a, Source source) {
    const int from = (lane() & 48) | source(row());
    Acc out;
    KDA_UNROLL
    for (int e = 0; e < 4; ++e) out.x[e] = shuffle(a.x[e], from);
    return out;
  }
  static KDA_FN ColVec last_row(const Acc& a) { return {broadcast_row<kTile - 1>(a.x)}; }
  template <int Row>
  static KDA_FN Float4 broadcast_row(Float4 x) {
    KDA_UNROLL
    for (int e = 0; e < 4; ++e) x[e] = dpp<kRowBroadcast + Row>(x[e]);
    return x;
  }
  static constexpr bool kInverseByHalves = false;
  // Row j is final after step j: broadcast it, and subtract its share from the rows below.
  static KDA_FN Acc unit_lower_inverse(const Acc& a) {
    float whole[kTile];  // this lane's row of a
    KDA_UNROLL
    for (int j = 0; j < kTile; ++j) whole[j] = shuffle(a.x[j & 3], 16 * (j >> 2) + row());
    Acc t;
    set_identity(t);
    subtract_rows(t, whole, std::make_integer_sequence<int, kTile - 1>{});
    return t;
  }
  template <int... J>
  static KDA_FN void subtract_rows(Acc& t, const float (&whole)[kTile],
                                   std::integer_sequence<int, J...>) {
    ((t.x -= (row() > J ? whole[J] : 0.0f) * broadcast_row<J>(t.x)), ...);
  }
};

}  // namespace KDA_ISA
}  // namespace kda
