// One set of runtime names for both GPU vendors. The source is HIP; nvcc builds it with -x cu.
#pragma once

// The second argument: blocks on a multiprocessor for nvcc, waves on a SIMD for HIP, which has registers enough.
#if defined(__CUDACC__)
#define KDA_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#else
#define KDA_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads)
#endif

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

using hipError_t = cudaError_t;
using hipStream_t = cudaStream_t;
constexpr hipError_t hipSuccess = cudaSuccess;
constexpr cudaFuncAttribute hipFuncAttributeMaxDynamicSharedMemorySize =
    cudaFuncAttributeMaxDynamicSharedMemorySize;
constexpr cudaDeviceAttr hipDeviceAttributeMultiprocessorCount = cudaDevAttrMultiProcessorCount;
constexpr cudaDeviceAttr hipDeviceAttributeComputeCapabilityMajor = cudaDevAttrComputeCapabilityMajor;
constexpr cudaDeviceAttr hipDeviceAttributeComputeCapabilityMinor = cudaDevAttrComputeCapabilityMinor;
constexpr cudaDeviceAttr hipDeviceAttributeSharedMemPerBlockOptin =
    cudaDevAttrMaxSharedMemoryPerBlockOptin;
constexpr cudaDeviceAttr hipDeviceAttributeMaxSharedMemoryPerMultiprocessor =
    cudaDevAttrMaxSharedMemoryPerMultiprocessor;
inline hipError_t hipDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return cudaDeviceGetAttribute(value, attribute, device);
}
inline const char* hipGetErrorString(hipError_t e) { return cudaGetErrorString(e); }
inline hipError_t hipGetDevice(int* device) { return cudaGetDevice(device); }
inline hipError_t hipFuncSetAttribute(const void* f, cudaFuncAttribute a, int value) {
  return cudaFuncSetAttribute(f, a, value);
}
inline hipError_t hipLaunchKernel(const void* f, dim3 grid, dim3 block, void** args, size_t shared,
                                  hipStream_t stream) {
  return cudaLaunchKernel(f, grid, block, args, shared, stream);
}
// sm_90: the blocks may start before the launch ahead of them in the stream is over; the kernel waits for it itself.
inline hipError_t launch_early(const void* f, dim3 grid, dim3 block, void** args, size_t shared,
                               hipStream_t stream) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared;
  config.stream = stream, config.attrs = &attribute, config.numAttrs = 1;
  return cudaLaunchKernelExC(&config, f, args);
}
#else
#include <hip/hip_runtime.h>
#endif
