// Entry points of the host target. Knows raw pointers and sizes, nothing of XLA.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "../kernel/problem.h"

namespace kda::host {

// Runs task(worker, 0), ..., task(worker, n - 1) on up to `workers` threads and returns when all are
// done. A task sees a worker index below `workers` that no other running task has.
struct Parallel {
  int workers = 1;
  std::function<void(int64_t n, const std::function<void(int, int64_t)>& task)> run;
};

// Checks sizes and tables, picks the kernel for this CPU and runs it. Returns "" or what is wrong.
std::string prefill(const Problem& problem, const Parallel& parallel);

// Workspace that `prefill` wants; kda_jax.fused computes the same number while tracing.
int64_t workspace_bytes(const Problem& problem);

// The instruction set that `prefill` uses here: "x86-64-v4", "x86-64-v3" or "baseline".
const char* instruction_set();

}  // namespace kda::host
