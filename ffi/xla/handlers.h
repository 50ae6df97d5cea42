// The FFI handlers; each library holds one of them.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace kda {

XLA_FFI_DECLARE_HANDLER_SYMBOL(KdaPrefillCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(KdaPrefillGpu);

}  // namespace kda
