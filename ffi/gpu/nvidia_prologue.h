// The prologue with its inputs brought to shared memory while the chunk before is worked on: a few blocks stay on
// each multiprocessor and take the (chunk, head)s in turn.
#pragma once

#include "kernels.h"
#include "nvidia_async.h"

namespace kda {
inline namespace KDA_ISA {

// A row of q, k or g is 256 bytes without padding; in every other pair of rows the two halves change places, so that
// the eight rows of a load do not meet in the same banks.
template <class Tiles, int K, int C>
struct InputStage {
  static constexpr int kPieces = K / 8;  // of 16 bytes, in a row
  using Rows = uint16_t[C][K];

  static KDA_FN int place(int row, int piece) { return (piece ^ (row << 1 & 4)) * 8; }

  // What a thread copies of each array: every fourth piece of some rows; those without a token become zeros.
  struct Copies {
    static constexpr int kThreads = C / kTile * Tiles::kWave, kStep = kThreads / 4, kRows = C / kStep;
    int64_t from[kRows];  // elements
    int bytes[kRows];
    int to[2];  // for even and odd steps of four pieces

    KDA_FN Copies(const Problem& p, const ChunkRow& chunk, int head) {
      const int piece = int(threadIdx.x) & 3, row = int(threadIdx.x) >> 2;
      KDA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const bool valid = row + i * kStep < chunk.valid;
        bytes[i] = valid ? 16 : 0;
        from[i] = valid ? row_offset(chunk.first + row + i * kStep, head, p.H, K) + 8 * piece : 0;
      }
      to[0] = row * K + place(row, piece), to[1] = row * K + place(row, piece + 4) - 32;
    }
    KDA_FN void fetch(Rows& rows, const Tensor& x) const {
      KDA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const auto* source = static_cast<const uint16_t*>(x.data) + from[i];
        KDA_UNROLL
        for (int j = 0; j < kPieces / 4; ++j)
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                           shared_address(&rows[i * kStep][to[j & 1] + 32 * j])),
                       "l"(source + 32 * j), "r"(bytes[i])
                       : "memory");
      }
    }
  };
  static_assert(Copies::kStep % 4 == 0, "rows so far apart change places alike");

  struct Block {  // a row block
    static constexpr bool kAgain = true;
    const Rows &q_rows, &k_rows, &g_rows;
    int block;
    using Raw = typename Tiles::Raw;
    KDA_FN void load(Raw& a, Raw& b, const Rows& x, int t) const {
      KDA_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int row = block * kTile + Tiles::token_row(2 * i);
        const uint4 v =
            *reinterpret_cast<const uint4*>(&x[row][place(row, t * 2 + Tiles::quarter())]);
        a.r[i] = v.x, a.r[i + 2] = v.y, b.r[i] = v.z, b.r[i + 2] = v.w;
      }
    }
    KDA_FN void q(Raw& a, Raw& b, int t) const { load(a, b, q_rows, t); }
    KDA_FN void k(Raw& a, Raw& b, int t) const { load(a, b, k_rows, t); }
    KDA_FN void g(typename Tiles::Acc& a, typename Tiles::Acc& b, int t) const {
      Raw x, y;
      load(x, y, g_rows, t);
      Tiles::widen(a, x), Tiles::widen(b, y);
    }
  };
};

constexpr int kPrologueBlocks = 3;  // on a multiprocessor

// How the tasks, (chunk, head)s in order of time, are given away. All blocks take those below `shared`; the rest is for
// the blocks on `staying` of the multiprocessors, so that the walk may begin on the others. Below 0: no walk waits for
// any, and all are shared.
struct PrologueSplit {
  int shared, staying, multiprocessors;
};

struct alignas(16) PrologueTask {
  ChunkRow row;  // of sequence -1: none
  int index, chunk, head;
};

template <class Tiles, class Policy, int K, int C, bool Unbounded>
struct StagedPrologueMemory {
  using Rows = typename InputStage<Tiles, K, C>::Rows;
  using Shared = typename Prologue<Tiles, Policy, K, C, Unbounded>::Shared;
  Shared shared;
  alignas(128) Rows q, k;
  PrologueTask now, next;  // in memory, since registers are few
  // g is where the decayed keys will be.
  KDA_FN Rows& g() { return reinterpret_cast<Rows&>(shared.keys); }
  static_assert(sizeof(Rows) <= sizeof(Shared::keys), "");
};

