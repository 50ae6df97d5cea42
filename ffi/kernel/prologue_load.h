// The prologue's first role (prologue.h): inputs to the decay summed inside a block; and what the roles hand on.
#pragma once

#include "diagonal.h"
#include "gate.h"
#include "ops.h"
#include "target.h"
#include "workspace.h"

namespace kda {
inline namespace KDA_ISA {

template <class Tiles_, class Policy, int K, int C, bool Unbounded>
struct PrologueLoad {
  using Tiles = Tiles_;
  using Acc = typename Tiles::Acc;
  using ColVec = typename Tiles::ColVec;
  using RowVec = typename Tiles::RowVec;
  using Storage = typename Tiles::Storage;
  using Decay = typename Policy::Decay;
  using Bounded = typename Policy::Bounded;
  using Layout = Blob<Tiles, K, C>;
  static constexpr bool kWide = Policy::kSecond, kNarrow = Policy::kNarrow;
  static constexpr int KT = K / kTile, NT = C / kTile, kPairs = NT * (NT - 1) / 2;
  static constexpr int kSome = kPairs ? kPairs : 1;  // an array of none is not C++

  // left(i) is kept times 2^kShift: over 16 rows at the bound it falls to 2^-115, where small channels
  // would become denormals and be flushed. What it is multiplied with carries 2^-kShift.
  static constexpr float kShift = Unbounded ? 0 : 20;
  // The decay to a block's end: 2^(end - anchor) 2^(anchor - G) rounds in the last bits of an exponent
  // of up to 115, which 16-bit operands do not see; float32 ones take the difference first.
  static constexpr bool kDifference = !Unbounded && is_float32<Decay>;

  struct Shared {  // LDS / shared memory
    alignas(64) float total[NT][K];   // decay of each block, log2
    alignas(64) float before[NT][K];  // 2^(totals of the blocks before - kShift)
    alignas(64) float own[NT][K];     // 2^(total + kShift)
    alignas(64) float after[NT][K];   // 2^(totals of the blocks behind)
    alignas(64) float bridge[kSome][K];  // of (row block, earlier block): 2^(totals between); not of neighbours
    alignas(64) float beta[C];
    alignas(64) Storage keys[kSome][KT][kTileElements];  // right operands, bridge included
    alignas(64) Storage lower[kSome][kTileElements];     // right operands of -Akk without beta
    alignas(64) Storage inverse[NT][kTileElements];  // right operands (I + Akk_II)^-1 diag(beta)
  };
  struct Wave {  // registers
    Rows<Tiles, KT> x;
    Acc sum[KT];                   // G - anchor, in units
    Acc rest[Unbounded ? KT : 1];  // G_end - G; a bounded gate does without
    typename Tiles::template Left<Decay> left_q[KT], left_k[KT];
    Acc akk, aqk;                  // diagonal block
    typename Tiles::template Left<Bounded> inverse_t;  // (I + Akk_II)^-1 diag(beta), transposed
    RowVec beta;
    float unit;                    // log2 of a unit of `sum`
    int32_t beyond;                // first token that a narrow policy does not hold
  };

  // Pairs (row block, earlier block); those with the same earlier block follow each other.
  static KDA_FN int pair(int row, int col) { return int(unsigned(col * (2 * NT - 3 - col)) / 2) + row - 1; }

  // Where the inputs of a row block come from: `q`, `k`, `g` fetch channel tiles t and t + 1. `kAgain`: q and k are
  // near enough to be read for the factors only, and `q_squares`, `k_squares` make the sums of their rows' squares.
  // `kSums`: `sums` makes of g what is summed of the decays, and the totals, in a way of its own.
  struct Direct {
    static constexpr bool kAgain = false, kSums = false;
    struct Gates {};
    const Problem& p;
    int64_t row, stride;
    int valid;
    KDA_FN Direct(const Problem& p, const ChunkRow& chunk, int head, int block)
        : p(p), row(row_offset(chunk.first + block * kTile, head, p.H, K)), stride(int64_t(p.H) * K),
          valid(valid_rows(chunk, block)) {}
    using Raw = typename Tiles::Raw;
    KDA_FN void q(Raw& a, Raw& b, int t) const {
      Tiles::load_raw2(a, b, p.q, row + t * kTile, stride, valid);
    }
    KDA_FN void k(Raw& a, Raw& b, int t) const {
      Tiles::load_raw2(a, b, p.k, row + t * kTile, stride, valid);
    }
    KDA_FN void g(Acc& a, Acc& b, int t) const {
      Tiles::load2(a, b, p.g, row + t * kTile, stride, valid);
    }
    static KDA_FN RowVec beta(const Problem& p, int64_t first, int head, int valid) {
      return Tiles::load_rows(p.beta, first * p.H + head, p.H, valid);
    }
  };

  template <class Inputs>
  static KDA_FN void load(const Problem& p, const ChunkRow& chunk, int head, int block,
                          const Inputs& in, Wave& w, Shared& s) {
    const int valid = valid_rows(chunk, block);
    const int64_t first = chunk.first + block * kTile;
    w.beyond = kNone;
    if constexpr (!Inputs::kSums) {
      KDA_UNROLL
      for (int t = 0; t < KT; t += 2) in.g(w.sum[t], w.sum[t + 1], t);
    }
    [[maybe_unused]] typename Inputs::Gates staged;
    if constexpr (Inputs::kAgain) {  // one after the other, and before the sums: registers are few
      staged.load(rate(p, head), p.dt_bias + int64_t(head) * K);
      const RowVec q = in.q_squares(), k = in.k_squares();
      w.x.q_factor = row_factor(q, p.l2norm, int(first), w.beyond);
      w.x.k_factor = row_factor(k, p.l2norm, int(first), w.beyond);
    } else {
      KDA_UNROLL
      for (int t = 0; t < KT; t += 2) {
        in.q(w.x.q[t], w.x.q[t + 1], t);
        in.k(w.x.k[t], w.x.k[t + 1], t);
      }
    }
    w.beta = in.beta(p, first, head, valid);
    w.unit = Unbounded ? 1.0f : p.lower_bound * kLog2E;
    if constexpr (Inputs::kSums) {
      in.sums(w.sum, s.total[block], staged, w.unit, valid);
    } else {
      gates(p, head, valid, w);
    }
    if constexpr (!Inputs::kAgain) {
      w.x.q_factor = row_factor(Tiles::row_squares(w.x.q), p.l2norm, int(first), w.beyond);
      w.x.k_factor = row_factor(Tiles::row_squares(w.x.k), p.l2norm, int(first), w.beyond);
    }
    if constexpr (Unbounded) {
      Diagonal<Tiles, Decay, K>::exact(w.x, w.sum, w.rest, w.akk, w.aqk);
    } else if constexpr (!Inputs::kSums) {
      KDA_UNROLL
      for (int t = 0; t < KT; ++t) Tiles::cumsum_rows(w.sum[t]);
    }
    if (p.gate != Gate::kActivated)
      Tiles::apply(w.beta, [](float x) { return sigmoid<Tiles>(x); }, w.beta);
    // A padded row is an exact no-op: its gate is 0 (not softplus(dt_bias)), its beta 0.
    Tiles::mask_rows(w.beta, valid);
    Tiles::store_rows(s.beta + block * kTile, w.beta);
    if constexpr (!Inputs::kSums) {
      const float unit = w.unit;
      KDA_UNROLL
      for (int t = 0; t < KT; ++t) {
        ColVec total = Tiles::last_row(w.sum[t]);
        Tiles::apply(total, [=](float x) { return unit * x; }, total);
        Tiles::store_cols(s.total[block] + t * kTile, total);
      }
    }
  }

  // The factor that normalises a row with this sum of squares, 1 without l2norm. Rows that nobody normalised may be
  // too long or too short for fp16 products; `beyond` gets the first such token.
  static KDA_FN RowVec row_factor(RowVec r, bool l2norm, int first, int32_t& beyond) {
    if (l2norm) {
      Tiles::apply(r, [](float s) { return Tiles::rsqrt(s + kNormEpsilon); }, r);
      return r;
    }
    Tiles::apply(
        r,
        [&](float s, float row) {
          if (Policy::kNarrow && (!(s <= kLongest) || (s > 0 && s < kShortest)) &&
              first + int(row) < beyond)
            beyond = first + int(row);
          return 1.0f;
        },
        r, Tiles::row_numbers());
    return r;
  }
  static constexpr float kLongest = 1 << 14, kShortest = 1.0f / (1 << 10);  // squares of a row's norm

  static KDA_FN float rate(const Problem& p, int head) { return head_rate<Tiles>(p.A_log[head]); }
  static KDA_FN void gates(const Problem& p, int head, int valid, Wave& w) {
    const bool raw = p.gate != Gate::kActivated;
    const float rate = raw ? PrologueLoad::rate(p, head) : 0.0f;
    KDA_UNROLL
    for (int t = 0; t < KT; t += 2) {
      ColVec bias[2] = {};
      if (raw) Tiles::load_cols2(bias[0], bias[1], p.dt_bias + int64_t(head) * K + t * kTile);
      KDA_UNROLL
      for (int i = 0; i < 2; ++i) {
        Acc& g = w.sum[t + i];
        if (p.gate == Gate::kBounded)
          Tiles::apply(bias[i], [=](float b) { return rate * b; }, bias[i]);
        if constexpr (!Unbounded) {
          decay<Gate::kBounded>(g, rate, bias[i], 1.0f);
        } else if (p.gate == Gate::kSoftplus) {
          decay<Gate::kSoftplus>(g, rate, bias[i], 1.0f);
        } else if (p.gate == Gate::kActivated) {
          decay<Gate::kActivated>(g, rate, bias[i], 1.0f);
        } else {
          decay<Gate::kBounded>(g, rate, bias[i], p.lower_bound * kLog2E);
        }
        if (valid < kTile) Tiles::select(g, [=](int r, int) { return r < valid; });
      }
    }
  }
  template <Gate G>
  static KDA_FN void decay(Acc& g, float rate, const ColVec& bias, float unit) {
    Tiles::apply(g, [=](float x, float b) { return unit * gate_units<Tiles>(G, x, rate, b); }, g, bias);
  }

  // Rows of a row block that hold tokens.
  static KDA_FN int valid_rows(const ChunkRow& chunk, int block) {
    const int n = chunk.valid - block * kTile;
    return n < 0 ? 0 : (n > kTile ? kTile : n);
  }
};

}  // namespace KDA_ISA
}  // namespace kda
