// The launches for one type of q, k, v (KDA_IO) and one K (KDA_K); compiled once for each. HIP is the
// source language; nvcc builds this file with -x cu.
#include "driver.h"

#include <algorithm>
#include <mutex>

#include "kernels.h"
#include "vendor.h"
#if defined(__CUDACC__)
#include "hopper_walk.h"
#include "nvidia_prologue.h"
#include "nvidia_split_walk.h"
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

// XLA's stream during a call. From the second launch on a kernel need not wait for the whole one before it
// (after_previous in kernels.h); the first has to, since it follows a kernel that knows nothing of this.
struct Stream {
  hipStream_t stream;
  bool overlaps;
  bool first = true;
};

template <class... Args>
hipError_t launch(void (*kernel)(Args...), int64_t blocks, int threads, size_t shared,
                  Stream& stream, Args... args) {
  void* pointers[] = {&args...};
  const auto* f = reinterpret_cast<const void*>(kernel);
  const dim3 grid{unsigned(blocks)}, block{unsigned(threads)};
  [[maybe_unused]] const bool early = stream.overlaps && !stream.first;
  stream.first = false;
#if defined(__CUDACC__)
  if (early) return launch_early(f, grid, block, pointers, shared, stream.stream);
#endif
  return hipLaunchKernel(f, grid, block, pointers, shared, stream.stream);
}

// What the choice of a walk depends on.
struct Device {
  int multiprocessors = 0;
  int shared_bytes = 0;  // that a block may have
  int all_shared_bytes = 0;  // of a multiprocessor
  bool wgmma = false;
  bool overlaps = false;  // kernels that say so
};

template <int K, int C, bool Unbounded>
struct GpuDriver {
  using T = GpuTiles;
  using Policy = MixedPolicy;
  using P = Prologue<T, Policy, K, C, Unbounded>;
  using P2 = Prologue<T, WidePolicy, K, C, true>;
  using S = Schedule<T, Policy, K, C>;

  template <class... Args>
  static hipError_t allow(void (*kernel)(Args...), size_t shared) {
    const auto* f = reinterpret_cast<const void*>(kernel);
#if defined(__CUDACC__)
    // The same division of a multiprocessor's memory for all, so that one may follow on the other at once.
    if (hipError_t error = hipFuncSetAttribute(f, cudaFuncAttributePreferredSharedMemoryCarveout,
                                               cudaSharedmemCarveoutMaxShared);
        error != hipSuccess)
      return error;
#endif
    return hipFuncSetAttribute(f, hipFuncAttributeMaxDynamicSharedMemorySize, int(shared));
  }

#if defined(__CUDACC__)
  using Staged = NvidiaTiles<KDA_IO, true>;
  static constexpr bool kSplits = K / C >= 2;  // a warp owns a pair of channel tiles
  template <int Stages>
  using SplitMemory = SplitWalkMemory<Staged, K, C, Stages>;
  static constexpr bool kHopper = C == 64;
  // N rows of V in a block, and as many chunks ahead as fit beside them.
  static constexpr int hopper_stages(int n) { return n < 64 ? 3 : 2; }
  template <int N>
  using HopperMemory = HopperWalkMemory<Staged, K, C, N, hopper_stages(N)>;
  template <int N, bool Packs>
  static constexpr auto kHopperWalk = hopper_walk_kernel<Staged, Policy, K, C, N, hopper_stages(N), Packs>;
  template <int N, bool Packs = false>
  static hipError_t hopper_walk(const Problem& p, Stream& stream, int first, int last, HopperPlan plan) {
    const int64_t units = p.N * p.H * (p.V / N), sms = plan.multiprocessors;
    return launch(kHopperWalk<N, Packs>, HopperUnits<S, N, Packs>::kTurns ? std::min(units, sms) : units,
                  kHopperThreads, sizeof(HopperMemory<N>), stream, Problem(p), first, last, HopperPlan(plan));
  }
  static hipError_t hopper_walk(int width, const Problem& p, Stream& stream, int first, int last, HopperPlan plan) {
    return width == 16   ? hopper_walk<16>(p, stream, first, last, plan)
           : width == 32 ? hopper_walk<32>(p, stream, first, last, plan)
           : width == 64 ? hopper_walk<64>(p, stream, first, last, plan)
                         : hopper_walk<128>(p, stream, first, last, plan);
  }
  template <int N, bool Packs = false>
  static hipError_t allow_hopper() {
    return allow(kHopperWalk<N, Packs>, sizeof(HopperMemory<N>));
  }

