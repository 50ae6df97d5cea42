// The CDNA tile layer: gfx90a, gfx942 and gfx950, waves of 64, MFMA.
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
#include "../kernel/problem.h"
#include "../kernel/target.h"
#include "../kernel/workspace.h"
#include "vendor.h"

namespace kda {
inline namespace KDA_ISA {

typedef float Float4 __attribute__((ext_vector_type(4)));
typedef short Short4 __attribute__((ext_vector_type(4)));
typedef __bf16 Bf16x4 __attribute__((ext_vector_type(4)));
typedef __bf16 Bf16x8 __attribute__((ext_vector_type(8)));
typedef _Float16 Half4 __attribute__((ext_vector_type(4)));
typedef _Float16 Half8 __attribute__((ext_vector_type(8)));

// `Io` is the type of q, k, v and out: BF16 or F16.
template <class Io>
struct CdnaTiles {
  using Storage = uint16_t;
  static constexpr bool kSkipsEmptyBlocks = false;
  static constexpr int kWave = 64;
  static constexpr bool kLoops = false;  // kernels.h
  static constexpr bool kSplitHalves = false;

  template <class Op>
  using Vector = std::conditional_t<std::is_same_v<Op, BF16>, Bf16x4, Half4>;

  struct Acc {
    Float4 x;
  };
  template <class Op>
  struct Operand {
    Vector<Op> x;
  };
  using Raw = Operand<Io>;
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
  static KDA_FN float at(const Raw& a, int e) { return float(a.x[e]); }
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

  // `first` = the smallest `token` + column where |a| is not within the limit.
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
    for (int e = 3; e >= 0; --e)
      if (!(__builtin_fabsf(a.x[e]) <= limit) && token + col(e) < first) first = token + col(e);
  }
  static KDA_FN int32_t wave_min(int32_t x) {
    KDA_UNROLL
    for (int d = 1; d < kWave; d *= 2) {
      const int32_t other = __builtin_amdgcn_ds_bpermute(4 * (lane() ^ d), x);
      x = other < x ? other : x;
    }
    return x;
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
  // Sums of squares of the rows: the diagonal of x x^T.
  template <int N>
  static KDA_FN RowVec row_squares(const Raw (&x)[N]) {
    Acc a;
    zero(a);
    KDA_UNROLL
    for (int i = 0; i + 1 < N; i += 2) product2(a, x[i], x[i + 1], x[i], x[i + 1]);
    if (N & 1) product(a, x[N - 1], x[N - 1]);
    const int e = row() & 3;
    const float low = e & 1 ? a.x[1] : a.x[0], high = e & 1 ? a.x[3] : a.x[2];
    return {shuffle(e & 2 ? high : low, 16 * (row() >> 2) + row())};
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

  // ---- operands ----------------------------------------------------------------------------------
  template <class Op>
  static KDA_FN Left<Op> left(const Acc& a) {
    if constexpr (std::is_same_v<Op, F32>) {
      return a;
    } else {
      return {__builtin_convertvector(a.x, Vector<Op>)};
    }
  }
  template <class Op>
  static KDA_FN Right<Op> right(const Acc& a) {
    return left<Op>(a);
  }
  // The same with values beyond fp16 kept finite, since 0 times infinity would reach other rows; NaN stays.
  template <class Op>
  static KDA_FN Left<Op> left_clamped(Acc a) {
    if constexpr (std::is_same_v<Op, F16>) {
      KDA_UNROLL
      for (int e = 0; e < 4; ++e)
        a.x[e] = __builtin_fabsf(a.x[e]) > kLargest ? __builtin_copysignf(kLargest, a.x[e]) : a.x[e];
    }
    return left<Op>(a);
  }
  template <class Op>
  static KDA_FN Right<Op> right_clamped(const Acc& a) {
    return left_clamped<Op>(a);
  }
  // The matrix unit transposes: I x^T is exact, since each sum has one term that is not 0 * finite.
  template <class Operand>
  static KDA_FN Acc transpose_operand(const Operand& x, const Operand& identity) {
    Acc t;
    zero(t);
    product(t, identity, x);
    return t;
  }
  static KDA_FN Acc transposed(const Operand<BF16>& a) {
    Acc one;
    set_identity(one);
    return transpose_operand(a, left<BF16>(one));
  }
  static KDA_FN Acc transposed(const Operand<F16>& a) {
    Acc one;
    set_identity(one);
    return transpose_operand(a, left<F16>(one));
  }
  static KDA_FN Acc transposed(const Acc& a) {
    Acc one;
    set_identity(one);
    return transpose_operand(a, one);
  }
  template <class Op>
  static KDA_FN Right<Op> right_t(const Acc& a) {
    return left<Op>(transposed(left<Op>(a)));
  }

  static KDA_FN void product(Acc& d, const Operand<BF16>& a, const Operand<BF16>& b) {
    d.x = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(Short4, b.x),
                                                    __builtin_bit_cast(Short4, a.x), d.x, 0, 0, 0);
  }
  static KDA_FN void product(Acc& d, const Operand<F16>& a, const Operand<F16>& b) {
    d.x = __builtin_amdgcn_mfma_f32_16x16x16f16(b.x, a.x, d.x, 0, 0, 0);
  }
  static KDA_FN void product(Acc& d, const Acc& a, const Acc& b) {
    KDA_UNROLL
    for (int e = 0; e < 4; ++e)
      d.x = __builtin_amdgcn_mfma_f32_16x16x4f32(b.x[e], a.x[e], d.x, 0, 0, 0);
  }
  static KDA_FN void product2(Acc& d, const Acc& a0, const Acc& a1, const Acc& b0, const Acc& b1) {
    product(d, a0, b0);
    product(d, a1, b1);
  }
#if defined(__gfx950__)
  // Two tiles in one instruction. It counts the contracted index in another order than the tiles do,
  // in both operands alike, so the sum is the same.
  template <class V>
  static KDA_FN auto join(V low, V high) {
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
  }
  static KDA_FN void product2(Acc& d, const Operand<BF16>& a0, const Operand<BF16>& a1,
                              const Operand<BF16>& b0, const Operand<BF16>& b1) {
    d.x = __builtin_amdgcn_mfma_f32_16x16x32_bf16(join(b0.x, b1.x), join(a0.x, a1.x), d.x, 0, 0, 0);
  }
  static KDA_FN void product2(Acc& d, const Operand<F16>& a0, const Operand<F16>& a1,
                              const Operand<F16>& b0, const Operand<F16>& b1) {
    d.x = __builtin_amdgcn_mfma_f32_16x16x32_f16(join(b0.x, b1.x), join(a0.x, a1.x), d.x, 0, 0, 0);
  }
#else
  template <class Op>
  static KDA_FN void product2(Acc& d, const Operand<Op>& a0, const Operand<Op>& a1,
                              const Operand<Op>& b0, const Operand<Op>& b1) {
    product(d, a0, b0);
    product(d, a1, b1);
  }
#endif
  template <class L, class R>
  static KDA_FN void mma(Acc& d, int n, L left, R right) {
    KDA_UNROLL
    for (int i = 0; i + 1 < n; i += 2) product2(d, left(i), left(i + 1), right(i), right(i + 1));
    if (n & 1) product(d, left(n - 1), right(n - 1));
  }

  // ---- native-order memory -----------------------------------------------------------------------
  template <class Op>
  static KDA_FN Operand<Op> load_left(const Storage* p) {
    return {reinterpret_cast<const Vector<Op>*>(p)[lane()]};
  }
  template <class Op>
  static KDA_FN Operand<Op> load_right(const Storage* p) {
    return load_left<Op>(p);
  }
  template <class Op>
  static KDA_FN Acc load_acc(const Storage* p) {
    return {__builtin_convertvector(load_left<Op>(p).x, Float4)};
  }
  template <class Op>
  static KDA_FN void store(Storage* p, const Operand<Op>& a) {
    reinterpret_cast<Vector<Op>*>(p)[lane()] = a.x;
  }
  template <class Op>
  static KDA_FN void store_acc(Storage* p, const Acc& a) {
    store(p, left<Op>(a));
  }
  template <class Op>
  static KDA_FN void store_acc_t(Storage* p, const Acc& a) {
    store(p, right_t<Op>(a));
  }
  // Operands that the walk reads; here they lie like all others.
  template <class Op>
  static KDA_FN void store_blob(Storage* p, TileAt at, const Operand<Op>& a) {
    store(p + at.offset, a);
  }
  template <class Op>
  static KDA_FN Operand<Op> load_blob_left(const Storage* p, TileAt at) {
    return load_left<Op>(p + at.offset);
  }
  template <class Op>
  static KDA_FN Operand<Op> load_blob_right(const Storage* p, TileAt at) {
    return load_left<Op>(p + at.offset);
  }
  // Vectors in LDS and in the workspace: by place, not by channel.
  static KDA_FN ColVec load_cols(const float* p) {
    return {reinterpret_cast<const Float4*>(p)[lane() >> 4]};
  }
  static KDA_FN void store_cols(float* p, const ColVec& v) {
    if (row() == 0) reinterpret_cast<Float4*>(p)[lane() >> 4] = v.x;
  }
  static KDA_FN void store_rows(float* p, const RowVec& v) {
    if (lane() < kTile) p[lane()] = v.x;
  }

  // ---- the caller's arrays -----------------------------------------------------------------------
  static KDA_FN Raw load_raw(const Tensor& t, int64_t offset, int64_t stride, int valid) {
    Raw a = {Vector<Io>{0, 0, 0, 0}};
    if (row() < valid) {
      const auto* p = static_cast<const uint16_t*>(t.data) + offset + row() * stride + col(0);
      a.x = *reinterpret_cast<const Vector<Io>*>(p);
    }
    return a;
  }
  static KDA_FN void load_raw2(Raw& a, Raw& b, const Tensor& t, int64_t offset, int64_t stride,
                               int valid) {
    using Pair = std::conditional_t<std::is_same_v<Io, BF16>, Bf16x8, Half8>;
    Pair x = {0, 0, 0, 0, 0, 0, 0, 0};
    if (row() < valid)
      x = *reinterpret_cast<const Pair*>(static_cast<const uint16_t*>(t.data) + offset +
                                         row() * stride + 2 * col(0));
    a.x = __builtin_shufflevector(x, x, 0, 1, 2, 3);
    b.x = __builtin_shufflevector(x, x, 4, 5, 6, 7);
  }
  static KDA_FN void load2(Acc& a, Acc& b, const Tensor& t, int64_t offset, int64_t stride,
                           int valid) {
    if (t.type != DType::kF32) {
      Raw x, y;
      load_raw2(x, y, t, offset, stride, valid);
      a.x = __builtin_convertvector(x.x, Float4), b.x = __builtin_convertvector(y.x, Float4);
      return;
    }
    zero(a), zero(b);
    if (row() < valid) {
      const auto* p = reinterpret_cast<const Float4*>(static_cast<const float*>(t.data) + offset +
                                                      row() * stride + 2 * col(0));
      a.x = p[0], b.x = p[1];
    }
  }
  static KDA_FN void load_cols2(ColVec& a, ColVec& b, const float* p) {
    const auto* x = reinterpret_cast<const Float4*>(p + 2 * col(0));
    a.x = x[0], b.x = x[1];
  }
  static KDA_FN RowVec load_rows(const Tensor& t, int64_t offset, int64_t stride, int valid) {
    using Element = std::conditional_t<std::is_same_v<Io, BF16>, __bf16, _Float16>;
    const int64_t at = offset + row() * stride;
    if (row() >= valid) return {0};
    return {t.type == DType::kF32 ? static_cast<const float*>(t.data)[at]
                                  : float(static_cast<const Element*>(t.data)[at])};
  }
  static KDA_FN void store(void* data, DType, int64_t offset, int64_t stride, const Acc& a,
                           int from, int to) {  // rows [from, to)
    if (row() < from || row() >= to) return;
    auto* p = static_cast<uint16_t*>(data) + offset + row() * stride + col(0);
    *reinterpret_cast<Vector<Io>*>(p) = left<Io>(a).x;
  }
  // States: rows are values, columns a pair of channel tiles.
  static KDA_FN void load_state2(Acc& a, Acc& b, const float* p, int64_t row_stride,
                                 int64_t col_stride) {
    p += row() * row_stride + 2 * col(0) * col_stride;
    KDA_UNROLL
    for (int e = 0; e < 4; ++e)
      a.x[e] = p[e * col_stride], b.x[e] = p[(e + 4) * col_stride];
  }
  static KDA_FN void store_state2(float* p, int64_t row_stride, int64_t col_stride, const Acc& a,
                                  const Acc& b) {
    p += row() * row_stride + 2 * col(0) * col_stride;
    KDA_UNROLL
    for (int e = 0; e < 4; ++e)
      p[e * col_stride] = a.x[e], p[(e + 4) * col_stride] = b.x[e];
  }
  // In plain order.
  static KDA_FN Acc load_f32(const float* p, int64_t row_stride, int64_t col_stride) {
    Acc a;
    KDA_UNROLL
    for (int e = 0; e < 4; ++e) a.x[e] = p[row() * row_stride + col(e) * col_stride];
    return a;
  }
  static KDA_FN void store_f32(float* p, int64_t row_stride, int64_t col_stride, const Acc& a) {
    KDA_UNROLL
    for (int e = 0; e < 4; ++e) p[row() * row_stride + col(e) * col_stride] = a.x[e];
  }
};

}  // namespace KDA_ISA
}  // namespace kda
