// Copies from global to shared memory beside the work: bulk copies that count on an mbarrier (sm_90), else
// cp.async.
#pragma once

#include <cstdint>

#include "../kernel/target.h"
#include "vendor.h"

namespace kda {
inline namespace KDA_ISA {

KDA_FN unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

struct Barrier {  // in shared memory; sm_90
  uint64_t word;

  KDA_FN void init(int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&word)), "r"(count)
                 : "memory");
  }
  static KDA_FN void fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  KDA_FN void expect(int bytes) {  // arrives, and waits for this many bytes
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&word)),
                 "r"(bytes)
                 : "memory");
  }
  KDA_FN void arrive() {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(&word)) : "memory");
  }
  // Whether it is complete. Asked early, since the answer takes its time.
  KDA_FN bool test(int parity) const {
    uint32_t done;
    asm volatile(
        "{\n\t.reg .pred done;\n\tmbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, done;\n\t}"
        : "=r"(done)
        : "r"(shared_address(&word)), "r"(parity)
        : "memory");
    return done;
  }
  KDA_FN void wait(int parity) {
    asm volatile(
        "{\n\t.reg .pred done;\n"
        "WAIT:\n\tmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "\t@!done bra WAIT;\n\t}" ::"r"(shared_address(&word)),
        "r"(parity)
        : "memory");
  }
  // 16-byte multiples, by one thread.
  KDA_FN void copy(void* to, const void* from, int bytes) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(&word))
        : "memory");
  }
};

// A barrier of a block in two halves, between which a warp does what needs no other. Each thread arrives by itself, and
// in the next turn only behind another barrier.
struct SplitBarrier {
  Barrier barrier;
  struct Turn {
    static constexpr bool kHalves = true;
    Barrier& barrier;
    int parity;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    KDA_FN void arrive() const { barrier.arrive(); }
    KDA_FN void wait() const { barrier.wait(parity); }
#else
    KDA_FN void arrive() const {}
    KDA_FN void wait() const { __syncthreads(); }
#endif
  };
  KDA_FN void init(int threads) {  // by one thread
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    barrier.init(threads);
    Barrier::fence_init();
#endif
  }
  KDA_FN Turn turn(int n) { return {barrier, n & 1}; }
};

// A chunk's operands in shared memory.
template <class Tiles, int K, int C>
struct WalkStage {
  using Storage = typename Tiles::Storage;
  using Layout = Blob<Tiles, K, C>;
  alignas(128) Storage operands[Layout::kElements];
  float decay[K];
  int32_t beyond[kBeyondBytes / 4];
  alignas(16) ChunkRow row;
  static constexpr int kBytes = int(Layout::kBytes) + int(sizeof(ChunkRow));

  // copy(to, from, bytes) for all of it.
  template <class S, class Copy>
  KDA_FN void fetch(const S& s, int64_t chunk, int head, Copy copy) {
    copy(operands, s.blob(chunk, head), int(Layout::kBytes));  // and what follows
    copy(&row, reinterpret_cast<const ChunkRow*>(s.p.chunks) + chunk, int(sizeof row));
  }
};

// cp.async by all threads of a block, 16 bytes each.
struct CopyByAll {
  KDA_FN void operator()(void* to, const void* from, int bytes) const {
    for (int i = 16 * int(threadIdx.x); i < bytes; i += 16 * int(blockDim.x))
      piece(static_cast<char*>(to) + i, static_cast<const char*>(from) + i);
  }
  static KDA_FN void piece(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
  }
  static KDA_FN void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  template <int Left>
  static KDA_FN void wait() {  // until at most `Left` groups of this thread are on their way
    asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
  }
};

// The stages of a walk as a ring: chunk n of a block's chunks is in stage n % Stages. `fetch` is called by
// all threads, `wait` before a chunk is read; between the last read of a stage and the next fetch into it
// there is a block barrier.
template <class Stage, int Stages>
struct Ring {
  Stage stage[Stages];
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  Barrier full[Stages];

  KDA_FN void init() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < Stages; ++i) full[i].init(1);
      Barrier::fence_init();
    }
    __syncthreads();
  }
  template <class S>
  KDA_FN void fetch(int n, int count, const S& s, int64_t first, int head) {
    if (n >= count || threadIdx.x != blockDim.x / 2) return;
    Barrier& b = full[n % Stages];
    b.expect(Stage::kBytes);
    stage[n % Stages].fetch(s, first + n, head, [&](void* to, const void* from, int bytes) {
      b.copy(to, from, bytes);
    });
  }
  KDA_FN void wait(int n) { full[n % Stages].wait(n / Stages & 1); }
#else
  KDA_FN void init() {}
  template <class S>
  KDA_FN void fetch(int n, int count, const S& s, int64_t first, int head) {
    if (n < count) stage[n % Stages].fetch(s, first + n, head, CopyByAll{});
    CopyByAll::commit();
  }
  KDA_FN void wait(int) {
    CopyByAll::wait<Stages - 1>();
    __syncthreads();
  }
#endif
  KDA_FN Stage& operator[](int n) { return stage[n % Stages]; }
};

}  // namespace KDA_ISA
}  // namespace kda
