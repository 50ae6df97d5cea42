// Schedules the kernel's roles on CPU threads. Compiled once per instruction set (KDA_ISA).
#include "driver.h"

#include <cstring>

#include "../kernel/prologue.h"
#include "../kernel/schedule.h"
#include "../kernel/solve.h"
#include "tiles.h"

namespace kda {
inline namespace KDA_ISA {
namespace {

using host::TaskRunner;

template <class Policy, int K, int C, bool Unbounded>
struct HostDriver {
  using P = Prologue<HostTiles, Policy, K, C, Unbounded>;
  using S = Schedule<HostTiles, Policy, K, C>;
  using Scan = GroupScan<HostTiles, Policy, K, C>;
  using State = typename S::State;

  struct PrologueScratch {
    typename P::Shared shared;
    typename P::Wave waves[P::NT];
  };
  struct States {  // of slices `from` and up
    State* first;
    int from;
    State& operator()(int slice) const { return first[slice - from]; }
  };

  const Problem& p;
  const TaskRunner& tasks;
  const int workers;
  char* const scratch;

  S s{p, 0, 0};
  const int slices = p.V / kTile;
  int64_t num_chunks = 0;  // without padding

  static int64_t scratch_bytes(const Problem& p) {
    const int64_t states = p.V / kTile * int64_t(sizeof(State));
    int64_t bytes = states > int64_t(sizeof(PrologueScratch)) ? states : int64_t(sizeof(PrologueScratch));
    if constexpr (Policy::kNarrow) {  // the same memory serves a second pass
      const int64_t wide = HostDriver<WidePolicy, K, C, true>::scratch_bytes(p);
      bytes = wide > bytes ? wide : bytes;
    }
    return bytes;
  }
  static int64_t workspace_bytes(const Problem& p) { return S::workspace_bytes(p); }
  static void prefill(const Problem& p, const TaskRunner& tasks, int workers, char* scratch) {
    HostDriver driver{p, tasks, workers, scratch};
    while (driver.num_chunks < p.NC && driver.s.chunk_row(driver.num_chunks).sequence >= 0)
      ++driver.num_chunks;
    if constexpr (!Policy::kSecond) {
      std::memset(driver.s.status(), 0, size_t(S::status_bytes(p)));
      driver.fill_what_no_chunk_writes();
    }
    driver.run();
    if constexpr (Policy::kNarrow)
      if (*driver.s.status())
        HostDriver<WidePolicy, K, C, true>::prefill(p, tasks, workers, scratch);
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

  void run() {
    const int64_t slab = p.groups > 1 ? num_chunks : p.slab_chunks;
    for (s.slab_first = 0; s.slab_first < num_chunks; s.slab_first = s.slab_last) {
      s.slab_last = s.slab_first + slab < num_chunks ? s.slab_first + slab : num_chunks;
      parallel((s.slab_last - s.slab_first) * p.H, [&](int worker, int64_t i) {
        prologue(worker, s.slab_first + i / p.H, int(i % p.H));
      });
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
    int64_t used = 0;
    if (num_chunks) {
      const ChunkRow last = s.chunk_row(num_chunks - 1);
      used = int64_t(last.first) + last.valid;
    }
    const int64_t row = int64_t(p.H) * p.V * (p.v.type == DType::kF32 ? 4 : 2);
    clear(static_cast<char*>(p.out) + used * row, (p.T - used) * row);
    const int64_t size = int64_t(p.H) * K * p.V, bytes = size * int64_t(sizeof(float));
    for (int64_t m = 0; m < p.M && !p.in_pool; ++m)
      if (p.checkpoints[2 * m] < 0) clear(p.checkpoint_state + m * size, bytes);
    for (int64_t n = 0; n < p.N; ++n) {
      if (s.leaves_final_state(n)) continue;
      float* to = p.final_state + live_row(p, n) * size;
      if (s.seq_row(n).length == 0 && s.starts_from_state(n)) {
        std::memcpy(to, p.initial_state + live_row(p, n) * size, size_t(bytes));
      } else {
        clear(to, bytes);
      }
    }
  }

  static void clear(void* to, int64_t bytes) {
    if (bytes > 0) std::memset(to, 0, size_t(bytes));  // an empty array may be a null pointer
  }

  void prologue(int worker, int64_t chunk, int head) {
    auto& scratch = *scratch_of<PrologueScratch>(worker);
    auto& shared = scratch.shared;
    auto& waves = scratch.waves;
    const ChunkRow row = s.chunk_row(chunk);
    if (!s.has_to(row.sequence, head)) return;
    float *out = s.blob(chunk, head), *decay = s.decay(chunk, head);
    const int blocks = active_blocks<HostTiles, P::NT>(row);
    for (int w = 0; w < blocks; ++w)
      P::load(p, row, head, w, typename P::Direct(p, row, head, w), waves[w], shared);
    for (int w = 0; w < blocks; ++w) {
      P::channels(w, blocks, shared, decay);
      P::factors(w, blocks, typename P::Direct(p, row, head, w), waves[w], shared, out);
      P::diagonal(w, row.first, waves[w], shared, out);
    }
    for (int w = 0; w < blocks; ++w) P::scores(w, waves[w], shared, out);
    for (int w = 0; w < blocks; ++w)
      Solve<P>::solve(row, w, waves[w], shared, out, s.beyond(chunk, head));
  }

  // A task takes all slices of a head, so that a blob is read while it is warm, unless that leaves
  // threads idle. Slices do not depend on each other: the split never changes a result.
  int slices_per_task(int64_t heads) const {
    int n = slices;
    while (n > 1 && heads * ((slices + n - 1) / n) < 2 * workers) n = (n + 1) / 2;
    return n;
  }

  void walk_slab() {
    const int64_t first = s.chunk_row(s.slab_first).sequence;
    const int64_t count = s.chunk_row(s.slab_last - 1).sequence - first + 1;
    const int per_task = slices_per_task(count * p.H);
    const int parts = (slices + per_task - 1) / per_task;
    parallel(count * p.H * parts, [&](int worker, int64_t i) {
      const int from = int(i % parts) * per_task;
      const int to = from + per_task < slices ? from + per_task : slices;
      States states{scratch_of<State>(worker), from};
      const int64_t seq = first + i / parts / p.H;
      const int head = int(i / parts % p.H);
      if (s.has_to(seq, head)) s.walk_slab(states, seq, head, from, to);
    });
  }

  bool walks(int64_t row) const {
    return s.seq_row(row / p.H).num_chunks > 0 && s.has_to(row / p.H, int(row % p.H));
  }

  void walk_groups() {
    const int between = p.groups - 1;
    // f(sequence, head, group, slice) for groups 0 .. G-2 of every sequence that has chunks.
    auto for_each = [&](int per_group, auto f) {
      parallel(p.N * p.H * between * per_group, [&](int worker, int64_t i) {
        const int slice = int(i % per_group), group = int(i / per_group % between);
        const int64_t row = i / per_group / between;
        States states{scratch_of<State>(worker), slice};
        if (walks(row)) f(states, row / p.H, int(row % p.H), group, slice);
      });
    };
    for_each(slices + K / kTile, [&](States& states, int64_t seq, int head, int group, int slice) {
      s.walk_group_first(states, seq, head, group, slice);
    });
    parallel(p.N * p.H * slices, [&](int, int64_t i) {
      const int64_t row = i / slices;
      if (walks(row)) Scan::scan(s.slots(), row / p.H, row % p.H, int(i % slices));
    });
    for_each(slices, [&](States& states, int64_t seq, int head, int group, int slice) {
      s.walk_group_second(states, seq, head, group, slice);
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
