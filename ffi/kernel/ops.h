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

struct Float32Policy {
  using Decay = F32;
  using Bounded = F32;
};
struct MixedPolicy {
  using Decay = BF16;
  using Bounded = F16;
};

constexpr int kTile = 16;                    // every tile is 16 x 16
constexpr int kTileElements = kTile * kTile;

}  // namespace kda
