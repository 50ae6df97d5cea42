// Who brings the operands of the walk on Hopper (hopper_walk.h).
#pragma once

#include "hopper_memory.h"

namespace kda {
inline namespace KDA_ISA {

// Bulk copies behind this read what others stored, who said so.
KDA_FN void see_other_stores() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// By a warp: until chunk n of those from `flags` on is there; returns how many are.
KDA_FN int wait_until_there(const uint8_t* flags, int n, int there, int count) {
  while (true) {
    const int c = there + (threadIdx.x & 31);
    const bool yes = c < count && *static_cast<const volatile uint8_t*>(flags + c);
    const unsigned not_yet = ~__ballot_sync(~0u, yes);
    there += not_yet ? __ffs(not_yet) - 1 : 32;
    if (there > n) break;
    __nanosleep(100);
  }
  __threadfence();
  see_other_stores();
  return there;
}

// Three warps bring the parts of a stage, each part as soon as its place is free: the first what a step starts with, and it
// says which chunk it is; the others what makes the outputs and what goes into the state.
template <class Memory, class S, class Units>
struct HopperOperands {
  static constexpr int Stages = Memory::kStages;
  const S& s;
  Memory& m;
  Units units;
  const bool beside;

  static KDA_FN bool first_lane() { return (threadIdx.x & 31) == 0; }
  static KDA_FN void when_empty(Barrier (&empty)[Stages], int n) {
    if (n >= Stages) empty[n % Stages].wait((n / Stages - 1) & 1);
  }

  KDA_FN void start() {
    int n = 0;  // chunks, of all units
    auto say = [&](const HopperUnit& unit, int chunk, const ChunkRow& row) {
      auto& stage = m.stage[n % Stages];
      if (first_lane()) stage.unit = unit, stage.row = row, stage.chunk = chunk, m.known[n % Stages].arrive();
    };
    HopperUnit unit = units.first();
    if (unit.count == 0) wait_for_previous(), units.ask(), unit = units.next();
    for (; unit.count > 0; unit = units.next()) {
      ChunkRow next = s.chunk_row(unit.first);
      for (int i = 0, there = 0; i < unit.count; ++i, ++n) {
        auto& stage = m.stage[n % Stages];
        const ChunkRow row = next;
        const int chunk = unit.first + i;
        if (i + 1 < unit.count) next = s.chunk_row(chunk + 1);
        when_empty(m.start_empty, n);
        auto begin = [&] {
          say(unit, chunk, row);
          if (!beside && n == 0) wait_for_previous();  // not earlier: there is something to do with the unit alone
          if (first_lane()) stage.fetch_start(s, chunk, unit.head, m.start_full[n % Stages]);
        };
        if (!beside) begin();
        stage.fetch_values(s.p, row, unit.head, unit.first_value);
        CopyByAll::commit();
        if (n > 0) {
          CopyByAll::wait<1>();
          m.values_full[(n - 1) % Stages].arrive();
        }
        if (beside) {
          if (there <= i) there = wait_until_there(s.is_there(unit.first, unit.head), i, there, unit.count);
          begin();
        }
        if (i == 0) units.ask();
      }
    }
    if (n > 0) {
      CopyByAll::wait<0>();
      m.values_full[(n - 1) % Stages].arrive();
    }
    when_empty(m.start_empty, n);
    say(unit, 0, {});
  }

  // By one lane: f(stage, its number, chunk, unit) for each chunk, and behind the last one.
  template <class F>
  KDA_FN void follow(F f) {
    if (!first_lane()) return;
    for (int n = 0;; ++n) {
      auto& stage = m.stage[n % Stages];
      m.known[n % Stages].wait(n / Stages & 1);
      const HopperUnit unit = stage.unit;
      const ChunkRow row = stage.row;
      const int chunk = stage.chunk;
      m.start_empty[n % Stages].arrive();
      if (beside) {
        see_other_stores();
      } else if (n == 0) {
        wait_for_previous();
      }
      f(stage, n, chunk, unit, row);
      if (unit.count == 0) return;
    }
  }
  KDA_FN void for_outputs() {
    follow([&](auto& stage, int n, int chunk, const HopperUnit& unit, const ChunkRow& row) {
      when_empty(m.for_outputs_empty, n);
      stage.output_row = row, stage.output_value = unit.first_value;
      stage.output_head = unit.count ? unit.head : -1;
      Barrier& full = m.for_outputs_full[n % Stages];
      if (unit.count) {
        stage.fetch_for_outputs(s, chunk, unit.head, full);
      } else {
        full.arrive();
      }
    });
  }
  KDA_FN void for_state() {
    follow([&](auto& stage, int n, int chunk, const HopperUnit& unit, const ChunkRow&) {
      when_empty(m.for_state_empty, n);
      if (unit.count) stage.fetch_for_state(s, chunk, unit.head, m.for_state_full[n % Stages]);
    });
  }
};

}  // namespace KDA_ISA
}  // namespace kda
