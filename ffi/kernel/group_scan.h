// Stage 3, only with groups > 1: compose the groups of a sequence.
//
// A stretch of chunks acts on the state as S -> S M + B with M [K, K] and B [V, K]. Pass 1 of the
// walk yields (M, B) of every group between the first and the last; this stage turns the state at
// the end of group 0 into the state at the start of groups 1, 2, ...; pass 2 walks from those.
// Products are float32: M multiplies states that may be large.
#pragma once

#include "target.h"
#include "tile_ops.h"
#include "walk.h"

namespace kda {
inline namespace KDA_ISA {

// Chunks [first, last) of a sequence's group; groups beyond the number of chunks are empty.
struct GroupRange {
  int first, last;
};
KDA_FN GroupRange group_range(const SeqRow& seq, int group, int groups) {
  const int64_t n = seq.num_chunks;
  return {seq.first_chunk + int(n * group / groups),
          seq.first_chunk + int(n * (group + 1) / groups)};
}

// Where the groups' states and matrices lie: for each (sequence, head), `groups` slots of
// [V + K, K] float32. In slot g, rows 0..V-1 are first B of group g, then the state at the *start* of
// group g + 1; rows V.. are M of group g.
struct GroupSlots {
  float* base;
  int32_t heads, groups, K, V;
  KDA_FN float* slot(int64_t seq, int64_t head, int64_t group) const {
    return base + ((seq * heads + head) * groups + group) * (int64_t(V + K) * K);
  }
  static int64_t bytes(int64_t seqs, int64_t heads, int64_t groups, int64_t K, int64_t V) {
    return seqs * heads * groups * (V + K) * K * int64_t(sizeof(float));
  }
};

template <class Tiles, class Policy, int K, int C>
struct GroupScan {
  using W = Walk<Tiles, Policy, K, C>;
  using Acc = typename Tiles::Acc;

  // Rows 16 slice.. of V: slot 0 holds the state behind group 0. Slots are in memory order throughout, so
  // tiles are loaded in plain order here.
  static KDA_FN void scan(const GroupSlots& slots, int64_t seq, int64_t head, int slice) {
    Acc state[W::KT];
    load(state, slots.slot(seq, head, 0), slice);
    for (int g = 1; g + 1 < slots.groups; ++g) {
      float* slot = slots.slot(seq, head, g);
      const float* matrix = slot + int64_t(slots.V) * K;
      typename Tiles::template Left<F32> s[W::KT];
      KDA_UNROLL
      for (int t = 0; t < W::KT; ++t) s[t] = Tiles::template left<F32>(state[t]);
      load(state, slot, slice);  // B
      KDA_UNROLL
      for (int t = 0; t < W::KT; ++t)
        KDA_UNROLL
        for (int j = 0; j < W::KT; ++j) {
          const auto m = Tiles::template right_t<F32>(
              Tiles::load_f32(matrix + int64_t(j) * kTile * K + t * kTile, K, 1));
          accumulate<Tiles>(state[t], s[j], m);
        }
      KDA_UNROLL
      for (int t = 0; t < W::KT; ++t) Tiles::store_f32(at(slot, slice, t), K, 1, state[t]);
    }
  }

 private:
  template <class Float>
  static KDA_FN Float* at(Float* slot, int slice, int t) {
    return slot + int64_t(slice) * kTile * K + t * kTile;
  }
  static KDA_FN void load(Acc (&state)[W::KT], const float* slot, int slice) {
    KDA_UNROLL
    for (int t = 0; t < W::KT; ++t) state[t] = Tiles::load_f32(at(slot, slice, t), K, 1);
  }
};

}  // namespace KDA_ISA
}  // namespace kda
