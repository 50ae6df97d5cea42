// The end of stage 1: block forward substitution, (I + Akk) X = diag(beta) rhs for the columns of w and u.
#pragma once

#include "prologue.h"

namespace kda {
inline namespace KDA_ISA {

// `P`: the prologue whose scores are solved with.
template <class P>
struct Solve {
  using Tiles = typename P::Tiles;
  using Acc = typename P::Acc;
  using Storage = typename P::Storage;
  using Decay = typename P::Decay;
  using Bounded = typename P::Bounded;
  using Layout = typename P::Layout;
  using Shared = typename P::Shared;
  using Wave = typename P::Wave;
  static constexpr int KT = P::KT, NT = P::NT, kColumns = P::kColumns;

  // The tiles of v that a wave solves for first, or with `first` others, on their way early.
  static KDA_FN void values(const Problem& p, const ChunkRow& chunk, int head, int first, int blocks,
                            Wave& w) {
    const int64_t stride = int64_t(p.H) * p.V, row = row_offset(chunk.first, head, p.H, p.V);
    KDA_UNROLL
    for (int n = 0; n < kColumns; ++n)
      KDA_UNROLL
      for (int i = 0; i < blocks; ++i) {
        const int column = first + n * blocks;
        const int valid = column < p.V / kTile ? P::valid_rows(chunk, i) : 0;
        w.v[n][i] = Tiles::load_raw(p.v, row + i * kTile * stride + column * kTile, stride, valid);
      }
  }

  // (I + Akk) X = diag(beta) rhs for kColumns times sixteen columns, transposed: the accumulator X^T is the
  // next product's left operand as it stands. `rhs(i, n)` and `result(i, n, X)`: row block i, column block n.
  template <class Rhs, class Check, class Result>
  static KDA_FN void substitute(int blocks, Shared& s, Rhs rhs, Check check, Result result) {
    typename Tiles::template Left<Bounded> x[kColumns][NT];
    KDA_UNROLL
    for (int i = 0; i < blocks; ++i) {
      KDA_UNROLL
      for (int n = 0; n < kColumns; ++n) {
        Acc sum = rhs(i, n), solved;
        Tiles::mma(sum, i, [&](int j) -> decltype(auto) { return (x[n][j]); },
                   [&](int j) -> decltype(auto) {
                     return Tiles::template load_right<Bounded>(s.lower[P::pair(i, j)]);
                   });
        check(i, sum);
        const auto left = Tiles::template left_clamped<Bounded>(sum);
        auto&& inverse = Tiles::template load_right<Bounded>(s.inverse[i]);
        Tiles::zero(solved);
        accumulate<Tiles>(solved, left, inverse);
        x[n][i] = Tiles::template left<Bounded>(solved);
        result(i, n, solved);
      }
    }
  }

  static KDA_FN void solve(const Problem& p, const ChunkRow& chunk, int head, int wave, Wave& w,
                           Shared& s, Storage* blob, int32_t* beyond) {
    const int blocks = active_blocks<Tiles, NT>(chunk), columns = p.V / kTile;
    KDA_LOOP
    for (int first = wave; first < columns; first += kColumns * blocks) {
      substitute(
          blocks, s, [&](int i, int n) { return Tiles::transposed(w.v[n][i]); },
          [&](int i, const Acc& sum) {
            if constexpr (P::kNarrow)
              Tiles::first_beyond(w.beyond, sum, kLargest, chunk.first + i * kTile);
          },
          [&](int i, int n, Acc& x) {
            const int column = first + n * blocks;
            if (column < columns) Tiles::template store_acc<Bounded>(blob + Layout::u(column, i), x);
          });
      const int next = first + kColumns * blocks;
      if (next < columns) values(p, chunk, head, next, blocks, w);
    }
    KDA_LOOP
    for (int first = wave; first < KT; first += kColumns * blocks) {
      substitute(
          blocks, s,
          [&](int i, int n) {
            const int column = first + n * blocks;
            return Tiles::template load_acc<Bounded>(s.rhs[i][column < KT ? column : 0]);
          },
          [](int, const Acc&) {},
          [&](int i, int n, Acc& x) {
            const int column = first + n * blocks;
            if (column >= KT) return;
            Tiles::apply(x, [](float a) { return -a; }, x);
            Tiles::store_blob(blob, Layout::w(i, column), Tiles::template right_t<Decay>(x));
          });
    }
    if constexpr (P::kNarrow) beyond[wave] = Tiles::wave_min(w.beyond);
  }
};

}  // namespace KDA_ISA
}  // namespace kda
