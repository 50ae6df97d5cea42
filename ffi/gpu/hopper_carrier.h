// Who carries the state through the walk on Hopper (hopper_walk.h) and makes the outputs: a warpgroup, with 64 rows of V.
// What one product leaves in registers is, in 16 bits, the next one's left operand as it stands.
#pragma once

#include "hopper_lanes.h"
#include "hopper_memory.h"

namespace kda {
inline namespace KDA_ISA {

template <class Tiles, class Policy, int K, int C, int N, int Stages>
struct HopperCarrier {
  using S = Schedule<Tiles, Policy, K, C>;
  using W = typename S::W;
  using Layout = typename S::Layout;
  using Decay = typename Policy::Decay;
  using Bounded = typename Policy::Bounded;
  using Memory = HopperWalkMemory<Tiles, K, C, N, Stages>;
  using Lanes = HopperLanes;
  using Access = StateAccess<K>;
  using Io = typename Tiles::IoType;
  static_assert(C == 64 && Policy::kNarrow, "");
  static constexpr int NT = C / kTile, KT = K / kTile;

  const S& s;
  Memory& m;
  const int slice;  // of the block's rows of V, this warp's

  float state[K / 2], x[C / 2], o[C / 2];         // x: r, then v'
  uint32_t packed[KT][4], left[NT][4];            // the state; r, then v'
  uint32_t outputs[C / 4];                        // of a chunk, packed
  int32_t beyond;                                 // first token that fp16 does not hold
  ChunkRow chunk;

  // Sixteen columns of a product as left operand.
  template <class Pack, int R>
  static KDA_FN void pack(uint32_t (&to)[4], const float (&d)[R], int step, Pack f) {
    KDA_UNROLL
    for (int i = 0; i < 4; ++i) to[i] = f(d[8 * step + 2 * i], d[8 * step + 2 * i + 1]);
  }
  KDA_FN void pack_state() {
    KDA_UNROLL
    for (int t = 0; t < KT; ++t)
      pack(packed[t], state, t, [](float a, float b) { return Tiles::template pack<Decay>(a, b); });
  }
  KDA_FN void pack_x() {
    uint32_t most = 0;
    KDA_UNROLL
    for (int j = 0; j < NT; ++j)
      pack(left[j], x, j, [&](float a, float b) {
        const uint32_t both = Tiles::pack_clamped(a, b);
        asm("{.reg .b32 a;\n\tabs.f16x2 a, %1;\n\tmax.f16x2 %0, %0, a;}" : "+r"(most) : "r"(both));
        return both;
      });
    if ((most & 0xffff) >= 0x7bff || most >> 16 >= 0x7bff) {
      KDA_UNROLL
      for (int j = 0; j < C / 8; ++j)
        KDA_UNROLL
        for (int i = 0; i < 4; ++i)
          if (fabsf(x[4 * j + i]) > kLargest) beyond = min(beyond, chunk.first + Lanes::first_token() + Lanes::further(j, i & 1));
    }
  }
  // x starts as v.
  KDA_FN void load_values(int n) {
    m.start_full[n % Stages].wait(n / Stages & 1);
    m.values_full[n % Stages].wait(n / Stages & 1);
    const auto& stage = m.stage[n % Stages];
    // All of a lane's tokens have the same places changed.
    const int value = slice * kTile + Lanes::value(0);
    const uint16_t* from = stage.values + stage.place(Lanes::first_token(), value / 8) + value % 8;
    KDA_UNROLL
    for (int j = 0; j < C / 8; ++j)
      KDA_UNROLL
      for (int e = 0; e < 2; ++e) {
        const uint32_t pair = *reinterpret_cast<const uint32_t*>(from + Lanes::further(j, e) * N);
        x[4 * j + e] = Tiles::template unpack<Io>(pair, 0), x[4 * j + 2 + e] = Tiles::template unpack<Io>(pair, 1);
      }
  }
  KDA_FN void pack_outputs() {
    KDA_UNROLL
    for (int j = 0; j < C / 8; ++j)
      KDA_UNROLL
      for (int e = 0; e < 2; ++e)
        outputs[2 * j + e] = Tiles::template pack<Io>(s.p.scale * o[4 * j + e], s.p.scale * o[4 * j + 2 + e]);
  }
  KDA_FN void store_outputs(const ChunkRow& of, const HopperUnit& unit) const {
    const Problem& p = s.p;
    auto* to = static_cast<uint16_t*>(p.out) + row_offset(of.first + Lanes::first_token(), unit.head, p.H, p.V) +
               unit.first_value + slice * kTile + Lanes::value(0);
    const int64_t stride = hidden(int64_t(p.H) * p.V);
    KDA_UNROLL
    for (int tile = 0; tile < NT; ++tile, to += (kTile - 4) * stride)
      KDA_UNROLL
      for (int i = 0; i < 4; ++i, to += stride) {  // one after the other: registers
        if (kTile * tile + Lanes::first_token() + i < of.valid)
          *reinterpret_cast<uint32_t*>(to) = outputs[2 * (2 * tile + (i & 1)) + (i >> 1)];
        asm volatile("" : "+l"(to)::"memory");
      }
  }

  // The chunks of a unit from n on; returns the next one's number. The outputs' products fill the time in which the
  // others' results are packed.
  KDA_FN int walk(const HopperUnit& unit, int n) {
    const Access access{W::strides(s.p), unit.first_value + slice * kTile};
    access.load(state, s.entry(unit.seq, unit.head, unit.from_start));
    pack_state();
    beyond = kNone;
    load_values(n);
    const int first = n, end = n + unit.count;
    ChunkRow before = {};
    for (; n < end; ++n) {
      n = same_in_warp(n);
      const auto& stage = m.stage[n % Stages];
      chunk = stage.row;
      wgmma::fence();
      KDA_UNROLL
      for (int t = 0; t < KT; ++t) wgmma::product<Decay>(x, packed[t], stage.matrix(Layout::kd(0, t)), true);
      wgmma::commit();
      if (n > first) store_outputs(before, unit);
      m.for_outputs_full[n % Stages].wait(n / Stages & 1);
      wgmma::fence();
      KDA_UNROLL
      for (int t = 0; t < KT / 2; ++t)
        wgmma::product<Decay>(o, packed[t], stage.matrix(Layout::qg(0, t)), t > 0);
      wgmma::commit();
      KDA_UNROLL
      for (int j = 0; j < K / 8; ++j) {
        const float2 decay = *reinterpret_cast<const float2*>(stage.decay + 8 * j + 2 * Lanes::quarter());
        state[4 * j] *= decay.x, state[4 * j + 1] *= decay.y, state[4 * j + 2] *= decay.x, state[4 * j + 3] *= decay.y;
      }
      const int4 from_prologue = *reinterpret_cast<const int4*>(stage.beyond);
      wgmma::wait<1>(x);
      m.start_empty[n % Stages].arrive();
      pack_x();
      m.for_state_full[n % Stages].wait(n / Stages & 1);
      wgmma::fence();
      KDA_UNROLL
      for (int j = 0; j < NT; ++j) wgmma::product<Bounded>(x, left[j], stage.triangle(1, j), j > 0);
      wgmma::commit();
      KDA_UNROLL
      for (int t = KT / 2; t < KT; ++t) wgmma::product<Decay>(o, packed[t], stage.matrix(Layout::qg(0, t)), true);
      wgmma::commit();
      wgmma::wait<1>(x);
      wgmma::keep(left);
      pack_x();
      beyond = min(beyond, min(min(from_prologue.x, from_prologue.y), min(from_prologue.z, from_prologue.w)));
      wgmma::fence();
      KDA_UNROLL
      for (int j = 0; j < NT; ++j) wgmma::product<Bounded>(state, left[j], stage.matrix(Layout::kg(0, j)), true);
      wgmma::commit();
      KDA_UNROLL
      for (int j = 0; j < NT; ++j) wgmma::product<Bounded>(o, left[j], stage.triangle(0, j), true);
      wgmma::commit();
      before = chunk;
      if (n + 1 < end) load_values(n + 1);
      wgmma::wait<1>(state);
      wgmma::keep(packed);
      m.for_state_empty[n % Stages].arrive();
      if (float* to = s.checkpoint_state(chunk.checkpoint, unit.head)) access.store(state, to);
      pack_state();
      wgmma::wait<0>(o);  // in the step that asks for them, else ptxas waits for each product
      wgmma::keep(left);
      m.for_outputs_empty[n % Stages].arrive();
      pack_outputs();
    }
    store_outputs(before, unit);
    leave(unit, access);
    return end;
  }

 private:
  KDA_FN void leave(const HopperUnit& unit, const Access& access) const {
    const int of_v = unit.first_value / kTile + slice;
    float* to = nullptr;
    if (!s.p.in_pool) {
      to = unit.ends ? s.final_state(unit.seq, unit.head, 0) : s.waiting(unit.seq, unit.head, s.slab_last);
    } else {
      to = s.exit(unit.seq, unit.head, of_v, Tiles::wave_min(beyond) != kNone);
    }
    if (to) access.store(state, to);
    s.report(beyond, unit.seq, unit.head, of_v);
  }
};

}  // namespace KDA_ISA
}  // namespace kda
