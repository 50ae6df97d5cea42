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
    static constexpr bool kAgain = true, kSums = true;
    const Rows &q_rows, &k_rows;
    Rows& g_rows;
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
    // Bounded gates in units, summed down the tokens: a lane takes a pair of channels of each half, so that it only adds;
    // the sums then go to where tiles have them by way of where g was. Of g a lane reads 4 bytes of a row, of the sums it
    // stores 8 and loads 16; in every other pair of rows neighbours of 16 bytes change places.
    KDA_FN void sums(typename Tiles::Acc (&sum)[K / kTile], float* total, float rate, const float* dt_bias, float unit,
                     int valid) const {
      static_assert(K == 128, "");
      const int lane = Tiles::lane(), g = Tiles::group(), quarter = Tiles::quarter();
      uint32_t raw[2][kTile];
      KDA_UNROLL
      for (int half = 0; half < 2; ++half)
        KDA_UNROLL
        for (int r = 0; r < kTile; ++r) {
          const int row = block * kTile + r;
          raw[half][r] =
              *reinterpret_cast<const uint32_t*>(&g_rows[row][place(row, 8 * half + lane / 4) + 2 * (lane % 4)]);
        }
      __syncwarp();
      auto* scratch = reinterpret_cast<float*>(&g_rows[block * kTile][0]);
      KDA_UNROLL
      for (int half = 0; half < 2; ++half) {
        float2 bias = *reinterpret_cast<const float2*>(dt_bias + 64 * half + 2 * lane), x = {0, 0};
        bias.x *= rate, bias.y *= rate;
        KDA_UNROLL
        for (int r = 0; r < kTile; ++r) {
          const float a = gate_units<Tiles>(Gate::kBounded, Tiles::widen(raw[half][r], 0), rate, bias.x);
          const float b = gate_units<Tiles>(Gate::kBounded, Tiles::widen(raw[half][r], 1), rate, bias.y);
          if (r < valid) x.x += a, x.y += b;
          *reinterpret_cast<float2*>(scratch + 64 * r + 4 * (lane / 2 ^ (r >> 1 & 1)) + 2 * (lane & 1)) = x;
        }
        *reinterpret_cast<float2*>(total + 64 * half + 32 * (lane / 16) + 16 * (lane / 2 & 1) + 8 * (lane & 1) +
                                   2 * (lane / 4 % 4)) = {unit * x.x, unit * x.y};
        __syncwarp();
        KDA_UNROLL
        for (int pair = 0; pair < 2; ++pair)
          KDA_UNROLL
          for (int i = 0; i < 2; ++i)
            KDA_UNROLL
            for (int j = 0; j < 2; ++j)
              Tiles::set_row(sum[4 * half + 2 * pair + j], i,
                             *reinterpret_cast<const float4*>(scratch + 64 * (2 * g + i) + 32 * pair +
                                                              4 * ((2 * quarter + j) ^ (g & 1))));
        __syncwarp();
      }
    }
  };
};

constexpr int kPrologueBlocks = 3;  // on a multiprocessor

// How the tasks, (chunk, head)s in order of time, are given away. All blocks take those below `shared` in turn; the rest
// is for the blocks on `staying` of the multiprocessors, so that the walk may begin on the others. Below 0: no walk waits
// for any, and all are shared.
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
  int done_chunk, done_head;
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
  auto* first = reinterpret_cast<int32_t*>(&s.progress());
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += int64_t(gridDim.x) * blockDim.x)
    first[i] = 0;
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
  // Worked out again wherever it is needed: registers are few.
  auto awaited = [&] { return hidden(split.shared) >= 0; };
  wait_for_previous();
  let_next_start();  // in this order: a walk beside this looks at what the launch before has cleared
  // The multiprocessors that stay are counted from that of block 0, which says where it is; until then all stay.
  auto stays = [&] {
    const int first = *static_cast<volatile int*>(&s.progress().first_multiprocessor) - 1, all = split.multiprocessors;
    return first < 0 || (multiprocessor() - first + all) % all < split.staying;
  };
  // By one thread: the task behind m.now, its row on the way.
  auto find_next = [&] {
    const int all = (slab_last - slab_first) * p.H, shared = awaited() ? split.shared : all;
    int i = m.now.index;
    if (i < shared) i += int(gridDim.x);
    if (i >= shared) i = awaited() && stays() ? shared + atomicAdd(&s.progress().next_task, 1) : all;
    const int chunk = slab_first + i / p.H;
    m.next.index = i, m.next.chunk = chunk, m.next.head = i % p.H;
    if (i < all) {
      CopyByAll{}.piece(&m.next.row, reinterpret_cast<const ChunkRow*>(p.chunks) + chunk);
    } else {
      m.next.row.sequence = -1;
    }
  };
  const int wave = wave_index<Tiles>();
  if (slab_first == 0 && !awaited()) clear_status(s);
  if (threadIdx.x == 0) {
    if (!awaited() && blockIdx.x == 0) s.progress().next_unit = 0;
    m.now.index = int(blockIdx.x) - int(gridDim.x);
    find_next();
  }
  CopyByAll::commit();
  CopyByAll::wait<0>();
  __syncthreads();
  PrologueTask task = m.next;
  if (task.row.sequence < 0) return;  // padding, and all that follows
  {
    const typename Stage::Copies copies(p, task.row, task.head);
    copies.fetch(m.q, p.q), copies.fetch(m.k, p.k), copies.fetch(m.g(), p.g);
  }
  if (threadIdx.x == 0) {
    m.done_chunk = -1, m.now.chunk = -1;
    if (awaited() && blockIdx.x == 0) *static_cast<volatile int*>(&s.progress().first_multiprocessor) = 1 + multiprocessor();
  }
  while (true) {
    CopyByAll::commit();
    CopyByAll::wait<0>();
    __syncthreads();
    if (threadIdx.x == 0) {
      m.done_chunk = m.now.chunk, m.done_head = m.now.head;
      m.now = task;
      find_next();
    }
    CopyByAll::commit();
    prologue_of<P>(
        s, task.row, task.chunk, task.head, wave, typename Stage::Block{m.q, m.k, m.g(), wave},
        m.shared,
        [&] {
          CopyByAll::wait<0>();
          // Not earlier, when what was stored would be waited for.
          if (threadIdx.x == 0 && awaited() && m.done_chunk >= 0) say_there(s, m.done_chunk, m.done_head);
        },
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
