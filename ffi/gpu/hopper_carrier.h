// Who carries the state through the walk on Hopper (hopper_walk.h): a warpgroup, with at most 64 rows of V.
#pragma once

#include "hopper_memory.h"

namespace kda {
inline namespace KDA_ISA {

template <class Tiles, class Policy, int K, int C, int N, int Stages, bool Packs>
struct HopperCarrier {
  using S = Schedule<Tiles, Policy, K, C>;
  using W = typename S::W;
  using Layout = typename S::Layout;
  using Decay = typename Policy::Decay;
  using Bounded = typename Policy::Bounded;
  using Memory = HopperWalkMemory<Tiles, K, C, N, Stages>;
  static constexpr int kRows = Memory::kRows;
  using Lanes = HopperLanes<kRows>;
  using Access = StateAccess<K, kRows>;
  using Io = typename Tiles::IoType;
  static_assert(C == 64 && Policy::kNarrow, "");
  static constexpr int NT = C / kTile, KT = K / kTile, M = K / 64, R = kRows / 2;

  const S& s;
  Memory& m;
  const int carrier, warp;

  // Registers 4 j + 2 i + e of state[a] have a channel of tile(i), of its first or second eight as half(a, i) says:
  // with two products of 64 channels each has one half of all tiles, so that a lane's channels are near each other.
  float state[M][R], x[R];  // x: r, then v'
  uint32_t values[2][Lanes::kBlocks][Lanes::kWidth / 2];  // of the next chunk, which x starts as
  // The first token of each slice of V that fp16 does not hold, when there is one.
  int32_t beyond[Lanes::kBlocks];

  KDA_FN int tile(int i) const { return M == 2 ? 2 * warp + i : warp; }
  static KDA_FN int half(int a, int i) { return M == 2 ? a : i; }
  KDA_FN int place(int a, int i) const { return tile(i) * kTile + 8 * half(a, i) + Lanes::group(); }
  KDA_FN void barrier() const { asm volatile("bar.sync %0, 128;" ::"r"(carrier + 1) : "memory"); }

  KDA_FN void publish_state() {
    KDA_UNROLL
    for (int a = 0; a < M; ++a)
      m.state[carrier].store(2 * tile(0) + half(a, 0), 2 * tile(1) + half(a, 1), [&](int r) {
        return Tiles::template pack<Decay>(state[a][r], state[a][r + 1]);
      });
    wgmma::publish();
    m.state_ready.arrive();
    barrier();
  }
  // v of a chunk that has come.
  KDA_FN void load_values(int n) {
    const auto& stage = m.stage[n % Stages];
    KDA_UNROLL
    for (int i = 0; i < 2; ++i)
      KDA_UNROLL
      for (int b = 0; b < Lanes::kBlocks; ++b) {
        const int row = warp * kTile + 2 * Lanes::group() + i, value = carrier * kRows + Lanes::value(b);
        load_words(values[i][b], stage.values + stage.place(row, value / 8) + value % 8);
      }
  }
  // x starts as v.
  KDA_FN void start_x() {
    KDA_UNROLL
    for (int i = 0; i < 2; ++i)
      KDA_UNROLL
      for (int b = 0; b < Lanes::kBlocks; ++b)
        KDA_UNROLL
        for (int c = 0; c < Lanes::kWidth; ++c)
          x[Lanes::reg(b, c, i)] = Tiles::template unpack<Io>(values[i][b][c / 2], c & 1);
  }
  // x as right operand.
  KDA_FN void publish_narrow(RightMatrices<C, kRows>& to, const ChunkRow& chunk) {
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
              beyond[b] = min(beyond[b], chunk.first + warp * kTile + 2 * Lanes::group() + i);
    }
  }

  // The chunks of a unit from n on; returns the next one's number.
  KDA_FN int walk(const HopperUnit& unit, int n) {
    const int first_value = unit.first_value + carrier * kRows;
    const Access access{W::strides(s.p), first_value, warp, m.scratch(carrier, warp)};
    if (!unit.from_start) wait_for_previous();  // for the walk of the slab before, for which that launch has waited
    access.load(state, s.entry(unit.seq, unit.head, unit.from_start));
    if (n > 0) m.state_read.wait((n - 1) & 1);
    publish_state();
    KDA_UNROLL
    for (int b = 0; b < Lanes::kBlocks; ++b) beyond[b] = kNone;
    m.start_full[n % Stages].wait(n / Stages & 1);
    m.values_full[n % Stages].wait(n / Stages & 1);
    load_values(n), start_x();
    const int end = n + unit.count;
    for (; n < end; ++n) {
      if constexpr (Packs) n = same_in_warp(n);
      const auto& stage = m.stage[n % Stages];
      const ChunkRow chunk = stage.row;
      wgmma::fence();
      KDA_UNROLL
      for (int t = 0; t < KT; ++t)
        wgmma::product<Decay>(x, stage.left(Layout::kd(0, t)), m.state[carrier].right(t), true);
      wgmma::commit();
      const int next = n + 1, parity = next / Stages & 1;
      const bool for_state = m.for_state_full[n % Stages].test(n / Stages & 1);
      const bool delta_read = m.delta_read.test((n - 1) & 1);
      const bool start = m.start_full[next % Stages].test(parity), v = m.values_full[next % Stages].test(parity);
      KDA_UNROLL
      for (int a = 0; a < M; ++a) {
        const float decay[2] = {stage.decay[place(a, 0)], stage.decay[place(a, 1)]};
        KDA_UNROLL
        for (int r = 0; r < R; ++r) state[a][r] *= decay[r >> 1 & 1];
      }
      const int32_t from_prologue = stage.beyond[warp];
      wgmma::wait<0>(x);
      m.start_empty[n % Stages].arrive();
      publish_narrow(m.residual[carrier], chunk);
      barrier();
      if (!for_state) m.for_state_full[n % Stages].wait(n / Stages & 1);
      wgmma::fence();
      KDA_UNROLL
      for (int j = 0; j < NT; ++j)
        wgmma::product<Bounded>(x, stage.triangle(1, j), m.residual[carrier].right(j), j > 0);
      wgmma::commit();
      const bool come = start & v & (next < end);
      if (come) load_values(next);
      wgmma::wait<0>(x);
      if (n > 0 && !delta_read) m.delta_read.wait((n - 1) & 1);
      publish_narrow(m.delta[carrier], chunk);
      m.delta_ready.arrive();
      barrier();
      wgmma::fence();
      KDA_UNROLL
      for (int j = 0; j < NT; ++j)
        KDA_UNROLL
        for (int a = 0; a < M; ++a)
          wgmma::product<Bounded>(state[a], stage.left(Layout::kg(0, j), M * 128).at(128 * a),
                                  m.delta[carrier].right(j), true);
      wgmma::commit();
      const bool state_read = m.state_read.test(n & 1);
      if (!come && next < end) {
        m.start_full[next % Stages].wait(parity);
        m.values_full[next % Stages].wait(parity);
        load_values(next);
      }
      if (next < end) start_x();
      KDA_UNROLL
      for (int b = 0; b < Lanes::kBlocks; ++b) beyond[b] = min(beyond[b], from_prologue);
      KDA_UNROLL
      for (int a = 0; a < M; ++a) wgmma::wait<0>(state[a]);
      m.for_state_empty[n % Stages].arrive();
      if (chunk.checkpoint >= 0)
        if (float* to = s.checkpoint_state(chunk.checkpoint, unit.head)) access.store(state, to, ~0u);
      if (next < end) {
        if (!state_read) m.state_read.wait(n & 1);
        publish_state();
      }
    }
    leave(unit, first_value, access);
    return end;
  }

 private:
  KDA_FN void leave(const HopperUnit& unit, int first_value, const Access& access) {
    float* to = nullptr;
    unsigned slices = ~0u;
    if (!s.p.in_pool) {
      to = unit.ends ? s.final_state(unit.seq, unit.head, 0) : s.waiting(unit.seq, unit.head, s.slab_last);
    } else {
      // A slice goes on to where it is written or not as a whole, and its warps have met different tokens.
      slices = 0;
      for (int i = 0; i < kRows / kTile; ++i) {
        int any = 0;
        KDA_UNROLL
        for (int b = 0; b < Lanes::kBlocks; ++b)
          any |= Lanes::value(b) / kTile == i && beyond[b] != kNone;
        asm volatile("{.reg .pred mine, all;\n\tsetp.ne.b32 mine, %0, 0;\n\t"
                     "barrier.red.or.pred all, %1, 128, mine;\n\tselp.b32 %0, 1, 0, all;}"
                     : "+r"(any)
                     : "r"(carrier + 1)
                     : "memory");
        if (float* at = s.exit(unit.seq, unit.head, first_value / kTile + i, any)) to = at, slices |= 1u << i;
      }
    }
    if (to) access.store(state, to, slices);
    KDA_UNROLL
    for (int b = 0; b < Lanes::kBlocks; ++b)
      s.report(beyond[b], unit.seq, unit.head, (first_value + Lanes::value(b)) / kTile);
  }
};

}  // namespace KDA_ISA
}  // namespace kda
