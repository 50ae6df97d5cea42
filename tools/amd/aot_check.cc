// An FFI handler that does nothing, for `aot.py check`: XLA looks a target up, and asks its handler for its API
// version and traits, when it compiles.
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error Nothing(ffi::Buffer<ffi::BF16>, ffi::Buffer<ffi::BF16>, ffi::ResultBuffer<ffi::F32>) {
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(aot_check, Nothing,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Ret<ffi::Buffer<ffi::F32>>(),
                              {ffi::Traits::kCmdBufferCompatible});