// Zeros where a prologue and a walk beside it say how far they are.
template <class Tiles, class Policy, int K, int C>
__global__ void clear_progress_kernel(KDA_PARAMETER Problem p) {
  using S = Schedule<Tiles, Policy, K, C>;
  const S s{p, 0, p.NC};
  after_previous();
  const int64_t words = (S::progress_bytes(p) + S::status_bytes(p)) / 4;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += int64_t(gridDim.x) * blockDim.x)
    s.progress()[i] = 0;
}

// A task's operands are in memory: all threads of the block have met a barrier behind their stores.
template <class S>
KDA_FN void say_there(const S& s, int chunk, int head) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");  // they are read by bulk copies
#endif
  __threadfence();
  *static_cast<volatile uint8_t*>(s.is_there(chunk, head)) = 1;
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
  const Schedule<Tiles, Policy, K, C> s{p, slab_first, slab_last};
  wait_for_previous();
  let_next_start();  // in this order: a walk beside this looks at what the launch before has cleared
  // Worked out again wherever it is needed: registers are few.
  auto awaited = [&] { return hidden(split.shared) >= 0; };
  auto tasks = [&] { return (slab_last - slab_first) * hidden(p.H); };
  // The multiprocessors that stay are counted from that of block 0, which says where it is; until then all stay.
  auto stays = [&] {
    const int first = static_cast<volatile int*>(s.progress())[1] - 1, all = split.multiprocessors;
    return first < 0 || (multiprocessor() - first + all) % all < split.staying;
  };
  // By one thread: the task behind m.now, its row on the way.
  auto find_next = [&] {
    const int shared = awaited() ? split.shared : tasks();
    int i = m.now.index;
    if (i < shared) i += int(gridDim.x);
    if (i >= shared) i = awaited() && stays() ? shared + atomicAdd(s.progress(), 1) : tasks();
    const int chunk = slab_first + i / p.H;
    m.next.index = i, m.next.chunk = chunk, m.next.head = i % p.H;
    if (i < tasks()) {
      CopyByAll{}.piece(&m.next.row, reinterpret_cast<const ChunkRow*>(p.chunks) + chunk);
    } else {
      m.next.row.sequence = -1;
    }
  };
  const int wave = wave_index<Tiles>();
  if (slab_first == 0 && !awaited()) clear_status(s);
  int i = blockIdx.x;
  if (i >= tasks()) return;
  PrologueTask task{s.chunk_row(slab_first + i / p.H), i, slab_first + i / p.H, i % p.H};
  if (task.row.sequence < 0) return;  // padding, and all that follows
  {
    const typename Stage::Copies copies(p, task.row, task.head);
    copies.fetch(m.q, p.q), copies.fetch(m.k, p.k), copies.fetch(m.g(), p.g);
  }
  if (threadIdx.x == 0) {
    m.now.chunk = -1;
    if (awaited() && blockIdx.x == 0) static_cast<volatile int*>(s.progress())[1] = 1 + multiprocessor();
  }
  while (true) {
    CopyByAll::commit();
    CopyByAll::wait<0>();
    __syncthreads();
    if (threadIdx.x == 0) {
      if (awaited() && m.now.chunk >= 0) say_there(s, m.now.chunk, m.now.head);
      m.now = task;
      find_next();
    }
    CopyByAll::commit();
    prologue_of<P>(
        s, task.row, task.chunk, task.head, wave, typename Stage::Block{m.q, m.k, m.g(), wave},
        m.shared,
        [&] { CopyByAll::wait<0>(); },
        [&] {
          if (m.next.row.sequence < 0) return;
          const typename Stage::Copies copies(p, m.next.row, m.next.head);
          copies.fetch(m.q, p.q), copies.fetch(m.k, p.k), copies.fetch(m.g(), p.g);
        });
    task = m.next;
    if (task.row.sequence < 0) break;
  }
  if (!awaited()) return;
  __syncthreads();
  if (threadIdx.x == 0) say_there(s, m.now.chunk, m.now.head);
}

}  // namespace KDA_ISA
}  // namespace kda
