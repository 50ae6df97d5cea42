// The end of stage 1: block forward substitution for the inverse of I + Akk, times diag(beta).
#pragma once

#include "prologue.h"

namespace kda {
inline namespace KDA_ISA {

// `P`: the prologue whose scores are solved with. X_JJ is known; below it
//   X_IJ = -(I + Akk_II)^-1 diag(beta_I) (L_IJ X_JJ + ... + L_I,I-1 X_I-1,J),   Akk = diag(beta) L
// with L negated in memory. Transposed, an accumulator is the next product's left operand as it stands.
template <class P>
struct Solve {
  using Tiles = typename P::Tiles;
  using Acc = typename P::Acc;
  using Storage = typename P::Storage;
  using Bounded = typename P::Bounded;
  using Layout = typename P::Layout;
  static constexpr int NT = P::NT;

  // Block column `wave`.
  static KDA_FN void solve(const ChunkRow& chunk, int wave, typename P::Wave& w,
                           typename P::Shared& s, Storage* blob, int32_t* beyond) {
    const int blocks = active_blocks<Tiles, NT>(chunk);
    typename Tiles::template Left<Bounded> x[NT];
    KDA_UNROLL
    for (int i = 0; i < blocks; ++i) {
      if (i == wave) x[i] = w.inverse_t;
      if (i <= wave) continue;
      Acc sum, solved;
      Tiles::zero(sum), Tiles::zero(solved);
      KDA_UNROLL
      for (int j = 0; j < i; ++j)
        if (j >= wave)
          accumulate<Tiles>(sum, x[j], Tiles::template load_right<Bounded>(s.lower[P::pair(i, j)]));
      check(w.beyond, sum, chunk.first + i * kTile);
      accumulate<Tiles>(solved, Tiles::template left_clamped<Bounded>(sum),
                        Tiles::template load_right<Bounded>(s.inverse[i]));
      check(w.beyond, solved, chunk.first + i * kTile);
      x[i] = Tiles::template left_clamped<Bounded>(solved);
      Tiles::store_blob(blob, Layout::inverse(i, wave), Tiles::template right_t<Bounded>(solved));
    }
    if constexpr (P::kNarrow) beyond[wave] = Tiles::wave_min(w.beyond);
  }

 private:
  static KDA_FN void check(int32_t& beyond, const Acc& a, int first) {
    if constexpr (P::kNarrow) Tiles::first_beyond(beyond, a, kLargest, first);
  }
};

}  // namespace KDA_ISA
}  // namespace kda
