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
constexpr KDA_FN float hopper_step_time(int n) { return n == 16 ? 0.9f : n == 32 ? 1.13f : n == 64 ? 1.75f : 2.4f; }

constexpr int kOrdered = 128;  // sequences; more of them come as they are

struct HopperUnit {
  int64_t seq;
  int head, first_value;  // of V
  int first, count;       // chunks in the slab
  bool from_start;
};

// What is the same in all lanes, in a register that is. Where ptxas cannot see that all threads take the same way, it
// waits for each wgmma before it starts the next one (its notes C7518 and C7520, and twice the time).
KDA_FN int same_in_warp(int x) { return __reduce_max_sync(~0u, x); }

// The units, those of long sequences first. With all rows of V in a block it takes several of them in turn: one for each
// block, then one for each in the opposite order, and so on, so that all have about as many chunks. With fewer rows there
// are few units, and a block has one: each step of a walk over several costs more, since less is known of it.
template <class S, int N>
struct HopperUnits {
  static constexpr bool kTurns = N == 128;
  const S& s;
  const uint8_t* order;  // [N] in shared memory, or null

  // The block's unit `i` or the next one with chunks, and `i` is set to it; false: none is left.
  KDA_FN bool find(int& i, HopperUnit& u) const {
    const bool found = (kTurns || i == 0) && look_for(i, u);
    i = same_in_warp(i), u.seq = same_in_warp(int(u.seq)), u.head = same_in_warp(u.head), u.first_value = same_in_warp(u.first_value);
    u.first = same_in_warp(u.first), u.count = same_in_warp(u.count), u.from_start = same_in_warp(u.from_start);
    return same_in_warp(found);
  }

 private:
  KDA_FN bool look_for(int& i, HopperUnit& u) const {
    const Problem& p = s.p;
    const int parts = p.V / N, of_sequence = p.H * parts, grid = int(gridDim.x), block = int(blockIdx.x);
    for (;; ++i) {
      const int64_t at = int64_t(i) * grid + (i & 1 ? grid - 1 - block : block);
      if (int64_t(i) * grid >= p.N * of_sequence) return false;
      if (kTurns && at >= p.N * of_sequence) continue;
      const int in_sequence = int(at % of_sequence);
      u.seq = at / of_sequence;
      if (order) u.seq = order[u.seq];
      u.head = in_sequence / parts, u.first_value = in_sequence % parts * N;
      const typename S::Range range = s.range_in_slab(u.seq);
      u.first = int(range.first), u.count = int(range.last - range.first), u.from_start = range.from_start;
      if (u.count > 0 || !kTurns) return u.count > 0;
    }
  }
};

// Sequences from the longest to the shortest, by all threads of a block; a barrier follows.
template <class S>
KDA_FN void order_sequences(const S& s, uint8_t (&order)[kOrdered]) {
  const int n = int(s.p.N);
  for (int i = int(threadIdx.x); i < n; i += int(blockDim.x)) {
    const int mine = s.seq_row(i).num_chunks;
    int rank = 0;
    for (int j = 0; j < n; ++j) {
      const int other = s.seq_row(j).num_chunks;
      rank += other > mine || (other == mine && j < i);
    }
    order[rank] = uint8_t(i);
  }
}

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
