// The prologue with its inputs brought to shared memory while the chunk before is worked on: a few blocks stay on
// each multiprocessor and take the (chunk, head)s in turn.
#pragma once

#include "kernels.h"
#include "nvidia_async.h"
#include "nvidia_inputs.h"

namespace kda {
inline namespace KDA_ISA {

constexpr int kPrologueBlocks = 3;       // on a multiprocessor
constexpr size_t kReservedBytes = 1024;  // by CUDA, of each block's shared memory

// The tasks, (chunk, head)s in order of time, are given away in turn, or to whoever asks first: then the launch before has
// cleared the progress. After so many rounds only the blocks on `staying` of the multiprocessors go on, so that the walk
// may begin on the others. No rounds: no walk waits for any.
struct PrologueSplit {
  bool asks;
  int rounds, staying, multiprocessors;
};

template <class Tiles, class Policy, int K, int C, bool Unbounded>
struct StagedPrologueMemory {
  using Progress = typename Schedule<Tiles, Policy, K, C>::Progress;
  using Rows = typename InputStage<Tiles, K, C>::Rows;
  using Shared = typename Prologue<Tiles, Policy, K, C, Unbounded>::Shared;
  Shared shared;
  alignas(128) Rows q, k;
  PrologueTask task[4];     // in turn, of which the last one, this one and the next one are needed; of sequence -1: none
  SplitBarrier keys_there;  // of this task
  Progress* progress;       // which takes long to work out
  int taken, stays;         // stays: below 0, nobody has asked
  uint32_t beta[C];         // as they are
  // g is where the decayed keys will be.
  KDA_FN Rows& g() { return reinterpret_cast<Rows&>(shared.keys); }
  static_assert(sizeof(Rows) <= sizeof(Shared::keys), "");
};

// Zeros where a prologue says how far it is; `beside`: to a walk.
template <class Tiles, class Policy, int K, int C>
__global__ void clear_progress_kernel(KDA_PARAMETER Problem p, bool beside) {
  using S = Schedule<Tiles, Policy, K, C>;
  const S s{p, 0, p.NC};
  after_previous();
  const int64_t bytes = beside ? S::progress_bytes(p) + S::status_bytes(p) : int64_t(sizeof(typename S::Progress));
  auto* first = reinterpret_cast<int32_t*>(&s.progress());
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < bytes / 4; i += int64_t(gridDim.x) * blockDim.x)
    first[i] = 0;
}

// A task's operands are in memory: all threads of the block have met a barrier behind their stores.
template <class S>
KDA_FN void say_there(const S& s, const PrologueTask& task) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");  // they are read by bulk copies
#endif
  __threadfence();
  *static_cast<volatile uint8_t*>(s.is_there(task.chunk, task.head)) = 1;
}

