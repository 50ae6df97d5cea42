// Checks a problem and picks the kernels for it. The tables lie on the device and are not looked at.
#include "launch.h"

#include "../check.h"
#include "conv_problem.h"
#include "driver.h"

namespace kda::gpu {
namespace {

const Driver& driver(const Problem& p) {
  if (p.q.type == DType::kBF16) return p.K == 64 ? driver_BF16_64() : driver_BF16_128();
  return p.K == 64 ? driver_F16_64() : driver_F16_128();
}

std::string check(const Problem& p) {
  if (std::string error = check_width(p); !error.empty()) return error;
  if (p.q.type == DType::kF32 || p.k.type != p.q.type || p.v.type != p.q.type)
    return "q, k and v must all be bfloat16 or all be float16";
  for (const Tensor* t : {&p.g, &p.beta})
    if (t->type != p.q.type && t->type != DType::kF32)
      return "g and beta must have the type of q or be float32";
  if (p.NC * p.H >= int64_t(1) << 31) return "too many chunks and heads for one launch";
  if (p.C == 1 && p.N * p.H * p.V / 16 >= int64_t(1) << 31) return "too many sequences and heads for one launch";
  if (p.C == 1 && (p.N != p.T || p.NC != p.T || p.M != 0))
    return "with chunks of one token every sequence has one, in order, and there are no checkpoints";
  return check_sizes(p, 32, workspace_bytes(p), true);
}

}  // namespace

int64_t workspace_bytes(const Problem& p) { return driver(p).workspace_bytes(p); }

std::string prefill(const Problem& p, void* stream) {
  if (std::string error = check(p); !error.empty()) return error;
  return driver(p).prefill(p, stream);
}

std::string convolve(const ConvProblem& p, void* stream) {
  return p.type == DType::kBF16 ? convolve_BF16(p, stream) : convolve_F16(p, stream);
}

}  // namespace kda::gpu
