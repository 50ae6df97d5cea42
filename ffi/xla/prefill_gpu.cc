// The GPU handler of `kda_prefill_v1`, for ROCm and CUDA alike: everything happens on XLA's stream, and
// nothing but launches, so a command buffer may record it.
#include "../gpu/launch.h"
#include "handlers.h"
#include "prefill.h"

namespace kda {
namespace {

std::string run(void* stream, const Problem& problem) { return gpu::prefill(problem, stream); }

constexpr auto kHandler = &prefill_handler<void*, run>;

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdaPrefillGpu, kHandler,
                              bind_prefill(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace kda
