// Hopper's warpgroup products: D += A B with D in registers and both operands in shared memory as 8 x 8 matrices of
// 128 bytes, not swizzled.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../kernel/ops.h"
#include "../kernel/target.h"
#include "nvidia_async.h"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KDA_HAS_WGMMA
#endif

namespace kda {
inline namespace KDA_ISA {
namespace wgmma {

// Where an operand lies. `contracted` and `other`: bytes from one matrix to the next along the contracted index
// and along the rows of A or the columns of B. The matrices of A have eight contracted elements in a row of 16
// bytes; those of B have eight columns in a row.
struct Matrix {
  uint32_t low, high;
  KDA_FN Matrix(const void* p, int contracted, int other)
      : low(shared_address(p) >> 4 | unsigned(contracted >> 4) << 16), high(unsigned(other >> 4)) {}
  KDA_FN Matrix at(int bytes) const {  // so much further on
    Matrix m = *this;
    m.low += unsigned(bytes >> 4);
    return m;
  }
  KDA_FN uint64_t descriptor() const { return uint64_t(high) << 32 | low; }
};

KDA_FN void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
KDA_FN void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// What ordinary stores left in shared memory, for the products of whoever meets a barrier behind this.
KDA_FN void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Waits until at most `Left` groups are on their way; what they write is named, that nothing reads it before.
template <int Left, int R>
KDA_FN void wait(float (&d)[R]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
  KDA_UNROLL
  for (int i = 0; i < R; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define KDA_F8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define KDA_F16(i) KDA_F8(i), KDA_F8(i + 8)
#define KDA_F32(i) KDA_F16(i), KDA_F16(i + 16)
#define KDA_F64(i) KDA_F32(i), KDA_F32(i + 32)
#define KDA_WGMMA(N, TYPE, D, A, B, ADD, ...)                                                    \
  asm volatile("{.reg .pred add;\n\tsetp.ne.b32 add, " ADD ", 0;\n\t"                            \
               "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" D "}, " A ", " B \
               ", add, 1, 1, 0, 1;}"                                                             \
               : __VA_ARGS__                                                                     \
               : "l"(a.descriptor()), "l"(b.descriptor()), "r"(int(add)))
#define KDA_D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define KDA_D16 KDA_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define KDA_D32                                                                              \
  KDA_D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KDA_D64                                                                                    \
  KDA_D32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
          "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// 64 rows, 2 R columns, sixteen contracted. `add`: to what D holds.
template <class Op, int R>
KDA_FN void product(float (&d)[R], Matrix a, Matrix b, bool add) {
  static_assert(R == 8 || R == 16 || R == 32 || R == 64, "");
#define KDA_SIZES(TYPE)                                                   \
  if constexpr (R == 8) {                                                 \
    KDA_WGMMA("16", TYPE, KDA_D8, "%8", "%9", "%10", KDA_F8(0));          \
  } else if constexpr (R == 16) {                                         \
    KDA_WGMMA("32", TYPE, KDA_D16, "%16", "%17", "%18", KDA_F16(0));      \
  } else if constexpr (R == 32) {                                         \
    KDA_WGMMA("64", TYPE, KDA_D32, "%32", "%33", "%34", KDA_F32(0));      \
  } else {                                                                \
    KDA_WGMMA("128", TYPE, KDA_D64, "%64", "%65", "%66", KDA_F64(0));     \
  }
  if constexpr (std::is_same_v<Op, BF16>) {
    KDA_SIZES("bf16")
  } else {
    KDA_SIZES("f16")
  }
#undef KDA_SIZES
}

#undef KDA_F8
#undef KDA_F16
#undef KDA_F32
#undef KDA_F64
#undef KDA_WGMMA
#undef KDA_D8
#undef KDA_D16
#undef KDA_D32
#undef KDA_D64

// Four 8 x 8 matrices from the registers where a product leaves them; a lane names a row of one.
KDA_FN void store_matrices(void* row, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(row)),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

}  // namespace wgmma
}  // namespace KDA_ISA
}  // namespace kda
