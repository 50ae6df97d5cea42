// Gates and normalisation of one element. Formulas: kda_jax/gate.py.
#pragma once

#include "problem.h"
#include "target.h"

namespace kda {
inline namespace KDA_ISA {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kNormEpsilon = 1e-6f;  // inside the root, on the sum of squares

// 1 / (1 + 2^x), the sigmoid of -x / log2(e); tanh-based approximations lose 1e-3 of a slow decay.
template <class Math>
KDA_FN float sigmoid_of_log2(float x) {
  return Math::rcp(1.0f + Math::exp2(x));
}
template <class Math>
KDA_FN float sigmoid(float x) {
  return sigmoid_of_log2<Math>(-x * kLog2E);
}

// log(1 + e^x) with a small relative error at both ends: log1p(t) = 2 atanh(t / (2 + t)), and
// t = e^-|x| <= 1 keeps the series' argument below 1/3.
template <class Math>
KDA_FN float softplus(float x) {
  const float magnitude = x < 0 ? -x : x;
  const float t = Math::exp2(-magnitude * kLog2E);
  const float s = t * Math::rcp(2.0f + t), s2 = s * s;
  float p = 1.0f / 15;
  p = p * s2 + 1.0f / 13;
  p = p * s2 + 1.0f / 11;
  p = p * s2 + 1.0f / 9;
  p = p * s2 + 1.0f / 7;
  p = p * s2 + 1.0f / 5;
  p = p * s2 + 1.0f / 3;
  p = p * s2 + 1.0f;
  return (x > 0 ? x : 0.0f) + 2.0f * s * p;
}

// A head's rate: -exp(A_log), in log2 units.
template <class Math>
KDA_FN float head_rate(float A_log) {
  return -kLog2E * Math::exp2(A_log * kLog2E);
}

// The log decay: in log2 units, for a bounded gate in units of lower_bound * log2(e). `rate` is the head's
// -exp(A_log) log2(e), `bias` the channel's dt_bias, for a bounded gate already times the rate.
template <class Math>
KDA_FN float gate_units(Gate gate, float raw_g, float rate, float bias) {
  switch (gate) {
    case Gate::kBounded:
      return sigmoid_of_log2<Math>(raw_g * rate + bias);
    case Gate::kSoftplus:
      return rate * softplus<Math>(raw_g + bias);
    default:
      return raw_g * kLog2E;
  }
}

}  // namespace KDA_ISA
}  // namespace kda
