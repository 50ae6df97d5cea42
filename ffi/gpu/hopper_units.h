// What the blocks of the walk on Hopper (hopper_walk.h) work on: units, each N rows of V of one (sequence, head).
#pragma once

#include "kernels.h"

namespace kda {
inline namespace KDA_ISA {

// How a walk is launched.
struct HopperPlan {
  bool beside;  // the prologue still runs, and says which chunks are there (nvidia_prologue.h)
  int other;    // 0, or the rows of V in a block of a second launch: one of the two does the work
  int multiprocessors;
};

// us for a chunk on an H200, with n rows of V in a block.
constexpr KDA_FN float hopper_step_time(int n) { return n == 16 ? 0.75f : n == 32 ? 0.9f : n == 64 ? 1.25f : 2.1f; }

struct HopperUnit {
  int seq, head, first_value;  // of V
  int first, count;            // chunks in the slab; none: there is no unit
  bool from_start, ends;       // in the slab
};

// What is the same in all lanes, in a register that is. Where ptxas cannot see that all threads take the same way, it
// waits for each wgmma before it starts the next one (its notes C7518 and C7520, and twice the time).
KDA_FN int same_in_warp(int x) { return __reduce_max_sync(~0u, x); }
KDA_FN HopperUnit same_in_warp(const HopperUnit& u) {
  return {same_in_warp(u.seq),   same_in_warp(u.head),       same_in_warp(u.first_value), same_in_warp(u.first),
          same_in_warp(u.count), bool(same_in_warp(u.from_start)), bool(same_in_warp(u.ends))};
}

constexpr int kOrdered = 128;  // sequences; more of them come as they are

// Sequences from the longest to the shortest, of the same length the last one first, whose operands may still be in the
// cache; and their chunks. In shared memory.
struct HopperOrder {
  int first[kOrdered], count[kOrdered];
  uint8_t sequence[kOrdered];

  template <class S>
  KDA_FN void make(const S& s) {  // by all threads of a block; a barrier follows
    const int n = int(s.p.N);
    for (int i = int(threadIdx.x); i < n; i += int(blockDim.x)) {
      const SeqRow mine = s.seq_row(i);
      int place = 0;
      for (int j = 0; j < n; ++j) {
        const int other = s.seq_row(j).num_chunks;
        place += other > mine.num_chunks || (other == mine.num_chunks && j > i);
      }
      first[place] = mine.first_chunk, count[place] = mine.num_chunks, sequence[place] = uint8_t(i);
    }
  }
};

// The units. With packs those of long sequences come first, and with all rows of V in a block it takes the next one that
// nobody has when it is done with one. Else a block has one, of which ptxas knows more: each step costs less.
template <class S, int N, bool Packs>
struct HopperUnits {
  static constexpr bool kTurns = Packs && N == 128;
  const S& s;
  const HopperOrder* order;         // for packs, null: as they come
  int upcoming = -1;  // a unit's number, where one was asked for

  // A block's first unit, without turns its only one. It may have no chunks.
  KDA_FN HopperUnit first() const { return set(int(blockIdx.x)); }
  // What follows is by a warp, behind the launch before. The next unit, asked for early, since the answer takes its time:
  KDA_FN void ask() {
    upcoming = units();
    if (kTurns && (threadIdx.x & 31) == 0) upcoming = int(gridDim.x) + atomicAdd(&s.progress().next_unit, 1);
  }
  // and got; without chunks: there is none.
  KDA_FN HopperUnit next() {
    while (true) {
      const int at = __shfl_sync(~0u, upcoming, 0);
      if (at >= units()) return {};
      const HopperUnit u = set(at);
      if (u.count > 0) return u;
      ask();
    }
  }

 private:
  KDA_FN int units() const { return int(s.p.N) * s.p.H * (s.p.V / N); }
  KDA_FN HopperUnit set(int at) const {
    const Problem& p = s.p;
    const int parts = p.V / N, row = at / parts, place = row / p.H;
    HopperUnit u;
    u.head = row % p.H, u.first_value = at % parts * N;
    typename S::Range range;
    if (Packs && order) {
      u.seq = order->sequence[place], range = s.range_in_slab(order->first[place], order->count[place]);
    } else {
      u.seq = place, range = s.range_in_slab(place);
    }
    u.first = int(range.first), u.count = int(range.last > range.first ? range.last - range.first : 0);
    u.from_start = range.from_start, u.ends = range.to_end;
    return u;
  }
};

// Whether a walk with n rows of V in a block is through before one with `plan.other`: the longest sequence takes its
// time, and so does all work on all multiprocessors.
template <class S>
KDA_FN bool is_chosen(const S& s, const HopperPlan& plan, int n, int longest) {
  auto time = [&](int n) {
    const float all = float(s.p.NC) * float(s.p.H) * float(s.p.V / n) / float(plan.multiprocessors);
    return hopper_step_time(n) * fmaxf(float(longest), all);
  };
  const float mine = time(n), others = time(plan.other);
  return mine < others || (mine == others && n < plan.other);
}

}  // namespace KDA_ISA
}  // namespace kda
