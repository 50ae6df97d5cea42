// How the kernels of a call are launched: what all targets share, and the launches of a target that has no kernels of its
// own (nvidia_launches.h: one that has).
#pragma once

#include <string>

#include "kernels.h"
#include "vendor.h"

namespace kda {
inline namespace KDA_ISA {

inline std::string failure(hipError_t error, const char* what, const char* file, int line) {
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

template <class... Args>
hipError_t allow(void (*kernel)(Args...), size_t shared) {
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

template <class T, class Policy, int K, int C, bool Unbounded>
struct Launches {
  using P = Prologue<T, Policy, K, C, Unbounded>;
  static constexpr int kThreads = C / kTile * T::kWave;
  template <class Roles>
  static hipError_t direct_prologue(const Problem& p, Stream& stream, int64_t blocks, int first,
                                    int last) {
    return launch(Roles::kWide ? prologue_kernel<T, WidePolicy, K, C, true>
                                  : prologue_kernel<T, Policy, K, C, Unbounded>,
                  blocks, kThreads, sizeof(typename Roles::Shared), stream, Problem(p), first,
                  last);
  }
  template <class Pass>
  static hipError_t simple_walk(const Problem& p, Stream& stream, int64_t waves, int first,
                                int last) {
    return launch(walk_kernel<T, Pass, K, C>, (waves + kWalkWaves - 1) / kWalkWaves,
                  kWalkWaves * T::kWave, 0, stream, Problem(p), first, last);
  }
  static hipError_t prologue(const Problem& p, Stream& stream, const Device&, int first,
                             int last) {
    return direct_prologue<P>(p, stream, int64_t(last - first) * p.H, first, last);
  }
  static std::string prepare_walks(const Device&) { return ""; }
  static constexpr bool kOneLaunch = false;  // of the second pass
  static std::string second_pass(const Problem&, Stream&, int64_t) { return ""; }
  struct Beside {
    int width = 0;
  };
  static Beside beside(const Problem&, const Device&, int64_t) { return {}; }
  static std::string run_beside(const Problem&, Stream&, const Device&, const Beside&) { return ""; }
  static hipError_t walk(const Problem& p, Stream& stream, const Device&, int first, int last) {
    return simple_walk<Policy>(p, stream, p.N * p.H * (p.V / kTile), first, last);
  }
};

}  // namespace KDA_ISA
}  // namespace kda
