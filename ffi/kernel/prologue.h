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
// Inside a diagonal block: a bounded gate keeps 2^-G_j finite (16 rows * 7.22 < 127) and is factored
// around the anchor; any other gate goes through `exact_diagonal`.
#pragma once

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
  static constexpr float kMiddle = 58;  // half of 16 rows * 5 * log2(e)

  struct Shared {  // LDS / shared memory
    alignas(64) float total[NT][K];                  // decay of each block, log2
    alignas(64) float beta[C];
    alignas(64) Storage keys[NT][KT][kTileElements];  // right operands k 2^(G_end - G)
    alignas(64) Storage rhs[NT][KT][kTileElements];   // (beta k 2^G)^T
    alignas(64) Storage lower[NT * (NT - 1) / 2 + 1][kTileElements];  // right operands of -Akk
    alignas(64) Storage inverse[NT][kTileElements];   // right operands (I + Akk_II)^-1
  };
  struct Decayed {
    float operator()(float x, float g) const { return x * Tiles::exp2(g); }
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
      exact_diagonal(w);
    } else {
      for (int t = 0; t < KT; ++t) {
        Tiles::cumsum_rows(w.sum[t]);
        const ColVec total = Tiles::last_row(w.sum[t]);
        Tiles::apply(w.rest[t], [](float e, float x) { return e - x; }, total, w.sum[t]);
      }
      factored_diagonal(w);
    }
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

  // ---- diagonal blocks -----------------------------------------------------------------------
  // Bounded gate: 2^(G_i - anchor) * 2^(anchor - G_j). Over 16 rows the first factor falls to
  // 2^-115.5, where small channels would become denormals and be flushed (an error of 1e-3 in a row's
  // own weight, measured); so both are moved to the middle of the range by an exact power of two.
  static void factored_diagonal(Wave& w) {
    Tiles::zero(w.akk);
    Tiles::zero(w.aqk);
    Acc growth, left;
    for (int t = 0; t < KT; ++t) {
      Tiles::apply(growth, [](float k, float g) { return k * Tiles::exp2(-kMiddle - g); }, w.k[t],
                   w.sum[t]);
      const auto right = Tiles::template right<Decay>(growth);
      auto shifted = [](float x, float g) { return x * Tiles::exp2(kMiddle + g); };
      Tiles::apply(left, shifted, w.k[t], w.sum[t]);
      accumulate(w.akk, left, right);
      Tiles::apply(left, shifted, w.q[t], w.sum[t]);
      accumulate(w.aqk, left, right);
    }
    mask_diagonal(w);
  }

  // Any gate. Halves of 1, 2, 4, 8 rows are joined: a pair (i, j) meets at the level where i lies in
  // the upper and j in the lower half of one stretch, and its decay is (sum from the upper half's
  // start to i) + (sum from behind j to the lower half's end). Both are sums of gates, never a
  // difference, so nothing cancels and nothing overflows. Leaves sum and rest.
  static void exact_diagonal(Wave& w) {
    Tiles::zero(w.akk);
    Tiles::zero(w.aqk);
    for (int t = 0; t < KT; ++t) Tiles::zero(w.rest[t]);
    Acc left, level_kk, level_qk, right_k;
    for (int half = 1; half < kTile; half *= 2) {
      Tiles::zero(level_kk);
      Tiles::zero(level_qk);
      auto upper = [=](int r, int) { return (r & half) != 0; };
      auto lower = [=](int r, int) { return (r & half) == 0; };
      for (int t = 0; t < KT; ++t) {
        Tiles::apply(right_k, Decayed{}, w.k[t], w.rest[t]);
        Tiles::select(right_k, lower);
        const auto right = Tiles::template right<Decay>(right_k);
        Tiles::apply(left, Decayed{}, w.k[t], w.sum[t]);
        Tiles::select(left, upper);
        accumulate(level_kk, left, right);
        Tiles::apply(left, Decayed{}, w.q[t], w.sum[t]);
        Tiles::select(left, upper);
        accumulate(level_qk, left, right);
        // Join the halves: what lies before an upper row and behind a lower one grows by the other
        // half's total, which is the sum at the last row of that half.
        Acc before = Tiles::gather_rows(w.sum[t], [=](int r) { return (r & ~(2 * half - 1)) + half - 1; });
        Acc behind = Tiles::gather_rows(w.sum[t], [=](int r) { return r | (2 * half - 1); });
        Tiles::select(before, upper);
        Tiles::select(behind, lower);
        Tiles::apply(w.sum[t], [](float a, float b) { return a + b; }, w.sum[t], before);
        Tiles::apply(w.rest[t], [](float a, float b) { return a + b; }, w.rest[t], behind);
      }
      auto together = [=](int r, int c) { return (r ^ c) < 2 * half; };
      Tiles::select(level_kk, together);
      Tiles::select(level_qk, together);
      Tiles::apply(w.akk, [](float a, float b) { return a + b; }, w.akk, level_kk);
      Tiles::apply(w.aqk, [](float a, float b) { return a + b; }, w.aqk, level_qk);
    }
    Acc own;
    Tiles::zero(own);
    for (int t = 0; t < KT; ++t)
      Tiles::apply(own, [](float s, float a, float b) { return s + a * b; }, own, w.q[t], w.k[t]);
    Tiles::add_diagonal(w.aqk, Tiles::row_sums(own));
    mask_diagonal(w);
  }

  static void mask_diagonal(Wave& w) {
    Tiles::select(w.akk, [](int r, int c) { return r > c; });
    Tiles::select(w.aqk, [](int r, int c) { return r >= c; });
    Tiles::apply(w.akk, [](float a, float b) { return a * b; }, w.akk, w.beta);
  }

  // ---- factors -------------------------------------------------------------------------------
  static void factors(int block, int blocks, Wave& w, Shared& s, Storage* blob, float* decay) {
    for (int t = 0; t < KT; ++t) {
      const ColVec before = exp2_total(s, t, 0, block), after = exp2_total(s, t, block + 1, blocks);
      Acc x;
      Tiles::apply(x, Decayed{}, w.k[t], w.rest[t]);
      Tiles::store(s.keys[block][t], Tiles::template right<Decay>(x));
      Tiles::apply(x, [](float a, float f) { return a * f; }, x, after);
      Tiles::store(blob + Layout::kg(t, block), Tiles::template right_t<Bounded>(x));

      Tiles::apply(w.k[t], Decayed{}, w.k[t], w.sum[t]);
      Tiles::apply(w.q[t], Decayed{}, w.q[t], w.sum[t]);
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
        accumulate(kk, x, right);
        Tiles::apply(x, [](float a, float f) { return a * f; }, w.q[t], bridge);
        accumulate(qk, x, right);
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
      accumulate_operands(solved, left, inverse);
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
  template <class L, class R>
  static void accumulate_operands(Acc& d, const L& left, const R& right) {
    Tiles::mma(d, 1, [&](int) -> const L& { return left; }, [&](int) -> const R& { return right; });
  }
  template <class R>
  static void accumulate(Acc& d, const Acc& left, const R& right) {
    accumulate_operands(d, Tiles::template left<Decay>(left), right);
  }
};

}  // namespace KDA_ISA
}  // namespace kda
