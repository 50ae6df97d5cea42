// Stage 1, parallel over (chunk, head): everything of a chunk that does not depend on the state.
//
// C/16 waves work on a chunk; wave I owns the 16 tokens of row block I. The functions below are what one wave does between two barriers;
// a target's driver calls them in order, with a barrier between two of them (the host loops over the
// waves instead):
//
//   load      inputs -> normalised q, k and the decay summed inside the block
//   factors   decayed keys for the later blocks, and what the walk needs of q and k
//   scores    Akk and Aqk by 16 x 16 blocks; inverse of the diagonal blocks of I + Akk
//   solve     block forward substitution; each wave solves for some columns of (w, u)
//
// Exponents. G is the decay in log2 units, summed from the chunk's start. No factor 2^G is ever
// divided by another over a whole chunk: block I uses G just before its own first row as anchor, so
//   left(i)  = x_i 2^(G_i - anchor_I)             local sum, <= 0
//   right(j) = k_j 2^(G_end(J) - G_j)             local sum, <= 0
//   bridge   = 2^(anchor_I - G_end(J)), J < I     sum of whole blocks' totals, <= 0
// all of which depend on the past of row i only, so that later gates never change earlier rows.
// Inside a diagonal block: diagonal.h.
#pragma once

#include "diagonal.h"
#include "gate.h"
#include "ops.h"
#include "target.h"
#include "workspace.h"