  using StagedMemory = StagedPrologueMemory<T, Policy, K, C, Unbounded>;
  static constexpr bool kStages = K == 128 && C == 64 && !Unbounded;
  static constexpr size_t kReserved = 1024;  // by CUDA, of each block
  static bool stages(const Problem& p, const Device& device) {
    return kStages && p.g.type == p.q.type &&
           size_t(device.all_shared_bytes) >= kPrologueBlocks * (sizeof(StagedMemory) + kReserved);
  }

  static hipError_t prologue(const Problem& p, Stream& stream, const Device& device, int first,
                             int last, PrologueSplit split = {-1, 0, 0}) {
    const int64_t tasks = int64_t(last - first) * p.H;
    if constexpr (kStages)
      if (stages(p, device))
        return launch(staged_prologue_kernel<T, Policy, K, C, Unbounded>,
                      std::min(tasks, resident(device)), kThreads, sizeof(StagedMemory), stream,
                      Problem(p), first, last, PrologueSplit(split));
    return direct_prologue<P>(p, stream, tasks, first, last);
  }
  static int64_t resident(const Device& device) { return kPrologueBlocks * device.multiprocessors; }

  // A walk of one sequence takes the multiprocessors that it needs as soon as they are free. The prologue leaves them
  // after some rounds, so that the rest of it is done on the others before the walk is through. `width`: 0, not so.
  struct Beside {
    int width = 0;
    PrologueSplit split;
  };
  static Beside beside(const Problem& p, const Device& device, int64_t slab) {
    Beside best;
    if constexpr (kHopper && kStages) {
      const int64_t tasks = p.NC * p.H, round = resident(device), sms = device.multiprocessors;
      if (!device.wgmma || !stages(p, device) || p.N != 1 || p.groups > 1 || slab < p.NC || tasks <= round) return best;
      double least = 1e30;
      for (int n = 16; n <= 128; n *= 2) {
        const int64_t blocks = p.H * p.V / n, others = kPrologueBlocks * (sms - blocks);
        if (p.V % n != 0 || others <= 0) continue;
        const double walk = hopper_step_time(n) * double(p.NC), beside = walk / kRoundTime * double(others);
        const int64_t rounds = int64_t(std::max(0.0, double(tasks) - beside)) / round;
        for (int64_t r = std::max(rounds, int64_t(1)); r <= rounds + 1; ++r) {
          const double rest = kRoundTime * double(std::max(tasks - r * round, int64_t(0))) / double(others);
          const double all = kRoundTime * double(r) + std::max(walk, rest);
          if (all >= least) continue;
          least = all;
          best = {n, {int(std::min(r * round, tasks)), int(sms - blocks), int(sms)}};
        }
      }
    }
    return best;
  }
  // us on an H200: three tasks of the prologue on one multiprocessor.
  static constexpr double kRoundTime = 17.4;

  static std::string run_beside(const Problem& p, Stream& stream, const Device& device, const Beside& plan) {
    if constexpr (kHopper && kStages) {
      KDA_TRY(launch(clear_progress_kernel<T, Policy, K, C>, 8, 256, 0, stream, Problem(p)));
      KDA_TRY(prologue(p, stream, device, 0, int(p.NC), plan.split));
      KDA_TRY(hopper_walk(plan.width, p, stream, 0, int(p.NC), {true, 0, device.multiprocessors}));
    }
    return "";
  }

  static std::string prepare_walks(const Device& device) {
    if constexpr (kStages)
      if (size_t(device.shared_bytes) >= sizeof(StagedMemory))
        KDA_TRY(allow(staged_prologue_kernel<T, Policy, K, C, Unbounded>, sizeof(StagedMemory)));
    if constexpr (kSplits) {
      if (device.shared_bytes >= int(sizeof(SplitMemory<3>)))
        KDA_TRY(allow(split_walk_kernel<Staged, Policy, K, C, 3>, sizeof(SplitMemory<3>)));
      if (device.shared_bytes >= int(sizeof(SplitMemory<2>)))
        KDA_TRY(allow(split_walk_kernel<Staged, Policy, K, C, 2>, sizeof(SplitMemory<2>)));
    }
    if constexpr (kHopper) {
      if (device.wgmma) {
        KDA_TRY(allow_hopper<16>());
        KDA_TRY(allow_hopper<32>());
        KDA_TRY(allow_hopper<64>());
        KDA_TRY(allow_hopper<128>());
        KDA_TRY((allow_hopper<kNarrow, true>()));
        KDA_TRY((allow_hopper<kWide, true>()));
      }
    }
    return "";
  }

