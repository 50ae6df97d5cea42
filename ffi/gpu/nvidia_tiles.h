// The NVIDIA tile layer: sm_80 and newer, warps of 32, mma.sync m16n8k16.
//
// Lane l = 4 g + t holds of every 16 x 16 tile the rows g and g + 8 and the columns 2t, 2t + 1, 2t + 8
// and 2t + 9. Element e = 0..7 of a lane: row g + 8 (e / 2 % 2), column 2t + e % 2 + 8 (e / 4). That is
// two m16n8 accumulators side by side; packed in pairs it is an m16k16 left operand, and two k16n8 right
// operands of the transpose.
//
// Which token or channel such a row or column stands for is free, as long as both operands of a product
// agree. Here a lane's places are neighbours in the caller's arrays, so that it moves 8 or 16 bytes at a
// time: its rows are the tokens 2g and 2g + 1, its columns the channels 4t..4t + 3 of a single tile, 8t..8t + 7
// of a pair of tiles.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../kernel/ops.h"
#include "../kernel/problem.h"
#include "../kernel/target.h"
#include "../kernel/workspace.h"
#include "vendor.h"

namespace kda {
inline namespace KDA_ISA {

// `Io` is the type of q, k, v and out: BF16 or F16. `Staged`: the walk's operands are in shared memory.
template <class Io, bool Staged = false>
struct NvidiaTiles {
  using Storage = uint16_t;
  static constexpr bool kSkipsEmptyBlocks = false;
  static constexpr bool kLoops = true;  // kernels.h
  static constexpr bool kSplitHalves = true;
  static constexpr int kWave = 32;

  struct Acc {
    float x[8];
  };
  struct Raw {
    uint32_t r[4];
  };
  template <class Op>
  struct Operand {
    uint32_t r[4];
  };
  template <class Op>  // float32 operands stay accumulators
  using Left = std::conditional_t<std::is_same_v<Op, F32>, Acc, Operand<Op>>;
  template <class Op>
  using Right = Left<Op>;
  struct RowVec {
    float x[2];
  };
  struct ColVec {
    float x[4];
  };

  static KDA_FN int lane() { return threadIdx.x & 31; }
  static KDA_FN int group() { return lane() >> 2; }
  static KDA_FN int quarter() { return lane() & 3; }
  // Places of element e in a tile that is not reordered.
  static KDA_FN int row(int e) { return group() + 8 * (e >> 1 & 1); }
  static KDA_FN int col(int e) { return 2 * quarter() + (e & 1) + 8 * (e >> 2); }
  // The token of a row or a column, the channel of a row of a single tile.
  static KDA_FN int token_row(int e) { return 2 * group() + (e >> 1 & 1); }
  static KDA_FN int token_col(int e) { return 4 * quarter() + 2 * (e & 1) + (e >> 2); }
  static KDA_FN int value_row(int i) { return 4 * (group() >> 1) + (group() & 1) + 2 * i; }
  static KDA_FN float shuffle(float x, int from) { return __shfl_sync(~0u, x, from); }

  static KDA_FN float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static KDA_FN float rcp(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static KDA_FN float rsqrt(float x) { return rsqrtf(x); }

  static KDA_FN void zero(Acc& a) {
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) a.x[e] = 0;
  }
  template <class Op>
  static KDA_FN void zero(Operand<Op>& a) {
    a = {{0, 0, 0, 0}};
  }
  // Two tiles of neighbouring channels: 1 where the channel is row + offset.
  static KDA_FN void set_identity2(Acc& a, Acc& b, int offset) {
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) {
      const int c = 8 * quarter() + (e & 1) + 2 * (e >> 2), r = value_row(e >> 1 & 1) + offset;
      a.x[e] = c == r ? 1.0f : 0.0f;
      b.x[e] = c + 4 == r ? 1.0f : 0.0f;
    }
  }
  static KDA_FN void set_identity(Acc& a) {
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) a.x[e] = row(e) == col(e) ? 1.0f : 0.0f;
  }

