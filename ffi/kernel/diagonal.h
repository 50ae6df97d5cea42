// The diagonal 16 x 16 blocks of Akk and Aqk, where a row's and a column's decay overlap.
//
// Exponents inside a block cannot be split at an anchor for every gate: with G_i - anchor down to
// -16 * 150 one factor vanishes and the other overflows. A bounded gate is factored nevertheless
// (its 16 rows stay inside float32's range); any other gate goes through `exact`.
#pragma once

#include "ops.h"

#ifndef KDA_ISA
#define KDA_ISA base
#endif

namespace kda {
inline namespace KDA_ISA {

// x 2^g
template <class Tiles>
struct Decayed {
  float operator()(float x, float g) const { return x * Tiles::exp2(g); }
};

// acc += left right^T for one pair of tiles that are values already.
template <class Tiles, class L, class R>
void accumulate(typename Tiles::Acc& acc, const L& left, const R& right) {
  Tiles::mma(acc, 1, [&](int) -> const L& { return left; }, [&](int) -> const R& { return right; });
}

template <class Tiles, class Op, int K>
struct Diagonal {
  using Acc = typename Tiles::Acc;
  static constexpr int KT = K / kTile;
  static constexpr float kMiddle = 58;  // half of 16 rows * 5 * log2(e)

  // Bounded gate: 2^(G_i - anchor) * 2^(anchor - G_j). Over 16 rows the first factor falls to
  // 2^-115.5, where small channels would become denormals and be flushed (an error of 1e-3 in a row's
  // own weight, measured); so both are moved to the middle of the range by an exact power of two.
  static void factored(const Acc (&q)[KT], const Acc (&k)[KT], const Acc (&sum)[KT], Acc& akk,
                       Acc& aqk) {
    Tiles::zero(akk);
    Tiles::zero(aqk);
    Acc growth, left;
    for (int t = 0; t < KT; ++t) {
      Tiles::apply(growth, [](float k, float g) { return k * Tiles::exp2(-kMiddle - g); }, k[t],
                   sum[t]);
      const auto right = Tiles::template right<Op>(growth);
      auto shifted = [](float x, float g) { return x * Tiles::exp2(kMiddle + g); };
      Tiles::apply(left, shifted, k[t], sum[t]);
      product(akk, left, right);
      Tiles::apply(left, shifted, q[t], sum[t]);
      product(aqk, left, right);
    }
    mask(akk, aqk);
  }

  // Any gate. Halves of 1, 2, 4, 8 rows are joined: a pair (i, j) meets at the level where i lies in
  // the upper and j in the lower half of one stretch, and its decay is (sum from the upper half's
  // start to i) + (sum from behind j to the lower half's end). Both are sums of gates, never a
  // difference, so nothing cancels and nothing overflows. On entry `sum` holds the gates; it leaves
  // with G - anchor, and `rest` with G_end - G.
  static void exact(const Acc (&q)[KT], const Acc (&k)[KT], Acc (&sum)[KT], Acc (&rest)[KT],
                    Acc& akk, Acc& aqk) {
    Tiles::zero(akk);
    Tiles::zero(aqk);
    for (int t = 0; t < KT; ++t) Tiles::zero(rest[t]);
    Acc left, level_kk, level_qk, right_k;
    for (int half = 1; half < kTile; half *= 2) {
      Tiles::zero(level_kk);
      Tiles::zero(level_qk);
      auto upper = [=](int r, int) { return (r & half) != 0; };
      auto lower = [=](int r, int) { return (r & half) == 0; };
      for (int t = 0; t < KT; ++t) {
        Tiles::apply(right_k, Decayed<Tiles>{}, k[t], rest[t]);
        Tiles::select(right_k, lower);
        const auto right = Tiles::template right<Op>(right_k);
        Tiles::apply(left, Decayed<Tiles>{}, k[t], sum[t]);
        Tiles::select(left, upper);
        product(level_kk, left, right);
        Tiles::apply(left, Decayed<Tiles>{}, q[t], sum[t]);
        Tiles::select(left, upper);
        product(level_qk, left, right);
        // Join the halves: what lies before an upper row and behind a lower one grows by the other
        // half's total, which is the sum at the last row of that half.
        Acc before = Tiles::gather_rows(sum[t], [=](int r) { return (r & ~(2 * half - 1)) + half - 1; });
        Acc behind = Tiles::gather_rows(sum[t], [=](int r) { return r | (2 * half - 1); });
        Tiles::select(before, upper);
        Tiles::select(behind, lower);
        Tiles::apply(sum[t], [](float a, float b) { return a + b; }, sum[t], before);
        Tiles::apply(rest[t], [](float a, float b) { return a + b; }, rest[t], behind);
      }
      auto together = [=](int r, int c) { return (r ^ c) < 2 * half; };
      Tiles::select(level_kk, together);
      Tiles::select(level_qk, together);
      Tiles::apply(akk, [](float a, float b) { return a + b; }, akk, level_kk);
      Tiles::apply(aqk, [](float a, float b) { return a + b; }, aqk, level_qk);
    }
    Acc own;
    Tiles::zero(own);
    for (int t = 0; t < KT; ++t)
      Tiles::apply(own, [](float s, float a, float b) { return s + a * b; }, own, q[t], k[t]);
    Tiles::add_diagonal(aqk, Tiles::row_sums(own));
    mask(akk, aqk);
  }

  // akk holds what lies below the diagonal, aqk the diagonal as well.
  static void mask(Acc& akk, Acc& aqk) {
    Tiles::select(akk, [](int r, int c) { return r > c; });
    Tiles::select(aqk, [](int r, int c) { return r >= c; });
  }
  template <class R>
  static void product(Acc& acc, const Acc& left, const R& right) {
    accumulate<Tiles>(acc, Tiles::template left<Op>(left), right);
  }
};

}  // namespace KDA_ISA
}  // namespace kda
