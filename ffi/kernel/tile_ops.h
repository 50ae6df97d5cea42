// Small things that several stages say with tiles.
#pragma once

#include "target.h"

namespace kda {
inline namespace KDA_ISA {

struct Add {
  KDA_FN float operator()(float a, float b) const { return a + b; }
};
struct Multiply {
  KDA_FN float operator()(float a, float b) const { return a * b; }
};

// acc += left right^T for one pair of tiles that are values already.
template <class Tiles, class L, class R>
KDA_FN void accumulate(typename Tiles::Acc& acc, const L& left, const R& right) {
  Tiles::mma(acc, 1, [&](int) -> const L& { return left; }, [&](int) -> const R& { return right; });
}

}  // namespace KDA_ISA
}  // namespace kda
