// Hopper's warpgroup products: D += A B^T with D and A in registers, in the layout of mma.sync, and B in shared
// memory as 8 x 8 matrices (NvidiaTiles::store_blob).
#pragma once

#include <cstdint>

#include "../kernel/ops.h"
#include "../kernel/target.h"
#include "../kernel/workspace.h"
#include "nvidia_async.h"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KDA_HAS_WGMMA
#endif

namespace kda {
inline namespace KDA_ISA {
namespace wgmma {

#if defined(KDA_HAS_WGMMA)

// A right operand: rows in tiles that follow `at`, sixteen contracted columns. No swizzle; 128 bytes from eight
// rows to the next eight, `half` elements from eight columns to the next eight.
struct Matrix {
  uint64_t descriptor;
  template <class Storage>
  KDA_FN Matrix(const Storage* p, TileAt at) {
    const uint64_t address = shared_address(p + at.offset);
    descriptor = (address & 0x3ffff) >> 4 | uint64_t(at.half * sizeof(Storage) >> 4) << 16 |
                 uint64_t(128 >> 4) << 32;
  }
};

KDA_FN void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
KDA_FN void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `Left` groups are on their way; what they write is named, that nothing reads it before.
template <int Left, class Acc, int N>
KDA_FN void wait(Acc (&d)[N]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
  KDA_UNROLL
  for (int i = 0; i < N; ++i)
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) asm volatile("" : "+f"(d[i].x[e])::"memory");
}

#define KDA_F8(d) \
  "+f"(d.x[0]), "+f"(d.x[1]), "+f"(d.x[2]), "+f"(d.x[3]), "+f"(d.x[4]), "+f"(d.x[5]), "+f"(d.x[6]), "+f"(d.x[7])
#define KDA_WGMMA(N, TYPE, D, A, ...)                                                               \
  asm volatile("{.reg .pred add;\n\tsetp.eq.u32 add, 0, 0;\n\t"                                    \
               "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" D "}, " A        \
               ", add, 1, 1, 0;}"                                                                   \
               : __VA_ARGS__                                                                        \
               : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "l"(b.descriptor))
#define KDA_D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define KDA_D16 KDA_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define KDA_D24 KDA_D16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define KDA_D32 KDA_D24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define KDA_D64                                                                                    \
  KDA_D32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
          "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// All tiles of an accumulator, with as many rows of B.
template <class Op, class Acc, int N, class Operand>
KDA_FN void product(Acc (&d)[N], const Operand& a, Matrix b) {
  static_assert(N == 2 || N == 4 || N == 8, "");
#define KDA_SIZES(TYPE)                                                                            \
  if constexpr (N == 2) {                                                                          \
    KDA_WGMMA("32", TYPE, KDA_D16, "{%16, %17, %18, %19}, %20", KDA_F8(d[0]), KDA_F8(d[1]));       \
  } else if constexpr (N == 4) {                                                                   \
    KDA_WGMMA("64", TYPE, KDA_D32, "{%32, %33, %34, %35}, %36", KDA_F8(d[0]), KDA_F8(d[1]),        \
              KDA_F8(d[2]), KDA_F8(d[3]));                                                         \
  } else {                                                                                         \
    KDA_WGMMA("128", TYPE, KDA_D64, "{%64, %65, %66, %67}, %68", KDA_F8(d[0]), KDA_F8(d[1]),       \
              KDA_F8(d[2]), KDA_F8(d[3]), KDA_F8(d[4]), KDA_F8(d[5]), KDA_F8(d[6]), KDA_F8(d[7])); \
  }
  if constexpr (std::is_same_v<Op, BF16>) {
    KDA_SIZES("bf16")
  } else {
    KDA_SIZES("f16")
  }
#undef KDA_SIZES
}

#undef KDA_F8
#undef KDA_WGMMA
#undef KDA_D8
#undef KDA_D16
#undef KDA_D24
#undef KDA_D32
#undef KDA_D64

#endif

}  // namespace wgmma
}  // namespace KDA_ISA
}  // namespace kda