  // As few rows of V in a block as one block for each multiprocessor allows, so that a step is short; with more
  // blocks than that as many rows as there are, since a chunk's operands are brought once for all of them. Of several
  // sequences one may be much longer than the others, which only the device knows: it also has narrow blocks to choose.
  static constexpr int kNarrow = 32, kWide = 128;
  static hipError_t walk(const Problem& p, Stream& stream, const Device& device, int first,
                         int last) {
    const int64_t heads = p.N * p.H, slices = heads * (p.V / kTile), sms = device.multiprocessors;
    if constexpr (kHopper) {
      if (device.wgmma) {
        int width = 16;
        for (int n = 32; n <= kWide; n *= 2)
          if (p.V % n == 0 && heads * (p.V / width) > sms) width = n;
        HopperPlan plan{false, 0, device.multiprocessors};
        if (p.N == 1 || p.N > kOrdered || width < kWide) return hopper_walk(width, p, stream, first, last, plan);
        plan.other = kWide;
        if (hipError_t error = hopper_walk<kNarrow, true>(p, stream, first, last, plan); error != hipSuccess)
          return error;
        plan.other = kNarrow;
        return hopper_walk<kWide, true>(p, stream, first, last, plan);
      }
    }
    if constexpr (kSplits) {
      if (device.shared_bytes >= int(sizeof(SplitMemory<3>)))
        return launch(split_walk_kernel<Staged, Policy, K, C, 3>, slices, C * 4,
                      sizeof(SplitMemory<3>), stream, Problem(p), first, last);
      if (device.shared_bytes >= int(sizeof(SplitMemory<2>)))
        return launch(split_walk_kernel<Staged, Policy, K, C, 2>, slices, C * 4,
                      sizeof(SplitMemory<2>), stream, Problem(p), first, last);
    }
    return simple_walk<Policy>(p, stream, slices, first, last);
  }
#else
  static hipError_t prologue(const Problem& p, Stream& stream, const Device&, int first,
                             int last) {
    return direct_prologue<P>(p, stream, int64_t(last - first) * p.H, first, last);
  }
  static std::string prepare_walks(const Device&) { return ""; }
  struct Beside {
    int width = 0;
  };
  static Beside beside(const Problem&, const Device&, int64_t) { return {}; }
  static std::string run_beside(const Problem&, Stream&, const Device&, const Beside&) { return ""; }
  static hipError_t walk(const Problem& p, Stream& stream, const Device&, int first, int last) {
    return simple_walk<Policy>(p, stream, p.N * p.H * (p.V / kTile), first, last);
  }
#endif
  static constexpr int kThreads = C / kTile * T::kWave;
  template <class Prologue>
  static hipError_t direct_prologue(const Problem& p, Stream& stream, int64_t blocks, int first,
                                    int last) {
    return launch(Prologue::kWide ? prologue_kernel<T, WidePolicy, K, C, true>
                                  : prologue_kernel<T, Policy, K, C, Unbounded>,
                  blocks, kThreads, sizeof(typename Prologue::Shared), stream, Problem(p), first,
                  last);
  }
  template <class Policy>
  static hipError_t simple_walk(const Problem& p, Stream& stream, int64_t waves, int first,
                                int last) {
    return launch(walk_kernel<T, Policy, K, C>, (waves + kWalkWaves - 1) / kWalkWaves,
                  kWalkWaves * T::kWave, 0, stream, Problem(p), first, last);
  }

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
      if (std::string error = prepare_walks(d); !error.empty()) return error;
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
    const Beside plan = beside(p, device, slab);
    if (plan.width)
      if (std::string error = run_beside(p, stream, device, plan); !error.empty()) return error;
    for (int64_t first = 0; first < p.NC && !plan.width; first += slab) {
      const int64_t last = first + slab < p.NC ? first + slab : p.NC;
      KDA_TRY(prologue(p, stream, device, int(first), int(last)));
      if (p.groups == 1) KDA_TRY(walk(p, stream, device, int(first), int(last)));
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
    for (int64_t first = 0; first == 0 || first < p.NC; first += slab) {
      const int64_t last = first + slab < p.NC ? first + slab : p.NC, tasks = (last - first) * p.H;
      KDA_TRY(direct_prologue<P2>(p, stream, std::min(few, std::max(tasks, kFillBlocks)), int(first),
                                  int(last)));
      if (tasks == 0) break;
      KDA_TRY(simple_walk<WidePolicy>(
          p, stream, std::min(few * kWalkWaves, p.N * p.H * (p.V / kTile)), int(first), int(last)));
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
