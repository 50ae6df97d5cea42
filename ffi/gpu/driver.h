// What a compilation of driver.hip offers to launch.cc.
#pragma once

#include <cstdint>
#include <string>

#include "../kernel/problem.h"

namespace kda::gpu {

struct Driver {
  int64_t (*workspace_bytes)(const Problem&);
  std::string (*prefill)(const Problem&, void* stream);
};

const Driver& driver_BF16_64();
const Driver& driver_BF16_128();
const Driver& driver_F16_64();
const Driver& driver_F16_128();

}  // namespace kda::gpu
