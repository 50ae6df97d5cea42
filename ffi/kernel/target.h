// What differs between compilers: how a function of the kernel is declared, how a loop over registers
// is unrolled, and the namespace that keeps two compilations of one header apart.
#pragma once

#if defined(__CUDACC__) || defined(__HIP__)
#if defined(__CUDACC__)
#define KDA_FN __device__ __forceinline__
#else
#define KDA_FN __attribute__((device, always_inline)) inline
#endif
#define KDA_UNROLL _Pragma("unroll")  // arrays of tiles are registers: every index must be a constant
#define KDA_LOOP _Pragma("unroll 1")  // short and rare: code is cache, too
#else
#define KDA_FN inline
#define KDA_UNROLL
#define KDA_LOOP
#endif

#ifndef KDA_ISA
#define KDA_ISA base
#endif
