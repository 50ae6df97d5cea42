// Operands of MFMA, and products.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../kernel/ops.h"
#include "../kernel/target.h"
#include "cdna_lanes.h"
#include "vendor.h"

namespace kda {
inline namespace KDA_ISA {

struct CdnaProducts : CdnaLanes {
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
  template <class Op>
  static KDA_FN Left<Op> left_t(const Acc& a) {  // both operands have one layout
    return right_t<Op>(a);
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
  // Sums of squares of the rows: the diagonal of x x^T.
  template <class Op, int N>
  static KDA_FN RowVec row_squares(const Operand<Op> (&x)[N]) {
    Acc a;
    zero(a);
    KDA_UNROLL
    for (int i = 0; i + 1 < N; i += 2) product2(a, x[i], x[i + 1], x[i], x[i + 1]);
    if (N & 1) product(a, x[N - 1], x[N - 1]);
    const int e = row() & 3;
    const float low = e & 1 ? a.x[1] : a.x[0], high = e & 1 ? a.x[3] : a.x[2];
    return {shuffle(e & 2 ? high : low, 16 * (row() >> 2) + row())};
  }
};

}  // namespace KDA_ISA
}  // namespace kda
