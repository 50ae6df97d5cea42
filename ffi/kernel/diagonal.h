// The diagonal 16 x 16 blocks of Akk and Aqk for gates without a bound, where exponents cannot be split at
// an anchor: with G_i - anchor down to -16 * 150 one factor vanishes and the other overflows.
#pragma once

#include "ops.h"
#include "target.h"
#include "tile_ops.h"

namespace kda {
inline namespace KDA_ISA {

// x factor 2^g: a normalised row with its decay.
template <class Tiles>
struct Decayed {
  KDA_FN float operator()(float x, float factor, float g) const {
    return x * factor * Tiles::exp2(g);
  }
};
// q and k of 16 rows as the caller gave them, with the factor of each row (norm and scale).
template <class Tiles, int KT>
struct Rows {
  typename Tiles::Raw q[KT], k[KT];
  typename Tiles::RowVec q_factor, k_factor;
};

template <class Tiles, class Op, int K>
struct Diagonal {
  using Acc = typename Tiles::Acc;
  static constexpr int KT = K / kTile;

  // Any gate. Halves of 1, 2, 4, 8 rows are joined: a pair (i, j) meets at the level where i lies in
  // the upper and j in the lower half of one stretch, and its decay is (sum from the upper half's
  // start to i) + (sum from behind j to the lower half's end). Both are sums of gates, never a
  // difference, so nothing cancels and nothing overflows. On entry `sum` holds the gates; it leaves
  // with G - anchor, and `rest` with G_end - G.
  static KDA_FN void exact(const Rows<Tiles, KT>& x, Acc (&sum)[KT], Acc (&rest)[KT], Acc& akk,
                           Acc& aqk) {
    Tiles::zero(akk);
    Tiles::zero(aqk);
    KDA_UNROLL
    for (int t = 0; t < KT; ++t) Tiles::zero(rest[t]);
    KDA_UNROLL
    for (int half = 1; half < kTile; half *= 2) {
      Acc level_kk, level_qk;
      Tiles::zero(level_kk);
      Tiles::zero(level_qk);
      auto upper = [=](int r, int) { return (r & half) != 0; };
      auto lower = [=](int r, int) { return (r & half) == 0; };
      KDA_UNROLL
      for (int t = 0; t < KT; ++t) {
        Acc left, right_k;
        Tiles::apply(right_k, Decayed<Tiles>{}, x.k[t], x.k_factor, rest[t]);
        Tiles::select(right_k, lower);
        const auto right = Tiles::template right<Op>(right_k);
        Tiles::apply(left, Decayed<Tiles>{}, x.k[t], x.k_factor, sum[t]);
        Tiles::select(left, upper);
        product(level_kk, left, right);
        Tiles::apply(left, Decayed<Tiles>{}, x.q[t], x.q_factor, sum[t]);
        Tiles::select(left, upper);
        product(level_qk, left, right);
        // Join the halves: what lies before an upper row and behind a lower one grows by the other
        // half's total, which is the sum at the last row of that half.
        Acc before = Tiles::gather_rows(
            sum[t], [=](int r) { return (r & ~(2 * half - 1)) + half - 1; });
        Acc behind = Tiles::gather_rows(sum[t], [=](int r) { return r | (2 * half - 1); });
        Tiles::select(before, upper);
        Tiles::select(behind, lower);
        Tiles::apply(sum[t], Add{}, sum[t], before);
        Tiles::apply(rest[t], Add{}, rest[t], behind);
      }
      auto together = [=](int r, int c) { return (r ^ c) < 2 * half; };
      Tiles::select(level_kk, together);
      Tiles::select(level_qk, together);
      Tiles::apply(akk, Add{}, akk, level_kk);
      Tiles::apply(aqk, Add{}, aqk, level_qk);
    }
    Acc own;
    Tiles::zero(own);
    KDA_UNROLL
    for (int t = 0; t < KT; ++t)
      Tiles::apply(own, [](float s, float a, float b) { return s + a * b; }, own, x.q[t], x.k[t]);
    typename Tiles::RowVec diagonal = Tiles::row_sums(own);
    Tiles::apply(diagonal, Multiply{}, diagonal, x.q_factor);
    Tiles::apply(diagonal, Multiply{}, diagonal, x.k_factor);
    Tiles::add_diagonal(aqk, diagonal);
    mask(akk, aqk);
  }

  // akk holds what lies below the diagonal, aqk the diagonal as well.
  static KDA_FN void mask(Acc& akk, Acc& aqk) {
    Tiles::select(akk, [](int r, int c) { return r > c; });
    Tiles::select(aqk, [](int r, int c) { return r >= c; });
  }
  template <class R>
  static KDA_FN void product(Acc& acc, const Acc& left, const R& right) {
    accumulate<Tiles>(acc, Tiles::template left<Op>(left), right);
  }
};

}  // namespace KDA_ISA
}  // namespace kda
