// Stage 2, parallel over (sequence, head, 16 rows of V): the serial pass over the chunks.
//
// One wave holds 16 rows of the state S [V, K] in float32 accumulators. The state never changes
// layout: packed, the accumulator is the left operand of one product and the right operand of the
// other. For a chunk (kernel/workspace.h names the operands):
//
//   v'^T = u^T + S (-w)^T          S as left operand
//   o    = qg S^T + Aqk v'         the same registers as right operand
//   S    = S diag(2^G_last) + v'^T kg
//
// With groups (group_scan.h) the same body also carries the group's transfer matrix: identity rows
// instead of state rows, u = 0, no output.
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
  using Layout = Blob<K, C>;
  static constexpr int KT = K / kTile, NT = C / kTile;

  struct State {
    Acc s[KT];
  };

  // Strides of one [V, K] or [K, V] state.
  struct Strides {
    int64_t value, channel;
  };
  static KDA_FN Strides strides(const Problem& p) {
    return p.state_kv ? Strides{1, p.V} : Strides{K, 1};
  }

  static KDA_FN void load_state(State& state, const float* p, Strides at, int slice) {
    KDA_UNROLL
    for (int t = 0; t < KT; ++t)
      state.s[t] = Tiles::load_f32(p + slice * kTile * at.value + t * kTile * at.channel, at.value,
                                   at.channel);
  }
  static KDA_FN void store_state(const State& state, float* p, Strides at, int slice) {
    KDA_UNROLL
    for (int t = 0; t < KT; ++t)
      Tiles::store_f32(p + slice * kTile * at.value + t * kTile * at.channel, at.value, at.channel,
                       state.s[t]);
  }
  static KDA_FN void zero_state(State& state) {
    KDA_UNROLL
    for (int t = 0; t < KT; ++t) Tiles::zero(state.s[t]);
  }
  // Rows 16 slice.. of the [K, K] identity.
  static KDA_FN void identity_state(State& state, int slice) {
    zero_state(state);
    KDA_UNROLL
    for (int t = 0; t < KT; ++t)
      if (t == slice) Tiles::set_identity(state.s[t]);
  }

  // v'^T for the 16 rows, token tile by token tile. `u` null: the homogeneous part alone.
  static KDA_FN void deltas(const State& state, const Storage* blob, const Storage* u, int blocks,
                     Acc (&delta)[NT]) {
    typename Tiles::template Left<Decay> s[KT];
    KDA_UNROLL
    for (int t = 0; t < KT; ++t) s[t] = Tiles::template left<Decay>(state.s[t]);
    KDA_UNROLL
    for (int i = 0; i < blocks; ++i) {
      if (u) {
        delta[i] = Tiles::template load_acc<Bounded>(u + i * kTileElements);
      } else {
        Tiles::zero(delta[i]);
      }
      Tiles::mma(delta[i], KT, [&](int t) -> decltype(auto) { return (s[t]); },
                 [&](int t) -> decltype(auto) {
                   return Tiles::template load_right<Decay>(blob + Layout::w(i, t));
                 });
    }
  }

  static KDA_FN void outputs(const Problem& p, const ChunkRow& chunk, int head, int slice,
                      const State& state, const Storage* blob, int blocks,
                      const Acc (&delta)[NT]) {
    typename Tiles::template Right<Decay> s[KT];
    typename Tiles::template Right<Bounded> v[NT];
    KDA_UNROLL
    for (int t = 0; t < KT; ++t) s[t] = Tiles::template right<Decay>(state.s[t]);
    KDA_UNROLL
    for (int i = 0; i < blocks; ++i) v[i] = Tiles::template right<Bounded>(delta[i]);
    KDA_UNROLL
    for (int i = 0; i < blocks; ++i) {
      Acc o;
      Tiles::zero(o);
      Tiles::mma(o, KT,
                 [&](int t) -> decltype(auto) {
                   return Tiles::template load_left<Decay>(blob + Layout::qg(i, t));
                 },
                 [&](int t) -> decltype(auto) { return (s[t]); });
      Tiles::mma(o, i + 1,
                 [&](int j) -> decltype(auto) {
                   return Tiles::template load_left<Bounded>(blob + Layout::aqk(i, j));
                 },
                 [&](int j) -> decltype(auto) { return (v[j]); });
      const int rows = chunk.valid - i * kTile;
      Tiles::store(p.out, p.v.type,
                   row_offset(int64_t(chunk.first) + i * kTile, head, p.H, p.V) + slice * kTile,
                   int64_t(p.H) * p.V, o, rows < kTile ? rows : kTile);
    }
  }

  static KDA_FN void advance(State& state, const Storage* blob, const float* decay, int blocks,
                      const Acc (&delta)[NT]) {
    typename Tiles::template Left<Bounded> v[NT];
    KDA_UNROLL
    for (int i = 0; i < blocks; ++i) v[i] = Tiles::template left<Bounded>(delta[i]);
    KDA_UNROLL
    for (int t = 0; t < KT; ++t) {
      Tiles::apply(state.s[t], [](float s, float d) { return s * d; }, state.s[t],
                   Tiles::load_cols(decay + t * kTile));
      Tiles::mma(state.s[t], blocks, [&](int i) -> decltype(auto) { return (v[i]); },
                 [&](int i) -> decltype(auto) {
                   return Tiles::template load_right<Bounded>(blob + Layout::kg(t, i));
                 });
    }
  }

  // One chunk for rows 16 slice.. of V, outputs included. `u`: the slice's tiles of u.
  static KDA_FN void step(const Problem& p, const ChunkRow& chunk, int head, int slice, State& state,
                          const Storage* blob, const Storage* u, const float* decay) {
    const int blocks = active_blocks<Tiles, NT>(chunk);
    Acc delta[NT];
    deltas(state, blob, u, blocks, delta);
    outputs(p, chunk, head, slice, state, blob, blocks, delta);
    advance(state, blob, decay, blocks, delta);
  }
  // The same without outputs: a group's contribution to later groups (`identity`: its matrix).
  static KDA_FN void transfer(const ChunkRow& chunk, bool identity, int slice, State& state,
                       const Storage* blob, const float* decay) {
    const int blocks = active_blocks<Tiles, NT>(chunk);
    Acc delta[NT];
    deltas(state, blob, identity ? nullptr : blob + Layout::u(slice, 0), blocks, delta);
    advance(state, blob, decay, blocks, delta);
  }
};

}  // namespace KDA_ISA
}  // namespace kda
