// Where the walk on Hopper (hopper_walk.h) has its values in registers, and how the state goes to memory.
#pragma once

#include "kernels.h"

namespace kda {
inline namespace KDA_ISA {

// Where the registers of a product of 64 rows are: register 4 j + 2 i + e of lane 4 g + t has row g + 8 i of the
// warp's sixteen and column 8 j + 2 t + e. Columns are rows of V in an order that lets a lane move 16 bytes.
template <int N>
struct HopperLanes {
  static constexpr int kWidth = N == 16 ? 4 : 8, kBlock = 4 * kWidth;  // values of a lane side by side, of a row
  static constexpr int kBlocks = N / kBlock;
  static KDA_FN int group() { return (threadIdx.x & 31) >> 2; }
  static KDA_FN int quarter() { return threadIdx.x & 3; }
  static KDA_FN int value(int block) { return block * kBlock + kWidth * quarter(); }
  // Register of value(block) + c in row i of the two.
  static constexpr KDA_FN int reg(int block, int c, int i) {
    return 4 * (block * kWidth / 2 + c / 2) + 2 * i + c % 2;
  }
};

template <int Words>
KDA_FN void load_words(uint32_t (&x)[Words], const uint16_t* from) {  // 8 or 16 bytes
  const auto v = *reinterpret_cast<const std::conditional_t<Words == 2, uint2, uint4>*>(from);
  x[0] = v.x, x[1] = v.y;
  if constexpr (Words == 4) x[2] = v.z, x[3] = v.w;
}
template <int Words>
KDA_FN void store_words(uint16_t* to, const uint32_t (&x)[Words]) {
  if constexpr (Words == 2) {
    *reinterpret_cast<uint2*>(to) = {x[0], x[1]};
  } else {
    *reinterpret_cast<uint4*>(to) = {x[0], x[1], x[2], x[3]};
  }
}

// A warp's part of the state in memory, [V, K] or [K, V]. Of K = 128 it has 32 channels, a lane those that are even
// or odd among eight; the lane beside it has the others, and the two change them so that each stores four.
template <int K, int N>
struct StateAccess {
  using Lanes = HopperLanes<N>;
  using State = float[K / 64][N / 2];
  int64_t value_stride, channel_stride;
  int first_value, warp;

  template <class S>
  KDA_FN StateAccess(S strides, int first_value, int warp)
      : value_stride(strides.value), channel_stride(strides.channel), first_value(first_value), warp(warp) {}

  static KDA_FN float other(float x) { return __shfl_xor_sync(~0u, x, 4); }
  KDA_FN int channel(int a, int i) const {  // NvidiaTiles::load_state2
    const int g = Lanes::group(), tile = K == 128 ? 2 * warp + i : warp, half = K == 128 ? a : i;
    return tile / 2 * 32 + 8 * (g / 2) + 4 * (tile & 1) + (g & 1) + 2 * half;
  }
  // A stride that the compiler does not know: what depends on it is computed where it is used, not kept in registers
  // through the walk.
  static KDA_FN int64_t hidden(int64_t stride) {
    asm volatile("" : "+l"(stride));
    return stride;
  }
  // For each value, f(its block, its registers with i = 0, with i = 1, offset of the four channels that this lane stores).
  template <class F>
  KDA_FN void for_fours(F f) const {
    const int g = Lanes::group();
    const int64_t stride = hidden(value_stride);
    KDA_UNROLL
    for (int b = 0; b < Lanes::kBlocks; ++b) {
      int64_t at = (first_value + Lanes::value(b)) * stride + 32 * warp + 8 * (g / 2) + 4 * (g & 1);
      KDA_UNROLL
      for (int c = 0; c < Lanes::kWidth; ++c, at += stride) {
        f(b, Lanes::reg(b, c, 0), Lanes::reg(b, c, 1), at);
        asm volatile("" ::: "memory");  // one at a time: registers
      }
    }
  }
  template <class F>
  KDA_FN void for_each(F f) const {
    const int64_t stride = hidden(value_stride);
    KDA_UNROLL
    for (int a = 0; a < K / 64; ++a)
      KDA_UNROLL
      for (int i = 0; i < 2; ++i)
        KDA_UNROLL
        for (int b = 0; b < Lanes::kBlocks; ++b) {
          int64_t at = (first_value + Lanes::value(b)) * stride + channel(a, i) * channel_stride;
          KDA_UNROLL
          for (int c = 0; c < Lanes::kWidth; ++c, at += stride) f(b, a, Lanes::reg(b, c, i), at);
        }
  }
  // `slices`: a bit for each 16 values, whether they are stored.
  KDA_FN void store(const State& s, float* to, unsigned slices) const {
    if constexpr (K == 128 && N < 128)  // with more values ptxas spills the state over the shuffles
      if (channel_stride == 1) {
        const bool odd = Lanes::group() & 1;
        for_fours([&](int b, int low, int high, int64_t at) {
          const float x = other(odd ? s[0][low] : s[0][high]), y = other(odd ? s[1][low] : s[1][high]);
          if (slices >> Lanes::value(b) / kTile & 1)
            *reinterpret_cast<float4*>(to + at) = odd ? float4{x, s[0][high], y, s[1][high]}
                                                    : float4{s[0][low], x, s[1][low], y};
        });
        return;
      }
    for_each([&](int b, int a, int r, int64_t at) {
      if (slices >> Lanes::value(b) / kTile & 1) to[at] = s[a][r];
    });
  }
  KDA_FN void load(State& s, const float* from) const {  // null: zeros
    for_each([&](int, int a, int r, int64_t at) { s[a][r] = from ? from[at] : 0; });
  }
};

}  // namespace KDA_ISA
}  // namespace kda
