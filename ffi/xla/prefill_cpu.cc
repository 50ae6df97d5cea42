// The CPU handlers of `kda_prefill_v1` and `kda_prefill_pool_v1`.
#include <algorithm>

#include "../host/launch.h"
#include "handlers.h"
#include "parallel.h"
#include "prefill.h"

namespace kda {
namespace {

std::string run(ffi::ThreadPool pool, const Problem& problem) {
  host::Parallel parallel;
  // The calling thread works too, so a pool without threads is a pool of one.
  parallel.workers = int(std::max<int64_t>(1, pool.num_threads()));
  parallel.run = [&](int64_t n, const std::function<void(int, int64_t)>& task) {
    PoolRun::run(pool, parallel.workers, n, task);
  };
  return host::prefill(problem, parallel);
}

constexpr auto kHandler = &prefill_handler<ffi::ThreadPool, run>;
constexpr auto kPoolHandler = &prefill_pool_handler<ffi::ThreadPool, run>;

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdaPrefillCpu, kHandler,
                              bind_prefill(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(KdaPrefillPoolCpu, kPoolHandler,
                              bind_prefill_pool(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

}  // namespace kda
