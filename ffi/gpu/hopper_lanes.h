// Where the walk on Hopper (hopper_walk.h) has its values in registers, and how the state goes to memory.
//
// The 64 rows of a product are rows of V, a warp's sixteen of them a slice. Register 4 j + 2 i + e of lane 4 g + t has row
// g + 8 i of the slice, which stands for its value 2 g + i, and column 8 j + 2 t + e: a channel or a token in the order of
// the operands (NvidiaLanes), so that of every 32 channels a lane has eight side by side, of every 16 tokens four.
#pragma once

#include "kernels.h"

namespace kda {
inline namespace KDA_ISA {

struct HopperLanes {
  static KDA_FN int group() { return (threadIdx.x & 31) >> 2; }
  static KDA_FN int quarter() { return threadIdx.x & 3; }
  static KDA_FN int value(int i) { return 2 * group() + i; }
  // Token of column 8 j + 2 t + e: the first of the lane, and how far behind it.
  static KDA_FN int first_token() { return 4 * quarter(); }
  static constexpr KDA_FN int further(int j, int e) { return 16 * (j / 2) + 2 * e + (j & 1); }
  // Channel of column 8 j + 2 t; that of 8 j + 2 t + 1 is the next.
  static KDA_FN int channel(int j) { return 32 * (j / 4) + 8 * quarter() + 2 * (j & 3); }
};

// A number that the compiler does not know: what depends on it is computed where it is used, not kept in registers
// through the walk.
KDA_FN int64_t hidden(int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

// A slice of the state in memory, [V, K] or [K, V].
template <int K>
struct StateAccess {
  using Lanes = HopperLanes;
  using State = float[K / 2];
  int64_t value_stride, channel_stride;
  int first_value;

  template <class S>
  KDA_FN StateAccess(S strides, int first_value)
      : value_stride(strides.value), channel_stride(strides.channel), first_value(first_value) {}

  // f(register of the first of four channels, of the second two; offset).
  template <class F>
  KDA_FN void for_fours(F f) const {
    const int64_t stride = hidden(value_stride);
    KDA_UNROLL
    for (int i = 0; i < 2; ++i)
      KDA_UNROLL
      for (int j = 0; j < K / 8; j += 2)
        f(4 * j + 2 * i, 4 * (j + 1) + 2 * i, (first_value + Lanes::value(i)) * stride + Lanes::channel(j));
  }
  template <class F>
  KDA_FN void for_each(F f) const {
    const int64_t stride = hidden(value_stride);
    KDA_UNROLL
    for (int i = 0; i < 2; ++i)
      KDA_UNROLL
      for (int j = 0; j < K / 8; ++j)
        KDA_UNROLL
        for (int e = 0; e < 2; ++e)
          f(4 * j + 2 * i + e,
            (first_value + Lanes::value(i)) * stride + (Lanes::channel(j) + e) * channel_stride);
  }
  KDA_FN void store(const State& s, float* to) const {
    if (channel_stride == 1) {
      for_fours([&](int a, int b, int64_t at) {
        *reinterpret_cast<float4*>(to + at) = {s[a], s[a + 1], s[b], s[b + 1]};
      });
    } else {
      for_each([&](int r, int64_t at) { to[at] = s[r]; });
    }
  }
  KDA_FN void load(State& s, const float* from) const {  // null: zeros
    if (!from) {
      KDA_UNROLL
      for (int r = 0; r < K / 2; ++r) s[r] = 0;
    } else if (channel_stride == 1) {
      for_fours([&](int a, int b, int64_t at) {
        const float4 x = *reinterpret_cast<const float4*>(from + at);
        s[a] = x.x, s[a + 1] = x.y, s[b] = x.z, s[b + 1] = x.w;
      });
    } else {
      for_each([&](int r, int64_t at) { s[r] = from[at]; });
    }
  }
};

}  // namespace KDA_ISA
}  // namespace kda
