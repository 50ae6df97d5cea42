// Conversion and checks that every platform's handler of `kda_prefill_v1` shares.
#pragma once

#include <string>

#include "../kernel/problem.h"
#include "xla/ffi/api/ffi.h"

namespace kda {

struct PrefillOperands {
  xla::ffi::AnyBuffer q, k, v, g, beta, A_log, dt_bias, initial_state, has_initial_state, seqs,
      chunks, checkpoints;
};
struct PrefillResults {
  xla::ffi::Result<xla::ffi::AnyBuffer> out, final_state, checkpoint_state, workspace;
};
struct PrefillAttributes {
  float scale, lower_bound;
  int32_t gate, chunk_size, groups, slab_chunks;
  bool l2norm, state_kv, mixed;
};

// Fills `problem`; the error names the operand that does not fit.
xla::ffi::Error make_problem(PrefillOperands operands, PrefillResults results,
                             PrefillAttributes attributes, Problem* problem);

}  // namespace kda
