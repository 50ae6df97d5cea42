// The walk on Hopper's wgmma (sm_90a), chunks of 64. A block has N rows of V of one (sequence, head); they are the rows of
// all products, with tokens or channels as columns:
//
//   r^T = v^T + S (-kd)^T,   v'^T = r^T inverse^T,   S = S diag(2^G_last) + v'^T kg,   o^T = S qg^T + v'^T Aqk^T
//
// A warpgroup for 64 rows of V does this in its registers (hopper_carrier.h); warps of another bring the operands
// (hopper_operands.h). A block may take several units (hopper_units.h); chunks are numbered through all of them.
#pragma once

#include "hopper_carrier.h"
#include "hopper_operands.h"

namespace kda {
inline namespace KDA_ISA {

// So many registers for each thread of the warpgroup; below 0: fewer than it has.
template <int Count>
KDA_FN void registers() {
  if constexpr (Count < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(-Count));
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
  }
}

template <class Tiles, class Policy, int K, int C, int N, int Stages>
__global__ void __launch_bounds__(HopperThreads<N>::kAll, 1)
    hopper_walk_kernel(KDA_PARAMETER Problem p, int slab_first, int slab_last, HopperPlan plan) {
#if defined(KDA_HAS_WGMMA)
  using S = Schedule<Tiles, Policy, K, C>;
  using Threads = HopperThreads<N>;
  using Memory = HopperWalkMemory<Tiles, K, C, N, Stages>;
  using Units = HopperUnits<S, N>;
  extern __shared__ __attribute__((aligned(128))) char memory[];
  auto& m = *reinterpret_cast<Memory*>(memory);
  const S s{p, slab_first, slab_last};
  if (threadIdx.x == 0) m.init();
  for (int i = 0; i < Stages; ++i) m.stage[i].clear();
  wgmma::publish();
  let_next_start();
  const bool ordered = p.N <= kOrdered;
  if (ordered) m.order.make(s);
  __syncthreads();
  if (!plan.beside) wait_for_previous();

  const int wave = wave_index<Tiles>();
  if (wave * 32 >= Threads::kCarrying) {
    if constexpr (Threads::kMoves) registers<-Threads::kOperandRegisters>();
    HopperOperands<Memory, S, Units> operands{s, m, Units{s, ordered ? &m.order : nullptr}, plan.beside};
    if (wave % 4 == 0) operands.start();
    if (wave % 4 == 1) operands.for_outputs();
    if (wave % 4 == 2) operands.for_state();
  } else {
    if constexpr (Threads::kMoves) registers<Threads::kCarrierRegisters>();
    HopperCarrier<Tiles, Policy, K, C, N, Stages> carrier{s, m, wave};
    for (int n = 0;;) {
      m.start_full[n % Stages].wait(n / Stages & 1);
      const HopperUnit unit = same_in_warp(m.stage[n % Stages].unit);
      if (unit.count == 0) break;
      n = carrier.walk(unit, n);
    }
    // The status was cleared before, and who waits for this launch waits for that one.
    if (plan.beside) wait_for_previous();
  }
#endif
}

}  // namespace KDA_ISA
}  // namespace kda
