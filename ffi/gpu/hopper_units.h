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

// The units. Of packs those of long sequences come first, and with all rows of V in a block it takes several of them in
// turn: one for each block, then one for each in the opposite order, and so on, so that all have about as many chunks.
// Else a block has one, of which ptxas knows more: each step costs less.
template <class S, int N, bool Packs>
struct HopperUnits {
  static constexpr bool kTurns = Packs && N == 128;
  const S& s;
  const uint8_t* order;  // [N] in shared memory, for packs

  // The block's unit `i` or the next one with chunks, and `i` is set to it; false: none is left.
  KDA_FN bool find(int& i, HopperUnit& u) const {
    if constexpr (!Packs) return i == 0 && set(u, blockIdx.x);
    const bool found = (kTurns || i == 0) && look_for(i, u);
    i = same_in_warp(i), u.seq = same_in_warp(int(u.seq)), u.head = same_in_warp(u.head);
    u.first_value = same_in_warp(u.first_value), u.first = same_in_warp(u.first), u.count = same_in_warp(u.count);
    u.from_start = same_in_warp(u.from_start);
    return same_in_warp(found);
  }

 private:
  KDA_FN bool look_for(int& i, HopperUnit& u) const {
    const Problem& p = s.p;
    const int64_t units = p.N * p.H * (p.V / N);
    const int grid = int(gridDim.x), block = int(blockIdx.x);
    for (;; ++i) {
      const int64_t at = int64_t(i) * grid + (i & 1 ? grid - 1 - block : block);
      if (int64_t(i) * grid >= units) return false;
      if (at < units && set(u, at)) return true;
      if (!kTurns) return false;
    }
  }
  KDA_FN bool set(HopperUnit& u, int64_t at) const {
    const Problem& p = s.p;
    const int parts = p.V / N;
    const int64_t row = at / parts;
    u.seq = row / p.H, u.head = int(row % p.H), u.first_value = int(at % parts) * N;
    if (Packs) u.seq = order[u.seq];
    const typename S::Range range = s.range_in_slab(u.seq);
    u.first = int(range.first), u.count = int(range.last - range.first), u.from_start = range.from_start;
    return u.count > 0;
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

// By a warp: until chunk n of those from `flags` on is there; returns how many are.
KDA_FN int wait_until_there(const uint8_t* flags, int n, int there, int count) {
  while (true) {
    const int c = there + (threadIdx.x & 31);
    const bool yes = c < count && *static_cast<const volatile uint8_t*>(flags + c);
    const unsigned not_yet = ~__ballot_sync(~0u, yes);
    there += not_yet ? __ffs(not_yet) - 1 : 32;
    if (there > n) break;
    __nanosleep(100);
  }
  __threadfence();
  asm volatile("fence.proxy.async.global;" ::: "memory");
  return there;
}

}  // namespace KDA_ISA
}  // namespace kda
