// The walk on Hopper's wgmma (sm_90a), for calls with enough slices: a warpgroup holds 64 rows of the state in
// registers, four slices, and reads its right operands where the bulk copies put them. Warps meet only where
// a stage is filled again.
#pragma once

#include "kernels.h"
#include "nvidia_async.h"
#include "wgmma.h"

namespace kda {
inline namespace KDA_ISA {

constexpr int kGroupSlices = 4;  // of a warpgroup

template <class Tiles, int K, int C, int Groups, int Stages>
struct HopperWalkMemory {
  WalkStage<Tiles, K, C, kGroupSlices * Groups> stage[Stages];
  Barrier full[Stages], empty[Stages];
};

template <class Tiles, class Policy, int K, int C, int Groups, int Stages>
__global__ void __launch_bounds__(kGroupSlices* Groups * 32, 1)
    hopper_walk_kernel(KDA_PARAMETER Problem p, int slab_first, int slab_last) {
#if defined(KDA_HAS_WGMMA)
  using S = Schedule<Tiles, Policy, K, C>;
  using W = typename S::W;
  using Acc = typename Tiles::Acc;
  using Layout = typename S::Layout;
  using Decay = typename Policy::Decay;
  using Bounded = typename Policy::Bounded;
  constexpr int NT = C / kTile, KT = K / kTile, kSlices = kGroupSlices * Groups;

  extern __shared__ __attribute__((aligned(128))) char memory[];
  auto& m = *reinterpret_cast<HopperWalkMemory<Tiles, K, C, Groups, Stages>*>(memory);
  const S s{p, slab_first, slab_last};
  const int parts = p.V / kTile / kSlices;
  const int64_t row = blockIdx.x / parts, seq = row / p.H;
  const int head = int(row % p.H), first_slice = int(blockIdx.x % parts) * kSlices;
  const typename S::Range range = s.range_in_slab(seq);
  const int first = int(range.first), count = int(range.last - range.first);
  if (count <= 0) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Stages; ++i) m.full[i].init(1), m.empty[i].init(kSlices);
    Barrier::fence_init();
  }
  __syncthreads();

  auto fetch = [&](int n) {
    if (n >= count || threadIdx.x != 0) return;
    Barrier& full = m.full[n % Stages];
    if (n >= Stages) m.empty[n % Stages].wait((n / Stages - 1) & 1);
    full.expect(m.stage[0].kBytes);
    m.stage[n % Stages].fetch(
        s, first + n, head, first_slice,
        [&](void* to, const void* from, int bytes) { full.copy(to, from, bytes); });
  };
  for (int n = 0; n < Stages - 1; ++n) fetch(n);

  const int wave = wave_index<Tiles>();
  const int slice = first_slice + wave;
  typename S::State state;
  s.load(state, s.entry(seq, head, range.from_start), slice);
  for (int n = 0; n < count; ++n) {
    fetch(n + Stages - 1);  // into the stage of the step before
    m.full[n % Stages].wait(n / Stages & 1);
    const auto& stage = m.stage[n % Stages];
    const auto* operands = stage.operands;
    const ChunkRow chunk = stage.row;

    Acc d[NT], o[NT];
    typename W::StateOperands packed;
    KDA_UNROLL
    for (int t = 0; t < KT; ++t) packed[t] = Tiles::template left<Decay>(state.s[t]);
    KDA_UNROLL
    for (int i = 0; i < NT; ++i) {
      d[i] = Tiles::template load_acc<Bounded>(stage.u + wave * stage.kSliceElements +
                                               i * kTileElements);
      Tiles::zero(o[i]);
    }
    wgmma::fence();
    KDA_UNROLL
    for (int t = 0; t < KT; ++t)
      wgmma::product<Decay>(d, packed[t], wgmma::Matrix(operands, Layout::w(0, t)));
    wgmma::commit();
    KDA_UNROLL
    for (int t = 0; t < KT; ++t)
      wgmma::product<Decay>(o, packed[t], wgmma::Matrix(operands, Layout::qg(0, t)));
    wgmma::commit();
    KDA_UNROLL
    for (int t = 0; t < KT; ++t) W::decay_tile(state.s[t], stage.decay, t);
    wgmma::wait<1>(d);
    typename Tiles::template Left<Bounded> v[NT];
    KDA_UNROLL
    for (int i = 0; i < NT; ++i) {
      v[i] = Tiles::template left_clamped<Bounded>(d[i]);
      W::watch(state.beyond, d[i], stage.beyond[i], chunk.first + i * kTile);
    }
    wgmma::wait<0>(o);
    wgmma::fence();
    KDA_UNROLL
    for (int j = 0; j < NT; ++j)
      wgmma::product<Bounded>(state.s, v[j], wgmma::Matrix(operands, Layout::kg(0, j)));
    wgmma::commit();
    // A triangle of tiles is more than one wgmma can skip; it goes the other way meanwhile.
    KDA_UNROLL
    for (int i = 0; i < NT; ++i)
      Tiles::mma(o[i], i + 1, [&](int j) -> decltype(auto) { return (v[j]); },
                 [&](int j) {
                   return Tiles::template load_blob_right<Bounded>(operands, Layout::aqk(i, j));
                 });
    wgmma::wait<0>(state.s);
    if (Tiles::lane() == 0) m.empty[n % Stages].arrive();
    KDA_UNROLL
    for (int i = 0; i < NT; ++i)
      Tiles::store_transposed(
          p.out, row_offset(chunk.first + i * kTile, head, p.H, p.V) + slice * kTile,
          int64_t(p.H) * p.V, p.scale, o[i], chunk.valid - i * kTile);
    s.save_checkpoint(state, chunk, head, slice);
  }
  s.leave(state, seq, head, slice);
#endif
}

}  // namespace KDA_ISA
}  // namespace kda
