// Conversion and checks that the handlers of all platforms share. `kda_prefill_v1` takes and returns states by
// sequence and by checkpoint, `kda_prefill_pool_v1` reads and writes rows of a pool.
#pragma once

#include <string>
#include <utility>

#include "../kernel/problem.h"
#include "xla/ffi/api/ffi.h"

namespace kda {

namespace ffi = xla::ffi;

struct PrefillOperands {
  ffi::AnyBuffer q, k, v, g, beta, A_log, dt_bias, seqs, chunks, checkpoints;
};
struct PrefillStates {
  ffi::AnyBuffer initial_state, has_initial_state;
  ffi::Result<ffi::AnyBuffer> final_state, checkpoint_state;
};
struct PrefillPool {
  ffi::AnyBuffer before, state_indices, has_initial_state, checkpoint_state_indices;
  ffi::Result<ffi::AnyBuffer> after;
};
struct PrefillResults {
  ffi::Result<ffi::AnyBuffer> out, workspace;
};
struct PrefillAttributes {
  float scale, lower_bound;
  int32_t gate, chunk_size, groups, slab_chunks;
  bool l2norm, state_kv, mixed;
};

// Fill `problem`; the error names the target and the operand that does not fit.
ffi::Error make_problem(const char* target, PrefillOperands operands, PrefillStates states,
                        PrefillResults results, PrefillAttributes attributes, Problem* problem);
ffi::Error make_problem(const char* target, PrefillOperands operands, PrefillPool pool,
                        PrefillResults results, PrefillAttributes attributes, Problem* problem);

// A platform's `Run(context, problem)` returns "" or what went wrong.
template <class Context, std::string (*Run)(Context, const Problem&), class States>
ffi::Error run_prefill(const char* target, Context context, PrefillOperands operands, States states,
                       PrefillResults results, PrefillAttributes attributes) {
  Problem problem;
  ffi::Error error = make_problem(target, operands, states, results, attributes, &problem);
  if (error.failure()) return error;
  if (std::string what = Run(context, problem); !what.empty())
    return ffi::Error::InvalidArgument(std::string(target) + ": " + what);
  return ffi::Error::Success();
}

template <class Context, std::string (*Run)(Context, const Problem&)>
ffi::Error prefill_handler(Context context, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                           ffi::AnyBuffer g, ffi::AnyBuffer beta, ffi::AnyBuffer A_log,
                           ffi::AnyBuffer dt_bias, ffi::AnyBuffer initial_state,
                           ffi::AnyBuffer has_initial_state, ffi::AnyBuffer seqs,
                           ffi::AnyBuffer chunks, ffi::AnyBuffer checkpoints,
                           ffi::Result<ffi::AnyBuffer> out,
                           ffi::Result<ffi::AnyBuffer> final_state,
                           ffi::Result<ffi::AnyBuffer> checkpoint_state,
                           ffi::Result<ffi::AnyBuffer> workspace, float scale, float lower_bound,
                           int32_t gate, int32_t chunk_size, int32_t groups, int32_t slab_chunks,
                           bool l2norm, bool state_kv, bool mixed) {
  return run_prefill<Context, Run>(
      "kda_prefill_v1", context, {q, k, v, g, beta, A_log, dt_bias, seqs, chunks, checkpoints},
      PrefillStates{initial_state, has_initial_state, final_state, checkpoint_state},
      {out, workspace},
      {scale, lower_bound, gate, chunk_size, groups, slab_chunks, l2norm, state_kv, mixed});
}

template <class Context, std::string (*Run)(Context, const Problem&)>
ffi::Error prefill_pool_handler(
    Context context, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer g,
    ffi::AnyBuffer beta, ffi::AnyBuffer A_log, ffi::AnyBuffer dt_bias, ffi::AnyBuffer before,
    ffi::AnyBuffer state_indices, ffi::AnyBuffer has_initial_state,
    ffi::AnyBuffer checkpoint_state_indices, ffi::AnyBuffer seqs, ffi::AnyBuffer chunks,
    ffi::AnyBuffer checkpoints, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> after,
    ffi::Result<ffi::AnyBuffer> workspace, float scale, float lower_bound, int32_t gate,
    int32_t chunk_size, int32_t groups, int32_t slab_chunks, bool l2norm, bool state_kv,
    bool mixed) {
  return run_prefill<Context, Run>(
      "kda_prefill_pool_v1", context, {q, k, v, g, beta, A_log, dt_bias, seqs, chunks, checkpoints},
      PrefillPool{before, state_indices, has_initial_state, checkpoint_state_indices, after},
      {out, workspace},
      {scale, lower_bound, gate, chunk_size, groups, slab_chunks, l2norm, state_kv, mixed});
}

// N more operands, or results. A binding cannot be moved, so the last step returns what it makes.
template <int N, class Binding>
auto bind_operands(Binding&& binding) {
  if constexpr (N == 1) {
    return std::move(binding).template Arg<ffi::AnyBuffer>();
  } else {
    return bind_operands<N - 1>(std::move(binding).template Arg<ffi::AnyBuffer>());
  }
}
template <int N, class Binding>
auto bind_results(Binding&& binding) {
  if constexpr (N == 1) {
    return std::move(binding).template Ret<ffi::AnyBuffer>();
  } else {
    return bind_results<N - 1>(std::move(binding).template Ret<ffi::AnyBuffer>());
  }
}

// The operands, results and attributes of a handler behind a binding's context.
template <int Operands, int Results, class Binding>
auto bind_call(Binding&& context) {
  return bind_results<Results>(bind_operands<Operands>(std::move(context)))
      .template Attr<float>("scale")
      .template Attr<float>("lower_bound")
      .template Attr<int32_t>("gate")
      .template Attr<int32_t>("chunk_size")
      .template Attr<int32_t>("groups")
      .template Attr<int32_t>("slab_chunks")
      .template Attr<bool>("l2norm")
      .template Attr<bool>("state_kv")
      .template Attr<bool>("mixed");
}
template <class Binding>
auto bind_prefill(Binding&& context) {
  return bind_call<12, 4>(std::move(context));
}
template <class Binding>
auto bind_prefill_pool(Binding&& context) {
  return bind_call<14, 3>(std::move(context));
}

}  // namespace kda
