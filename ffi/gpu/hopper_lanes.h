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
  // In assembler, since the compiler takes it apart where it knows less of where `to` comes from.
  const size_t at = __cvta_generic_to_global(to);
  if constexpr (Words == 2) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(at), "r"(x[0]), "r"(x[1]) : "memory");
  } else {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
  }
}

// A warp's part of the state in memory, [V, K] or [K, V]. Of K = 128 it has 32 channels, side by side, a lane every
// second one of some fours; `scratch` turns them into whole fours, eight lanes side by side.
template <int K, int N>
struct StateAccess {
  using Lanes = HopperLanes<N>;
  using State = float[K / 64][N / 2];
  static constexpr bool kWhole = K == 128;
  static constexpr int kChannels = 32, kTogether = N / kTile, kRows = 4 * kTogether;  // rows of V at a time
  static constexpr int kScratch = kRows * kChannels;
  int64_t value_stride, channel_stride;
  int first_value, warp;
  float* scratch;  // [kScratch], the warp's own

  template <class S>
  KDA_FN StateAccess(S strides, int first_value, int warp, float* scratch)
      : value_stride(strides.value), channel_stride(strides.channel), first_value(first_value), warp(warp),
        scratch(scratch) {}

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

  // Each quarter's rows have the channels' second and third bit changed in a way of their own, so that lanes do not
  // meet in a bank. f(a, register, place in scratch): of the values value(b) + first..
  template <class F>
  KDA_FN void for_own(int b, int first, F f) const {
    const int g = Lanes::group(), t = Lanes::quarter();
    KDA_UNROLL
    for (int c = 0; c < kTogether; ++c)
      KDA_UNROLL
      for (int a = 0; a < 2; ++a)
        KDA_UNROLL
        for (int i = 0; i < 2; ++i)
          f(a, Lanes::reg(b, first + c, i),
            (t * kTogether + c) * kChannels + ((8 * (g / 2) + 4 * i + (g & 1) + 2 * a) ^ t << 1));
  }
  // f(value in the block, place in scratch, whether its halves change places, offset in memory) of fours.
  template <class F>
  KDA_FN void for_fours(int b, int first, F f) const {
    const int lane = threadIdx.x & 31, four = lane & 7;
    const int64_t stride = hidden(value_stride);
    KDA_UNROLL
    for (int k = 0; k < kTogether; ++k) {
      const int row = 4 * k + lane / 8, t = kTogether >= 4 ? 4 * k / kTogether : row / kTogether;
      const int value = b * Lanes::kBlock + Lanes::kWidth * t + first + row % kTogether;
      f(value, reinterpret_cast<float4*>(scratch + row * kChannels + 4 * (four ^ t >> 1)), t & 1,
        (first_value + value) * stride + kChannels * warp + 4 * four);
    }
  }
  template <class F>
  KDA_FN void for_parts(F f) const {
    KDA_UNROLL
    for (int b = 0; b < Lanes::kBlocks; ++b)
      KDA_UNROLL
      for (int first = 0; first < Lanes::kWidth; first += kTogether) f(b, first);
  }
  static KDA_FN float4 halves(float4 x, bool change) { return change ? float4{x.z, x.w, x.x, x.y} : x; }

  // `slices`: a bit for each 16 values, whether they are stored.
  KDA_FN void store(const State& s, float* to, unsigned slices) const {
    if constexpr (kWhole)
      if (channel_stride == 1) {
        for_parts([&](int b, int first) {
          for_own(b, first, [&](int a, int r, int place) { scratch[place] = s[a][r]; });
          __syncwarp();
          for_fours(b, first, [&](int value, const float4* from, bool change, int64_t at) {
            if (slices >> value / kTile & 1) *reinterpret_cast<float4*>(to + at) = halves(*from, change);
          });
          __syncwarp();
        });
        return;
      }
    for_each([&](int b, int a, int r, int64_t at) {
      if (slices >> Lanes::value(b) / kTile & 1) to[at] = s[a][r];
    });
  }
  KDA_FN void load(State& s, const float* from) const {  // null: zeros
    if (!from) {
      KDA_UNROLL
      for (int a = 0; a < K / 64; ++a)
        KDA_UNROLL
        for (int r = 0; r < N / 2; ++r) s[a][r] = 0;
      return;
    }
    if constexpr (kWhole)
      if (channel_stride == 1) {
        for_parts([&](int b, int first) {
          for_fours(b, first, [&](int, float4* to, bool change, int64_t at) {
            *to = halves(*reinterpret_cast<const float4*>(from + at), change);
          });
          __syncwarp();
          for_own(b, first, [&](int a, int r, int place) { s[a][r] = scratch[place]; });
          __syncwarp();
        });
        return;
      }
    for_each([&](int, int a, int r, int64_t at) { s[a][r] = from[at]; });
  }
};

}  // namespace KDA_ISA
}  // namespace kda
