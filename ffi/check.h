// What every target checks of a problem before it touches it. Host code.
#pragma once

#include <string>

#include "kernel/problem.h"

namespace kda {

// "" or what is wrong. `smallest_chunk`: the smallest chunk size that the target was compiled for;
// `tokens`: besides, it takes chunks of one token.
inline std::string check_sizes(const Problem& p, int smallest_chunk, int64_t workspace_bytes, bool tokens = false) {
  auto number = [](int64_t n) { return std::to_string(n); };
  if (p.V < 16 || p.V > 256 || p.V % 16)
    return "V is " + number(p.V) + ", want a multiple of 16 up to 256";
  if ((p.C < smallest_chunk && !(tokens && p.C == 1)) || p.C > 64 || (p.C & (p.C - 1)))
    return "chunk_size is " + number(p.C) + ", the kernel has powers of two from " +
           number(smallest_chunk) + " to 64";
  if (p.groups < 1 || p.groups > 64) return "groups is " + number(p.groups) + ", want 1 to 64";
  if (p.slab_chunks < 1) return "slab_chunks is " + number(p.slab_chunks) + ", want at least 1";
  if (p.groups > 1 && p.slab_chunks < p.NC)
    return "slab_chunks is " + number(p.slab_chunks) + ", with groups it must hold all " +
           number(p.NC) + " chunks";
  if (p.workspace_bytes < workspace_bytes)
    return "workspace has " + number(p.workspace_bytes) + " bytes, want " + number(workspace_bytes);
  return "";
}

// Apart from the rest, since the workspace of another K is not defined.
inline std::string check_width(const Problem& p) {
  if (p.K == 64 || p.K == 128) return "";
  return "K is " + std::to_string(p.K) + ", the kernel has 64 and 128";
}

}  // namespace kda
