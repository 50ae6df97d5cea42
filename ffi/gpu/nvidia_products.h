// Operands of mma.sync m16n8k16, and products.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../kernel/ops.h"
#include "../kernel/target.h"
#include "nvidia_lanes.h"
#include "vendor.h"

namespace kda {
inline namespace KDA_ISA {

struct NvidiaProducts : NvidiaLanes {
  template <class Op>
  static KDA_FN Left<Op> left(const Acc& a) {
    if constexpr (std::is_same_v<Op, F32>) {
      return a;
    } else {
      Operand<Op> o;
      KDA_UNROLL
      for (int i = 0; i < 4; ++i) o.r[i] = pack<Op>(a.x[2 * i], a.x[2 * i + 1]);
      return o;
    }
  }
  template <class Op>
  static KDA_FN RightOperand<Op> right_of(const Operand<Op>& a) {
    return {{a.r[0], a.r[2], a.r[1], a.r[3]}};
  }
  static KDA_FN Acc right_of(const Acc& a) { return a; }
  template <class Op>
  static KDA_FN Right<Op> right(const Acc& a) {
    return right_of(left<Op>(a));
  }
  // The same with values beyond fp16 kept finite, since 0 times infinity would reach other rows; NaN stays.
  template <class Op>
  static KDA_FN Left<Op> left_clamped(const Acc& a) {
    if constexpr (std::is_same_v<Op, F16>) {
      Operand<Op> o;
      KDA_UNROLL
      for (int i = 0; i < 4; ++i) o.r[i] = pack_clamped(a.x[2 * i], a.x[2 * i + 1]);
      return o;
    } else {
      return left<Op>(a);
    }
  }
  template <class Op>
  static KDA_FN Right<Op> right_clamped(const Acc& a) {
    return right_of(left_clamped<Op>(a));
  }
  static KDA_FN uint32_t transpose8(uint32_t r) {
    uint32_t out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(r));
    return out;
  }
  template <class Op>
  static KDA_FN Operand<Op> transpose_operand(const Operand<Op>& a) {
    return {{transpose8(a.r[0]), transpose8(a.r[2]), transpose8(a.r[1]), transpose8(a.r[3])}};
  }
  template <class Op>
  static KDA_FN Left<Op> left_t(const Acc& a) {
    if constexpr (std::is_same_v<Op, F32>) {
      return a;  // mma_f32 reads its right operand as [contraction][row]
    } else {
      return transpose_operand(left<Op>(a));
    }
  }
  template <class Op>
  static KDA_FN Right<Op> right_t(const Acc& a) {
    return right_of(left_t<Op>(a));
  }
  template <class Op>
  static KDA_FN Acc unpack_all(const uint32_t (&r)[4]) {
    Acc a;
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) a.x[e] = unpack<Op>(r[e >> 1], e & 1);
    return a;
  }
  template <class Op>
  static KDA_FN Acc transposed(const Operand<Op>& a) {
    return unpack_all<Op>(transpose_operand(a).r);
  }

  template <class Op>
  static KDA_FN void mma8(float* d, const Operand<Op>& a, uint32_t b0, uint32_t b1) {
#define KDA_MMA(TYPE)                                                                             \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                      \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                      \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                            \
      : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b0), "r"(b1))
    if constexpr (std::is_same_v<Op, BF16>) {
      KDA_MMA("bf16");
    } else {
      KDA_MMA("f16");
    }
#undef KDA_MMA
  }
  template <class Op>
  static KDA_FN void product(Acc& d, const Operand<Op>& a, const RightOperand<Op>& b) {
    mma8<Op>(d.x, a, b.r[0], b.r[1]);
    mma8<Op>(d.x + 4, a, b.r[2], b.r[3]);
  }
  // float32: no tensor core keeps 24 bits, so 16 rank-one updates by shuffles. A call: the scan of groups has 64 of
  // these products in a row, and ptxas takes minutes over them in one piece.
  static KDA_FN void product(Acc& d, const Acc& a, const Acc& b) { d = product_float32(d, a, b); }
  static __device__ __noinline__ Acc product_float32(Acc d, const Acc a, const Acc b) {
    KDA_UNROLL
    for (int k = 0; k < kTile; ++k) {
      const int holder = (lane() & ~3) + (k & 7) / 2, c = (k & 1) + 4 * (k >> 3);
      const float left[2] = {shuffle(a.x[c], holder), shuffle(a.x[c + 2], holder)};
      const int l = (k & 7) * 4 + (lane() & 3);
      KDA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int e = (i & 1) + 4 * (i >> 1);
        const float right = shuffle(b.x[e + 2 * (k >> 3)], l);
        d.x[e] += left[0] * right;
        d.x[e + 2] += left[1] * right;
      }
    }
    return d;
  }
  template <class L, class R>
  static KDA_FN void mma(Acc& d, int n, L left, R right) {
    if (n < 8) {
      KDA_UNROLL
      for (int i = 0; i < n; ++i) product(d, left(i), right(i));
    } else {  // two chains: one alone is all latency
      Acc other;
      zero(other);
      KDA_UNROLL
      for (int i = 0; i < n; ++i) product(i & 1 ? other : d, left(i), right(i));
      KDA_UNROLL
      for (int e = 0; e < 8; ++e) d.x[e] += other.x[e];
    }
  }
  // The same by blocks of 8 tokens in float32, and what lies between them by two products with fp16 operands:
  //   X_21 = -X_22 (A_21 X_11)
  // as is what lies between blocks of 16 (solve.h). `between` gets what is in brackets, which fp16 may be too narrow for.
  static constexpr bool kInverseByHalves = true;
  static KDA_FN Acc unit_lower_inverse_by_halves(const Acc& a, Acc& between) {
    Acc x = unit_lower_inverse<kTile / 2>(a), rest;
    const auto own = left_clamped<F16>(x);
    auto below = left<F16>(a);
    const bool is_below = (lane() & 18) == 16;
    KDA_UNROLL
    for (int i = 0; i < 4; ++i) below.r[i] = is_below ? below.r[i] : 0;
    zero(between), zero(rest);
    product(between, below, right_of(transpose_operand(own)));
    product(rest, own, right_of(transpose_operand(left_clamped<F16>(between))));
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) x.x[e] -= rest.x[e];
    return x;
  }
  // Sums of squares of the rows: the diagonal of x x^T. Row g lies in lane (g, g / 2).
  template <class Op, int N>
  static KDA_FN RowVec row_squares(const Operand<Op> (&x)[N]) {
    Acc a;
    zero(a);
    KDA_UNROLL
    for (int i = 0; i < N; ++i) product(a, x[i], right_of(x[i]));
    return diagonal(a);
  }
  static KDA_FN RowVec diagonal(const Acc& a) {
    const int from = (lane() & ~3) + (group() >> 1);
    const bool odd = group() & 1;
    return {{shuffle(odd ? a.x[1] : a.x[0], from), shuffle(odd ? a.x[7] : a.x[6], from)}};
  }
};

}  // namespace KDA_ISA
}  // namespace kda
