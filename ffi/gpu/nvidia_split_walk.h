// The walk of one slice by two sets of warps, where there is no wgmma: one carries the recurrence, the other
// makes the outputs. Each warp of a set has 16 tokens; between the parts of a step r, v' and the state go
// through shared memory, where the recurrence's warps own some channels of the state each.
#pragma once

#include "kernels.h"
#include "nvidia_async.h"

namespace kda {
inline namespace KDA_ISA {

template <class Tiles, int K, int C, int Stages>
struct SplitWalkMemory {
  Ring<WalkStage<Tiles, K, C>, Stages> ring;
  alignas(128) typename Tiles::Storage state[K / kTile][kTileElements];  // left operands
  alignas(128) typename Tiles::Storage residual[C / kTile][kTileElements];  // r, likewise
  alignas(128) typename Tiles::Storage delta[C / kTile][kTileElements];  // v', likewise
};

template <class Tiles, class Policy, int K, int C, int Stages>
__global__ void __launch_bounds__(2 * C / kTile * Tiles::kWave, 1)
    split_walk_kernel(KDA_PARAMETER Problem p, int slab_first, int slab_last) {
  using S = Schedule<Tiles, Policy, K, C>;
  using W = typename S::W;
  using Acc = typename Tiles::Acc;
  using Decay = typename Policy::Decay;
  using Bounded = typename Policy::Bounded;
  using Layout = typename S::Layout;
  constexpr int NT = C / kTile, KT = K / kTile, kOwn = KT / NT;
  static_assert(kOwn % 2 == 0, "a warp stores pairs of channel tiles");

  extern __shared__ __attribute__((aligned(128))) char memory[];
  auto& m = *reinterpret_cast<SplitWalkMemory<Tiles, K, C, Stages>*>(memory);
  const S s{p, slab_first, slab_last};
  const int slices = p.V / kTile, slice = int(blockIdx.x % slices);
  const int64_t row = blockIdx.x / slices, seq = row / p.H;
  const int head = int(row % p.H);
  const typename S::Range range = s.range_in_slab(seq);
  const int first = int(range.first), count = int(range.last - range.first);
  if (count <= 0) {
    after_previous();  // who waits for this launch waits for that one
    return;
  }

  m.ring.init();
  after_previous();
  for (int n = 0; n < Stages; ++n) m.ring.fetch(n, count, s, first, head);

  const int wave = wave_index<Tiles>(), part = wave % NT, tile = part * kOwn;
  const bool recurrence = wave < NT;
  const typename W::Strides strides = W::strides(p);
  int32_t beyond = kNone;
  Acc own[kOwn];  // channel tiles tile.. of the state
  auto publish = [&] {
    KDA_UNROLL
    for (int j = 0; j < kOwn; ++j)
      Tiles::store(m.state[tile + j], Tiles::template left<Decay>(own[j]));
  };
  auto save = [&](float* to) {
    KDA_UNROLL
    for (int j = 0; j < kOwn; j += 2)
      W::store_pair(own[j], own[j + 1], to, strides, slice, tile + j);
  };
  if (recurrence) {
    const float* from = s.entry(seq, head, range.from_start);
    KDA_UNROLL
    for (int j = 0; j < kOwn; j += 2) {
      Tiles::zero(own[j]), Tiles::zero(own[j + 1]);
      if (from) W::load_pair(own[j], own[j + 1], from, strides, slice, tile + j);
    }
    publish();
  }

  // What a step takes from its stage is in registers before the barrier behind which it is used: kd or qg and v
  // first, then the inverse, kg or Aqk.
  using Halves = typename Tiles::template Left<Decay>;
  using Others = typename Tiles::template Left<Bounded>;
  Halves ahead[KT];
  typename Tiles::Raw values;
  Acc x;  // r and v', or o
  auto load_ahead = [&](int n) {
    m.ring.wait(n);
    const auto& stage = m.ring[n];
    if (recurrence) values = W::values(p, stage.row, head, slice, part);
    KDA_UNROLL
    for (int t = 0; t < KT; ++t)
      ahead[t] = Tiles::template load_blob<Decay>(
          stage.operands, recurrence ? Layout::kd(part, t) : Layout::qg(part, t), recurrence);
  };
  load_ahead(0);
  __syncthreads();
  for (int n = 0; n < count; ++n) {
    const auto& stage = m.ring[n];
    const ChunkRow chunk = stage.row;
    typename W::StateOperands state;
    KDA_UNROLL
    for (int t = 0; t < KT; ++t) state[t] = Tiles::template load_left<Decay>(m.state[t]);
    Others triangle[NT];
    typename Tiles::template Right<Bounded> second[kOwn * NT];
    KDA_UNROLL
    for (int j = 0; j < NT; ++j) {
      Tiles::zero(triangle[j]);
      if (j <= part)
        triangle[j] = Tiles::template load_blob<Bounded>(
            stage.operands, recurrence ? Layout::inverse(part, j) : Layout::aqk(part, j), recurrence);
    }
    int32_t from_prologue = kNone;
    if (recurrence) {
      x = Tiles::transposed(values);
      W::residual(x, state, [&](int t) { return Tiles::as_right(ahead[t]); });
      W::watch(beyond, x, chunk.first + part * kTile);
      Tiles::store(m.residual[part], Tiles::template left_clamped<Bounded>(x));
      KDA_UNROLL
      for (int j = 0; j < kOwn; ++j) {  // while the product is on its way
        W::decay_tile(own[j], stage.decay, tile + j);
        KDA_UNROLL
        for (int i = 0; i < NT; ++i)
          second[j * NT + i] =
              Tiles::template load_blob_right<Bounded>(stage.operands, Layout::kg(tile + j, i));
      }
      from_prologue = stage.beyond[part];
    } else {
      typename Tiles::template Right<Decay> columns[KT];
      KDA_UNROLL
      for (int t = 0; t < KT; ++t) columns[t] = Tiles::right_of(state[t]);
      W::output_of_state(x, columns, [&](int t) -> decltype(auto) { return (ahead[t]); });
    }
    __syncthreads();
    if (recurrence) {
      Others r[NT];
      KDA_UNROLL
      for (int j = 0; j < NT; ++j) r[j] = Tiles::template load_left<Bounded>(m.residual[j]);
      W::delta(x, r, NT, [&](int j) { return Tiles::as_right(triangle[j]); });
      Tiles::store(m.delta[part], Tiles::template left_clamped<Bounded>(x));
    }
    __syncthreads();
    m.ring.fetch(n + Stages, count, s, first, head);  // nobody needs this stage any more
    Others v[NT];
    KDA_UNROLL
    for (int i = 0; i < NT; ++i) v[i] = Tiles::template load_left<Bounded>(m.delta[i]);
    if (recurrence) {
      KDA_UNROLL
      for (int j = 0; j < kOwn; ++j)
        W::add_tile(own[j], v, NT, [&](int i) -> decltype(auto) { return (second[j * NT + i]); });
      if (n + 1 < count) load_ahead(n + 1);
      publish();
      W::watch_prologue(beyond, from_prologue);
      W::watch(beyond, x, chunk.first + part * kTile);
      if (float* to = s.checkpoint_state(chunk.checkpoint, head)) save(to);
    } else {
      typename Tiles::template Right<Bounded> columns[NT];
      KDA_UNROLL
      for (int i = 0; i < NT; ++i) columns[i] = Tiles::right_of(v[i]);
      W::output_of_chunk(x, columns, NT, [&](int j) -> decltype(auto) { return (triangle[j]); });
      if (n + 1 < count) load_ahead(n + 1);
      W::store_output(p, chunk, head, slice, part, 0, x);
    }
    __syncthreads();
  }
  // A warp writes its channels, whose values depend on all tokens.
  const bool any_beyond = p.in_pool && __syncthreads_or(beyond != kNone);
  if (recurrence) {
    if (float* to = s.exit(seq, head, slice, any_beyond)) save(to);
    s.report(beyond, seq, head, slice);
  }
}

}  // namespace KDA_ISA
}  // namespace kda
