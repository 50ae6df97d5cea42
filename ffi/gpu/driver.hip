// The launches for one type of q, k, v (KDA_IO) and one K (KDA_K); compiled once for each. HIP is the
// source language; nvcc builds this file with -x cu.
#include "driver.h"

#include <atomic>

#include "kernels.h"
#include "vendor.h"
#if defined(__CUDACC__)
#include "nvidia_tiles.h"
#else
#include "cdna_tiles.h"
#endif

namespace kda {
inline namespace KDA_ISA {
namespace {

#if defined(__CUDACC__)
using GpuTiles = NvidiaTiles<KDA_IO>;
#else
using GpuTiles = CdnaTiles<KDA_IO>;
#endif

constexpr int kMaxDevices = 64;

std::string failure(hipError_t error, const char* what, const char* file, int line) {
  return std::string(file) + ":" + std::to_string(line) + ": " + what + ": " +
         hipGetErrorString(error);
}
#define KDA_TRY(call)                                 \
  if (hipError_t error = (call); error != hipSuccess) \
  return failure(error, #call, __FILE__, __LINE__)

template <class... Args>
hipError_t launch(void (*kernel)(Args...), int64_t blocks, int y, int threads, size_t shared,
                  hipStream_t stream, Args... args) {
  void* pointers[] = {&args...};
  return hipLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(unsigned(blocks), unsigned(y)),
                         dim3(unsigned(threads)), pointers, shared, stream);
}

template <int K, int C, bool Unbounded>
struct GpuDriver {
  using T = GpuTiles;
  using Policy = MixedPolicy;
  using P = Prologue<T, Policy, K, C, Unbounded>;
  using S = Schedule<T, Policy, K, C>;

  template <class... Args>
  static hipError_t allow(void (*kernel)(Args...), size_t shared) {
    return hipFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               hipFuncAttributeMaxDynamicSharedMemorySize, int(shared));
  }
  template <int Waves>
  static constexpr size_t stages_bytes() {
    return 2 * sizeof(WalkStage<T, K, C, Waves>);
  }

  // More shared memory than the default limit is asked for once per device; racing threads ask twice.
  static std::string prepare() {
    static std::atomic<bool> done[kMaxDevices];
    int device = 0;
    KDA_TRY(hipGetDevice(&device));
    if (device < kMaxDevices && done[device].load(std::memory_order_acquire)) return "";
    KDA_TRY(allow(prologue_kernel<T, Policy, K, C, Unbounded>, sizeof(typename P::Shared)));
    if constexpr (T::kStages) {
      KDA_TRY(allow(staged_walk_kernel<T, Policy, K, C, 1>, stages_bytes<1>()));
      KDA_TRY(allow(staged_walk_kernel<T, Policy, K, C, 4>, stages_bytes<4>()));
    }
    if (device < kMaxDevices) done[device].store(true, std::memory_order_release);
    return "";
  }

  static hipError_t walk(const Problem& p, hipStream_t stream, int first, int last) {
    const int64_t slices = p.N * p.H * (p.V / kTile);
    if constexpr (T::kStages) {
      if (p.V / kTile % 4 == 0) {
        return launch(staged_walk_kernel<T, Policy, K, C, 4>, slices / 4, 1, 4 * T::kWave,
                      stages_bytes<4>(), stream, Problem(p), first, last);
      }
      return launch(staged_walk_kernel<T, Policy, K, C, 1>, slices, 1, T::kWave, stages_bytes<1>(),
                    stream, Problem(p), first, last);
    } else {
      return launch(walk_kernel<T, Policy, K, C>, (slices + kWalkWaves - 1) / kWalkWaves, 1,
                    kWalkWaves * T::kWave, 0, stream, Problem(p), first, last);
    }
  }

  static std::string run(const Problem& p, hipStream_t stream) {
    if (std::string error = prepare(); !error.empty()) return error;
    const int walk_threads = kWalkWaves * T::kWave;
    KDA_TRY(launch(fill_kernel<T>, 64, int(p.N + p.M + 1), kFillThreads, 0, stream, Problem(p)));
    const int64_t slab = p.groups > 1 ? p.NC : p.slab_chunks;
    auto waves = [&](int64_t n) { return (n + kWalkWaves - 1) / kWalkWaves; };
    for (int64_t first = 0; first < p.NC; first += slab) {
      const int64_t last = first + slab < p.NC ? first + slab : p.NC;
      KDA_TRY(launch(prologue_kernel<T, Policy, K, C, Unbounded>, (last - first) * p.H, 1,
                     C / kTile * T::kWave, sizeof(typename P::Shared), stream, Problem(p),
                     int(first)));
      if (p.groups > 1) break;
      KDA_TRY(walk(p, stream, int(first), int(last)));
    }
    if (p.groups > 1 && p.NC > 0) {
      const int64_t heads = p.N * p.H, between = p.groups - 1, slices = p.V / kTile;
      KDA_TRY(launch(group_kernel<T, Policy, K, C, kGroupFirst>,
                     waves(heads * between * (slices + K / kTile)), 1, walk_threads, 0, stream,
                     Problem(p)));
      KDA_TRY(launch(group_kernel<T, Policy, K, C, kGroupScan>, waves(heads * slices), 1,
                     walk_threads, 0, stream, Problem(p)));
      KDA_TRY(launch(group_kernel<T, Policy, K, C, kGroupSecond>,
                     waves(heads * between * slices), 1, walk_threads, 0, stream, Problem(p)));
    }
    return "";
  }
};

template <class F>
auto with_gate(const Problem& p, F f) {
  if (p.C == 32) {
    return unbounded(p.gate) ? f(GpuDriver<KDA_K, 32, true>{}) : f(GpuDriver<KDA_K, 32, false>{});
  }
  return unbounded(p.gate) ? f(GpuDriver<KDA_K, 64, true>{}) : f(GpuDriver<KDA_K, 64, false>{});
}

const gpu::Driver kDriver = {
    [](const Problem& p) {
      return with_gate(p, [&](auto d) { return decltype(d)::S::workspace_bytes(p); });
    },
    [](const Problem& p, void* stream) {
      return with_gate(
          p, [&](auto d) { return decltype(d)::run(p, static_cast<hipStream_t>(stream)); });
    },
};

}  // namespace
}  // namespace KDA_ISA

#define KDA_JOIN2(a, b, c, d) a##b##c##d
#define KDA_JOIN(a, b, c, d) KDA_JOIN2(a, b, c, d)
const gpu::Driver& gpu::KDA_JOIN(driver_, KDA_IO, _, KDA_K)() { return KDA_ISA::kDriver; }

}  // namespace kda
