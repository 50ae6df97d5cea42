// In which order the work of a call is taken: sequences from the longest to the shortest, and the prologue's tasks as a
// walk beside it needs them.
#pragma once

#include "kernels.h"

namespace kda {
inline namespace KDA_ISA {

constexpr int kOrdered = 128;  // sequences; more of them come as they are

// f(place in the order, sequence, its row), by some thread of the block for each; a barrier follows.
template <class S, class F>
KDA_FN void order_sequences(const S& s, F f) {
  const int n = int(s.p.N);
  for (int i = int(threadIdx.x); i < n; i += int(blockDim.x)) {
    const SeqRow mine = s.seq_row(i);
    int place = 0;
    for (int j = 0; j < n; ++j) {
      const int other = s.seq_row(j).num_chunks;
      place += other > mine.num_chunks || (other == mine.num_chunks && j < i);
    }
    f(place, i, mine);
  }
}

// How a prologue's tasks, (chunk, head)s, are given away. All blocks take those below `shared` in turn; the rest is for the
// blocks on `staying` of the multiprocessors, so that the walk may begin on the others. Below 0: no walk waits for any, and
// all are shared. `group`: so many (sequence, head)s are walked at a time.
struct PrologueSplit {
  int shared, staying, multiprocessors, group;
};

// The tasks' order for a walk beside: group by group, and of a group by time. A group has as many places for each chunk as
// (sequence, head)s, so that those of a shorter sequence stand for no task in the end.
struct TaskOrder {
  // Of a place in the order of sequences: places for tasks of all groups that begin before it; chunks.
  int start[kOrdered + 1], length[kOrdered], first[kOrdered];

  static KDA_FN int groups_before(int place, int heads, int group) { return (place * heads + group - 1) / group; }

  // By all threads of a block; a barrier is the last of it.
  template <class S>
  KDA_FN void make(const S& s, int group) {
    const int n = int(s.p.N), lane = int(threadIdx.x) & 31;
    order_sequences(s, [&](int place, int, const SeqRow& row) {
      length[place] = row.num_chunks, first[place] = row.first_chunk;
    });
    __syncthreads();
    if (threadIdx.x < 32) {
      int sum = 0;
      for (int place = lane; place - lane < n; place += 32) {
        int x = 0;
        if (place < n)
          x = (groups_before(place + 1, s.p.H, group) - groups_before(place, s.p.H, group)) * group * length[place];
        KDA_UNROLL
        for (int d = 1; d < 32; d *= 2) {
          const int before = __shfl_up_sync(~0u, x, d);
          x += lane >= d ? before : 0;
        }
        if (place < n) start[place + 1] = sum + x;
        sum += __shfl_sync(~0u, x, 31);
      }
      if (lane == 0) start[0] = 0;
    }
    __syncthreads();
  }
  // Task i < start[N]; false: there is none in its place.
  template <class S>
  KDA_FN bool find(const S& s, int group, int i, int& chunk, int& head) const {
    const int n = int(s.p.N), H = s.p.H;
    int place = 0;
    for (int end = n; end - place > 1;) {
      const int middle = (place + end) / 2;
      (start[middle] <= i ? place : end) = middle;
    }
    const int in = i - start[place], size = group * length[place];
    const int row = (groups_before(place, H, group) + in / size) * group + in % group, t = in % size / group;
    const int at = row / H;
    if (at >= n || t >= length[at]) return false;
    chunk = first[at] + t, head = row % H;
    return true;
  }
};

}  // namespace KDA_ISA
}  // namespace kda
