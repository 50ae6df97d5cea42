// The launches on NVIDIA: a prologue that brings its inputs early, walks of which several warps or warpgroups share a
// block, and on Hopper one that runs beside the prologue.
#pragma once

#include <algorithm>

#include "hopper_walk.h"
#include "launches.h"
#include "nvidia_prologue.h"
#include "nvidia_second_pass.h"
#include "nvidia_split_walk.h"
#include "nvidia_tiles.h"

namespace kda {
inline namespace KDA_ISA {

// `Io`: the type of q, k and v.
template <class Io, class Policy, int K, int C, bool Unbounded>
struct NvidiaLaunches : Launches<NvidiaTiles<Io>, Policy, K, C, Unbounded> {
  using T = NvidiaTiles<Io>;
  using Base = Launches<T, Policy, K, C, Unbounded>;
  using Base::kThreads;
  using typename Base::P;
  using S = Schedule<T, Policy, K, C>;
  using Staged = NvidiaTiles<Io, true>;
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
                  HopperThreads<N>::kAll, sizeof(HopperMemory<N>), stream, Problem(p), first, last, HopperPlan(plan));
  }
  static hipError_t hopper_walk(int width, const Problem& p, Stream& stream, int first, int last, HopperPlan plan) {
    return width == 16   ? hopper_walk<16>(p, stream, first, last, plan)
           : width == 32 ? hopper_walk<32>(p, stream, first, last, plan)
           : width == 64 ? hopper_walk<64>(p, stream, first, last, plan)
                         : hopper_walk<kWide, true>(p, stream, first, last, plan);
  }
  template <int N, bool Packs = false>
  static hipError_t allow_hopper() {
    return allow(kHopperWalk<N, Packs>, sizeof(HopperMemory<N>));
  }

  using StagedMemory = StagedPrologueMemory<T, Policy, K, C, Unbounded>;
  static constexpr bool kStages = K == 128 && C == 64 && !Unbounded;
  static bool stages(const Problem& p, const Device& device) {
    return kStages && p.g.type == p.q.type &&
           size_t(device.all_shared_bytes) >= kPrologueBlocks * (sizeof(StagedMemory) + kReservedBytes);
  }

  static hipError_t prologue(const Problem& p, Stream& stream, const Device& device, int first,
                             int last, PrologueSplit split = {}) {
    const int64_t tasks = int64_t(last - first) * p.H;
    if constexpr (kStages)
      if (stages(p, device)) {
        split.asks = split.rounds > 0 || tasks >= kAskFrom * resident(device);
        if (split.asks)
          if (hipError_t error = clear_progress(p, stream, split.rounds > 0); error != hipSuccess) return error;
        return launch(staged_prologue_kernel<T, Policy, K, C, Unbounded>,
                      std::min(tasks, resident(device)), kThreads, sizeof(StagedMemory), stream,
                      Problem(p), first, last, PrologueSplit(split));
      }
    return Base::template direct_prologue<P>(p, stream, tasks, first, last);
  }
  static hipError_t clear_progress(const Problem& p, Stream& stream, bool beside) {
    return launch(clear_progress_kernel<T, Policy, K, C>, beside ? 8 : 1, 256, 0, stream, Problem(p), bool(beside));
  }
  // Rounds from which it is worth a launch that blocks differ in speed.
  static constexpr int64_t kAskFrom = 8;
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
      for (int n = 16; n <= kWide; n *= 2) {
        const int64_t blocks = p.H * p.V / n, others = kPrologueBlocks * (sms - blocks);
        if (p.V % n != 0 || others <= 0) continue;
        const double walk = beside_step_time(n) * double(p.NC), beside = walk / kRoundTime * double(others);
        const int64_t rounds = int64_t(std::max(0.0, double(tasks) - beside)) / round;
        for (int64_t r = std::max(rounds, int64_t(1)); r <= rounds + 1; ++r) {
          const double rest = kRoundTime * double(std::max(tasks - r * round, int64_t(0))) / double(others);
          const double all = kRoundTime * double(r) + std::max(walk, rest);
          if (all >= least) continue;
          least = all;
          best = {n, {true, int(r), int(sms - blocks), int(sms)}};
        }
      }
    }
    return best;
  }
  // us on an H200, where both run: three tasks of the prologue on one multiprocessor, and a chunk with n rows of V.
  static constexpr double kRoundTime = 12.0;
  static double beside_step_time(int n) { return n == 16 ? 0.85 : n == 32 ? 1.08 : n == 64 ? 1.55 : 2.55; }

  static std::string run_beside(const Problem& p, Stream& stream, const Device& device, const Beside& plan) {
    if constexpr (kHopper && kStages) {
      KDA_TRY(prologue(p, stream, device, 0, int(p.NC), plan.split));
      KDA_TRY(hopper_walk(plan.width, p, stream, 0, int(p.NC), {true, 0, device.multiprocessors}));
    }
    return "";
  }

  static constexpr bool kOneLaunch = true;
  static constexpr auto kSecondPass = second_pass_kernel<T, WidePolicy, K, C>;
  static constexpr size_t kSecondBytes = sizeof(typename Prologue<T, WidePolicy, K, C, true>::Shared);
  static std::string second_pass(const Problem& p, Stream& stream, int64_t blocks) {
    KDA_TRY(launch(kSecondPass, blocks, kThreads, kSecondBytes, stream, Problem(p)));
    return "";
  }

  static std::string prepare_walks(const Device& device) {
    KDA_TRY(allow(kSecondPass, kSecondBytes));
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
        // Where there are many sequences even a long one is not what all wait for, and so many blocks that only start
        // and return take longer than the walk.
        if (heads * (p.V / kNarrow) <= 4 * sms) {
          plan.other = kWide;
          if (hipError_t error = hopper_walk<kNarrow, true>(p, stream, first, last, plan); error != hipSuccess)
            return error;
          plan.other = kNarrow;
        }
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
    return Base::template simple_walk<Policy>(p, stream, slices, first, last);
  }
};

}  // namespace KDA_ISA
}  // namespace kda
