/* A stand-in for libamdhip64.so.7: a ROCm library links and loads against it where there is no ROCm, its FFI
 * handlers register, and every call that would need a GPU answers hipErrorNoDevice (100). Nothing runs.
 * Add a name here when ffi/gpu calls another HIP function. */
#include <stddef.h>

enum { hipErrorNoDevice = 100 };

#define NO_DEVICE(name) \
  int name(void) { return hipErrorNoDevice; }
NO_DEVICE(__hipPopCallConfiguration)
NO_DEVICE(__hipPushCallConfiguration)
NO_DEVICE(hipDeviceGetAttribute)
NO_DEVICE(hipDeviceSynchronize)
NO_DEVICE(hipExtLaunchKernel)
NO_DEVICE(hipFuncGetAttributes)
NO_DEVICE(hipFuncSetAttribute)
NO_DEVICE(hipGetDevice)
NO_DEVICE(hipGetDevicePropertiesR0600)
NO_DEVICE(hipGetLastError)
NO_DEVICE(hipLaunchKernel)
NO_DEVICE(hipMemcpyAsync)
NO_DEVICE(hipMemsetAsync)
NO_DEVICE(hipOccupancyMaxActiveBlocksPerMultiprocessor)
NO_DEVICE(hipPeekAtLastError)
NO_DEVICE(hipSetDevice)
NO_DEVICE(hipStreamGetDevice)
NO_DEVICE(hipStreamIsCapturing)
NO_DEVICE(hipStreamSynchronize)

int hipGetDeviceCount(int* count) {
  if (count) *count = 0;
  return hipErrorNoDevice;
}

const char* hipGetErrorString(int error) { return error ? "no ROCm here (stub libamdhip64)" : "no error"; }
const char* hipGetErrorName(int error) { return error ? "hipErrorNoDevice" : "hipSuccess"; }

/* What the compiler calls when a library with kernels is loaded and unloaded. */
void** __hipRegisterFatBinary(const void* data) {
  static void* handle;
  handle = (void*)data;
  return &handle;
}
void __hipRegisterFunction(void) {}
void __hipRegisterManagedVar(void) {}
void __hipRegisterVar(void) {}
void __hipUnregisterFatBinary(void** handle) { (void)handle; }
