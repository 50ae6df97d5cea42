// Which chunks a walk takes and where its states come from and go to: what the drivers of all targets
// share. A driver says who runs a task and when.
//
// Chunks are taken in slabs, so that the workspace stays bounded: the prologue of all chunks of a slab,
// then the walk over it. With groups > 1 the slab is the whole call. Between two slabs a state waits in
// final_state. In a pool it must not: the second pass (status, below) starts from the row that the final state
// is written to, and a sequence may have none. So there
//   - a state waits in the workspace. At most one sequence goes on from a slab to the next one, but another one
//     may come out of the slab's beginning at that time: two places, in turn;
//   - the first pass does not write the final state of a slice that the second pass does again;
//   - with groups, where the last group does not know what the others meet, the first one leaves a copy of the
//     initial state in the last slot, which is free.
#pragma once

#include "group_scan.h"
#include "target.h"
#include "walk.h"

namespace kda {
inline namespace KDA_ISA {

template <class Tiles, class Policy, int K, int C>
struct Schedule {
  using W = Walk<Tiles, Policy, K, C>;
  using State = typename W::State;
  using Storage = typename Tiles::Storage;
  using Layout = Blob<Tiles, K, C>;

  const Problem& p;
  int64_t slab_first, slab_last;  // chunks whose blobs are in the workspace

  static int64_t blobs_bytes(const Problem& p) {
    return (p.slab_chunks < p.NC ? p.slab_chunks : p.NC) * p.H * Layout::kBytes;
  }
  static int64_t workspace_bytes(const Problem& p) {
    return blobs_bytes(p) + states_bytes(p) + progress_bytes(p) + status_bytes(p);
  }
  static int64_t states_bytes(const Problem& p) {
    if (p.groups > 1) return GroupSlots::bytes(p.N, p.H, p.groups, p.K, p.V);
    return p.in_pool && p.slab_chunks < p.NC ? 2 * state_offset(p, 1, 0) * int64_t(sizeof(float)) : 0;
  }
  // The end of the workspace. One word for the call, not 0 once a narrow policy met what its operands do
  // not hold, and one for each (sequence, head, 16 rows of V): 0, or kNone - the first such token. From
  // that token on a second pass with a wide policy writes the results; those of earlier tokens stay.
  static constexpr int64_t status_bytes(const Problem& p) {  // on host and device
    return (4 * (1 + p.N * p.H * (p.V / kTile)) + 127) / 128 * 128;
  }
  // Before it, where a walk can run beside the prologue: how the work is given away, and which (head, chunk)s are
  // there, a byte each.
  struct Progress {
    int32_t next_task, first_multiprocessor, next_unit, second_task, second_done, unused[3];
    KDA_FN void clear_for_followers() { next_unit = second_task = second_done = 0; }
  };
  static_assert(sizeof(Progress) == 32, "kda_jax/workspace.py counts it");
  static constexpr int64_t progress_bytes(const Problem& p) {
    const int64_t chunks = p.slab_chunks < p.NC ? p.slab_chunks : p.NC;
    return Tiles::kOverlaps ? (int64_t(sizeof(Progress)) + p.H * chunks + 127) / 128 * 128 : 0;
  }
  KDA_FN Progress& progress() const {
    return *reinterpret_cast<Progress*>(reinterpret_cast<char*>(status()) - progress_bytes(p));
  }
  KDA_FN uint8_t* is_there(int64_t chunk, int head) const {
    return reinterpret_cast<uint8_t*>(&progress() + 1) + head * (slab_last - slab_first) + (chunk - slab_first);
  }
  KDA_FN int32_t* status() const {
    return reinterpret_cast<int32_t*>(static_cast<char*>(p.workspace) + p.workspace_bytes -
                                      status_bytes(p));
  }
  KDA_FN int32_t* status(int64_t seq, int head, int slice) const {
    return status() + 1 + (seq * p.H + head) * (p.V / kTile) + slice;
  }
  KDA_FN void report(int32_t token, int64_t seq, int head, int slice) const {
    if (token == kNone) return;
    *status() = 1;
    Tiles::atomic_max(status(seq, head, slice), kNone - token);
  }
  KDA_FN void report(const State& state, int64_t seq, int head, int slice) const {
    if constexpr (Policy::kNarrow) report(state.beyond, seq, head, slice);
  }
  // The first token whose results a pass writes, kNone: none.
  KDA_FN int32_t writes_from(int64_t seq, int head, int slice) const {
    return Policy::kSecond ? kNone - *status(seq, head, slice) : 0;
  }
  KDA_FN bool has_to(int64_t seq, int head) const {
    bool any = !Policy::kSecond;
    for (int slice = 0; !any && slice < p.V / kTile; ++slice)
      any = *status(seq, head, slice) != 0;
    return any;
  }

  KDA_FN SeqRow seq_row(int64_t n) const { return reinterpret_cast<const SeqRow*>(p.seqs)[n]; }
  KDA_FN ChunkRow chunk_row(int64_t c) const {
    return reinterpret_cast<const ChunkRow*>(p.chunks)[c];
  }
  KDA_FN Storage* blob(int64_t chunk, int64_t head) const {
    return reinterpret_cast<Storage*>(static_cast<char*>(p.workspace) +
                                      ((chunk - slab_first) * p.H + head) * Layout::kBytes);
  }
  KDA_FN float* decay(int64_t chunk, int64_t head) const {
    return reinterpret_cast<float*>(blob(chunk, head) + Layout::kElements);
  }
  KDA_FN int32_t* beyond(int64_t chunk, int64_t head) const {
    return reinterpret_cast<int32_t*>(decay(chunk, head) + K);
  }
  // Behind the blobs.
  KDA_FN float* states_in_workspace() const {
    const int64_t chunks = p.slab_chunks < p.NC ? p.slab_chunks : p.NC;
    return reinterpret_cast<float*>(static_cast<char*>(p.workspace) +
                                    chunks * p.H * Layout::kBytes);
  }
  KDA_FN GroupSlots slots() const { return {states_in_workspace(), p.H, p.groups, K, p.V}; }

  KDA_FN bool starts_from_state(int64_t seq) const {
    return p.initial_state && (!p.has_initial_state || p.has_initial_state[seq]) &&
           live_row(p, seq) >= 0;
  }
  // Where a sequence's state comes from, null: zeros.
  KDA_FN const float* origin(int64_t seq, int head) const {
    if (!starts_from_state(seq)) return nullptr;
    if (Policy::kSecond && p.in_pool && p.groups > 1) return kept_origin(seq, head);
    return p.initial_state + state_offset(p, live_row(p, seq), head);
  }
  KDA_FN float* kept_origin(int64_t seq, int head) const {
    return slots().slot(seq, head, p.groups - 1);
  }
  // Where it waits between the slabs that meet at chunk `border`.
  KDA_FN float* waiting(int64_t seq, int head, int64_t border) const {
    if (!p.in_pool) return p.final_state + state_offset(p, seq, head);
    return states_in_workspace() + state_offset(p, border / p.slab_chunks % 2, head);
  }
  // What the first pass did well, and the second one leaves alone.
  KDA_FN bool done(int64_t seq, int head, int slice) const {
    return Policy::kSecond && *status(seq, head, slice) == 0;
  }
  // Where a slice's final state goes, null: nowhere.
  KDA_FN float* final_state(int64_t seq, int head, int slice) const {
    const int64_t row = live_row(p, seq);
    return row < 0 || done(seq, head, slice) ? nullptr : p.final_state + state_offset(p, row, head);
  }
  // Where the state at a checkpoint goes, null: nowhere.
  KDA_FN float* checkpoint_state(int64_t checkpoint, int head) const {
    const int64_t row = checkpoint < 0 ? -1 : saved_row(p, checkpoint);
    return row < 0 ? nullptr : p.checkpoint_state + state_offset(p, row, head);
  }
  // Whether a fill has nothing to do for a sequence: chunks write its final state, or it has no row in the pool,
  // or it is empty and its state is there.
  KDA_FN bool leaves_final_state(int64_t seq) const {
    const SeqRow row = seq_row(seq);
    if (row.num_chunks > 0) return true;
    return p.in_pool && (row.length < 0 || live_row(p, seq) < 0 || starts_from_state(seq));
  }
  KDA_FN void start(State& state, int64_t seq, int head, int slice) const {
    load(state, origin(seq, head), slice);
  }
  KDA_FN void load(State& state, const float* from, int slice) const {
    if (from) {
      W::load_state(state, from, W::strides(p), slice);
    } else {
      W::zero_state(state);
    }
  }

  // Chunks [first, last) of one head for slices [from, to): outputs and checkpoints. `states(slice)`
  // is the slice's state. All slices take a chunk before the next one, while its blob is warm.
  template <class States>
  KDA_FN void walk(States& states, int head, int from, int to, int64_t first, int64_t last) const {
    for (int64_t c = first; c < last; ++c) {
      const ChunkRow chunk = chunk_row(c);
      for (int slice = from; slice < to; ++slice) {
        states(slice).writes_from = writes_from(chunk.sequence, head, slice);
        W::step(p, chunk, head, slice, states(slice), blob(c, head), decay(c, head),
                beyond(c, head));
        save_checkpoint(states(slice), chunk, head, slice);
      }
    }
  }

  KDA_FN void save_checkpoint(const State& state, const ChunkRow& chunk, int head,
                              int slice) const {
    if (Policy::kSecond && chunk.first + chunk.valid <= state.writes_from) return;
    if (float* to = checkpoint_state(chunk.checkpoint, head))
      W::store_state(state, to, W::strides(p), slice);
  }

  // The chunks of a sequence that lie in the slab.
  struct Range {
    int64_t first, last;
    bool from_start, to_end;  // false: the state waits
  };
  KDA_FN Range range_in_slab(int64_t seq) const {
    const SeqRow row = seq_row(seq);
    return range_in_slab(row.first_chunk, row.num_chunks);
  }
  KDA_FN Range range_in_slab(int first_chunk, int num_chunks) const {
    const int64_t begin = first_chunk, end = begin + num_chunks;
    return {begin > slab_first ? begin : slab_first, end < slab_last ? end : slab_last,
            begin >= slab_first, end <= slab_last};
  }
  KDA_FN const float* entry(int64_t seq, int head, bool from_start) const {
    return from_start ? origin(seq, head) : waiting(seq, head, slab_first);
  }
  // Where a slice's state goes behind the slab. Walks of earlier slabs have reported what they met.
  KDA_FN typename W::Exit exit(int64_t seq, int head, int slice) const {
    const SeqRow row = seq_row(seq);
    if (done(seq, head, slice)) return {nullptr, false};
    if (int64_t(row.first_chunk) + row.num_chunks > slab_last)
      return {waiting(seq, head, slab_last), false};
    if (!Policy::kNarrow || !p.in_pool) return {final_state(seq, head, slice), false};
    return {*status(seq, head, slice) != 0 ? nullptr : final_state(seq, head, slice), true};
  }
  // `beyond`: whether this walk of it met what a narrow policy does not hold.
  KDA_FN float* exit(int64_t seq, int head, int slice, bool beyond) const {
    const typename W::Exit at = exit(seq, head, slice);
    return at.unless_beyond && beyond ? nullptr : at.to;
  }
  KDA_FN void leave(const State& state, int64_t seq, int head, int slice) const {
    if (state.exit.to && !(state.exit.unless_beyond && any_beyond(state)))
      W::store_state(state, state.exit.to, W::strides(p), slice);
    report(state, seq, head, slice);
  }
  KDA_FN bool any_beyond(const State& state) const {  // of all lanes
    return Policy::kNarrow && Tiles::wave_min(state.beyond) != kNone;
  }
  template <class States>
  KDA_FN void walk_slab(States& states, int64_t seq, int head, int from, int to) const {
    const Range range = range_in_slab(seq);
    if (range.first >= range.last) return;
    for (int slice = from; slice < to; ++slice) {
      load(states(slice), entry(seq, head, range.from_start), slice);
      states(slice).exit = exit(seq, head, slice);
    }
    walk(states, head, from, to, range.first, range.last);
    for (int slice = from; slice < to; ++slice) leave(states(slice), seq, head, slice);
  }

  // Groups, pass 1 (groups 0 .. G-2). Group 0 starts from the true state and writes its outputs at
  // once; the others yield their transfer: B for slices below V/16, then the rows of M.
  template <class States>
  KDA_FN void walk_group_first(States& states, int64_t seq, int head, int group, int slice) const {
    const int slices = p.V / kTile;
    const GroupRange range = group_range(seq_row(seq), group, p.groups);
    State& state = states(slice);
    if (group == 0) {
      if (slice >= slices) return;
      start(state, seq, head, slice);
      if (Policy::kNarrow && p.in_pool)
        W::store_state(state, kept_origin(seq, head), W::strides(p), slice);
      walk(states, head, slice, slice + 1, range.first, range.last);
    } else {
      const bool identity = slice >= slices;
      if (identity) {
        W::identity_state(state, slice - slices);
      } else {
        W::zero_state(state);
      }
      for (int64_t c = range.first; c < range.last; ++c)
        W::transfer(p, chunk_row(c), head, slice, identity, state, blob(c, head), decay(c, head),
                    beyond(c, head));
      // What was met here spoils the groups behind this one, and nothing before.
      if (state.beyond != kNone && range.first < range.last) {
        const ChunkRow last = chunk_row(range.last - 1);
        state.beyond = last.first + last.valid;
      }
      if (identity) {
        W::store_state(state, slots().slot(seq, head, group), {K, 1}, slice);
        for (int i = 0; Policy::kNarrow && i < slices; ++i) report(state.beyond, seq, head, i);
        return;
      }
    }
    W::store_state(state, slots().slot(seq, head, group), {K, 1}, slice);
    report(state, seq, head, slice);
  }

  // Groups, pass 2: group `group` + 1 from the composed state.
  template <class States>
  KDA_FN void walk_group_second(States& states, int64_t seq, int head, int group,
                                int slice) const {
    State& state = states(slice);
    W::load_state(state, slots().slot(seq, head, group), {K, 1}, slice);
    const GroupRange range = group_range(seq_row(seq), group + 1, p.groups);
    state.exit = {group + 2 == p.groups ? final_state(seq, head, slice) : nullptr, false};
    walk(states, head, slice, slice + 1, range.first, range.last);
    leave(state, seq, head, slice);
  }
};

}  // namespace KDA_ISA
}  // namespace kda
