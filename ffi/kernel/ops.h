// Names of operand types, and which one each product of the kernel uses.
//
// A *policy* picks two operand types. `Decay` operands carry factors 2^G and need the exponent
// range of float32; `Bounded` operands (u, v', kg, Aqk, the solve) are at most moderately large and
// gain from fp16's three extra bits of mantissa. Accumulators are float32 throughout.
#pragma once

namespace kda {

struct F32 {};
struct BF16 {};
struct F16 {};

template <class Op>
inline constexpr bool is_float32 = false;
template <>
inline constexpr bool is_float32<F32> = true;

// A policy with operands in fp16 is narrow: its walk notices what they do not hold (walk.h), and the heads
// of the sequences where that happened are done a second time with WidePolicy.
struct Float32Policy {
  static constexpr bool kNarrow = false, kSecond = false;
  using Decay = F32;
  using Bounded = F32;
};
struct MixedPolicy {
  static constexpr bool kNarrow = true, kSecond = false;
  using Decay = BF16;
  using Bounded = F16;
};
struct WidePolicy {
  static constexpr bool kNarrow = false, kSecond = true;
  using Decay = BF16;
  using Bounded = BF16;
};

constexpr float kLargest = 65504;           // of fp16
constexpr int kTile = 16;                     // every tile is 16 x 16
constexpr int kTileElements = kTile * kTile;

}  // namespace kda
