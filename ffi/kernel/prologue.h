// Stage 1, parallel over (chunk, head): everything of a chunk that does not depend on the state. Its last
// two roles are in solve.h.
//
// C/16 waves work on a chunk; wave I owns the 16 tokens of row block I. The functions below are what one
// wave does; a target's driver calls them in order, with a barrier of all waves where there is a line (the
// host loops over the waves instead):
//
//   load      inputs -> the decay summed inside the block, and its total
//   --------
//   channels  factors 2^(sum of whole blocks' totals) that this wave uses, a channel at a time
//   factors   diagonal blocks of Akk and Aqk, decayed keys for later blocks, what the walk needs of q, k
//   --------
//   scores    Akk and Aqk below the diagonal
//   diagonal  inverse of the diagonal block of I + Akk: at any time from the factors to the next line
//   --------
//   solve     the blocks of the inverse below the diagonal, by substitution; a wave for each block column
//
// Exponents. G is the decay in log2 units, summed from the chunk's start. No factor 2^G is ever
// divided by another over a whole chunk: block I uses G just before its own first row as anchor, so
//   left(i)  = x_i 2^(G_i - anchor_I)             local sum, <= 0
//   right(j) = k_j 2^(G_end(J) - G_j)             local sum, <= 0
//   bridge   = 2^(anchor_I - G_end(J)), J < I     sum of whole blocks' totals, <= 0
// all of which depend on the past of row i only, so that later gates never change earlier rows.
// Inside a diagonal block of a bounded gate left(i) meets k_j 2^(anchor_I - G_j), which stays inside
// float32's range; any other gate goes through diagonal.h.
#pragma once

#include "prologue_load.h"

