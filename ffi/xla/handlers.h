// The FFI handlers; each library holds those of one platform.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace kda {

XLA_FFI_DECLARE_HANDLER_SYMBOL(KdaPrefillCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(KdaPrefillPoolCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(KdaPrefillGpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(KdaPrefillPoolGpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(KdaConvGpu);

}  // namespace kda
