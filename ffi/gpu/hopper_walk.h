// The walk on Hopper's wgmma (sm_90a), chunks of 64. A block has N rows of V of one (sequence, head); the state is
// held transposed, so that tokens and channels are the 64 rows of a product and V its columns, few or many:
//
//   r = v + (-kd) S^T,   v' = inverse r,   S^T = diag(2^G_last) S^T + kg^T v',   o = qg S^T + Aqk v'
//
// One warpgroup carries the state through these, another brings the operands and makes the outputs.
// What one product leaves in registers goes to shared memory, in 16 bits, as right operand of the next.
// A block takes several units (hopper_units.h); chunks are numbered through all of them.
#pragma once

#include "hopper_lanes.h"
#include "hopper_memory.h"
#include "hopper_units.h"
#include "kernels.h"

namespace kda {
inline namespace KDA_ISA {

constexpr int kHopperThreads = 2 * 128;

template <class Tiles, class Policy, int K, int C, int N, int Stages, bool Packs>
__global__ void __launch_bounds__(kHopperThreads, 1)
    hopper_walk_kernel(KDA_PARAMETER Problem p, int slab_first, int slab_last, HopperPlan plan) {
#if defined(KDA_HAS_WGMMA)
  using S = Schedule<Tiles, Policy, K, C>;
  using W = typename S::W;
  using Layout = typename S::Layout;
  using Decay = typename Policy::Decay;
  using Bounded = typename Policy::Bounded;
  using Lanes = HopperLanes<N>;
  using Io = typename Tiles::IoType;
  static_assert(C == 64 && Policy::kNarrow, "");
  constexpr int NT = C / kTile, KT = K / kTile, M = K / 64, R = N / 2;

  extern __shared__ __attribute__((aligned(128))) char memory[];
  auto& m = *reinterpret_cast<HopperWalkMemory<Tiles, K, C, N, Stages>*>(memory);
  const S s{p, slab_first, slab_last};
  if (threadIdx.x == 0) {
    for (int i = 0; i < Stages; ++i) m.full[i].init(1), m.values_full[i].init(128), m.empty[i].init(256);
    m.state_ready.init(128), m.state_read.init(128), m.residual_done.init(128);
    m.delta_ready.init(128), m.delta_read.init(128);
    Barrier::fence_init();
  }
  for (int i = 0; i < Stages; ++i) m.stage[i].clear();
  wgmma::publish();
  let_next_start();
  if (Packs) order_sequences(s, m.order);
  if (!plan.beside) wait_for_previous();
  __syncthreads();
  if (Packs && plan.other && !is_chosen(s, plan, N, s.seq_row(m.order[0]).num_chunks)) return;
  using Units = HopperUnits<S, N, Packs>;
  const Units units{s, m.order};

  const int wave = wave_index<Tiles>(), warp = wave % 4, g = Lanes::group();
  auto warpgroup_barrier = [] { asm volatile("bar.sync 1, 128;" ::: "memory"); };  // of the state's

  if (wave >= 4) {  // ---- operands and outputs ----
    const int thread = int(threadIdx.x) - 128;
    HopperUnit unit;  // whose chunk `ahead` is the next to be brought
    int index = 0, ahead = 0, fetched = 0, there = 0;
    bool more = units.find(index, unit);
    auto fetch = [&](const ChunkRow& chunk) {
      const int n = fetched % Stages;
      auto& stage = m.stage[n];
      stage.fetch_values(p, chunk, unit.head, unit.first_value, thread);
      if (plan.beside && warp == 0 && there <= ahead)
        there = wait_until_there(s.is_there(unit.first, unit.head), ahead, there, unit.count);
      if (thread == 0) {
        stage.head = unit.head, stage.first_value = unit.first_value;
        stage.fetch(s, unit.first + ahead, unit.head, m.full[n]);
      }
      CopyByAll::commit();
      ++fetched;
      if (++ahead < unit.count) return;
      ahead = 0, more = units.find(++index, unit);
    };
    // A group of copies of v for each chunk; `left` groups may follow that of chunk n.
    auto values_are_here = [&](int n, auto left) {
      if (n + decltype(left)::value < fetched) {
        CopyByAll::wait<decltype(left)::value>();
      } else {
        CopyByAll::wait<0>();
      }
      m.values_full[n % Stages].arrive();
    };
    while (more && fetched < Stages) fetch(s.chunk_row(unit.first + ahead));
    if (fetched > 0) values_are_here(0, std::integral_constant<int, Stages - 1>{});
    float o[R];
    for (int n = 0; n < fetched; ++n) {
      const auto& stage = m.stage[n % Stages];
      ChunkRow next = {};
      if (more) next = s.chunk_row(unit.first + ahead);
      m.full[n % Stages].wait(n / Stages & 1);
      m.state_ready.wait(n & 1);
      m.residual_done.wait(n & 1);  // the state's product goes first: it is waited for
      wgmma::fence();
      KDA_UNROLL
      for (int t = 0; t < KT; ++t)
        wgmma::product<Decay>(o, stage.left(Layout::qg(0, t)), m.state.right(t), t > 0);
      wgmma::commit();
      wgmma::wait<0>(o);
      m.state_read.arrive();
      if (n + 1 < fetched) values_are_here(n + 1, std::integral_constant<int, Stages - 2>{});
      const ChunkRow chunk = stage.row;
      const int head = stage.head, first_value = stage.first_value;
      m.delta_ready.wait(n & 1);
      wgmma::fence();
      KDA_UNROLL
      for (int j = 0; j < NT; ++j)
        wgmma::product<Bounded>(o, stage.triangle(0, j), m.delta.right(j), true);
      wgmma::commit();
      wgmma::wait<0>(o);
      m.delta_read.arrive();
      m.empty[n % Stages].arrive();
      KDA_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int token = warp * kTile + 2 * g + i;
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
      if (more) {
        m.empty[n % Stages].wait(n / Stages & 1);
        fetch(next);
      }
    }
    return;
  }

  // ---- the state ----
  // Registers 4 j + 2 i + e of state[a] have a channel of tile(i), of its first or second eight as half(a, i) says:
  // with two products of 64 channels each has one half of all tiles, so that a lane's channels are near each other.
  float state[M][R], x[R];  // x: r, then v'
  auto tile = [&](int i) { return M == 2 ? 2 * warp + i : warp; };
  auto half = [&](int a, int i) { return M == 2 ? a : i; };
  auto place = [&](int a, int i) { return tile(i) * kTile + 8 * half(a, i) + g; };
  auto publish_state = [&] {
    KDA_UNROLL
    for (int a = 0; a < M; ++a)
      m.state.store(2 * tile(0) + half(a, 0), 2 * tile(1) + half(a, 1), [&](int r) {
        return Tiles::template pack<Decay>(state[a][r], state[a][r + 1]);
      });
    wgmma::publish();
    m.state_ready.arrive();
    warpgroup_barrier();
  };

  using Access = StateAccess<K, N>;
  // x starts as v.
  auto load_values = [&](int n) {
    m.full[n % Stages].wait(n / Stages & 1);
    m.values_full[n % Stages].wait(n / Stages & 1);
    const auto& stage = m.stage[n % Stages];
    KDA_UNROLL
    for (int i = 0; i < 2; ++i)
      KDA_UNROLL
      for (int b = 0; b < Lanes::kBlocks; ++b) {
        const int row = warp * kTile + 2 * g + i, value = Lanes::value(b);
        uint32_t words[Lanes::kWidth / 2];
        load_words(words, stage.values + stage.place(row, value / 8) + value % 8);
        KDA_UNROLL
        for (int c = 0; c < Lanes::kWidth; ++c)
          x[Lanes::reg(b, c, i)] = Tiles::template unpack<Io>(words[c / 2], c & 1);
      }
  };
  // Packs x as right operand; the first token of each slice of V that fp16 does not hold, when there is one.
  int32_t beyond[Lanes::kBlocks];
  auto publish_narrow = [&](RightMatrices<C, N>& to, const ChunkRow& chunk) {
    uint32_t most = 0;
    to.store(2 * warp, 2 * warp + 1, [&](int r) {
      const uint32_t packed = Tiles::pack_clamped(x[r], x[r + 1]);
      asm("{.reg .b32 a;\n\tabs.f16x2 a, %1;\n\tmax.f16x2 %0, %0, a;}" : "+r"(most) : "r"(packed));
      return packed;
    });
    wgmma::publish();
    if ((most & 0xffff) >= 0x7bff || most >> 16 >= 0x7bff) {
      KDA_UNROLL
      for (int i = 1; i >= 0; --i)
        KDA_UNROLL
        for (int b = 0; b < Lanes::kBlocks; ++b)
          KDA_UNROLL
          for (int c = 0; c < Lanes::kWidth; ++c)
            if (fabsf(x[Lanes::reg(b, c, i)]) > kLargest)
              beyond[b] = min(beyond[b], chunk.first + warp * kTile + 2 * g + i);
    }
  };

  // The chunks of a unit from n on; returns the next one's number.
  auto walk_unit = [&](const HopperUnit& unit, int n) {
    const Access access{W::strides(p), unit.first_value, warp, m.scratch(warp)};
    access.load(state, s.entry(unit.seq, unit.head, unit.from_start));
    if (n > 0) m.state_read.wait((n - 1) & 1);
    publish_state();
    KDA_UNROLL
    for (int b = 0; b < Lanes::kBlocks; ++b) beyond[b] = kNone;
    load_values(n);
    const int end = n + unit.count;
    for (; n < end; ++n) {
      if constexpr (Packs) n = same_in_warp(n);
      const auto& stage = m.stage[n % Stages];
      const ChunkRow chunk = stage.row;
      wgmma::fence();
      KDA_UNROLL
      for (int t = 0; t < KT; ++t)
        wgmma::product<Decay>(x, stage.left(Layout::kd(0, t)), m.state.right(t), true);
      wgmma::commit();
      KDA_UNROLL
      for (int a = 0; a < M; ++a) {
        const float decay[2] = {stage.decay[place(a, 0)], stage.decay[place(a, 1)]};
        KDA_UNROLL
        for (int r = 0; r < R; ++r) state[a][r] *= decay[r >> 1 & 1];
      }
      const int32_t from_prologue = stage.beyond[warp];
      wgmma::wait<0>(x);
      m.residual_done.arrive();
      publish_narrow(m.residual, chunk);
      warpgroup_barrier();
      wgmma::fence();
      KDA_UNROLL
      for (int j = 0; j < NT; ++j)
        wgmma::product<Bounded>(x, stage.triangle(1, j), m.residual.right(j), j > 0);
      wgmma::commit();
      wgmma::wait<0>(x);
      if (n > 0) m.delta_read.wait((n - 1) & 1);
      publish_narrow(m.delta, chunk);
      m.delta_ready.arrive();
      warpgroup_barrier();
      wgmma::fence();
      KDA_UNROLL
      for (int j = 0; j < NT; ++j)
        KDA_UNROLL
        for (int a = 0; a < M; ++a)
          wgmma::product<Bounded>(state[a],
                                  stage.left(Layout::kg(0, j), M * 128).at(128 * a),
                                  m.delta.right(j), true);
      wgmma::commit();
      if (n + 1 < end) load_values(n + 1);
      KDA_UNROLL
      for (int b = 0; b < Lanes::kBlocks; ++b) beyond[b] = min(beyond[b], from_prologue);
      KDA_UNROLL
      for (int a = 0; a < M; ++a) wgmma::wait<0>(state[a]);
      m.empty[n % Stages].arrive();
      if (float* to = s.checkpoint_state(chunk.checkpoint, unit.head)) access.store(state, to, ~0u);
      if (n + 1 < end) {
        m.state_read.wait(n & 1);
        publish_state();
      }
    }
    if (plan.beside) wait_for_previous();  // the status is cleared before, and who waits for this launch waits for that one
    // In a pool a slice goes on to where it is written or not as a whole, and its warps have met different tokens.
    float* leaves = nullptr;
    unsigned slices = 0;
    for (int i = 0; i < N / kTile; ++i) {
      int any = 0;
      if (p.in_pool) {
        KDA_UNROLL
        for (int b = 0; b < Lanes::kBlocks; ++b)
          any |= Lanes::value(b) / kTile == i && beyond[b] != kNone;
        asm volatile("{.reg .pred mine, all;\n\tsetp.ne.b32 mine, %0, 0;\n\t"
                     "barrier.red.or.pred all, 1, 128, mine;\n\tselp.b32 %0, 1, 0, all;}"
                     : "+r"(any)::"memory");
      }
      if (float* to = s.exit(unit.seq, unit.head, unit.first_value / kTile + i, any)) leaves = to, slices |= 1u << i;
    }
    if (leaves) access.store(state, leaves, slices);
    KDA_UNROLL
    for (int b = 0; b < Lanes::kBlocks; ++b)
      s.report(beyond[b], unit.seq, unit.head, (unit.first_value + Lanes::value(b)) / kTile);
    return end;
  };
  HopperUnit unit;
  int index = 0, n = 0;
  if constexpr (Units::kTurns) {
    for (; units.find(index, unit); ++index) n = walk_unit(unit, n);
  } else {
    if (units.find(index, unit)) walk_unit(unit, n);
  }
#endif
}

}  // namespace KDA_ISA
}  // namespace kda