  // ---- conversions ---------------------------------------------------------------------------
  template <class Op>
  static KDA_FN uint32_t pack(float lo, float hi) {
    uint32_t r;
    if constexpr (std::is_same_v<Op, BF16>) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    }
    return r;
  }
  template <class Op>
  static KDA_FN float unpack(uint32_t r, int half) {
    if constexpr (std::is_same_v<Op, BF16>) {
      return __uint_as_float(half ? r & 0xffff0000u : r << 16);
    } else {
      return __half2float(__ushort_as_half(uint16_t(half ? r >> 16 : r)));
    }
  }

  // ---- element-wise ----------------------------------------------------------------------------
  static KDA_FN float at(const Acc& a, int e) { return a.x[e]; }
  static KDA_FN float at(const Raw& a, int e) { return unpack<Io>(a.r[e >> 1], e & 1); }
  static KDA_FN float at(const RowVec& v, int e) { return v.x[e >> 1 & 1]; }
  static KDA_FN float at(const ColVec& v, int e) { return v.x[(e >> 2) * 2 + (e & 1)]; }
  template <class F, class... In>
  static KDA_FN void apply(Acc& out, F f, const In&... in) {
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) out.x[e] = f(at(in, e)...);
  }
  template <class F, class... In>
  static KDA_FN void apply(ColVec& out, F f, const In&... in) {
    KDA_UNROLL
    for (int i = 0; i < 4; ++i) out.x[i] = f(in.x[i]...);
  }
  template <class F, class... In>
  static KDA_FN void apply(RowVec& out, F f, const In&... in) {
    KDA_UNROLL
    for (int i = 0; i < 2; ++i) out.x[i] = f(in.x[i]...);
  }
  template <class Keep>
  static KDA_FN void select(Acc& a, Keep keep) {
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) a.x[e] = keep(token_row(e), token_col(e)) ? a.x[e] : 0.0f;
  }
  static KDA_FN void mask_rows(RowVec& v, int valid) {
    KDA_UNROLL
    for (int i = 0; i < 2; ++i) v.x[i] = token_row(2 * i) < valid ? v.x[i] : 0.0f;
  }
  static KDA_FN void add_diagonal(Acc& a, const RowVec& d) {
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) a.x[e] += row(e) == col(e) ? at(d, e) : 0.0f;
  }

  // `first` = the smallest `token` + column where |a| is beyond the limit; NaN is let pass.
  static KDA_FN void first_beyond(int32_t& first, const Acc& a, float limit, int32_t token) {
    float most = 0;
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) most = fmaxf(most, fabsf(a.x[e]));
    if (most <= limit) return;
    KDA_UNROLL
    for (int e = 0; e < 8; ++e)
      if (fabsf(a.x[e]) > limit) first = min(first, token + token_col(e));
  }
  static KDA_FN int32_t wave_min(int32_t x) { return __reduce_min_sync(~0u, x); }
  static KDA_FN void atomic_max(int32_t* p, int32_t value) { atomicMax(p, value); }
  static KDA_FN RowVec row_numbers() {
    return {{float(token_row(0)), float(token_row(2))}};
  }

  // ---- across rows and columns -------------------------------------------------------------------
  static KDA_FN RowVec row_sums(const Acc& a) {
    RowVec v{{a.x[0] + a.x[1] + a.x[4] + a.x[5], a.x[2] + a.x[3] + a.x[6] + a.x[7]}};
    KDA_UNROLL
    for (int i = 0; i < 2; ++i) {
      v.x[i] += __shfl_xor_sync(~0u, v.x[i], 1);
      v.x[i] += __shfl_xor_sync(~0u, v.x[i], 2);
    }
    return v;
  }
  // Sums of squares of the rows: the diagonal of x x^T. Token 2g lies in lane (g, g / 2).
  template <int N>
  static KDA_FN RowVec row_squares(const Raw (&x)[N]) {
    Acc a;
    zero(a);
    KDA_UNROLL
    for (int i = 0; i < N; ++i) {
      const Operand<Io> o{{x[i].r[0], x[i].r[1], x[i].r[2], x[i].r[3]}};
      product(a, o, o);
    }
    const int from = (lane() & ~3) + (group() >> 1);
    const bool odd = group() & 1;
    return {{shuffle(odd ? a.x[1] : a.x[0], from), shuffle(odd ? a.x[7] : a.x[6], from)}};
  }
  // Down the tokens, inclusive. A lane adds its two tokens to the sum of those before them; what a shuffle
  // brings from no lane is multiplied with 0.
  static KDA_FN void cumsum_rows(Acc& a) {
    const float has[3] = {lane() >= 4 ? 1.0f : 0.0f, lane() >= 8 ? 1.0f : 0.0f,
                          lane() >= 16 ? 1.0f : 0.0f};
    KDA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int e = (i & 1) + 4 * (i >> 1);
      float before = has[0] * __shfl_up_sync(~0u, a.x[e] + a.x[e + 2], 4);
      KDA_UNROLL
      for (int level = 0; level < 3; ++level)
        before += has[level] * __shfl_up_sync(~0u, before, 4 << level);
      a.x[e] += before;
      a.x[e + 2] += a.x[e];
    }
  }
  template <class Source>
  static KDA_FN Acc gather_rows(const Acc& a, Source source) {
    Acc out;
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) {
      const int from = source(token_row(e)), l = (from >> 1) * 4 + quarter();
      const float low = shuffle(a.x[e & ~2], l), high = shuffle(a.x[e | 2], l);
      out.x[e] = from & 1 ? high : low;
    }
    return out;
  }
  static KDA_FN ColVec last_row(const Acc& a) {
    const int l = 28 + quarter();
    return {{shuffle(a.x[2], l), shuffle(a.x[3], l), shuffle(a.x[6], l), shuffle(a.x[7], l)}};
  }
  // Row j is final after step j: broadcast it, and subtract its share from the rows below.
  static KDA_FN Acc unit_lower_inverse(const Acc& a) {
    Acc t;
    set_identity(t);
    KDA_UNROLL
    for (int j = 0; j < kTile - 1; ++j) {
      const int l = (j >> 1) * 4 + quarter(), c = (j >> 1 & 1) + 4 * (j & 1);
      const int holder = (lane() & ~3) + (j >> 2);  // lane of this row that holds column j
      float factor[2] = {shuffle(a.x[c], holder), shuffle(a.x[c + 2], holder)};
      KDA_UNROLL
      for (int i = 0; i < 2; ++i) factor[i] = token_row(2 * i) > j ? factor[i] : 0.0f;
      float done[4];
      KDA_UNROLL
      for (int i = 0; i < 4; ++i)
        done[i] = shuffle(t.x[(i & 1) + 4 * (i >> 1) + 2 * (j & 1)], l);
      KDA_UNROLL
      for (int e = 0; e < 8; ++e)
        t.x[e] -= factor[e >> 1 & 1] * done[(e >> 2) * 2 + (e & 1)];
    }
    return t;
  }

  // ---- operands ----------------------------------------------------------------------------------
  template <class Op>
  static KDA_FN Left<Op> left(const Acc& a) {
    if constexpr (std::is_same_v<Op, F32>) {
      return a;
    } else {
      Operand<Op> o;
      KDA_UNROLL
      for (int i = 0; i < 4; ++i) o.r[i] = pack<Op>(a.x[2 * i], a.x[2 * i + 1]);
      return o;
    }
  }
  template <class Op>
  static KDA_FN Right<Op> right(const Acc& a) {
    return left<Op>(a);
  }
  // The same with values beyond fp16 kept finite, since 0 times infinity would reach other rows; NaN stays.
  template <class Op>
  static KDA_FN Left<Op> left_clamped(const Acc& a) {
    Left<Op> o = left<Op>(a);
    if constexpr (std::is_same_v<Op, F16>) {
      KDA_UNROLL
      for (int i = 0; i < 4; ++i)
        asm("{min.NaN.f16x2 %0, %0, %1;\n\tmax.NaN.f16x2 %0, %0, %2;}"
            : "+r"(o.r[i])
            : "r"(0x7bff7bffu), "r"(0xfbfffbffu));
    }
    return o;
  }
  template <class Op>
  static KDA_FN Right<Op> right_clamped(const Acc& a) {
    return left_clamped<Op>(a);
  }
  static KDA_FN uint32_t transpose8(uint32_t r) {
    uint32_t out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(r));
    return out;
  }
  template <class Op>
  static KDA_FN Right<Op> right_t(const Acc& a) {
    if constexpr (std::is_same_v<Op, F32>) {
      return a;  // mma_f32 reads its right operand as [contraction][row]
    } else {
      const Operand<Op> o = left<Op>(a);
      return Operand<Op>{
          {transpose8(o.r[0]), transpose8(o.r[2]), transpose8(o.r[1]), transpose8(o.r[3])}};
    }
  }
  template <class Op>
  static KDA_FN Acc unpack_all(const uint32_t (&r)[4]) {
    Acc a;
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) a.x[e] = unpack<Op>(r[e >> 1], e & 1);
    return a;
  }
  static KDA_FN Acc transposed(const Raw& a) {
    const uint32_t r[4] = {transpose8(a.r[0]), transpose8(a.r[2]), transpose8(a.r[1]),
                           transpose8(a.r[3])};
    return unpack_all<Io>(r);
  }

  template <class Op>
  static KDA_FN void mma8(float* d, const Operand<Op>& a, uint32_t b0, uint32_t b1) {
#define KDA_MMA(TYPE)                                                                             \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                      \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                      \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                            \
      : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b0), "r"(b1))
    if constexpr (std::is_same_v<Op, BF16>) {
      KDA_MMA("bf16");
    } else {
      KDA_MMA("f16");
    }
