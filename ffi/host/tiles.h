// The host tile layer: 16 x 16 tiles as plain arrays, loops that the compiler vectorises.
//
// BUILD.md ("The tile layer") says what each operation means and how it maps to MFMA and mma.sync.
// On the host a left operand is stored row major and a right operand contraction major, so that the
// inner loop of `mma` is a broadcast times a row of 16. Operands are kept as float32 whatever their
// type is: BF16 and F16 round the value and keep the container, which reproduces a GPU's numerics.
//
// This header is compiled once per instruction set; KDA_ISA names the namespace so that the linker
// never merges two versions of one function. For the same reason it uses no std:: templates.
#pragma once

#include <cstdint>
#include <cstring>

#include "../kernel/ops.h"
#include "../kernel/problem.h"
#include "../kernel/target.h"
#include "scalar.h"

namespace kda {
inline namespace KDA_ISA {

// Sixteen floats: one zmm, two ymm or four xmm registers.
typedef float Vec16 __attribute__((vector_size(64)));

// Kept out of line: the operation is long enough that a call costs nothing, and the kernels use it
// in so many places that inlining would make the build take minutes.
#define KDA_OUT_OF_LINE __attribute__((noinline)) static

struct HostTiles {
  using Storage = float;  // element type of operands in memory
  static constexpr bool kSkipsEmptyBlocks = true;

  struct alignas(64) Acc {  // float32, [row][column]
    union {
      float x[kTile][kTile];
      Vec16 row[kTile];
    };
  };
  template <class Op>
  struct Left : Acc {};   // [row][contraction]
  template <class Op>
  struct Right : Acc {};  // [contraction][row]
  using Raw = Acc;  // a tile of q, k or v as the caller gave it; a GPU keeps it in 16 bits
  struct alignas(64) RowVec {
    float x[kTile];  // one value for each row of a tile
  };
  struct alignas(64) ColVec {
    float x[kTile];  // one value for each column of a tile
  };

  static float exp2(float x) { return scalar::exp2(x); }
  static float rcp(float x) { return 1.0f / x; }
  static float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }

  static void zero(Acc& a) {
    for (int r = 0; r < kTile; ++r) a.row[r] = Vec16{};
  }
  static void set_identity(Acc& a) {
    for (int r = 0; r < kTile; ++r)
      for (int c = 0; c < kTile; ++c) a.x[r][c] = r == c ? 1.0f : 0.0f;
  }

  // ---- element-wise ------------------------------------------------------------------------
  static float at(const Acc& a, int r, int c) { return a.x[r][c]; }
  static float at(const RowVec& v, int r, int) { return v.x[r]; }
  static float at(const ColVec& v, int, int c) { return v.x[c]; }

  // out = f(in...) element by element; a RowVec or ColVec is broadcast.
  template <class F, class... In>
  static void apply(Acc& out, F f, const In&... in) {
    for (int r = 0; r < kTile; ++r)
      for (int c = 0; c < kTile; ++c) out.x[r][c] = f(at(in, r, c)...);
  }
  template <class F, class... In>
  static void apply(ColVec& out, F f, const In&... in) {
    for (int c = 0; c < kTile; ++c) out.x[c] = f(at(in, 0, c)...);
  }
  template <class F, class... In>
  static void apply(RowVec& out, F f, const In&... in) {
    for (int r = 0; r < kTile; ++r) out.x[r] = f(at(in, r, 0)...);
  }
  // out = keep(row, column) ? a : 0, a select: what is dropped may be infinite.
  template <class Keep>
  static void select(Acc& a, Keep keep) {
    for (int r = 0; r < kTile; ++r)
      for (int c = 0; c < kTile; ++c) a.x[r][c] = keep(r, c) ? a.x[r][c] : 0.0f;
  }
  static void mask_rows(RowVec& v, int valid) {
    for (int r = 0; r < kTile; ++r) v.x[r] = r < valid ? v.x[r] : 0.0f;
  }
  static void add_diagonal(Acc& a, const RowVec& d) {
    for (int r = 0; r < kTile; ++r) a.x[r][r] += d.x[r];
  }

  // ---- across rows and columns -------------------------------------------------------------
  KDA_OUT_OF_LINE RowVec row_sums(const Acc& a) {
    const Acc t = transpose(a);  // sums of rows vectorise as sums over rows of the transpose
    Vec16 sum = t.row[0];
    for (int r = 1; r < kTile; ++r) sum += t.row[r];
    RowVec v;
    std::memcpy(v.x, &sum, sizeof v.x);
    return v;
  }
  KDA_OUT_OF_LINE void cumsum_rows(Acc& a) {  // inclusive, down the rows
    for (int r = 1; r < kTile; ++r) a.row[r] += a.row[r - 1];
  }
  template <class Source>
  static Acc gather_rows(const Acc& a, Source source) {  // row r of the result = row source(r)
    Acc out;
    for (int r = 0; r < kTile; ++r) out.row[r] = a.row[source(r)];
    return out;
  }
  static ColVec last_row(const Acc& a) {
    ColVec v;
    std::memcpy(v.x, a.x[kTile - 1], sizeof v.x);
    return v;
  }
  KDA_OUT_OF_LINE Acc transpose(const Acc& a) {
    Acc out;
    scalar::transpose16(&a.x[0][0], &out.x[0][0]);
    return out;
  }
  // The transpose of a tile rounded to Op (a GPU transposes in 16 bits), or of a caller's tile.
  template <class Op>
  static Acc transposed(const Acc& a) {
    return transpose(left<Op>(a));
  }
  static Acc transposed(const Raw& a) { return transpose(a); }
  // (I + a)^-1 for a strictly lower triangular a, in float32 by forward substitution.
  KDA_OUT_OF_LINE Acc unit_lower_inverse(const Acc& a) {
    Acc t;
    for (int r = 0; r < kTile; ++r) {
      Vec16 row = {};
      row[r] = 1.0f;
      for (int j = 0; j < r; ++j) row -= a.x[r][j] * t.row[j];
      t.row[r] = row;
    }
    return t;
  }

  // ---- operands ----------------------------------------------------------------------------
  template <class Op>
  static Left<Op> left(const Acc& a) {  // rows stay rows, columns are contracted
    Left<Op> out;
    for (int i = 0; i < kTileElements; ++i) (&out.x[0][0])[i] = scalar::round<Op>((&a.x[0][0])[i]);
    return out;
  }
  template <class Op>
  static Right<Op> right(const Acc& a) {  // rows stay rows, columns are contracted
    Right<Op> out;
    static_cast<Acc&>(out) = transpose(left<Op>(a));
    return out;
  }
  template <class Op>
  static Right<Op> right_t(const Acc& a) {  // of the transpose: columns are rows, rows contracted
    Right<Op> out;
    static_cast<Acc&>(out) = left<Op>(a);
    return out;
  }

  // d += sum_i left(i) right(i)^T. All n products run on one set of registers; where the matrix
  // instruction contracts 32, the layer joins two neighbours.
  template <class L, class R>
  static void mma(Acc& d, int n, L left, R right) {
    const Acc *a[kTile], *b[kTile];
    for (int i = 0; i < n; ++i) {
      a[i] = &static_cast<const Acc&>(left(i));
      b[i] = &static_cast<const Acc&>(right(i));
    }
    mma_tiles(d, n, a, b);
  }
  KDA_OUT_OF_LINE void mma_tiles(Acc& d, int n, const Acc* const* a, const Acc* const* b) {
#if defined(__AVX512F__)
    constexpr int kRows = 16;
#else
    constexpr int kRows = 4;
#endif
    for (int r0 = 0; r0 < kTile; r0 += kRows) {
      Vec16 acc[kRows];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) acc[r] = d.row[r0 + r];
      for (int i = 0; i < n; ++i)
        for (int k = 0; k < kTile; ++k) {
          const Vec16 bk = b[i]->row[k];
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) acc[r] += a[i]->x[r0 + r][k] * bk;
        }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) d.row[r0 + r] = acc[r];
    }
  }

  // ---- native-order memory (workspace, shared memory) --------------------------------------
  template <class Op>
  static const Left<Op>& load_left(const Storage* p) {
    return *reinterpret_cast<const Left<Op>*>(p);
  }
  template <class Op>
  static const Right<Op>& load_right(const Storage* p) {
    return *reinterpret_cast<const Right<Op>*>(p);
  }
  template <class Op>
  static Acc load_acc(const Storage* p) {
    return *reinterpret_cast<const Acc*>(p);
  }
  template <class Op>
  static void store(Storage* p, const Left<Op>& a) { std::memcpy(p, &a, sizeof a); }
  template <class Op>
  static void store(Storage* p, const Right<Op>& a) { std::memcpy(p, &a, sizeof a); }
  template <class Op>
  static void store_acc(Storage* p, const Acc& a) { store(p, left<Op>(a)); }
  static ColVec load_cols(const float* p) {
    ColVec v;
    std::memcpy(v.x, p, sizeof v.x);
    return v;
  }
  static void store_cols(float* p, const ColVec& v) { std::memcpy(p, v.x, sizeof v.x); }
  // A row vector becomes the column vector of the transposed tile by way of memory.
  static void store_rows(float* p, const RowVec& v) { std::memcpy(p, v.x, sizeof v.x); }

  // ---- the caller's arrays ------------------------------------------------------------------
  // Rows >= valid are zeros and their memory is not read.
  KDA_OUT_OF_LINE Acc load(const Tensor& t, int64_t offset, int64_t stride, int valid) {
    Acc a;
    zero(a);
    for (int r = 0; r < valid; ++r) scalar::load16(t, offset + r * stride, a.x[r]);
    return a;
  }
  static Raw load_raw(const Tensor& t, int64_t offset, int64_t stride, int valid) {
    return load(t, offset, stride, valid);
  }
  KDA_OUT_OF_LINE RowVec load_rows(const Tensor& t, int64_t offset, int64_t stride, int valid) {
    RowVec v = {};
    for (int r = 0; r < valid; ++r) v.x[r] = scalar::load1(t, offset + r * stride);
    return v;
  }
  KDA_OUT_OF_LINE void store(void* p, DType type, int64_t offset, int64_t stride, const Acc& a, int valid) {
    for (int r = 0; r < valid; ++r) scalar::store16(p, type, offset + r * stride, a.x[r]);
  }
  // float32 tiles with free strides: states in either layout, the groups' matrices.
  KDA_OUT_OF_LINE Acc load_f32(const float* p, int64_t row_stride, int64_t col_stride) {
    Acc a;
    for (int r = 0; r < kTile; ++r)
      for (int c = 0; c < kTile; ++c) a.x[r][c] = p[r * row_stride + c * col_stride];
    return a;
  }
  KDA_OUT_OF_LINE void store_f32(float* p, int64_t row_stride, int64_t col_stride, const Acc& a) {
    for (int r = 0; r < kTile; ++r)
      for (int c = 0; c < kTile; ++c) p[r * row_stride + c * col_stride] = a.x[r][c];
  }
};

#undef KDA_OUT_OF_LINE

}  // namespace KDA_ISA
}  // namespace kda
