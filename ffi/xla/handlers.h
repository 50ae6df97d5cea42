// The FFI handlers that this build holds.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace kda {

XLA_FFI_DECLARE_HANDLER_SYMBOL(KdaPrefillCpu);

}  // namespace kda