#undef KDA_MMA
  }
  template <class Op>
  static KDA_FN void product(Acc& d, const Operand<Op>& a, const Operand<Op>& b) {
    mma8<Op>(d.x, a, b.r[0], b.r[2]);
    mma8<Op>(d.x + 4, a, b.r[1], b.r[3]);
  }
  // float32: no tensor core keeps 24 bits, so 16 rank-one updates by shuffles.
  static KDA_FN void product(Acc& d, const Acc& a, const Acc& b) {
    KDA_UNROLL
    for (int k = 0; k < kTile; ++k) {
      const int holder = (lane() & ~3) + (k & 7) / 2, c = (k & 1) + 4 * (k >> 3);
      const float left[2] = {shuffle(a.x[c], holder), shuffle(a.x[c + 2], holder)};
      const int l = (k & 7) * 4 + (lane() & 3);
      KDA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int e = (i & 1) + 4 * (i >> 1);
        const float right = shuffle(b.x[e + 2 * (k >> 3)], l);
        d.x[e] += left[0] * right;
        d.x[e + 2] += left[1] * right;
      }
    }
  }
  template <class L, class R>
  static KDA_FN void mma(Acc& d, int n, L left, R right) {
    if (n < 8) {
      KDA_UNROLL
      for (int i = 0; i < n; ++i) product(d, left(i), right(i));
    } else {  // two chains: one alone is all latency
      Acc other;
      zero(other);
      KDA_UNROLL
      for (int i = 0; i < n; ++i) product(i & 1 ? other : d, left(i), right(i));
      KDA_UNROLL
      for (int e = 0; e < 8; ++e) d.x[e] += other.x[e];
    }
  }

  // ---- native-order memory -----------------------------------------------------------------------
  template <class Op>
  static KDA_FN Operand<Op> load_operand(const Storage* p) {
    const uint4 v = reinterpret_cast<const uint4*>(p)[lane()];
    return {{v.x, v.y, v.z, v.w}};
  }
  template <class Op>
  static KDA_FN Operand<Op> load_left(const Storage* p) {
    return load_operand<Op>(p);
  }
  template <class Op>
  static KDA_FN Operand<Op> load_right(const Storage* p) {
    return load_operand<Op>(p);
  }
  template <class Op>
  static KDA_FN Acc load_acc(const Storage* p) {
    return unpack_all<Op>(load_operand<Op>(p).r);
  }
  template <class Op>
  static KDA_FN void store(Storage* p, const Operand<Op>& a) {
    reinterpret_cast<uint4*>(p)[lane()] = make_uint4(a.r[0], a.r[1], a.r[2], a.r[3]);
  }
  template <class Op>
  static KDA_FN void store_acc(Storage* p, const Acc& a) {
    store(p, left<Op>(a));
  }
  template <class Op>
  static KDA_FN void store_acc_t(Storage* p, const Acc& a) {
    store(p, right_t<Op>(a));
  }

  // ---- the walk's operands -----------------------------------------------------------------------
  // A tile is four 8 x 8 matrices of 128 bytes, a row after the other: what ldmatrix and wgmma read.
  template <class Op>
  static KDA_FN void store_blob(Storage* p, TileAt at, const Operand<Op>& a) {
    auto* low = reinterpret_cast<uint32_t*>(p + at.offset) + lane();
    auto* high = low + at.half / 2;
    low[0] = a.r[0], low[32] = a.r[1], high[0] = a.r[2], high[32] = a.r[3];
  }
  template <class Op>
  static KDA_FN Operand<Op> load_blob(const Storage* p, TileAt at) {
    Operand<Op> a;
    if constexpr (Staged) {
      const int l = lane();
      p += at.offset + (l >> 4) * at.half + (l & 15) * 8;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(a.r[0]), "=r"(a.r[1]), "=r"(a.r[2]), "=r"(a.r[3])
                   : "r"(unsigned(__cvta_generic_to_shared(p))));
    } else {
      const auto* low = reinterpret_cast<const uint32_t*>(p + at.offset) + lane();
      const auto* high = low + at.half / 2;
      a = {{low[0], low[32], high[0], high[32]}};
    }
    return a;
  }
  template <class Op>
  static KDA_FN Operand<Op> load_blob_left(const Storage* p, TileAt at) {
    return load_blob<Op>(p, at);
  }
  template <class Op>
  static KDA_FN Operand<Op> load_blob_right(const Storage* p, TileAt at) {
    return load_blob<Op>(p, at);
  }

  // Vectors in shared memory and in the workspace: by place, not by channel or token.
  static KDA_FN ColVec load_cols(const float* p) {
    p += 2 * (lane() & 3);
    return {{p[0], p[1], p[8], p[9]}};
  }
  static KDA_FN void store_cols(float* p, const ColVec& v) {
    if (lane() < 4) {
      p += 2 * lane();
      p[0] = v.x[0], p[1] = v.x[1], p[8] = v.x[2], p[9] = v.x[3];
    }
  }
  static KDA_FN void store_rows(float* p, const RowVec& v) {
    if ((lane() & 3) == 0) p[row(0)] = v.x[0], p[row(2)] = v.x[1];
  }

  // ---- the caller's arrays -----------------------------------------------------------------------
  static KDA_FN Raw load_raw(const Tensor& t, int64_t offset, int64_t stride, int valid) {
    const auto* p = static_cast<const uint16_t*>(t.data) + offset + 4 * quarter();
    Raw a;
    KDA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int r = token_row(2 * i);
      const uint2 v = r < valid ? *reinterpret_cast<const uint2*>(p + r * stride) : uint2{0, 0};
      a.r[i] = v.x, a.r[i + 2] = v.y;
    }
    return a;
  }
  static KDA_FN void load_raw2(Raw& a, Raw& b, const Tensor& t, int64_t offset, int64_t stride,
                               int valid) {
    const auto* p = static_cast<const uint16_t*>(t.data) + offset + 8 * quarter();
    KDA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int r = token_row(2 * i);
      const uint4 v =
          r < valid ? *reinterpret_cast<const uint4*>(p + r * stride) : uint4{0, 0, 0, 0};
      a.r[i] = v.x, a.r[i + 2] = v.y, b.r[i] = v.z, b.r[i + 2] = v.w;
    }
  }
  static KDA_FN void load2(Acc& a, Acc& b, const Tensor& t, int64_t offset, int64_t stride,
                           int valid) {
    if (t.type != DType::kF32) {
      Raw x, y;
      load_raw2(x, y, t, offset, stride, valid);
      a = unpack_all<Io>(x.r), b = unpack_all<Io>(y.r);
      return;
    }
    const auto* p = static_cast<const float*>(t.data) + offset + 8 * quarter();
    KDA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int r = token_row(2 * i);
      float4 x{0, 0, 0, 0}, y{0, 0, 0, 0};
      if (r < valid) {
        x = reinterpret_cast<const float4*>(p + r * stride)[0];
        y = reinterpret_cast<const float4*>(p + r * stride)[1];
      }
      set_row(a, i, x), set_row(b, i, y);
    }
  }
  static KDA_FN void set_row(Acc& a, int i, float4 v) {
    a.x[2 * i] = v.x, a.x[2 * i + 1] = v.y, a.x[2 * i + 4] = v.z, a.x[2 * i + 5] = v.w;
  }
  static KDA_FN float4 get_row(const Acc& a, int i) {
    return {a.x[2 * i], a.x[2 * i + 1], a.x[2 * i + 4], a.x[2 * i + 5]};
  }
  static KDA_FN void load_cols2(ColVec& a, ColVec& b, const float* p) {
    const auto* x = reinterpret_cast<const float4*>(p + 8 * quarter());
    const float4 v = x[0], w = x[1];
    a = {{v.x, v.y, v.z, v.w}};
    b = {{w.x, w.y, w.z, w.w}};
  }
  static KDA_FN void unpack(Acc& a, const Raw& x) { a = unpack_all<Io>(x.r); }
  static KDA_FN RowVec load_rows(const Tensor& t, int64_t offset, int64_t stride, int valid) {
    RowVec v;
    KDA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int r = token_row(2 * i);
      const int64_t at = offset + r * stride;
      v.x[i] = 0;
      if (r < valid)
        v.x[i] = t.type == DType::kF32 ? static_cast<const float*>(t.data)[at]
                                       : unpack<Io>(static_cast<const uint16_t*>(t.data)[at], 0);
    }
    return v;
  }
  static KDA_FN void store(void* data, DType, int64_t offset, int64_t stride, const Acc& a,
                           int from, int to) {  // rows [from, to)
    auto* p = static_cast<uint16_t*>(data) + offset + 4 * quarter();
    KDA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int r = token_row(2 * i);
      const float4 v = get_row(a, i);
      if (r >= from && r < to)
        *reinterpret_cast<uint2*>(p + r * stride) = {pack<Io>(v.x, v.y), pack<Io>(v.z, v.w)};
    }
  }
  // The same of o^T.
  static KDA_FN void store_transposed(void* data, int64_t offset, int64_t stride, float scale,
                                      const Acc& a, int to) {
    auto* p = static_cast<uint16_t*>(data) + offset + 4 * quarter();
    KDA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint2 v = {transpose8(pack<Io>(scale * a.x[4 * i], scale * a.x[4 * i + 1])),
                       transpose8(pack<Io>(scale * a.x[4 * i + 2], scale * a.x[4 * i + 3]))};
      const int r = token_row(2 * i);
      if (r < to) *reinterpret_cast<uint2*>(p + r * stride) = v;
    }
  }
  // States: rows are values, columns a pair of channel tiles.
  static KDA_FN void load_state2(Acc& a, Acc& b, const float* p, int64_t row_stride,
                                 int64_t col_stride) {
    KDA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float* x = p + value_row(i) * row_stride + 8 * quarter() * col_stride;
      if (col_stride == 1) {
        set_row(a, i, reinterpret_cast<const float4*>(x)[0]);
        set_row(b, i, reinterpret_cast<const float4*>(x)[1]);
      } else {
        const int64_t c = col_stride;
        set_row(a, i, float4{x[0], x[c], x[2 * c], x[3 * c]});
        set_row(b, i, float4{x[4 * c], x[5 * c], x[6 * c], x[7 * c]});
      }
    }
  }
  static KDA_FN void store_state2(float* p, int64_t row_stride, int64_t col_stride, const Acc& a,
                                  const Acc& b) {
    KDA_UNROLL
    for (int i = 0; i < 2; ++i) {
      float* x = p + value_row(i) * row_stride + 8 * quarter() * col_stride;
      const float4 v = get_row(a, i), w = get_row(b, i);
      if (col_stride == 1) {
        reinterpret_cast<float4*>(x)[0] = v, reinterpret_cast<float4*>(x)[1] = w;
      } else {
        const int64_t c = col_stride;
        x[0] = v.x, x[c] = v.y, x[2 * c] = v.z, x[3 * c] = v.w;
        x[4 * c] = w.x, x[5 * c] = w.y, x[6 * c] = w.z, x[7 * c] = w.w;
      }
    }
  }
  // In plain order.
  static KDA_FN Acc load_f32(const float* p, int64_t row_stride, int64_t col_stride) {
    Acc a;
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) a.x[e] = p[row(e) * row_stride + col(e) * col_stride];
    return a;
  }
  static KDA_FN void store_f32(float* p, int64_t row_stride, int64_t col_stride, const Acc& a) {
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) p[row(e) * row_stride + col(e) * col_stride] = a.x[e];
  }
};

}  // namespace KDA_ISA
}  // namespace kda
