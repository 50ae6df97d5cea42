// The walk on Hopper's wgmma (sm_90a), chunks of 64. A block has N rows of V of one (sequence, head); the state is
// held transposed, so that tokens and channels are the 64 rows of a product and V its columns, few or many:
//
//   r = v + (-kd) S^T,   v' = inverse r,   S^T = diag(2^G_last) S^T + kg^T v',   o = qg S^T + Aqk v'
//
// One or two warpgroups carry the state through these, another makes the outputs, and warps bring the operands.
// What one product leaves in registers goes to shared memory, in 16 bits, as right operand of the next.
// A block may take several units (hopper_units.h); chunks are numbered through all of them.
#pragma once

#include "hopper_carrier.h"
#include "hopper_operands.h"

namespace kda {
inline namespace KDA_ISA {

template <class Tiles, class Policy, int K, int C, int N, int Stages, bool Packs>
struct HopperOutputs {
  using S = Schedule<Tiles, Policy, K, C>;
  using Layout = typename S::Layout;
  using Lanes = HopperLanes<N>;
  using Io = typename Tiles::IoType;

  static KDA_FN void make(const Problem& p, HopperWalkMemory<Tiles, K, C, N, Stages>& m, int count, int warp) {
    float o[N / 2];
    for (int n = 0; Packs || n < count; ++n) {
      const auto& stage = m.stage[n % Stages];
      m.for_outputs_full[n % Stages].wait(n / Stages & 1);
      const ChunkRow chunk = stage.output_row;
      const int head = Packs ? same_in_warp(stage.output_head) : stage.output_head, first_value = stage.output_value;
      if (Packs && head < 0) break;
      m.state_ready.wait(n & 1);
      m.start_empty[n % Stages].wait(n / Stages & 1);  // the state's product goes first: it is waited for
      wgmma::fence();
      KDA_UNROLL
      for (int t = 0; t < K / kTile; ++t)
        wgmma::product<typename Policy::Decay>(o, stage.left(Layout::qg(0, t)), m.state[0].right(t), t > 0);
      wgmma::commit();
      wgmma::wait<0>(o);
      m.state_read.arrive();
      m.delta_ready.wait(n & 1);
      wgmma::fence();
      KDA_UNROLL
      for (int j = 0; j < C / kTile; ++j)
        wgmma::product<typename Policy::Bounded>(o, stage.triangle(0, j), m.delta[0].right(j), true);
      wgmma::commit();
      wgmma::wait<0>(o);
      m.delta_read.arrive();
      m.for_outputs_empty[n % Stages].arrive();
      KDA_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int token = warp * kTile + 2 * Lanes::group() + i;
        if (token >= chunk.valid) continue;
        auto* to = static_cast<uint16_t*>(p.out) + row_offset(chunk.first + token, head, p.H, p.V) + first_value;
        KDA_UNROLL
        for (int b = 0; b < Lanes::kBlocks; ++b) {
          uint32_t packed[Lanes::kWidth / 2];
          KDA_UNROLL
          for (int c = 0; c < Lanes::kWidth; c += 2)
            packed[c / 2] = Tiles::template pack<Io>(p.scale * o[Lanes::reg(b, c, i)],
                                                     p.scale * o[Lanes::reg(b, c + 1, i)]);
          store_words(to + Lanes::value(b), packed);
        }
      }
    }
  }
};

// So many registers for each thread of the warpgroup; below 0: fewer than it has.
template <int Count>
KDA_FN void registers() {
  if constexpr (Count < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(-Count));
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
  }
}

template <class Tiles, class Policy, int K, int C, int N, int Stages, bool Packs>
__global__ void __launch_bounds__(HopperThreads<N>::kAll, 1)
    hopper_walk_kernel(KDA_PARAMETER Problem p, int slab_first, int slab_last, HopperPlan plan) {
#if defined(KDA_HAS_WGMMA)
  using S = Schedule<Tiles, Policy, K, C>;
  using Threads = HopperThreads<N>;
  extern __shared__ __attribute__((aligned(128))) char memory[];
  using Memory = HopperWalkMemory<Tiles, K, C, N, Stages>;
  using Units = HopperUnits<S, N, Packs>;
  auto& m = *reinterpret_cast<Memory*>(memory);
  const S s{p, slab_first, slab_last};
  if (threadIdx.x == 0) m.init();
  for (int i = 0; i < Stages; ++i) m.stage[i].clear();
  wgmma::publish();
  let_next_start();
  const bool ordered = Packs && p.N <= kOrdered;
  if (ordered) m.order.make(s);
  __syncthreads();
  if (Packs && plan.other && !is_chosen(s, plan, N, m.order.count[0])) {
    wait_for_previous();  // who waits for this launch waits for that one
    return;
  }
  const Units units{s, ordered ? &m.order : nullptr};
  HopperUnit only = {};
  if constexpr (!Packs) only = units.first();

  const int wave = wave_index<Tiles>();
  if (wave * 32 >= Threads::kCarrying + Threads::kOutputs) {
    if constexpr (Threads::kMoves) registers<-Threads::kOperandRegisters>();
    HopperOperands<Memory, S, Units> operands{s, m, units, plan.beside};
    if (wave % 4 == 0) operands.start();
    if (wave % 4 == 1) operands.for_outputs();
    if (wave % 4 == 2) operands.for_state();
  } else if (wave * 32 >= Threads::kCarrying) {
    HopperOutputs<Tiles, Policy, K, C, N, Stages, Packs>::make(p, m, only.count, wave % 4);
  } else {
    if constexpr (Threads::kMoves) registers<Threads::kCarrierRegisters>();
    HopperCarrier<Tiles, Policy, K, C, N, Stages, Packs> carrier{s, m, wave / 4, wave % 4};
    if constexpr (Packs) {
      for (int n = 0;;) {
        m.known[n % Stages].wait(n / Stages & 1);
        const HopperUnit unit = same_in_warp(m.stage[n % Stages].unit);
        if (unit.count == 0) break;
        n = carrier.walk(unit, n);
      }
    } else {
      if (only.count > 0) carrier.walk(only, 0);
    }
    // The status was cleared before, and who waits for this launch waits for that one.
    if (plan.beside) wait_for_previous();
  }
#endif
}

}  // namespace KDA_ISA
}  // namespace kda
