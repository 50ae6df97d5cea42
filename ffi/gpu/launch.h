// Entry point of a GPU target: raw pointers, sizes and a stream; nothing of XLA.
#pragma once

#include <string>

#include "../kernel/problem.h"

namespace kda::gpu {

// Enqueues the prefill on `stream` (hipStream_t or cudaStream_t) and returns "" or what went wrong. It
// allocates nothing, waits for nothing and loads nothing after a device's first call, so it can be
// recorded into a command buffer.
std::string prefill(const Problem& problem, void* stream);

int64_t workspace_bytes(const Problem& problem);

}  // namespace kda::gpu
