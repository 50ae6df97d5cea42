// Checks a problem and picks the kernels for it. The tables lie on the device and are not looked at.
#include "launch.h"

#include "driver.h"

namespace kda::gpu {
namespace {

const Driver& driver(const Problem& p) {
  if (p.q.type == DType::kBF16) return p.K == 64 ? driver_BF16_64() : driver_BF16_128();
  return p.K == 64 ? driver_F16_64() : driver_F16_128();
}

std::string check(const Problem& p) {
  auto number = [](int64_t n) { return std::to_string(n); };
  if (p.K != 64 && p.K != 128) return "K is " + number(p.K) + ", the kernel has 64 and 128";
  if (p.V < 16 || p.V > 256 || p.V % 16)
    return "V is " + number(p.V) + ", want a multiple of 16 up to 256";
  if (p.C != 32 && p.C != 64)
    return "chunk_size is " + number(p.C) + ", the GPU kernel has 32 and 64";
  if (p.q.type == DType::kF32 || p.k.type != p.q.type || p.v.type != p.q.type)
    return "q, k and v must all be bfloat16 or all be float16";
  for (const Tensor* t : {&p.g, &p.beta})
    if (t->type != p.q.type && t->type != DType::kF32)
      return "g and beta must have the type of q or be float32";
  if (p.groups < 1 || p.groups > 64) return "groups is " + number(p.groups) + ", want 1 to 64";
  if (p.slab_chunks < 1) return "slab_chunks is " + number(p.slab_chunks) + ", want at least 1";
  if (p.groups > 1 && p.slab_chunks < p.NC)
    return "slab_chunks is " + number(p.slab_chunks) + ", with groups it must hold all " +
           number(p.NC) + " chunks";
  if (p.NC * p.H >= int64_t(1) << 31) return "too many chunks and heads for one launch";
  const int64_t want = gpu::workspace_bytes(p);
  if (p.workspace_bytes < want)
    return "workspace has " + number(p.workspace_bytes) + " bytes, want " + number(want);
  return "";
}

}  // namespace

int64_t workspace_bytes(const Problem& p) { return driver(p).workspace_bytes(p); }

std::string prefill(const Problem& p, void* stream) {
  if (std::string error = check(p); !error.empty()) return error;
  return driver(p).prefill(p, stream);
}

}  // namespace kda::gpu