namespace kda {
inline namespace KDA_ISA {

template <class Tiles, class Policy, int K, int C, bool Unbounded>
struct Prologue {
  using Acc = typename Tiles::Acc;
  using ColVec = typename Tiles::ColVec;
  using RowVec = typename Tiles::RowVec;
  using Storage = typename Tiles::Storage;
  using Decay = typename Policy::Decay;
  using Bounded = typename Policy::Bounded;
  using Layout = Blob<K, C>;
  static constexpr int KT = K / kTile, NT = C / kTile;

  struct Shared {  // LDS / shared memory
    alignas(64) float total[NT][K];                   // decay of each block, log2
    alignas(64) float beta[C];
    alignas(64) Storage keys[NT][KT][kTileElements];  // right operands k 2^(G_end - G)
    alignas(64) Storage rhs[NT][KT][kTileElements];   // (beta k 2^G)^T
    alignas(64) Storage lower[NT * (NT - 1) / 2 + 1][kTileElements];  // right operands of -Akk
    alignas(64) Storage inverse[NT][kTileElements];   // right operands (I + Akk_II)^-1
  };
  struct Wave {  // registers
    Rows<Tiles, KT> x;
    Acc sum[KT];                   // G - anchor
    Acc rest[Unbounded ? KT : 1];  // G_end - G; a bounded gate takes the difference when needed
    Acc akk, aqk;                  // diagonal block
    RowVec beta;
  };

  static KDA_FN Storage* lower(Shared& s, int row, int col) {
    return s.lower[row * (row - 1) / 2 + col];
  }

  // ---- load ----------------------------------------------------------------------------------
  static KDA_FN void load(const Problem& p, const ChunkRow& chunk, int head, int block, Wave& w,
                          Shared& s) {
    const int valid = valid_rows(chunk, block);
    const int64_t first = chunk.first + block * kTile;
    const int64_t row = row_offset(first, head, p.H, K), stride = int64_t(p.H) * K;
    KDA_UNROLL
    for (int t = 0; t < KT; ++t) {
      w.x.q[t] = Tiles::load_raw(p.q, row + t * kTile, stride, valid);
      w.x.k[t] = Tiles::load_raw(p.k, row + t * kTile, stride, valid);
      w.sum[t] = Tiles::load(p.g, row + t * kTile, stride, valid);
    }
    w.x.q_factor = row_factor(w.x.q, p.l2norm, p.scale);
    w.x.k_factor = row_factor(w.x.k, p.l2norm, 1.0f);

    w.beta = Tiles::load_rows(p.beta, first * p.H + head, p.H, valid);
    if (p.gate != Gate::kActivated)
      Tiles::apply(w.beta, [](float x) { return sigmoid<Tiles>(x); }, w.beta);
    // A padded row is an exact no-op: its gate is 0 (not softplus(dt_bias)), its beta 0.
    Tiles::mask_rows(w.beta, valid);
    Tiles::store_rows(s.beta + block * kTile, w.beta);
    gates(p, head, valid, w);

    if constexpr (Unbounded) {
      Diagonal<Tiles, Decay, K>::exact(w.x, w.sum, w.rest, w.akk, w.aqk);
    } else {
      KDA_UNROLL
      for (int t = 0; t < KT; ++t) Tiles::cumsum_rows(w.sum[t]);
      Diagonal<Tiles, Decay, K>::factored(w.x, w.sum, w.akk, w.aqk);
    }
    Tiles::apply(w.akk, Multiply{}, w.akk, w.beta);
    KDA_UNROLL
    for (int t = 0; t < KT; ++t)
      Tiles::store_cols(s.total[block] + t * kTile, Tiles::last_row(w.sum[t]));
  }

  // The factor that normalises a row (1 without l2norm), times `scale`.
  static KDA_FN RowVec row_factor(const typename Tiles::Raw (&x)[KT], bool l2norm, float scale) {
    Acc squares;
    Tiles::zero(squares);
    KDA_UNROLL
    for (int t = 0; t < KT; ++t)
      Tiles::apply(squares, [](float s, float a) { return s + a * a; }, squares, x[t]);
    RowVec r = Tiles::row_sums(squares);
    Tiles::apply(
        r, [=](float s) { return l2norm ? scale * Tiles::rsqrt(s + kNormEpsilon) : scale; }, r);
    return r;
  }

  static KDA_FN void gates(const Problem& p, int head, int valid, Wave& w) {
    const bool raw = p.gate != Gate::kActivated;
    const float rate = raw ? Tiles::exp2(p.A_log[head] * kLog2E) : 0.0f;
    const float bound = p.lower_bound;
    KDA_UNROLL
    for (int t = 0; t < KT; ++t) {
      ColVec bias = {};
      if (raw) bias = Tiles::load_cols(p.dt_bias + int64_t(head) * K + t * kTile);
      if constexpr (Unbounded) {
        raw ? decay<Gate::kSoftplus>(w.sum[t], rate, bias, bound)
            : decay<Gate::kActivated>(w.sum[t], rate, bias, bound);
      } else {
        decay<Gate::kBounded>(w.sum[t], rate, bias, bound);
      }
      Tiles::select(w.sum[t], [=](int r, int) { return r < valid; });
    }
  }
  template <Gate G>
  static KDA_FN void decay(Acc& g, float rate, const ColVec& bias, float bound) {
    Tiles::apply(g, [=](float x, float b) { return log2_decay<Tiles>(G, x, rate, b, bound); }, g,
                 bias);
  }

  // ---- factors -------------------------------------------------------------------------------
  static KDA_FN void factors(int block, int blocks, Wave& w, Shared& s, Storage* blob,
                             float* decay) {
    KDA_UNROLL
    for (int t = 0; t < KT; ++t) {
      const ColVec before = exp2_total(s, t, 0, block), after = exp2_total(s, t, block + 1, blocks);
      Acc x, e;
      if constexpr (Unbounded) {
        Tiles::apply(e, [](float g) { return Tiles::exp2(g); }, w.rest[t]);
      } else {
        Tiles::apply(e, [](float end, float g) { return Tiles::exp2(end - g); },
                     Tiles::load_cols(s.total[block] + t * kTile), w.sum[t]);
      }
      auto decayed = [](float a, float f, float e) { return a * f * e; };
      Tiles::apply(x, decayed, w.x.k[t], w.x.k_factor, e);
      Tiles::store(s.keys[block][t], Tiles::template right<Decay>(x));
      Tiles::apply(x, Multiply{}, x, after);
      Tiles::store(blob + Layout::kg(t, block), Tiles::template right_t<Bounded>(x));

      Tiles::apply(e, [](float g, float f) { return Tiles::exp2(g) * f; }, w.sum[t], before);
      Tiles::apply(x, decayed, w.x.q[t], w.x.q_factor, e);
      Tiles::store(blob + Layout::qg(block, t), Tiles::template left<Decay>(x));
      Tiles::apply(x, decayed, w.x.k[t], w.x.k_factor, e);
      Tiles::apply(x, Multiply{}, x, w.beta);
      Tiles::template store_acc<Bounded>(s.rhs[block][t], Tiles::template transposed<Bounded>(x));
      if (t % blocks == block) Tiles::store_cols(decay + t * kTile, exp2_total(s, t, 0, blocks));
    }
  }

  // 2^(sum of the totals of blocks [from, to)) for the channels of tile t.
  static KDA_FN ColVec exp2_total(const Shared& s, int t, int from, int to) {
    ColVec sum = {};
    for (int j = from; j < to; ++j)
      Tiles::apply(sum, Add{}, sum, Tiles::load_cols(s.total[j] + t * kTile));
    Tiles::apply(sum, [](float a) { return Tiles::exp2(a); }, sum);
    return sum;
  }

  // ---- scores --------------------------------------------------------------------------------
  static KDA_FN void scores(int block, Wave& w, Shared& s, Storage* blob) {
    for (int col = 0; col < block; ++col) {
      Acc kk, qk, x, e;
      Tiles::zero(kk);
      Tiles::zero(qk);
      KDA_UNROLL
      for (int t = 0; t < KT; ++t) {
        const ColVec bridge = exp2_total(s, t, col + 1, block);
        Tiles::apply(e, [](float g, float f) { return Tiles::exp2(g) * f; }, w.sum[t], bridge);
        auto&& right = Tiles::template load_right<Decay>(s.keys[col][t]);
        auto decayed = [](float a, float f, float e) { return a * f * e; };
        Tiles::apply(x, decayed, w.x.k[t], w.x.k_factor, e);
        accumulate<Tiles>(kk, Tiles::template left<Decay>(x), right);
        Tiles::apply(x, decayed, w.x.q[t], w.x.q_factor, e);
        accumulate<Tiles>(qk, Tiles::template left<Decay>(x), right);
      }
      Tiles::apply(kk, [](float a, float b) { return -a * b; }, kk, w.beta);
      Tiles::store(lower(s, block, col), Tiles::template right<Bounded>(kk));
      Tiles::store(blob + Layout::aqk(block, col), Tiles::template left<Bounded>(qk));
    }
    Tiles::store(blob + Layout::aqk(block, block), Tiles::template left<Bounded>(w.aqk));
    Tiles::store(s.inverse[block],
                 Tiles::template right<Bounded>(Tiles::unit_lower_inverse(w.akk)));
  }

  // ---- solve ---------------------------------------------------------------------------------
  // (I + Akk) X = rhs for sixteen columns, transposed: the accumulator X^T is the next product's left
  // operand as it stands.
  template <class Rhs, class Result>
  static KDA_FN void substitute(int blocks, Shared& s, Rhs rhs, Result result) {
    typename Tiles::template Left<Bounded> x[NT];
    KDA_UNROLL
    for (int i = 0; i < blocks; ++i) {
      Acc sum = rhs(i), solved;
      Tiles::mma(sum, i, [&](int j) -> decltype(auto) { return (x[j]); },
                 [&](int j) -> decltype(auto) {
                   return Tiles::template load_right<Bounded>(lower(s, i, j));
                 });
      const auto left = Tiles::template left<Bounded>(sum);
      auto&& inverse = Tiles::template load_right<Bounded>(s.inverse[i]);
      Tiles::zero(solved);
      accumulate<Tiles>(solved, left, inverse);
      x[i] = Tiles::template left<Bounded>(solved);
      result(i, solved);
    }
  }

  static KDA_FN void solve(const Problem& p, const ChunkRow& chunk, int head, int wave, Shared& s,
                           Storage* blob) {
    const int blocks = active_blocks<Tiles, NT>(chunk);
    for (int t = wave; t < KT; t += blocks) {
      substitute(
          blocks, s,
          [&](int i) { return Tiles::template load_acc<Bounded>(s.rhs[i][t]); },
          [&](int i, Acc& x) {
            Tiles::apply(x, [](float a) { return -a; }, x);
            Tiles::store(blob + Layout::w(i, t), Tiles::template right_t<Decay>(x));
          });
    }
    for (int t = wave; t < p.V / kTile; t += blocks) {
      substitute(
          blocks, s,
          [&](int i) {
            const int64_t row = row_offset(chunk.first + i * kTile, head, p.H, p.V) + t * kTile;
            Acc v = Tiles::transposed(
                Tiles::load_raw(p.v, row, int64_t(p.H) * p.V, valid_rows(chunk, i)));
            Tiles::apply(v, Multiply{}, v, Tiles::load_cols(s.beta + i * kTile));
            return v;
          },
          [&](int i, Acc& x) { Tiles::template store_acc<Bounded>(blob + Layout::u(t, i), x); });
    }
  }

 private:
  static KDA_FN int valid_rows(const ChunkRow& chunk, int block) {
    const int n = chunk.valid - block * kTile;
    return n < 0 ? 0 : (n > kTile ? kTile : n);
  }
};

}  // namespace KDA_ISA
}  // namespace kda
