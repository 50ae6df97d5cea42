// The second pass on NVIDIA in one launch, since it nearly always has nothing to do and a launch takes 2 us to say so.
#pragma once

#include "kernels.h"

namespace kda {
inline namespace KDA_ISA {

// Blocks take the prologue's tasks and then the walk's from one queue. Who has one of the walk's waits for the
// prologue's, which are all with blocks that wait for nobody.
template <class Tiles, class Policy, int K, int C>
__global__ void __launch_bounds__(C / kTile * Tiles::kWave) second_pass_kernel(KDA_PARAMETER Problem p) {
  using P = Prologue<Tiles, Policy, K, C, true>;
  using S = Schedule<Tiles, Policy, K, C>;
  constexpr int kWaves = C / kTile;
  extern __shared__ __attribute__((aligned(128))) char memory[];
  __shared__ int claimed;
  auto& shared = *reinterpret_cast<typename P::Shared*>(memory);
  const S s{p, 0, p.NC};
  let_next_start();
  fill(s);  // which nothing else of the call writes
  wait_for_previous();
  const int tasks = int(p.NC) * p.H, wave = wave_index<Tiles>();
  if (tasks == 0 || *s.status() == 0) return;
  const int64_t walks = p.N * p.H * (p.V / kTile);
  while (true) {
    if (threadIdx.x == 0) claimed = atomicAdd(&s.progress().second_task, 1);
    __syncthreads();
    const int i = claimed;
    if (i < tasks) {
      prologue_task<P>(s, i / p.H, i % p.H, wave, shared);
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) atomicAdd(&s.progress().second_done, 1);
      continue;
    }
    const int64_t walk = int64_t(i - tasks) * kWaves;
    if (walk >= walks) return;
    if (threadIdx.x == 0)
      while (*static_cast<volatile int*>(&s.progress().second_done) < tasks) __nanosleep(100);
    __threadfence();
    __syncthreads();
    if (walk + wave < walks) walk_slice(s, walk + wave);
    __syncthreads();
  }
}

}  // namespace KDA_ISA
}  // namespace kda