namespace kda {
inline namespace KDA_ISA {

template <class Tiles_, class Policy, int K, int C, bool Unbounded>
struct Prologue : PrologueLoad<Tiles_, Policy, K, C, Unbounded> {
  using Base = PrologueLoad<Tiles_, Policy, K, C, Unbounded>;
  using Tiles = Tiles_;
  using typename Base::Acc;
  using typename Base::Bounded;
  using typename Base::ColVec;
  using typename Base::Decay;
  using typename Base::Layout;
  using typename Base::Shared;
  using typename Base::Storage;
  using typename Base::Wave;
  using Base::kDifference;
  using Base::kNarrow;
  using Base::kShift;
  using Base::KT;
  using Base::NT;
  using Base::pair;

  // ---- channels ------------------------------------------------------------------------------
  // What wave `block` alone uses, and by the last one the decay of the chunk. Of all channels: a lane has neighbours.
  static KDA_FN void channels(int block, int blocks, Shared& s, float* decay) {
    constexpr int kEach = K / Tiles::kWave;
    struct alignas(kEach < 4 ? 4 * kEach : 16) Each {
      float x[kEach];
      KDA_FN void operator+=(const Each& other) {
        KDA_UNROLL
        for (int e = 0; e < kEach; ++e) x[e] += other.x[e];
      }
    };
    auto get = [](const float* from) { return reinterpret_cast<const Each*>(from)[Tiles::lane()]; };
    auto put = [](float* to, Each x, auto... shift) {
      KDA_UNROLL
      for (int e = 0; e < kEach; ++e) x.x[e] = Tiles::exp2((x.x[e] + ... + shift));
      reinterpret_cast<Each*>(to)[Tiles::lane()] = x;
    };
    Each total[NT], before = {}, after = {}, between = {};
    KDA_UNROLL
    for (int i = 0; i < blocks; ++i) total[i] = get(s.total[i]);
    const Each own = get(s.total[block]);
    KDA_UNROLL
    for (int i = 0; i < blocks - 1; ++i)
      if (i < block) before += total[i];
    KDA_UNROLL
    for (int i = blocks - 1; i > 0; --i)
      if (i > block) after += total[i];
    put(s.before[block], before, -kShift);
    put(s.own[block], own, kShift);
    put(s.after[block], after);
    KDA_UNROLL
    for (int row = 2; row < blocks; ++row) {
      if (row < block + 2) continue;
      between += total[row - 1];
      put(s.bridge[pair(row, block)], between);
    }
    if (block + 1 < blocks) return;
    before += own;
    put(decay, before);
  }

  // ---- factors -------------------------------------------------------------------------------
  template <class Inputs>
  static KDA_FN void factors(int block, int blocks, const Inputs& in, Wave& w, Shared& s,
                             Storage* blob) {
    if constexpr (!Unbounded) {
      Tiles::zero(w.akk);
      Tiles::zero(w.aqk);
    }
    const float unit = w.unit;
    KDA_UNROLL
    for (int t = 0; t < KT; ++t) {
      const int at = t * kTile;
      if constexpr (Inputs::kAgain)
        if (t % 2 == 0) in.q(w.x.q[t], w.x.q[t + 1], t), in.k(w.x.k[t], w.x.k[t + 1], t);
      const ColVec before = Tiles::load_cols(s.before[block] + at);
      Acc x, e, k;
      Tiles::apply(e, [=](float g) { return Tiles::exp2(unit * g + kShift); }, w.sum[t]);
      Tiles::apply(k, Multiply{}, w.x.k[t], w.x.k_factor);

      Tiles::apply(x, Multiply{}, k, e);
      w.left_k[t] = Tiles::template left<Decay>(x);
      Tiles::apply(x, [](float a, float f) { return a * -f; }, x, before);
      Tiles::store_blob(blob, Layout::kd(block, t), Tiles::template right<Decay>(x));
      Tiles::apply(x, [](float a, float f, float e) { return a * f * e; }, w.x.q[t], w.x.q_factor, e);
      w.left_q[t] = Tiles::template left<Decay>(x);
      Tiles::apply(x, Multiply{}, x, before);
      Tiles::store_blob(blob, Layout::qg(block, t), Tiles::template left<Decay>(x));

      if constexpr (Unbounded) {
        Tiles::apply(x, [](float a, float g) { return a * Tiles::exp2(g); }, k, w.rest[t]);
      } else {
        Tiles::apply(x, [=](float a, float g) { return a * Tiles::exp2(-(unit * g + kShift)); }, k,
                     w.sum[t]);
        const auto right = Tiles::template right<Decay>(x);
        accumulate<Tiles>(w.akk, w.left_k[t], right);
        accumulate<Tiles>(w.aqk, w.left_q[t], right);
        if constexpr (kDifference) {
          Tiles::apply(x, [=](float a, float g, float end) { return a * Tiles::exp2(end - unit * g); },
                       k, w.sum[t], Tiles::load_cols(s.total[block] + at));
        } else {
          Tiles::apply(x, Multiply{}, x, Tiles::load_cols(s.own[block] + at));
        }
      }
      Tiles::apply(e, Multiply{}, x, Tiles::load_cols(s.after[block] + at));
      Tiles::store_blob(blob, Layout::kg(t, block), Tiles::template right_t<Bounded>(e));
      const int first = pair(block + 1, block);
      KDA_UNROLL
      for (int i = 0; i < NT - 1; ++i) {  // later blocks
        if (i >= blocks - block - 1) break;
        if (i > 0) Tiles::apply(e, Multiply{}, x, Tiles::load_cols(s.bridge[first + i] + at));
        Tiles::store(s.keys[first + i][t], Tiles::template right<Decay>(i > 0 ? e : x));
      }
    }
    if constexpr (!Unbounded) Diagonal<Tiles, Decay, K>::mask(w.akk, w.aqk);
    Tiles::apply(w.akk, Multiply{}, w.akk, w.beta);
  }

  // ---- diagonal ------------------------------------------------------------------------------
  // `first`: the chunk's first token.
  static KDA_FN void diagonal(int block, int first, Wave& w, Shared& s, Storage* blob) {
    Tiles::store_blob(blob, Layout::aqk(block, block), Tiles::template left<Bounded>(w.aqk));
    Acc inverse;
    if constexpr (Tiles::kInverseByHalves && kNarrow) {
      Acc between;
      inverse = Tiles::unit_lower_inverse_by_halves(w.akk, between);
      Tiles::template first_beyond<true>(w.beyond, between, kLargest, first + block * kTile);
    } else {
      inverse = Tiles::unit_lower_inverse(w.akk);
    }
    Tiles::apply(inverse, Multiply{}, inverse, Tiles::load_cols(s.beta + block * kTile));
    if constexpr (kNarrow)
      Tiles::template first_beyond<true>(w.beyond, inverse, kLargest, first + block * kTile);
    const auto right = Tiles::template right_clamped<Bounded>(inverse);
    Tiles::store(s.inverse[block], right);
    Tiles::store_blob(blob, Layout::inverse(block, block), right);
    w.inverse_t = Tiles::template left_t<Bounded>(inverse);
  }

  // ---- scores --------------------------------------------------------------------------------
  static KDA_FN void scores(int block, const Wave& w, Shared& s, Storage* blob) {
    for (int col = 0; col < block; ++col) {
      auto key = [&](int t) -> decltype(auto) {
        return Tiles::template load_right<Decay>(s.keys[pair(block, col)][t]);
      };
      Acc kk, qk;
      Tiles::zero(kk);
      Tiles::zero(qk);
      Tiles::mma(kk, KT, [&](int t) -> decltype(auto) { return (w.left_k[t]); }, key);
      Tiles::mma(qk, KT, [&](int t) -> decltype(auto) { return (w.left_q[t]); }, key);
      constexpr float scale = Unbounded ? 1.0f : 1.0f / (1 << 20);
      static_assert(Unbounded || kShift == 20, "");
      Tiles::apply(kk, [](float a) { return -scale * a; }, kk);
      Tiles::apply(qk, [](float a) { return scale * a; }, qk);
      Tiles::store(s.lower[pair(block, col)], Tiles::template right<Bounded>(kk));
      Tiles::store_blob(blob, Layout::aqk(block, col), Tiles::template left<Bounded>(qk));
    }
  }
};

}  // namespace KDA_ISA
}  // namespace kda
