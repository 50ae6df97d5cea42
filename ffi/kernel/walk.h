// Stage 2, parallel over (sequence, head, 16 rows of V): the serial pass over the chunks.
//
// One wave holds 16 rows of the state S [V, K] in float32 accumulators. The state never changes
// layout: packed, the accumulator is the left operand of one product and the right operand of the
// other. For a chunk (kernel/workspace.h names the operands):
//
//   r^T  = v^T + S (-kd)^T                S as left operand
//   v'^T = r^T inverse^T                  what the tokens add to the state
//   o    = scale (qg S^T + Aqk v')        the same registers of S as right operand
//   S    = S diag(2^G_last) + v'^T kg
//
// With groups (group_scan.h) the same body also carries the group's transfer matrix: identity rows
// instead of state rows, v = 0, no output.
#pragma once

#include "ops.h"
#include "problem.h"
#include "target.h"
#include "workspace.h"

namespace kda {
inline namespace KDA_ISA {

template <class Tiles, class Policy, int K, int C>
struct Walk {
  using Acc = typename Tiles::Acc;
  using Storage = typename Tiles::Storage;
  using Decay = typename Policy::Decay;
  using Bounded = typename Policy::Bounded;
  using Layout = Blob<Tiles, K, C>;
  static constexpr int KT = K / kTile, NT = C / kTile;

  // Where a state goes behind a walk: known before it, so that a GPU keeps nothing that it follows from.
  struct Exit {
    float* to;           // null: nowhere
    bool unless_beyond;  // nor if the walk meets what a narrow policy does not hold
  };
  struct State {
    Acc s[KT];
    int32_t beyond;       // the first token whose r or v' a narrow policy does not hold
    int32_t writes_from;  // the first token whose results are written
    Exit exit;
  };
  using StateOperands = typename Tiles::template Left<Decay>[KT];

  // Strides of one [V, K] or [K, V] state.
  struct Strides {
    int64_t value, channel;
  };
  static KDA_FN Strides strides(const Problem& p) {
    return p.state_kv ? Strides{1, p.V} : Strides{K, 1};
  }

  static KDA_FN void load_state(State& state, const float* p, Strides at, int slice) {
    state.beyond = kNone;
    KDA_UNROLL
    for (int t = 0; t < KT; t += 2) load_pair(state.s[t], state.s[t + 1], p, at, slice, t);
  }
  // Channel tiles t and t + 1.
  static KDA_FN void load_pair(Acc& a, Acc& b, const float* p, Strides at, int slice, int t) {
    Tiles::load_state2(a, b, p + slice * kTile * at.value + t * kTile * at.channel, at.value,
                       at.channel);
  }
  static KDA_FN void store_pair(const Acc& a, const Acc& b, float* p, Strides at, int slice, int t) {
    Tiles::store_state2(p + slice * kTile * at.value + t * kTile * at.channel, at.value, at.channel,
                        a, b);
  }
  static KDA_FN void store_state(const State& state, float* p, Strides at, int slice) {
    KDA_UNROLL
    for (int t = 0; t < KT; t += 2) store_pair(state.s[t], state.s[t + 1], p, at, slice, t);
  }
  static KDA_FN void zero_state(State& state) {
    state.beyond = kNone;
    KDA_UNROLL
    for (int t = 0; t < KT; ++t) Tiles::zero(state.s[t]);
  }
  // Rows 16 slice.. of the [K, K] identity.
  static KDA_FN void identity_state(State& state, int slice) {
    state.beyond = kNone;
    KDA_UNROLL
    for (int t = 0; t < KT; t += 2)
      Tiles::set_identity2(state.s[t], state.s[t + 1], (slice - t) * kTile);
  }

  // The five products of a step, a tile at a time. The operands of the state, of r and of v' are arrays; `kd`,
  // `inverse`, `qg`, `aqk`, `kg` give an operand tile of the chunk by its contracted index.
  //
  // r^T of a token tile, which starts as v^T; v'^T of one from the `tiles` tiles of r up to it.
  template <class Operands, class D>
  static KDA_FN void residual(Acc& r, const Operands& s, D kd) {
    Tiles::mma(r, KT, [&](int t) -> decltype(auto) { return (s[t]); }, kd);
  }
  template <class Operands, class I>
  static KDA_FN void delta(Acc& d, const Operands& r, int tiles, I inverse) {
    Tiles::zero(d);
    Tiles::mma(d, tiles, [&](int j) -> decltype(auto) { return (r[j]); }, inverse);
  }
  // o of a token tile without its scale: what the state gives, and what the chunk itself adds.
  template <class Operands, class Q>
  static KDA_FN void output_of_state(Acc& o, const Operands& s, Q qg) {
    Tiles::zero(o);
    Tiles::mma(o, KT, qg, [&](int t) -> decltype(auto) { return (s[t]); });
  }
  template <class Operands, class A>
  static KDA_FN void output_of_chunk(Acc& o, const Operands& v, int tiles, A aqk) {
    Tiles::mma(o, tiles, aqk, [&](int j) -> decltype(auto) { return (v[j]); });
  }
  // A channel tile of the state, in two steps.
  static KDA_FN void decay_tile(Acc& s, const float* decay, int t) {
    Tiles::apply(s, Multiply{}, s, Tiles::load_cols(decay + t * kTile));
  }
  template <class Operands, class G>
  static KDA_FN void add_tile(Acc& s, const Operands& v, int tiles, G kg) {
    Tiles::mma(s, tiles, [&](int i) -> decltype(auto) { return (v[i]); }, kg);
  }

  static KDA_FN void store_output(const Problem& p, const ChunkRow& chunk, int head, int slice, int i,
                                  int32_t writes_from, Acc& o) {
    const float scale = p.scale;
    Tiles::apply(o, [=](float x) { return scale * x; }, o);
    const int first = chunk.first + i * kTile;
    Tiles::store(p.out, p.v.type, row_offset(first, head, p.H, p.V) + slice * kTile,
                 int64_t(p.H) * p.V, o, Policy::kSecond ? writes_from - first : 0,
                 chunk.valid - i * kTile);
  }

  // Notices what the operands do not hold: in r or v' of the token tile that begins at `first`, and before.
  static KDA_FN void watch(int32_t& beyond, const Acc& d, int first) {
    if constexpr (Policy::kNarrow) Tiles::first_beyond(beyond, d, kLargest, first);
  }
  static KDA_FN void watch_prologue(int32_t& beyond, int32_t from_prologue) {
    if constexpr (Policy::kNarrow)
      if (from_prologue < beyond) beyond = from_prologue;
  }
  // v of a token tile, as the caller gave it.
  static KDA_FN typename Tiles::Raw values(const Problem& p, const ChunkRow& chunk, int head,
                                           int slice, int i) {
    const int first = chunk.first + i * kTile;
    return Tiles::load_raw(p.v, row_offset(first, head, p.H, p.V) + slice * kTile,
                           int64_t(p.H) * p.V, chunk.valid - i * kTile);
  }
  // `homogeneous`: as for v = 0.
  static KDA_FN void deltas(const Problem& p, const ChunkRow& chunk, int head, int slice,
                            bool homogeneous, State& state, const Storage* blob,
                            const int32_t* beyond, int blocks, Acc (&d)[NT]) {
    StateOperands s;
    typename Tiles::Raw v[NT];
    typename Tiles::template Left<Bounded> r[NT];
    if (!homogeneous) {
      KDA_UNROLL
      for (int i = 0; i < blocks; ++i) v[i] = values(p, chunk, head, slice, i);
    }
    KDA_UNROLL
    for (int t = 0; t < KT; ++t) s[t] = Tiles::template left<Decay>(state.s[t]);
    for (int i = Tiles::lane(); i < blocks; i += Tiles::kWave) watch_prologue(state.beyond, beyond[i]);
    KDA_UNROLL
    for (int i = 0; i < blocks; ++i) {
      Acc x;
      if (homogeneous) {
        Tiles::zero(x);
      } else {
        x = Tiles::transposed(v[i]);
      }
      residual(x, s, [&](int t) -> decltype(auto) {
        return Tiles::template load_blob_right<Decay>(blob, Layout::kd(i, t));
      });
      watch(state.beyond, x, chunk.first + i * kTile);
      r[i] = Tiles::template left_clamped<Bounded>(x);
      delta(d[i], r, i + 1, [&](int j) -> decltype(auto) {
        return Tiles::template load_blob_right<Bounded>(blob, Layout::inverse(i, j));
      });
      watch(state.beyond, d[i], chunk.first + i * kTile);
    }
  }
  static KDA_FN void outputs(const Problem& p, const ChunkRow& chunk, int head, int slice,
                             const State& state, const Storage* blob, int blocks,
                             const Acc (&d)[NT]) {
    typename Tiles::template Right<Decay> s[KT];
    typename Tiles::template Right<Bounded> v[NT];
    KDA_UNROLL
    for (int t = 0; t < KT; ++t) s[t] = Tiles::template right<Decay>(state.s[t]);
    KDA_UNROLL
    for (int i = 0; i < blocks; ++i) v[i] = Tiles::template right_clamped<Bounded>(d[i]);
    KDA_UNROLL
    for (int i = 0; i < blocks; ++i) {
      Acc o;
      output_of_state(o, s, [&](int t) -> decltype(auto) {
        return Tiles::template load_blob_left<Decay>(blob, Layout::qg(i, t));
      });
      output_of_chunk(o, v, i + 1, [&](int j) -> decltype(auto) {
        return Tiles::template load_blob_left<Bounded>(blob, Layout::aqk(i, j));
      });
      store_output(p, chunk, head, slice, i, state.writes_from, o);
    }
  }
  static KDA_FN void advance_all(State& state, const Storage* blob, const float* decay, int blocks,
                                 const Acc (&d)[NT]) {
    typename Tiles::template Left<Bounded> v[NT];
    KDA_UNROLL
    for (int i = 0; i < blocks; ++i) v[i] = Tiles::template left_clamped<Bounded>(d[i]);
    KDA_UNROLL
    for (int t = 0; t < KT; ++t) {
      decay_tile(state.s[t], decay, t);
      add_tile(state.s[t], v, blocks, [&](int i) -> decltype(auto) {
        return Tiles::template load_blob_right<Bounded>(blob, Layout::kg(t, i));
      });
    }
  }

  // One chunk for rows 16 slice.. of V, outputs included.
  static KDA_FN void step(const Problem& p, const ChunkRow& chunk, int head, int slice, State& state,
                          const Storage* blob, const float* decay, const int32_t* beyond) {
    const int blocks = active_blocks<Tiles, NT>(chunk);
    Acc d[NT];
    deltas(p, chunk, head, slice, false, state, blob, beyond, blocks, d);
    outputs(p, chunk, head, slice, state, blob, blocks, d);
    advance_all(state, blob, decay, blocks, d);
  }
  // The same without outputs: a group's contribution to later groups (`identity`: its matrix).
  static KDA_FN void transfer(const Problem& p, const ChunkRow& chunk, int head, int slice,
                              bool identity, State& state, const Storage* blob, const float* decay,
                              const int32_t* beyond) {
    const int blocks = active_blocks<Tiles, NT>(chunk);
    Acc d[NT];
    deltas(p, chunk, head, slice, identity, state, blob, beyond, blocks, d);
    advance_all(state, blob, decay, blocks, d);
  }
};

}  // namespace KDA_ISA
}  // namespace kda
