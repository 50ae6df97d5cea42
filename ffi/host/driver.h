// What an instruction set's translation unit (driver.cc) offers to launch.cc: plain functions.
#pragma once

#include <cstdint>

#include "../kernel/problem.h"

namespace kda::host {

// launch.cc's Parallel without std::function, so that driver.cc instantiates no std:: template.
struct TaskRunner {
  void* context;
  void (*run)(void* context, int64_t n, void (*task)(void*, int, int64_t), void* argument);
  void for_each(int64_t n, void (*task)(void*, int, int64_t), void* argument) const {
    run(context, n, task, argument);
  }
};

struct Driver {
  // Bytes of scratch for one worker, and of workspace for the whole call.
  int64_t (*scratch_bytes)(const Problem&);
  int64_t (*workspace_bytes)(const Problem&);
  // `scratch` holds scratch_bytes for each of `workers` workers, 64-byte aligned.
  void (*prefill)(const Problem&, const TaskRunner&, int workers, char* scratch);
};

const Driver& driver_base();
#if defined(KDA_X86_DISPATCH)
const Driver& driver_v3();
const Driver& driver_v4();
#endif

}  // namespace kda::host
