// Conversion and checks that every platform's handler of `kda_prefill_v1` shares.
#pragma once

#include <string>
#include <utility>

#include "../kernel/problem.h"
#include "xla/ffi/api/ffi.h"

namespace kda {

namespace ffi = xla::ffi;

struct PrefillOperands {
  ffi::AnyBuffer q, k, v, g, beta, A_log, dt_bias, initial_state, has_initial_state, seqs, chunks,
      checkpoints;
};
struct PrefillResults {
  ffi::Result<ffi::AnyBuffer> out, final_state, checkpoint_state, workspace;
};
struct PrefillAttributes {
  float scale, lower_bound;
  int32_t gate, chunk_size, groups, slab_chunks;
  bool l2norm, state_kv, mixed;
};

// Fills `problem`; the error names the operand that does not fit.
ffi::Error make_problem(PrefillOperands operands, PrefillResults results,
                        PrefillAttributes attributes, Problem* problem);

// A platform's handler: `Run(context, problem)` returns "" or what went wrong.
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
  Problem problem;
  ffi::Error error = make_problem(
      {q, k, v, g, beta, A_log, dt_bias, initial_state, has_initial_state, seqs, chunks,
       checkpoints},
      {out, final_state, checkpoint_state, workspace},
      {scale, lower_bound, gate, chunk_size, groups, slab_chunks, l2norm, state_kv, mixed},
      &problem);
  if (error.failure()) return error;
  if (std::string what = Run(context, problem); !what.empty())
    return ffi::Error::InvalidArgument("kda_prefill_v1: " + what);
  return ffi::Error::Success();
}

// The operands, results and attributes of `kda_prefill_v1` behind a binding's context.
template <class Binding>
auto bind_prefill(Binding&& context) {
  auto qkv = std::move(context)
                 .template Arg<ffi::AnyBuffer>()   // q
                 .template Arg<ffi::AnyBuffer>()   // k
                 .template Arg<ffi::AnyBuffer>();  // v
  auto gates = std::move(qkv)
                   .template Arg<ffi::AnyBuffer>()   // g
                   .template Arg<ffi::AnyBuffer>()   // beta
                   .template Arg<ffi::AnyBuffer>()   // A_log
                   .template Arg<ffi::AnyBuffer>();  // dt_bias
  auto states = std::move(gates)
                    .template Arg<ffi::AnyBuffer>()   // initial_state
                    .template Arg<ffi::AnyBuffer>();  // has_initial_state
  auto tables = std::move(states)
                    .template Arg<ffi::AnyBuffer>()   // seqs
                    .template Arg<ffi::AnyBuffer>()   // chunks
                    .template Arg<ffi::AnyBuffer>();  // checkpoints
  auto results = std::move(tables)
                     .template Ret<ffi::AnyBuffer>()   // out
                     .template Ret<ffi::AnyBuffer>()   // final_state
                     .template Ret<ffi::AnyBuffer>()   // checkpoint_state
                     .template Ret<ffi::AnyBuffer>();  // workspace
  return std::move(results)
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

}  // namespace kda