KDA_FN int multiprocessor() {
  int id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

template <class Tiles, class Policy, int K, int C, bool Unbounded>
__global__ void __launch_bounds__(C / kTile * Tiles::kWave, kPrologueBlocks)
    staged_prologue_kernel(KDA_PARAMETER Problem p, int slab_first, int slab_last, PrologueSplit split) {
  using P = Prologue<Tiles, Policy, K, C, Unbounded>;
  using Stage = InputStage<Tiles, K, C>;
  extern __shared__ __attribute__((aligned(128))) char memory[];
  auto& m = *reinterpret_cast<StagedPrologueMemory<Tiles, Policy, K, C, Unbounded>*>(memory);
  static_assert(kPrologueBlocks * (sizeof m + kReservedBytes) <= 228 * 1024, "what a multiprocessor of sm_90 has");
  const Schedule<Tiles, Policy, K, C> s{p, slab_first, slab_last};
  // Worked out again wherever it is needed: registers are few.
  auto awaited = [&] { return hidden(split.rounds) > 0; };
  // The multiprocessors that stay are counted from that of block 0, which says where it is; should it not, all stay.
  auto stays = [&] {
    int first = -1;
#pragma unroll 1
    for (int i = 0; i < 100 && first < 0; ++i)
      first = *static_cast<volatile int*>(&m.progress->first_multiprocessor) - 1;
    const int all = split.multiprocessors;
    return first < 0 || (multiprocessor() - first + all) % all < split.staying;
  };
  // What follows is by one thread: the number of another task, asked for early, since the answer takes its time,
  auto take = [&] {
    const int all = (slab_last - slab_first) * p.H, blocks = int(gridDim.x), taken = m.taken++;
    if (!split.asks) return int(blockIdx.x) + taken * blocks;
    if (awaited() && taken >= split.rounds) {
      if (m.stays < 0) m.stays = stays();
      if (!m.stays) return all;
    }
    return blocks + atomicAdd(&m.progress->next_task, 1);
  };
  // and the task, its row on the way.
  auto set = [&](PrologueTask& task, int i) {
    const int all = (slab_last - slab_first) * p.H, chunk = slab_first + i / p.H;
    task.chunk = chunk, task.head = i % p.H;
    if (i < all) {
      CopyByAll{}.piece(&task.row, reinterpret_cast<const ChunkRow*>(p.chunks) + chunk);
    } else {
      task.row.sequence = -1;
    }
  };
  const int wave = wave_index<Tiles>();
  if (threadIdx.x == 0) {
    set(m.task[0], int(blockIdx.x));
    m.taken = 1, m.stays = -1, m.progress = &s.progress();
    m.keys_there.init(blockDim.x);
  }
  CopyByAll::commit();
  CopyByAll::wait<0>();
  __syncthreads();
  // Behind the launch before, which is waited for while the first inputs come. Only then: a walk beside this looks at
  // what that launch has cleared.
  auto begin = [&] {
    wait_for_previous();
    let_next_start();
    if (slab_first == 0 && !awaited()) clear_status(s);
    if (threadIdx.x != 0 || blockIdx.x != 0) return;
    if (!awaited()) m.progress->clear_for_followers();
    *static_cast<volatile int*>(&m.progress->first_multiprocessor) = 1 + multiprocessor();
  };
  if (m.task[0].row.sequence < 0) {  // padding, and all that follows
    begin();
    return;
  }
  // The token whose beta a lane brings; the upper half of a warp has the same as the lower one.
  auto token = [&] {
    const int thread = hidden(int(threadIdx.x));
    return thread / Tiles::kWave * kTile + thread % kTile;
  };
  // What was loaded comes in the order in which it was asked for, and so would a word that registers had no room for.
  auto load_beta = [&](const PrologueTask& task) {
    const int t = token();
    const int64_t at = (int64_t(task.row.first) + t) * p.H + task.head;
    uint32_t beta = 0;
    if (t < task.row.valid) {  // nobody has a token behind C
      if (p.beta.type == DType::kF32) {
        beta = static_cast<const uint32_t*>(p.beta.data)[at];
      } else {
        beta = static_cast<const uint16_t*>(p.beta.data)[at];
      }
    }
    return beta;
  };
  auto store_beta = [&](uint32_t beta) {
    if (Tiles::lane() < kTile) m.beta[token()] = beta;
  };
  {
    const uint32_t beta = load_beta(m.task[0]);
    const typename Stage::Copies copies(p, m.task[0]);
    copies.fetch(m.q, p.q), copies.fetch(m.k, p.k), copies.fetch(m.g(), p.g);
    store_beta(beta);
  }
  // There is no barrier between two tasks: a warp may load the next one while others solve this one. What it writes then
  // is its own (its rows of q, k and g, its part of beta, its block's total) or another slot of `task`.
  int upcoming = 0, n = 0;
  auto task = [&](int n) -> PrologueTask& { return m.task[hidden(n) & 3]; };
  for (;; ++n) {
    auto now = [&]() -> const PrologueTask& { return task(n); };
    auto next = [&]() -> const PrologueTask& { return task(n + 1); };
    CopyByAll::commit();
    CopyByAll::wait<0>();
    __syncwarp();
    if (awaited()) __syncthreads();  // all have stored the task before, which will be said
    if (threadIdx.x == 0 && n > 0) set(task(n + 1), upcoming);
    CopyByAll::commit();
    uint32_t beta = 0;
    prologue_of<P>(
        s, now, wave, typename Stage::Block{m.q, m.k, m.g(), m.beta, wave}, m.shared,
        m.keys_there.turn(hidden(n)),
        [&] {
          if (n == 0) {
            begin();
            if (threadIdx.x == 0) set(task(1), take());
            CopyByAll::commit();
          }
          CopyByAll::wait<0>();
          // Not earlier, when what was stored would be waited for.
          if (threadIdx.x == 0 && awaited() && n > 0) say_there(s, task(n - 1));
        },
        [&] {
          if (next().row.sequence >= 0) Stage::ask(p, next());
        },
        [&] {
          if (next().row.sequence < 0) return;
          const typename Stage::Copies copies(p, next());
          copies.fetch(m.q, p.q), copies.fetch(m.k, p.k);
        },
        [&] {
          if (next().row.sequence < 0) return;
          beta = load_beta(next());
          if (threadIdx.x == 0) upcoming = take();
          typename Stage::Copies(p, next()).fetch(m.g(), p.g);
        });
    store_beta(beta);
    if (next().row.sequence < 0) break;
  }
  if (!awaited()) return;
  __syncthreads();
  if (threadIdx.x == 0) say_there(s, task(n));
}

}  // namespace KDA_ISA
}  // namespace kda
