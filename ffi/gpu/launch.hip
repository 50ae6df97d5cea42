// Launches of the GPU target. HIP is the source language; nvcc builds the file with -x cu.
#include "launch.h"

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
template <class Io>
using GpuTiles = NvidiaTiles<Io>;
#else
template <class Io>
using GpuTiles = CdnaTiles<Io>;
#endif

// The wave size of the compilation for the host side, where the target's is not known.
constexpr int kMaxDevices = 64;

std::string failure(hipError_t error, const char* what, const char* file, int line) {
  return std::string(file) + ":" + std::to_string(line) + ": " + what + ": " +
         hipGetErrorString(error);
}
#define KDA_TRY(call)                                                            \
  if (hipError_t error = (call); error != hipSuccess)                            \
  return failure(error, #call, __FILE__, __LINE__)

template <class... Args>
hipError_t launch(void (*kernel)(Args...), int64_t blocks, int y, int threads, size_t shared,
                  hipStream_t stream, Args... args) {
  void* pointers[] = {&args...};
  return hipLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(unsigned(blocks), unsigned(y)),
                         dim3(unsigned(threads)), pointers, shared, stream);
}

template <class Io, int K, int C, bool Unbounded>
struct GpuDriver {
  using T = GpuTiles<Io>;
  using Policy = MixedPolicy;
  using P = Prologue<T, Policy, K, C, Unbounded>;
  using S = Schedule<T, Policy, K, C>;

  // More shared memory than the default limit is asked for once per device; racing threads ask twice.
  static std::string prepare() {
    static std::atomic<bool> done[kMaxDevices];
    int device = 0;
    KDA_TRY(hipGetDevice(&device));
    if (device < kMaxDevices && done[device].load(std::memory_order_acquire)) return "";
    KDA_TRY(hipFuncSetAttribute(
        reinterpret_cast<const void*>(&prologue_kernel<T, Policy, K, C, Unbounded>),
        hipFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(typename P::Shared))));
    if (device < kMaxDevices) done[device].store(true, std::memory_order_release);
    return "";
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
      KDA_TRY(launch(walk_kernel<T, Policy, K, C>, waves(p.N * p.H * (p.V / kTile)), 1, walk_threads,
                     0, stream, Problem(p), int(first), int(last)));
    }
    if (p.groups > 1 && p.NC > 0) {
      const int64_t heads = p.N * p.H, between = p.groups - 1, slices = p.V / kTile;
      KDA_TRY(launch(group_kernel<T, Policy, K, C, GroupStage::kFirst>,
                     waves(heads * between * (slices + K / kTile)), 1, walk_threads, 0, stream,
                     Problem(p)));
      KDA_TRY(launch(group_kernel<T, Policy, K, C, GroupStage::kScan>, waves(heads * slices), 1,
                     walk_threads, 0, stream, Problem(p)));
      KDA_TRY(launch(group_kernel<T, Policy, K, C, GroupStage::kSecond>,
                     waves(heads * between * slices), 1, walk_threads, 0, stream, Problem(p)));
    }
    return "";
  }
};

// f(driver) for the problem's types and sizes.
template <class Io, int K, int C, class F>
auto with_gate(const Problem& p, F f) {
  return unbounded(p.gate) ? f(GpuDriver<Io, K, C, true>{}) : f(GpuDriver<Io, K, C, false>{});
}
template <class Io, int K, class F>
auto with_chunk(const Problem& p, F f) {
  return p.C == 64   ? with_gate<Io, K, 64>(p, f)
         : p.C == 32 ? with_gate<Io, K, 32>(p, f)
                     : with_gate<Io, K, 16>(p, f);
}
template <class Io, class F>
auto with_width(const Problem& p, F f) {
  return p.K == 64 ? with_chunk<Io, 64>(p, f) : with_chunk<Io, 128>(p, f);
}
template <class F>
auto with_driver(const Problem& p, F f) {
  return p.q.type == DType::kBF16 ? with_width<BF16>(p, f) : with_width<F16>(p, f);
}

std::string check(const Problem& p) {
  auto number = [](int64_t n) { return std::to_string(n); };
  if (p.K != 64 && p.K != 128) return "K is " + number(p.K) + ", the kernel has 64 and 128";
  if (p.V < 16 || p.V > 256 || p.V % 16)
    return "V is " + number(p.V) + ", want a multiple of 16 up to 256";
  if (p.C != 16 && p.C != 32 && p.C != 64)
    return "chunk_size is " + number(p.C) + ", the kernel has 16, 32 and 64";
  if (p.q.type == DType::kF32 || p.k.type != p.q.type || p.v.type != p.q.type)
    return "q, k and v must all be bfloat16 or all be float16";
  for (const Tensor* t : {&p.g, &p.beta})
    if (t->type != p.q.type && t->type != DType::kF32)
      return "g and beta must have the type of q or be float32";
  if (p.groups < 1 || p.groups > 64) return "groups is " + number(p.groups) + ", want 1 to 64";
  if (p.slab_chunks < 1) return "slab_chunks is " + number(p.slab_chunks) + ", want at least 1";
  if (p.groups > 1 && p.slab_chunks < p.NC)
    return "slab_chunks is " + number(p.slab_chunks) + ", with groups it must hold all " +
           number(p.NC) + " chunks";
  if (p.NC * p.H >= int64_t(1) << 31) return "too many chunks and heads for one launch";
  const int64_t want = gpu::workspace_bytes(p);
  if (p.workspace_bytes < want)
    return "workspace has " + number(p.workspace_bytes) + " bytes, want " + number(want);
  return "";
}

}  // namespace
}  // namespace KDA_ISA

int64_t gpu::workspace_bytes(const Problem& p) {
  return with_driver(p, [&](auto d) { return decltype(d)::S::workspace_bytes(p); });
}

std::string gpu::prefill(const Problem& p, void* stream) {
  if (std::string error = check(p); !error.empty()) return error;
  return with_driver(p, [&](auto d) { return decltype(d)::run(p, static_cast<hipStream_t>(stream)); });
}

}  // namespace kda
