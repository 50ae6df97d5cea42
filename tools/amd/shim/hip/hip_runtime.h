// The part of HIP that kda_jax uses, written on clang's builtins, for machines where HIP's own headers cannot be
// had (see ../../install.sh). Compile with -nogpuinc -nogpulib. It proves that the code compiles; a library for
// users is built with ROCm's headers. The numbers of the enumerators are those of HIP 7.
#pragma once
#include <stddef.h>

#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds_1(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define __launch_bounds_2(threads, waves) __launch_bounds_1(threads) __attribute__((amdgpu_waves_per_eu(waves)))
#define __launch_bounds_pick(_1, _2, name, ...) name
#define __launch_bounds__(...) __launch_bounds_pick(__VA_ARGS__, __launch_bounds_2, __launch_bounds_1, )(__VA_ARGS__)

// ---- host API

enum hipError_t { hipSuccess = 0, hipErrorInvalidValue = 1, hipErrorNoDevice = 100 };
enum hipMemcpyKind { hipMemcpyHostToDevice = 1, hipMemcpyDeviceToHost = 2, hipMemcpyDeviceToDevice = 3 };
enum hipFuncAttribute { hipFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum hipDeviceAttribute_t {
  hipDeviceAttributeComputeCapabilityMajor = 23,
  hipDeviceAttributeComputeCapabilityMinor = 61,
  hipDeviceAttributeMultiprocessorCount = 63,
  hipDeviceAttributeMaxSharedMemoryPerBlock = 74,
};
typedef struct ihipStream_t* hipStream_t;

struct dim3 {
  unsigned x, y, z;
  __host__ __device__ constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

extern "C" {
hipError_t hipLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** args, size_t lds, hipStream_t stream);
hipError_t __hipPushCallConfiguration(dim3 grid, dim3 block, size_t lds = 0, hipStream_t stream = nullptr);
hipError_t __hipPopCallConfiguration(dim3* grid, dim3* block, size_t* lds, hipStream_t* stream);
hipError_t hipGetLastError();
hipError_t hipPeekAtLastError();
const char* hipGetErrorString(hipError_t error);
hipError_t hipFuncSetAttribute(const void* kernel, hipFuncAttribute attribute, int value);
hipError_t hipGetDevice(int* device);
hipError_t hipGetDeviceCount(int* count);
hipError_t hipSetDevice(int device);
hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int device);
hipError_t hipStreamGetDevice(hipStream_t stream, int* device);
hipError_t hipStreamSynchronize(hipStream_t stream);
hipError_t hipMemsetAsync(void* target, int value, size_t bytes, hipStream_t stream);
hipError_t hipMemcpyAsync(void* target, const void* source, size_t bytes, hipMemcpyKind kind, hipStream_t stream);
}

// ---- device

#define __kda_axes(type, x_value, y_value, z_value)      \
  struct type {                                          \
    struct X {                                           \
      __device__ operator unsigned() const { return x_value; } \
    } x;                                                 \
    struct Y {                                           \
      __device__ operator unsigned() const { return y_value; } \
    } y;                                                 \
    struct Z {                                           \
      __device__ operator unsigned() const { return z_value; } \
    } z;                                                 \
  }
__kda_axes(__kda_thread, __builtin_amdgcn_workitem_id_x(), __builtin_amdgcn_workitem_id_y(),
           __builtin_amdgcn_workitem_id_z());
__kda_axes(__kda_block, __builtin_amdgcn_workgroup_id_x(), __builtin_amdgcn_workgroup_id_y(),
           __builtin_amdgcn_workgroup_id_z());
__kda_axes(__kda_size, __builtin_amdgcn_workgroup_size_x(), __builtin_amdgcn_workgroup_size_y(),
           __builtin_amdgcn_workgroup_size_z());
#define __kda_blocks(axis) __builtin_amdgcn_grid_size_##axis() / __builtin_amdgcn_workgroup_size_##axis()
__kda_axes(__kda_grid, __kda_blocks(x), __kda_blocks(y), __kda_blocks(z));
#undef __kda_blocks
#undef __kda_axes
static const __device__ __attribute__((unused)) __kda_thread threadIdx{};
static const __device__ __attribute__((unused)) __kda_block blockIdx{};
static const __device__ __attribute__((unused)) __kda_size blockDim{};
static const __device__ __attribute__((unused)) __kda_grid gridDim{};

#define __kda_device static __device__ __forceinline__

__kda_device void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

__kda_device int __shfl(int value, int lane) { return __builtin_amdgcn_ds_bpermute(lane << 2, value); }
__kda_device float __shfl(float value, int lane) {
  return __builtin_bit_cast(float, __shfl(__builtin_bit_cast(int, value), lane));
}
__kda_device int __kda_lane() { return __builtin_amdgcn_mbcnt_hi(-1, __builtin_amdgcn_mbcnt_lo(-1, 0)); }
template <typename T>
__kda_device T __shfl_xor(T value, int mask) {
  return __shfl(value, __kda_lane() ^ mask);
}

__kda_device unsigned atomicOr(unsigned* address, unsigned value) {
  return __hip_atomic_fetch_or(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
__kda_device unsigned atomicAdd(unsigned* address, unsigned value) {
  return __hip_atomic_fetch_add(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
__kda_device int atomicMax(int* address, int value) {
  return __hip_atomic_fetch_max(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
