// The launches on NVIDIA: a prologue that brings its inputs early, walks of which several warps or warpgroups share a
// block, and on Hopper one that runs beside the prologue.
#pragma once

#include <algorithm>

#include "hopper_walk.h"
#include "launches.h"
#include "nvidia_prologue.h"
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
  // N rows of V in a block, and as many chunks ahead as fit.
  static constexpr int hopper_stages(int n) { return n == 64 ? 3 : 2; }
  template <int N>
  using HopperMemory = HopperWalkMemory<Staged, K, C, N, hopper_stages(N)>;
  template <int N>
  static constexpr auto kHopperWalk = hopper_walk_kernel<Staged, Policy, K, C, N, hopper_stages(N)>;
  template <int N>
  static hipError_t hopper_walk(const Problem& p, Stream& stream, int64_t blocks, int first, int last, bool beside) {
    const int64_t units = p.N * p.H * (p.V / N);
    return launch(kHopperWalk<N>, std::min(units, blocks), HopperThreads<N>::kAll, sizeof(HopperMemory<N>), stream,
                  Problem(p), first, last, HopperPlan{beside});
  }
  static hipError_t hopper_walk(int width, const Problem& p, Stream& stream, int64_t blocks, int first, int last,
                                bool beside) {
    return width == 64 ? hopper_walk<64>(p, stream, blocks, first, last, beside)
                       : hopper_walk<128>(p, stream, blocks, first, last, beside);
  }

  using StagedMemory = StagedPrologueMemory<T, Policy, K, C, Unbounded>;
  static constexpr bool kStages = K == 128 && C == 64 && !Unbounded;
  static constexpr size_t kReserved = 1024;  // by CUDA, of each block
  static bool stages(const Problem& p, const Device& device) {
    return kStages && p.g.type == p.q.type &&
           size_t(device.all_shared_bytes) >= kPrologueBlocks * (sizeof(StagedMemory) + kReserved);
  }

  static hipError_t prologue(const Problem& p, Stream& stream, const Device& device, int first,
                             int last, PrologueSplit split = {-1, 0, 0, 1}) {
    const int64_t tasks = int64_t(last - first) * p.H;
    if constexpr (kStages)
      if (stages(p, device))
        return launch(staged_prologue_kernel<T, Policy, K, C, Unbounded>,
                      std::min(tasks, resident(device)), kThreads, sizeof(StagedMemory), stream,
                      Problem(p), first, last, PrologueSplit(split));
    return Base::template direct_prologue<P>(p, stream, tasks, first, last);
  }
  static int64_t resident(const Device& device) { return kPrologueBlocks * device.multiprocessors; }

  // A walk takes the multiprocessors that it needs as soon as they are free. The prologue leaves them after some rounds,
  // so that the rest of it is done on the others before the walk is through. Blocks with all rows of V may take several
  // units in turn; with few for each those of the last ones come too late. `width`: 0, not so.
  struct Beside {
    int width = 0, blocks = 0;
    PrologueSplit split;
  };
  static Beside beside(const Problem& p, const Device& device, int64_t slab) {
    Beside best;
    if constexpr (kHopper && kStages) {
      const int64_t tasks = p.NC * p.H, round = resident(device), sms = device.multiprocessors;
      if (!device.wgmma || !stages(p, device) || p.groups > 1 || slab < p.NC || p.N > kOrdered || tasks <= round)
        return best;
      double least = 1e30;
      auto unit = [&](int n) { return hopper_step_time(n) * double(p.NC) / double(p.N) + kUnitTime; };
      auto consider = [&](int n, int64_t blocks) {
        const int64_t units = p.N * p.H * p.V / n, others = kPrologueBlocks * (sms - blocks);
        if (p.V % n != 0 || others <= 0) return;
        const double walk = unit(n) * double((units + blocks - 1) / blocks);
        const int64_t rounds = int64_t(std::max(0.0, double(tasks) - walk / kRoundTime * double(others))) / round;
        for (int64_t r = std::max(rounds, int64_t(1)); r <= rounds + 1; ++r) {
          const double rest = kRoundTime * double(std::max(tasks - r * round, int64_t(0))) / double(others);
          const double all = kRoundTime * double(r) + std::max(walk, rest);
          if (all >= least) continue;
          least = all;
          best = {n, int(blocks), {int(std::min(r * round, tasks)), int(sms - blocks), int(sms),
                                   std::max(1, int(blocks) * n / p.V)}};
        }
      };
      if (p.N == 1) {
        for (int n = 64; n <= 128; n *= 2) consider(n, p.H * p.V / n);
      } else {
        const int64_t units = p.N * p.H * p.V / 128;
        for (int64_t blocks = 8; blocks <= units / kTurns && blocks < sms; ++blocks) consider(128, blocks);
        const double apart = kRoundTime * double(tasks) / double(round) + unit(128) * double((units + sms - 1) / sms);
        if (least > 0.97 * apart) best.width = 0;
      }
    }
    return best;
  }
  // us on an H200: three tasks of the prologue on one multiprocessor; where a block begins and ends a unit.
  static constexpr double kRoundTime = 14.5, kUnitTime = 2.5;
  static constexpr int kTurns = 8;  // of a block, at least

  static std::string run_beside(const Problem& p, Stream& stream, const Device& device, const Beside& plan) {
    if constexpr (kHopper && kStages) {
      KDA_TRY(launch(clear_progress_kernel<T, Policy, K, C>, 8, 256, 0, stream, Problem(p)));
      KDA_TRY(prologue(p, stream, device, 0, int(p.NC), plan.split));
      KDA_TRY(hopper_walk(plan.width, p, stream, plan.blocks, 0, int(p.NC), true));
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
        KDA_TRY(allow(kHopperWalk<64>, sizeof(HopperMemory<64>)));
        KDA_TRY(allow(kHopperWalk<128>, sizeof(HopperMemory<128>)));
      }
    }
    return "";
  }

  // On Hopper 64 rows of V in a block, so that a step is short, as long as there is a block for each multiprocessor; else
  // 128, whose operands are brought once.
  static hipError_t walk(const Problem& p, Stream& stream, const Device& device, int first,
                         int last) {
    const int64_t heads = p.N * p.H, slices = heads * (p.V / kTile), sms = device.multiprocessors;
    if constexpr (kHopper) {
      if (device.wgmma) {
        const int width = p.V % 128 == 0 && heads * (p.V / 64) > sms ? 128 : 64;
        if (p.V % width == 0) return hopper_walk(width, p, stream, sms, first, last, false);
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
