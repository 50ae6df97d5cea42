// Short convolutions side by side as raw pointers and sizes: those of q, k and v (kda_jax/conv.py has the formula).
#pragma once

#include <string>

#include "../kernel/problem.h"

namespace kda {

constexpr int kConvWidth = 4, kConvParts = 3;
constexpr int kConvChannels = 8;  // in one thread: 16 bytes

struct ConvPart {
  const void* x;        // [T, C]
  Tensor weight;        // [C, 4]; x's type or float32
  const void* initial;  // [N, C, 3], null: zeros
  void *y;              // [T, C]
  void *final, *saved;  // [N, C, 3], [M, C, 3]
  int32_t C;
  int32_t first_block;  // of the launch
};

struct ConvProblem {
  ConvPart parts[kConvParts];
  const int32_t* seqs;         // problem.h
  const int32_t* checkpoints;
  const uint8_t* has_initial;  // [N], null: all
  int64_t T, N, M;
  int32_t num_parts;
  DType type;  // of x, of the states and of y
  bool silu;
};

namespace gpu {
// Enqueue it, as `prefill` in launch.h does; the first one by the type of x.
std::string convolve(const ConvProblem& problem, void* stream);
std::string convolve_BF16(const ConvProblem& problem, void* stream);
std::string convolve_F16(const ConvProblem& problem, void* stream);
}  // namespace gpu

}  // namespace kda
