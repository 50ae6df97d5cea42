// The CPU handler of `kda_prefill_v1`.
#include "../host/launch.h"
#include "handlers.h"
#include "parallel.h"
#include "prefill.h"

namespace kda {
namespace {

namespace ffi = xla::ffi;

ffi::Error prefill_cpu(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                       ffi::AnyBuffer g, ffi::AnyBuffer beta, ffi::AnyBuffer A_log,
                       ffi::AnyBuffer dt_bias, ffi::AnyBuffer initial_state,
                       ffi::AnyBuffer has_initial_state, ffi::AnyBuffer seqs,
                       ffi::AnyBuffer chunks, ffi::AnyBuffer checkpoints,
                       ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> final_state,
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

  host::Parallel parallel;
  // The calling thread works too, so a pool without threads is a pool of one.
  parallel.workers = int(std::max<int64_t>(1, pool.num_threads()));
  parallel.run = [&](int64_t n, const std::function<void(int, int64_t)>& task) {
    PoolRun::run(pool, parallel.workers, n, task);
  };
  if (std::string what = host::prefill(problem, parallel); !what.empty())
    return ffi::Error::InvalidArgument("kda_prefill_v1 (cpu): " + what);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdaPrefillCpu, prefill_cpu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // q
                                  .Arg<ffi::AnyBuffer>()  // k
                                  .Arg<ffi::AnyBuffer>()  // v
                                  .Arg<ffi::AnyBuffer>()  // g
                                  .Arg<ffi::AnyBuffer>()  // beta
                                  .Arg<ffi::AnyBuffer>()  // A_log
                                  .Arg<ffi::AnyBuffer>()  // dt_bias
                                  .Arg<ffi::AnyBuffer>()  // initial_state
                                  .Arg<ffi::AnyBuffer>()  // has_initial_state
                                  .Arg<ffi::AnyBuffer>()  // seqs
                                  .Arg<ffi::AnyBuffer>()  // chunks
                                  .Arg<ffi::AnyBuffer>()  // checkpoints
                                  .Ret<ffi::AnyBuffer>()  // out
                                  .Ret<ffi::AnyBuffer>()  // final_state
                                  .Ret<ffi::AnyBuffer>()  // checkpoint_state
                                  .Ret<ffi::AnyBuffer>()  // workspace
                                  .Attr<float>("scale")
                                  .Attr<float>("lower_bound")
                                  .Attr<int32_t>("gate")
                                  .Attr<int32_t>("chunk_size")
                                  .Attr<int32_t>("groups")
                                  .Attr<int32_t>("slab_chunks")
                                  .Attr<bool>("l2norm")
                                  .Attr<bool>("state_kv")
                                  .Attr<bool>("mixed"));

}  // namespace kda
