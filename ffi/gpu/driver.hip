// The launches for one type of q, k, v (KDA_IO) and one K (KDA_K); compiled once for each. HIP is the
// source language; nvcc builds this file with -x cu.
#include "driver.h"

#include <algorithm>
#include <mutex>

#if defined(__CUDACC__)
#include "nvidia_launches.h"
#else
#include "cdna_tiles.h"
#include "launches.h"
#endif
#include "tokens.h"

namespace kda {
inline namespace KDA_ISA {
namespace {

#if defined(__CUDACC__)
using GpuTiles = NvidiaTiles<KDA_IO>;
template <int K, int C, bool Unbounded>
using GpuLaunches = NvidiaLaunches<KDA_IO, MixedPolicy, K, C, Unbounded>;
#else
using GpuTiles = CdnaTiles<KDA_IO>;
template <int K, int C, bool Unbounded>
using GpuLaunches = Launches<GpuTiles, MixedPolicy, K, C, Unbounded>;
#endif

constexpr int kMaxDevices = 64;

template <int K, int C, bool Unbounded>
struct GpuDriver : GpuLaunches<K, C, Unbounded> {
  using Base = GpuLaunches<K, C, Unbounded>;
  using T = GpuTiles;
  using Policy = MixedPolicy;
  using typename Base::P;
  using P2 = Prologue<T, WidePolicy, K, C, true>;
  using S = Schedule<T, Policy, K, C>;

  // Once per device: its properties, and more shared memory than the default limit.
  static std::string prepare(Device* device) {
    static std::mutex lock;
    static Device known[kMaxDevices];
    int id = 0;
    KDA_TRY(hipGetDevice(&id));
    if (id >= kMaxDevices) return "more than " + std::to_string(kMaxDevices) + " devices";
    const std::lock_guard<std::mutex> guard(lock);
    if (known[id].multiprocessors == 0) {
      Device d;
      int major = 0, minor = 0;
      KDA_TRY(hipDeviceGetAttribute(&d.multiprocessors, hipDeviceAttributeMultiprocessorCount, id));
      KDA_TRY(hipDeviceGetAttribute(&major, hipDeviceAttributeComputeCapabilityMajor, id));
      KDA_TRY(hipDeviceGetAttribute(&minor, hipDeviceAttributeComputeCapabilityMinor, id));
#if defined(__CUDACC__)
      KDA_TRY(hipDeviceGetAttribute(&d.shared_bytes, hipDeviceAttributeSharedMemPerBlockOptin, id));
      KDA_TRY(hipDeviceGetAttribute(&d.all_shared_bytes,
                                    hipDeviceAttributeMaxSharedMemoryPerMultiprocessor, id));
      d.overlaps = major >= 9;
#endif
#if defined(KDA_SM90A)
      d.wgmma = major == 9 && minor == 0;
#endif
      KDA_TRY(allow(prologue_kernel<T, Policy, K, C, Unbounded>, sizeof(typename P::Shared)));
      KDA_TRY(allow(prologue_kernel<T, WidePolicy, K, C, true>, sizeof(typename P2::Shared)));
      if (std::string error = Base::prepare_walks(d); !error.empty()) return error;
      known[id] = d;
    }
    *device = known[id];
    return "";
  }

  static constexpr int64_t kFillBlocks = 64;

  static std::string run(const Problem& p, hipStream_t on) {
    Device device;
    if (std::string error = prepare(&device); !error.empty()) return error;
    Stream stream{on, device.overlaps};
    const int walk_threads = kWalkWaves * T::kWave;
    const int64_t slab = p.groups > 1 || p.NC == 0 ? p.NC : p.slab_chunks;
    auto waves = [&](int64_t n) { return (n + kWalkWaves - 1) / kWalkWaves; };
    const typename Base::Beside plan = Base::beside(p, device, slab);
    if (plan.width)
      if (std::string error = Base::run_beside(p, stream, device, plan); !error.empty()) return error;
    for (int64_t first = 0; first < p.NC && !plan.width; first += slab) {
      const int64_t last = first + slab < p.NC ? first + slab : p.NC;
      KDA_TRY(Base::prologue(p, stream, device, int(first), int(last)));
      if (p.groups == 1) KDA_TRY(Base::walk(p, stream, device, int(first), int(last)));
    }
    if (p.groups > 1 && p.NC > 0) {
      const int64_t heads = p.N * p.H, between = p.groups - 1, slices = p.V / kTile;
      KDA_TRY(launch(group_kernel<T, Policy, K, C, kGroupFirst>,
                     waves(heads * between * (slices + K / kTile)), walk_threads, 0, stream,
                     Problem(p)));
      KDA_TRY(launch(group_kernel<T, Policy, K, C, kGroupScan>, waves(heads * slices),
                     walk_threads, 0, stream, Problem(p)));
      KDA_TRY(launch(group_kernel<T, Policy, K, C, kGroupSecond>,
                     waves(heads * between * slices), walk_threads, 0, stream, Problem(p)));
    }
    // What no chunk writes, and what fp16 was too narrow for: nearly always nothing.
    const int64_t few = T::kLoops ? 2 * device.multiprocessors : int64_t(1) << 31;
    if (p.groups == 1 && slab >= p.NC && Base::kOneLaunch) return Base::second_pass(p, stream, few);
    for (int64_t first = 0; first == 0 || first < p.NC; first += slab) {
      const int64_t last = first + slab < p.NC ? first + slab : p.NC, tasks = (last - first) * p.H;
      KDA_TRY(Base::template direct_prologue<P2>(p, stream, std::min(few, std::max(tasks, kFillBlocks)), int(first),
                                  int(last)));
      if (tasks == 0) break;
      KDA_TRY(Base::template simple_walk<WidePolicy>(
          p, stream, std::min(few * kWalkWaves, p.N * p.H * (p.V / kTile)), int(first), int(last)));
    }
    return "";
  }
};

// Chunks of one token: a launch, and no workspace.
std::string run_tokens(const Problem& p, hipStream_t on) {
  Stream stream{on, false};
  const int64_t blocks = TokenStep<GpuTiles, KDA_K>::blocks(p);
  if (blocks == 0) return "";
  KDA_TRY(launch(tokens_kernel<GpuTiles, KDA_K>, blocks, kTokenThreads, 0, stream, Problem(p)));
  return "";
}

template <class F>
auto with_gate(const Problem& p, F f) {
  if (p.C == 32) {
    return unbounded(p.gate) ? f(GpuDriver<KDA_K, 32, true>{}) : f(GpuDriver<KDA_K, 32, false>{});
  }
  return unbounded(p.gate) ? f(GpuDriver<KDA_K, 64, true>{}) : f(GpuDriver<KDA_K, 64, false>{});
}

const gpu::Driver kDriver = {
    [](const Problem& p) {
      if (p.C == 1) return int64_t(0);
      return with_gate(p, [&](auto d) { return decltype(d)::S::workspace_bytes(p); });
    },
    [](const Problem& p, void* stream) {
      if (p.C == 1) return run_tokens(p, static_cast<hipStream_t>(stream));
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
