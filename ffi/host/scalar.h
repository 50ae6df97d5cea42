// Scalar and row helpers of the host tile layer: conversions, exp2, a 16 x 16 transpose.
// Branch-free where a loop over them must vectorise.
#pragma once

#include <cstdint>
#include <cstring>

#include "../kernel/ops.h"
#include "../kernel/problem.h"
#include "../kernel/target.h"

namespace kda {
inline namespace KDA_ISA {
namespace scalar {

inline uint32_t bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}
inline float from_bits(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

// 2^x to about 1 ulp for x <= 127; 0 below -126 (no denormals), NaN stays NaN. The polynomial is
// the Taylor series of 2^f on [-0.5, 0.5] (remainder 2e-9).
inline float exp2(float x) {
  const float bounded = x < -126.0f ? -126.0f : (x > 127.0f ? 127.0f : x);
  const float shifted = bounded + 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the low bits
  const float f = bounded - (shifted - 12582912.0f);
  float p = 1.5252733804e-5f;
  p = p * f + 1.5403530394e-4f;
  p = p * f + 1.3333558146e-3f;
  p = p * f + 9.6181291076e-3f;
  p = p * f + 5.5504108665e-2f;
  p = p * f + 2.4022650696e-1f;
  p = p * f + 6.9314718056e-1f;
  p = p * f + 1.0f;
  const float r = p * from_bits((bits(shifted) << 23) + 0x3f800000u);
  return x < -126.0f ? 0.0f : r;
}

inline float bf16_to_f32(uint16_t h) { return from_bits(uint32_t(h) << 16); }

inline uint32_t round_to_bf16(float x) {  // nearest even, NaN kept; the low 16 bits are zero
  const uint32_t u = bits(x);
  const uint32_t r = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
  return (u & 0x7fffffffu) > 0x7f800000u ? (u | 0x00400000u) & 0xffff0000u : r;
}

inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
  const float denormal = float(int32_t(mantissa)) * 5.9604644775390625e-8f;  // 2^-24
  const uint32_t normal = ((exponent + 112u) << 23) | (mantissa << 13);
  const uint32_t special = 0x7f800000u | (mantissa << 13);
  const uint32_t u = exponent == 0 ? bits(denormal) : (exponent == 31 ? special : normal);
  return from_bits(u | sign);
}

// The float32 nearest to x that fp16 holds (nearest even; beyond 65504: infinity).
inline float round_to_f16(float x) {
  const uint32_t u = bits(x), magnitude = u & 0x7fffffffu;
  const uint32_t normal = (u + 0xfffu + ((u >> 13) & 1u)) & 0xffffe000u;
  const float a = from_bits(magnitude);
  const uint32_t denormal = bits((a + 0.75f) - 0.75f) | (u & 0x80000000u);  // multiples of 2^-24
  uint32_t r = magnitude < 0x38800000u ? denormal : normal;
  r = (r & 0x7fffffffu) > 0x477fe000u ? (u & 0x80000000u) | 0x7f800000u : r;
  return magnitude > 0x7f800000u ? x : from_bits(r);
}

inline uint16_t f32_to_f16(float x) {
  const float rounded = round_to_f16(x);
  const uint32_t u = bits(rounded), magnitude = u & 0x7fffffffu, sign = (u >> 16) & 0x8000u;
  const uint32_t denormal = uint32_t(int32_t(from_bits(magnitude) * 16777216.0f));
  const uint32_t normal = (magnitude >> 13) - (112u << 10);
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t r =
      magnitude >= 0x7f800000u ? special : (magnitude < 0x38800000u ? denormal : normal);
  return uint16_t(r | sign);
}

template <class Op>
inline float round(float x);
template <>
inline float round<F32>(float x) {
  return x;
}
template <>
inline float round<BF16>(float x) {
  return from_bits(round_to_bf16(x));
}
template <>
inline float round<F16>(float x) {
  return round_to_f16(x);
}

inline void load16(const Tensor& t, int64_t offset, float* out) {
  if (t.type == DType::kF32) {
    std::memcpy(out, static_cast<const float*>(t.data) + offset, 16 * sizeof(float));
    return;
  }
  const uint16_t* p = static_cast<const uint16_t*>(t.data) + offset;
  if (t.type == DType::kBF16) {
    for (int i = 0; i < 16; ++i) out[i] = bf16_to_f32(p[i]);
  } else {
    for (int i = 0; i < 16; ++i) out[i] = f16_to_f32(p[i]);
  }
}

inline float load1(const Tensor& t, int64_t offset) {
  if (t.type == DType::kF32) return static_cast<const float*>(t.data)[offset];
  const uint16_t h = static_cast<const uint16_t*>(t.data)[offset];
  return t.type == DType::kBF16 ? bf16_to_f32(h) : f16_to_f32(h);
}

inline void store16(void* data, DType type, int64_t offset, const float* x) {
  if (type == DType::kF32) {
    std::memcpy(static_cast<float*>(data) + offset, x, 16 * sizeof(float));
    return;
  }
  uint16_t* p = static_cast<uint16_t*>(data) + offset;
  if (type == DType::kBF16) {
    for (int i = 0; i < 16; ++i) p[i] = uint16_t(round_to_bf16(x[i]) >> 16);
  } else {
    for (int i = 0; i < 16; ++i) p[i] = f32_to_f16(x[i]);
  }
}

// Four rounds of interleaving row i with row i + 8: each round is a perfect shuffle, and four of
// them swap rows and columns.
inline void transpose16(const float* in, float* out) {
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define KDA_HAS_SHUFFLE 1
#endif
#endif
#ifdef KDA_HAS_SHUFFLE
  typedef float Vec __attribute__((vector_size(64)));
  Vec a[16], b[16];
  std::memcpy(a, in, sizeof a);
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = __builtin_shufflevector(a[i], a[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21,
                                         6, 22, 7, 23);
      b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28,
                                             13, 29, 14, 30, 15, 31);
    }
    std::memcpy(a, b, sizeof a);
  }
  std::memcpy(out, a, sizeof a);
#else
  for (int r = 0; r < 16; ++r)
    for (int c = 0; c < 16; ++c) out[c * 16 + r] = in[r * 16 + c];
#endif
}

}  // namespace scalar
}  // namespace KDA_ISA
}  // namespace kda
