// The GPU handlers of `kda_prefill_v1` and `kda_prefill_pool_v1`, for ROCm and CUDA alike: everything happens
// on XLA's stream, and nothing but launches, so a command buffer may record it.
#include "../gpu/launch.h"
#include "handlers.h"
#include "prefill.h"

namespace kda {
namespace {

std::string run(void* stream, const Problem& problem) { return gpu::prefill(problem, stream); }

constexpr auto kHandler = &prefill_handler<void*, run>;
constexpr auto kPoolHandler = &prefill_pool_handler<void*, run>;

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdaPrefillGpu, kHandler,
                              bind_prefill(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(KdaPrefillPoolGpu, kPoolHandler,
                              bind_prefill_pool(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace kda
