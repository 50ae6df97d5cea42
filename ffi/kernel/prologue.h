// Stage 1, parallel over (chunk, head): everything of a chunk that does not depend on the state.
//
// C/16 waves work on a chunk; wave I owns the 16 tokens of row block I, and only the `blocks` waves
// that hold valid rows do anything. The functions below are what one wave does between two barriers;
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
#include "workspace.h"

#ifndef KDA_ISA
#define KDA_ISA base
#endif

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
    alignas(64) float total[NT][K];                  // decay of each block, log2
    alignas(64) float beta[C];
    alignas(64) Storage keys[NT][KT][kTileElements];  // right operands k 2^(G_end - G)
    alignas(64) Storage rhs[NT][KT][kTileElements];   // (beta k 2^G)^T
    alignas(64) Storage lower[NT * (NT - 1) / 2 + 1][kTileElements];  // right operands of -Akk
    alignas(64) Storage inverse[NT][kTileElements];   // right operands (I + Akk_II)^-1
  };
  struct Wave {  // registers
    Acc q[KT], k[KT];  // later q 2^(G - anchor), k 2^(G - anchor)
    Acc sum[KT];       // G - anchor
    Acc rest[KT];      // G_end - G
    Acc akk, aqk;      // diagonal block
    RowVec beta;
  };

  static int valid_blocks(const ChunkRow& chunk) { return (chunk.valid + kTile - 1) / kTile; }
  static Storage* lower(Shared& s, int row, int col) { return s.lower[row * (row - 1) / 2 + col]; }

  // ---- load ----------------------------------------------------------------------------------
  static void load(const Problem& p, const ChunkRow& chunk, int head, int block, Wave& w,
                   Shared& s) {
    const int valid = valid_rows(chunk, block);
    const int64_t first = chunk.first + block * kTile;
    const int64_t row = row_offset(first, head, p.H, K), stride = int64_t(p.H) * K;
    for (int t = 0; t < KT; ++t) {
      w.q[t] = Tiles::load(p.q, row + t * kTile, stride, valid);
      w.k[t] = Tiles::load(p.k, row + t * kTile, stride, valid);
      w.sum[t] = Tiles::load(p.g, row + t * kTile, stride, valid);
    }
    if (p.l2norm) {
      normalise(w.q);
      normalise(w.k);
    }
    const float scale = p.scale;
    for (int t = 0; t < KT; ++t) Tiles::apply(w.q[t], [=](float x) { return x * scale; }, w.q[t]);

    w.beta = Tiles::load_rows(p.beta, first * p.H + head, p.H, valid);
    if (p.gate != Gate::kActivated)
      Tiles::apply(w.beta, [](float x) { return sigmoid<Tiles>(x); }, w.beta);
    // A padded row is an exact no-op: its gate is 0 (not softplus(dt_bias)), its beta 0.
    Tiles::mask_rows(w.beta, valid);
    Tiles::store_rows(s.beta + block * kTile, w.beta);
    gates(p, head, valid, w);

    if constexpr (Unbounded) {
      Diagonal<Tiles, Decay, K>::exact(w.q, w.k, w.sum, w.rest, w.akk, w.aqk);
    } else {
      for (int t = 0; t < KT; ++t) {
        Tiles::cumsum_rows(w.sum[t]);
        const ColVec total = Tiles::last_row(w.sum[t]);
        Tiles::apply(w.rest[t], [](float e, float x) { return e - x; }, total, w.sum[t]);
      }
      Diagonal<Tiles, Decay, K>::factored(w.q, w.k, w.sum, w.akk, w.aqk);
    }
    Tiles::apply(w.akk, [](float a, float b) { return a * b; }, w.akk, w.beta);
    for (int t = 0; t < KT; ++t)
      Tiles::store_cols(s.total[block] + t * kTile, Tiles::last_row(w.sum[t]));
  }

  static void normalise(Acc (&x)[KT]) {
    Acc squares;
    Tiles::zero(squares);
    for (int t = 0; t < KT; ++t)
      Tiles::apply(squares, [](float s, float a) { return s + a * a; }, squares, x[t]);
    RowVec r = Tiles::row_sums(squares);
    Tiles::apply(r, [](float s) { return Tiles::rsqrt(s + kNormEpsilon); }, r);
    for (int t = 0; t < KT; ++t)
      Tiles::apply(x[t], [](float a, float f) { return a * f; }, x[t], r);
  }

  static void gates(const Problem& p, int head, int valid, Wave& w) {
    const bool raw = p.gate != Gate::kActivated;
    const float rate = raw ? Tiles::exp2(p.A_log[head] * kLog2E) : 0.0f;
    const float bound = p.lower_bound;
    for (int t = 0; t < KT; ++t) {
      ColVec bias = {};
      if (raw) bias = Tiles::load_cols(p.dt_bias + int64_t(head) * K + t * kTile);
      auto decay = [&](auto kind) {
        Tiles::apply(w.sum[t], [=](float x, float b) {
          return log2_decay<Tiles>(decltype(kind)::value, x, rate, b, bound);
        }, w.sum[t], bias);
      };
      if constexpr (Unbounded) {
        raw ? decay(GateTag<Gate::kSoftplus>{}) : decay(GateTag<Gate::kActivated>{});
      } else {
        decay(GateTag<Gate::kBounded>{});
      }
      Tiles::select(w.sum[t], [=](int r, int) { return r < valid; });
    }
  }

  // ---- factors -------------------------------------------------------------------------------
  static void factors(int block, int blocks, Wave& w, Shared& s, Storage* blob, float* decay) {
    for (int t = 0; t < KT; ++t) {
      const ColVec before = exp2_total(s, t, 0, block), after = exp2_total(s, t, block + 1, blocks);
      Acc x;
      Tiles::apply(x, Decayed<Tiles>{}, w.k[t], w.rest[t]);
      Tiles::store(s.keys[block][t], Tiles::template right<Decay>(x));
      Tiles::apply(x, [](float a, float f) { return a * f; }, x, after);
      Tiles::store(blob + Layout::kg(t, block), Tiles::template right_t<Bounded>(x));

      Tiles::apply(w.k[t], Decayed<Tiles>{}, w.k[t], w.sum[t]);
      Tiles::apply(w.q[t], Decayed<Tiles>{}, w.q[t], w.sum[t]);
      Tiles::apply(x, [](float a, float f, float b) { return a * f * b; }, w.k[t], before, w.beta);
      Tiles::template store_acc<Bounded>(s.rhs[block][t], Tiles::transpose(x));
      Tiles::apply(x, [](float a, float f) { return a * f; }, w.q[t], before);
      Tiles::store(blob + Layout::qg(block, t), Tiles::template left<Decay>(x));
      if (t % blocks == block) Tiles::store_cols(decay + t * kTile, exp2_total(s, t, 0, blocks));
    }
  }

  // 2^(sum of the totals of blocks [from, to)) for the channels of tile t.
  static ColVec exp2_total(const Shared& s, int t, int from, int to) {
    ColVec sum = {};
    for (int j = from; j < to; ++j)
      Tiles::apply(sum, [](float a, float b) { return a + b; }, sum,
                   Tiles::load_cols(s.total[j] + t * kTile));
    Tiles::apply(sum, [](float a) { return Tiles::exp2(a); }, sum);
    return sum;
  }

  // ---- scores --------------------------------------------------------------------------------
  static void scores(int block, Wave& w, Shared& s, Storage* blob) {
    for (int col = 0; col < block; ++col) {
      Acc kk, qk, x;
      Tiles::zero(kk);
      Tiles::zero(qk);
      for (int t = 0; t < KT; ++t) {
        const ColVec bridge = exp2_total(s, t, col + 1, block);
        auto&& right = Tiles::template load_right<Decay>(s.keys[col][t]);
        Tiles::apply(x, [](float a, float f) { return a * f; }, w.k[t], bridge);
        accumulate<Tiles>(kk, Tiles::template left<Decay>(x), right);
        Tiles::apply(x, [](float a, float f) { return a * f; }, w.q[t], bridge);
        accumulate<Tiles>(qk, Tiles::template left<Decay>(x), right);
      }
      Tiles::apply(kk, [](float a, float b) { return -a * b; }, kk, w.beta);
      Tiles::store(lower(s, block, col), Tiles::template right<Bounded>(kk));
      Tiles::store(blob + Layout::aqk(block, col), Tiles::template left<Bounded>(qk));
    }
    Tiles::store(blob + Layout::aqk(block, block), Tiles::template left<Bounded>(w.aqk));
    Tiles::store(s.inverse[block], Tiles::template right<Bounded>(Tiles::unit_lower_inverse(w.akk)));
  }

  // ---- solve ---------------------------------------------------------------------------------
  // (I + Akk) X = rhs for sixteen columns, transposed: the accumulator X^T is the next product's left
  // operand as it stands.
  template <class Rhs, class Result>
  static void substitute(int blocks, Shared& s, Rhs rhs, Result result) {
    typename Tiles::template Left<Bounded> x[NT];
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

  static void solve(const Problem& p, const ChunkRow& chunk, int head, int wave, Shared& s,
                    Storage* blob) {
    const int blocks = valid_blocks(chunk);
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
            Acc v = Tiles::transpose(
                Tiles::load(p.v, row, int64_t(p.H) * p.V, valid_rows(chunk, i)));
            const ColVec beta = Tiles::load_cols(s.beta + i * kTile);
            Tiles::apply(v, [](float a, float b) { return a * b; }, v, beta);
            return v;
          },
          [&](int i, Acc& x) { Tiles::template store_acc<Bounded>(blob + Layout::u(t, i), x); });
    }
  }

 private:
  template <Gate G>
  struct GateTag {
    static constexpr Gate value = G;
  };
  

  static int valid_rows(const ChunkRow& chunk, int block) {
    const int n = chunk.valid - block * kTile;
    return n < 0 ? 0 : (n > kTile ? kTile : n);
  }
};

}  // namespace KDA_ISA
}  // namespace kda
