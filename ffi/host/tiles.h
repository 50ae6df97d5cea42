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
#include <type_traits>

#include "../kernel/ops.h"
#include "../kernel/problem.h"
#include "../kernel/target.h"
#include "../kernel/workspace.h"
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
  static constexpr bool kSplitHalves = false;
  static constexpr bool kOverlaps = false;
  static constexpr int kWave = 1;
  static int lane() { return 0; }

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
  // Two tiles of neighbouring channels: 1 where the channel is row + offset.
  static void set_identity2(Acc& a, Acc& b, int offset) {
    for (int r = 0; r < kTile; ++r)
      for (int c = 0; c < kTile; ++c) {
        a.x[r][c] = c == r + offset ? 1.0f : 0.0f;
        b.x[r][c] = c + kTile == r + offset ? 1.0f : 0.0f;
      }
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
  // `first` = the smallest `token` + column (`Rows`: row) where |a| is not within the limit.
  template <bool Rows = false>
  static void first_beyond(int32_t& first, const Acc& a, float limit, int32_t token) {
    bool within = true;
    for (int i = 0; i < kTileElements; ++i) within &= __builtin_fabsf((&a.x[0][0])[i]) <= limit;
    if (within) return;
    for (int c = kTile - 1; c >= 0; --c)
      for (int r = 0; r < kTile; ++r) {
        const int at = token + (Rows ? r : c);
        if (!(__builtin_fabsf(a.x[r][c]) <= limit) && at < first) first = at;
      }
  }
  static int32_t wave_min(int32_t x) { return x; }
  static void atomic_max(int32_t* p, int32_t value) {
    int32_t old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (old < value && !__atomic_compare_exchange_n(p, &old, value, true, __ATOMIC_RELAXED,
                                                       __ATOMIC_RELAXED)) {
    }
  }
  static RowVec row_numbers() {
    RowVec v;
    for (int r = 0; r < kTile; ++r) v.x[r] = float(r);
    return v;
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
  template <int N>
  static RowVec row_squares(const Raw (&x)[N]) {
    Acc sum;
    zero(sum);
    for (const Raw& tile : x)
      for (int r = 0; r < kTile; ++r) sum.row[r] += tile.row[r] * tile.row[r];
    return row_sums(sum);
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
  // The transpose of a caller's tile.
  static Acc transposed(const Raw& a) { return transpose(a); }
  static constexpr bool kInverseByHalves = false;
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
  static Left<Op> left_t(const Acc& a) {
    Left<Op> out;
    static_cast<Acc&>(out) = transpose(left<Op>(a));
    return out;
  }
  template <class Op>
  static Right<Op> right_t(const Acc& a) {  // of the transpose: columns are rows, rows contracted
    Right<Op> out;
    static_cast<Acc&>(out) = left<Op>(a);
    return out;
  }

  // The same with values beyond fp16 kept finite, since 0 times infinity would reach other rows; NaN stays.
  template <class Op>
  static Acc clamped(Acc a) {
    if constexpr (std::is_same_v<Op, F16>)
      for (int r = 0; r < kTile; ++r)
        for (int c = 0; c < kTile; ++c) {
          const float x = a.x[r][c];
          a.x[r][c] = x > 65504 ? 65504 : x < -65504 ? -65504 : x;
        }
    return a;
  }
  template <class Op>
  static Left<Op> left_clamped(const Acc& a) {
    return left<Op>(clamped<Op>(a));
  }
  template <class Op>
  static Right<Op> right_clamped(const Acc& a) {
    return right<Op>(clamped<Op>(a));
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
  static void store(Storage* p, const Left<Op>& a) { std::memcpy(p, &a, sizeof a); }
  template <class Op>
  static void store(Storage* p, const Right<Op>& a) { std::memcpy(p, &a, sizeof a); }
  // Operands that the walk reads; here they lie like all others.
  template <class Operand>
  static void store_blob(Storage* p, TileAt at, const Operand& a) { store(p + at.offset, a); }
  template <class Op>
  static const Left<Op>& load_blob_left(const Storage* p, TileAt at) {
    return load_left<Op>(p + at.offset);
  }
  template <class Op>
  static const Right<Op>& load_blob_right(const Storage* p, TileAt at) {
    return load_right<Op>(p + at.offset);
  }
  static ColVec load_cols(const float* p) {
    ColVec v;
    std::memcpy(v.x, p, sizeof v.x);
    return v;
  }
  static void store_cols(float* p, const ColVec& v) { std::memcpy(p, v.x, sizeof v.x); }
  // A row vector becomes the column vector of the transposed tile by way of memory.
  static void store_rows(float* p, const RowVec& v) { std::memcpy(p, v.x, sizeof v.x); }

  // ---- the caller's arrays ------------------------------------------------------------------
  // Rows >= valid are zeros and their memory is not read; there may be more or fewer than a tile has.
  KDA_OUT_OF_LINE Acc load(const Tensor& t, int64_t offset, int64_t stride, int valid) {
    Acc a;
    zero(a);
    for (int r = 0; r < kTile && r < valid; ++r) scalar::load16(t, offset + r * stride, a.x[r]);
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
  KDA_OUT_OF_LINE void store(void* p, DType type, int64_t offset, int64_t stride, const Acc& a,
                             int from, int to) {  // rows [from, to)
    for (int r = from < 0 ? 0 : from; r < kTile && r < to; ++r)
      scalar::store16(p, type, offset + r * stride, a.x[r]);
  }
  // Two tiles of neighbouring channels; a layer may order the 32 channels as its loads like best.
  static void load2(Acc& a, Acc& b, const Tensor& t, int64_t offset, int64_t stride, int valid) {
    a = load(t, offset, stride, valid);
    b = load(t, offset + kTile, stride, valid);
  }
  static void load_raw2(Raw& a, Raw& b, const Tensor& t, int64_t offset, int64_t stride, int valid) {
    load2(a, b, t, offset, stride, valid);
  }
  static void load_cols2(ColVec& a, ColVec& b, const float* p) {
    a = load_cols(p);
    b = load_cols(p + kTile);
  }
  static void load_state2(Acc& a, Acc& b, const float* p, int64_t row_stride, int64_t col_stride) {
    a = load_f32(p, row_stride, col_stride);
    b = load_f32(p + kTile * col_stride, row_stride, col_stride);
  }
  static void store_state2(float* p, int64_t row_stride, int64_t col_stride, const Acc& a,
                           const Acc& b) {
    store_f32(p, row_stride, col_stride, a);
    store_f32(p + kTile * col_stride, row_stride, col_stride, b);
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
