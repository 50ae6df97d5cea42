// Schedules the kernel's roles on CPU threads. Compiled once per instruction set (KDA_ISA).
//
// Chunks are taken in slabs, so that the workspace stays bounded and warm: the prologue of all chunks
// of a slab, then the walk over it; the state between two slabs waits in final_state. With groups > 1
// the slab is the whole call.
#include "driver.h"

#include <cstring>

#include "../kernel/group_scan.h"
#include "../kernel/prologue.h"
#include "../kernel/walk.h"
#include "tiles.h"

namespace kda {
inline namespace KDA_ISA {
namespace {

using host::TaskRunner;

template <class Policy, int K, int C, bool Unbounded>
struct HostDriver {
  using P = Prologue<HostTiles, Policy, K, C, Unbounded>;
  using W = Walk<HostTiles, Policy, K, C>;
  using Scan = GroupScan<HostTiles, Policy, K, C>;
  using State = typename W::State;

  struct PrologueScratch {
    typename P::Shared shared;
    typename P::Wave waves[P::NT];
  };

  const Problem& p;
  const TaskRunner& tasks;
  const int workers;
  char* const scratch;

  const SeqRow* seqs = reinterpret_cast<const SeqRow*>(p.seqs);
  const ChunkRow* chunks = reinterpret_cast<const ChunkRow*>(p.chunks);
  const int slices = p.V / kTile;
  const int64_t state_size = int64_t(p.K) * p.V;
  const int64_t blob_bytes = Blob<K, C>::bytes(p.V, sizeof(float));
  int64_t slab_first = 0, slab_last = 0;  // chunks whose blobs are in the workspace
  int64_t num_chunks = 0;                 // without padding

  static int64_t scratch_bytes(const Problem& p) {
    const int64_t states = (p.V > K ? p.V : K) / kTile * int64_t(sizeof(State));
    return states > int64_t(sizeof(PrologueScratch)) ? states : int64_t(sizeof(PrologueScratch));
  }
  static int64_t blobs_bytes(const Problem& p) {
    const int64_t n = p.slab_chunks < p.NC ? p.slab_chunks : p.NC;
    return n * p.H * Blob<K, C>::bytes(p.V, sizeof(float));
  }
  static int64_t workspace_bytes(const Problem& p) {
    return blobs_bytes(p) +
           (p.groups > 1 ? GroupSlots::bytes(p.N, p.H, p.groups, p.K, p.V) : 0);
  }
  static void prefill(const Problem& p, const TaskRunner& tasks, int workers, char* scratch) {
    HostDriver{p, tasks, workers, scratch}.run();
  }

  template <class F>
  void parallel(int64_t n, F f) {
    tasks.for_each(n, [](void* arg, int worker, int64_t i) { (*static_cast<F*>(arg))(worker, i); },
                   &f);
  }
  template <class T>
  T* scratch_of(int worker) {
    return reinterpret_cast<T*>(scratch + worker * scratch_bytes(p));
  }
  char* blob(int64_t chunk, int64_t head) const {
    return static_cast<char*>(p.workspace) + ((chunk - slab_first) * p.H + head) * blob_bytes;
  }
  static float* decay_of(char* blob, int V) {
    return reinterpret_cast<float*>(blob) + Blob<K, C>::elements(V);
  }

  void run() {
    while (num_chunks < p.NC && chunks[num_chunks].sequence >= 0) ++num_chunks;
    fill_what_no_chunk_writes();
    const int64_t slab = p.groups > 1 ? num_chunks : p.slab_chunks;
    for (slab_first = 0; slab_first < num_chunks; slab_first = slab_last) {
      slab_last = slab_first + slab < num_chunks ? slab_first + slab : num_chunks;
      parallel((slab_last - slab_first) * p.H,
               [&](int worker, int64_t i) { prologue(worker, slab_first + i / p.H, int(i % p.H)); });
      if (p.groups > 1) {
        walk_groups();
      } else {
        walk_slab();
      }
    }
  }

  // XLA does not clear results: rows of no sequence, padded states, and the final states of empty
  // sequences are written here.
  void fill_what_no_chunk_writes() {
    const int64_t element = p.v.type == DType::kF32 ? 4 : 2;
    const int64_t used = num_chunks ? int64_t(chunks[num_chunks - 1].first) + chunks[num_chunks - 1].valid : 0;
    const int64_t row = int64_t(p.H) * p.V * element;
    clear(static_cast<char*>(p.out) + used * row, (p.T - used) * row);
    const int64_t states = p.H * state_size;
    for (int64_t m = 0; m < p.M; ++m)
      if (p.checkpoints[2 * m] < 0)
        clear(p.checkpoint_state + m * states, states * int64_t(sizeof(float)));
    for (int64_t n = 0; n < p.N; ++n) {
      if (seqs[n].num_chunks > 0) continue;
      float* to = p.final_state + n * states;
      if (seqs[n].length == 0 && starts_from_state(n)) {
        std::memcpy(to, p.initial_state + n * states, size_t(states) * sizeof(float));
      } else {
        clear(to, states * int64_t(sizeof(float)));
      }
    }
  }

  static void clear(void* to, int64_t bytes) {
    if (bytes > 0) std::memset(to, 0, size_t(bytes));  // an empty array may be a null pointer
  }

  bool starts_from_state(int64_t seq) const {
    return p.initial_state && (!p.has_initial_state || p.has_initial_state[seq]);
  }

  void prologue(int worker, int64_t chunk, int head) {
    auto& s = *scratch_of<PrologueScratch>(worker);
    auto* out = reinterpret_cast<float*>(blob(chunk, head));
    float* decay = decay_of(blob(chunk, head), p.V);
    const int blocks = active_blocks<HostTiles, P::NT>(chunks[chunk]);
    for (int w = 0; w < blocks; ++w) P::load(p, chunks[chunk], head, w, s.waves[w], s.shared);
    for (int w = 0; w < blocks; ++w) P::factors(w, blocks, s.waves[w], s.shared, out, decay);
    for (int w = 0; w < blocks; ++w) P::scores(w, s.waves[w], s.shared, out);
    for (int w = 0; w < blocks; ++w) P::solve(p, chunks[chunk], head, w, s.shared, out);
  }

  // A task takes all slices of a head, so that a blob is read while it is warm, unless that leaves
  // threads idle. Slices do not depend on each other: the split never changes a result.
  int slices_per_task(int64_t heads, int all) const {
    int n = all;
    while (n > 1 && heads * ((all + n - 1) / n) < 2 * workers) n = (n + 1) / 2;
    return n;
  }

  float* state_of(float* states, int64_t row, int head) const {
    return states + (row * p.H + head) * state_size;
  }

  void start(State& state, int64_t seq, int head, int slice) {
    if (starts_from_state(seq)) {
      W::load_state(state, p.initial_state + (seq * p.H + head) * state_size, W::strides(p), slice);
    } else {
      W::zero_state(state);
    }
  }

  // Chunks [first, last) of one head for slices [from, to): outputs and checkpoints.
  void walk(State* states, int head, int from, int to, int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) {
      const char* b = blob(c, head);
      const auto* operands = reinterpret_cast<const float*>(b);
      const float* decay = decay_of(const_cast<char*>(b), p.V);
      for (int slice = from; slice < to; ++slice) {
        State& state = states[slice - from];
        W::step(p, chunks[c], head, slice, state, operands, decay);
        if (chunks[c].checkpoint >= 0)
          W::store_state(state, state_of(p.checkpoint_state, chunks[c].checkpoint, head),
                         W::strides(p), slice);
      }
    }
  }

  void walk_slab() {
    const int64_t seq_first = chunks[slab_first].sequence;
    const int64_t seq_count = chunks[slab_last - 1].sequence - seq_first + 1;
    const int per_task = slices_per_task(seq_count * p.H, slices);
    const int parts = (slices + per_task - 1) / per_task;
    parallel(seq_count * p.H * parts, [&](int worker, int64_t i) {
      const int part = int(i % parts), head = int(i / parts % p.H);
      const int64_t seq = seq_first + i / parts / p.H;
      const int64_t begin = seqs[seq].first_chunk, end = begin + seqs[seq].num_chunks;
      const int64_t first = begin > slab_first ? begin : slab_first;
      const int64_t last = end < slab_last ? end : slab_last;
      if (first >= last) return;  // an empty sequence between two others
      const int from = part * per_task, to = from + per_task < slices ? from + per_task : slices;
      auto* states = scratch_of<State>(worker);
      float* carried = state_of(p.final_state, seq, head);
      for (int slice = from; slice < to; ++slice) {
        if (first == begin) {
          start(states[slice - from], seq, head, slice);
        } else {
          W::load_state(states[slice - from], carried, W::strides(p), slice);
        }
      }
      walk(states, head, from, to, first, last);
      for (int slice = from; slice < to; ++slice)
        W::store_state(states[slice - from], carried, W::strides(p), slice);
    });
  }

  // Group 0 starts from the true state and writes its outputs at once; groups 1 .. G-2 first yield
  // their transfer (M, B); then groups 1 .. G-1 walk from the composed states.
  void walk_groups() {
    const int groups = p.groups, all = slices + K / kTile;
    const GroupSlots slots{reinterpret_cast<float*>(static_cast<char*>(p.workspace) + blobs_bytes(p)),
                           p.H, groups, K, p.V};
    const typename W::Strides rows{K, 1};
    auto split = [&](int64_t i, int per, int64_t& seq, int& head, int& group, int& slice) {
      slice = int(i % per);
      group = int(i / per % (groups - 1));
      head = int(i / per / (groups - 1) % p.H);
      seq = i / per / (groups - 1) / p.H;
      return seqs[seq].num_chunks > 0;
    };
    parallel(p.N * p.H * (groups - 1) * all, [&](int worker, int64_t i) {
      int64_t seq;
      int head, group, slice;
      if (!split(i, all, seq, head, group, slice)) return;
      State& state = *scratch_of<State>(worker);
      const GroupRange range = group_range(seqs[seq], group, groups);
      if (group == 0) {
        if (slice >= slices) return;
        start(state, seq, head, slice);
        walk(&state, head, slice, slice + 1, range.first, range.last);
      } else {
        const bool identity = slice >= slices;
        identity ? W::identity_state(state, slice - slices) : W::zero_state(state);
        for (int64_t c = range.first; c < range.last; ++c)
          W::transfer(chunks[c], identity, slice, state,
                      reinterpret_cast<const float*>(blob(c, head)), decay_of(blob(c, head), p.V));
      }
      W::store_state(state, slots.slot(seq, head, group), rows, slice);
    });
    parallel(p.N * p.H * slices, [&](int, int64_t i) {
      const int64_t seq = i / slices / p.H;
      if (seqs[seq].num_chunks > 0) Scan::scan(slots, seq, i / slices % p.H, int(i % slices));
    });
    parallel(p.N * p.H * (groups - 1) * slices, [&](int worker, int64_t i) {
      int64_t seq;
      int head, group, slice;
      if (!split(i, slices, seq, head, group, slice)) return;
      State& state = *scratch_of<State>(worker);
      W::load_state(state, slots.slot(seq, head, group), rows, slice);  // start of group + 1
      const GroupRange range = group_range(seqs[seq], group + 1, groups);
      walk(&state, head, slice, slice + 1, range.first, range.last);
      if (group + 2 == groups)
        W::store_state(state, state_of(p.final_state, seq, head), W::strides(p), slice);
    });
  }
};

template <class Pointer>
struct Removed;
template <class T>
struct Removed<T*> {
  using type = T;
};
template <class Pointer>
using Pointee = typename Removed<Pointer>::type;

// Calls f with a null pointer to the HostDriver type of the problem.
template <class Policy, int K, class F>
auto with_chunk(const Problem& p, F f) {
  auto gate = [&](auto chunk) {
    constexpr int C = decltype(chunk)::C;
    return unbounded(p.gate) ? f(static_cast<HostDriver<Policy, K, C, true>*>(nullptr))
                             : f(static_cast<HostDriver<Policy, K, C, false>*>(nullptr));
  };
  struct C16 { enum { C = 16 }; };
  struct C32 { enum { C = 32 }; };
  struct C64 { enum { C = 64 }; };
  return p.C == 16 ? gate(C16{}) : p.C == 32 ? gate(C32{}) : gate(C64{});
}
template <class F>
auto with_driver(const Problem& p, F f) {
#if KDA_MIXED
  if (p.mixed)
    return p.K == 64 ? with_chunk<MixedPolicy, 64>(p, f) : with_chunk<MixedPolicy, 128>(p, f);
#endif
  return p.K == 64 ? with_chunk<Float32Policy, 64>(p, f) : with_chunk<Float32Policy, 128>(p, f);
}

const host::Driver kDriver = {
    [](const Problem& p) {
      return with_driver(p, [&](auto d) { return Pointee<decltype(d)>::scratch_bytes(p); });
    },
    [](const Problem& p) {
      return with_driver(p, [&](auto d) { return Pointee<decltype(d)>::workspace_bytes(p); });
    },
    [](const Problem& p, const TaskRunner& tasks, int workers, char* scratch) {
      with_driver(p, [&](auto d) { Pointee<decltype(d)>::prefill(p, tasks, workers, scratch); });
    },
};

}  // namespace
}  // namespace KDA_ISA

#define KDA_JOIN2(a, b) a##b
#define KDA_JOIN(a, b) KDA_JOIN2(a, b)
const host::Driver& host::KDA_JOIN(driver_, KDA_ISA)() { return KDA_ISA::kDriver; }

}  // namespace kda
