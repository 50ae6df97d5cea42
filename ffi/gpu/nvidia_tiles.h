// The NVIDIA tile layer: sm_80 and newer, warps of 32, mma.sync m16n8k16.
//
// Lane l = 4 g + t holds of every 16 x 16 tile the rows g and g + 8 and the columns 2t, 2t + 1, 2t + 8
// and 2t + 9. Element e = 0..7 of a lane: row g + 8 (e / 2 % 2), column 2t + e % 2 + 8 (e / 4). That is
// two m16n8 accumulators side by side; packed in pairs it is an m16k16 left operand, and two k16n8 right
// operands of the transpose. Operands in memory: 16 bytes a lane.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../kernel/ops.h"
#include "../kernel/problem.h"
#include "../kernel/target.h"
#include "vendor.h"

namespace kda {
inline namespace KDA_ISA {

// `Io` is the type of q, k, v and out: BF16 or F16.
template <class Io>
struct NvidiaTiles {
  using Storage = uint16_t;
  static constexpr bool kSkipsEmptyBlocks = false;
  static constexpr int kWave = 32;
  static constexpr bool kStages = true;  // copies to shared memory run beside the work

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
  static KDA_FN int row(int e) { return (lane() >> 2) + 8 * (e >> 1 & 1); }
  static KDA_FN int col(int e) { return 2 * (lane() & 3) + (e & 1) + 8 * (e >> 2); }
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
    for (int e = 0; e < 8; ++e) a.x[e] = keep(row(e), col(e)) ? a.x[e] : 0.0f;
  }
  static KDA_FN void mask_rows(RowVec& v, int valid) {
    KDA_UNROLL
    for (int i = 0; i < 2; ++i) v.x[i] = row(2 * i) < valid ? v.x[i] : 0.0f;
  }
  static KDA_FN void add_diagonal(Acc& a, const RowVec& d) {
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) a.x[e] += row(e) == col(e) ? at(d, e) : 0.0f;
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
  static KDA_FN void cumsum_rows(Acc& a) {
    KDA_UNROLL
    for (int e = 0; e < 8; ++e)
      KDA_UNROLL
      for (int d = 4; d < 32; d *= 2) {
        const float above = __shfl_up_sync(~0u, a.x[e], d);
        a.x[e] += lane() >= d ? above : 0.0f;
      }
    KDA_UNROLL
    for (int e = 0; e < 8; ++e)
      if (e & 2) a.x[e] += shuffle(a.x[e - 2], 28 + (lane() & 3));
  }
  template <class Source>
  static KDA_FN Acc gather_rows(const Acc& a, Source source) {
    Acc out;
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) {
      const int from = source(row(e)), l = (from & 7) * 4 + (lane() & 3);
      const float low = shuffle(a.x[e & ~2], l), high = shuffle(a.x[e | 2], l);
      out.x[e] = from < 8 ? low : high;
    }
    return out;
  }
  static KDA_FN ColVec last_row(const Acc& a) {
    const int l = 28 + (lane() & 3);
    return {{shuffle(a.x[2], l), shuffle(a.x[3], l), shuffle(a.x[6], l), shuffle(a.x[7], l)}};
  }
  // Row j is final after step j: broadcast it, and subtract its share from the rows below.
  static KDA_FN Acc unit_lower_inverse(const Acc& a) {
    Acc t;
    set_identity(t);
    KDA_UNROLL
    for (int j = 0; j < kTile - 1; ++j) {
      const int l = (j & 7) * 4 + (lane() & 3), c = (j & 1) + 4 * (j >> 3);
      const int holder = (lane() & ~3) + (j & 7) / 2;  // lane of this row that holds column j
      const float factor[2] = {shuffle(a.x[c], holder), shuffle(a.x[c + 2], holder)};
      float done[4];
      KDA_UNROLL
      for (int i = 0; i < 4; ++i)
        done[i] = shuffle(t.x[(i & 1) + 4 * (i >> 1) + 2 * (j >> 3)], l);
      KDA_UNROLL
      for (int e = 0; e < 8; ++e)
        if (row(e) > j) t.x[e] -= factor[e >> 1 & 1] * done[(e >> 2) * 2 + (e & 1)];
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
  template <class Op>
  static KDA_FN Acc transposed(const Acc& a) {
    return unpack_all<Op>(right_t<Op>(a).r);
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
    KDA_UNROLL
    for (int i = 0; i < n; ++i) product(d, left(i), right(i));
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

  static KDA_FN void copy16(void* shared, const void* global) {
    const auto to = unsigned(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  }
  static KDA_FN void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  template <int Left>
  static KDA_FN void wait_copies() {  // until at most `Left` groups of this thread are on their way
    asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
  }

  // ---- the caller's arrays -----------------------------------------------------------------------
  static KDA_FN Raw load_raw(const Tensor& t, int64_t offset, int64_t stride, int valid) {
    const auto* p = static_cast<const uint16_t*>(t.data) + offset;
    Raw a;
    KDA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int r = row(2 * i);
      a.r[i] = r < valid ? *reinterpret_cast<const uint32_t*>(p + r * stride + col(2 * i)) : 0u;
    }
    return a;
  }
  static KDA_FN Acc load(const Tensor& t, int64_t offset, int64_t stride, int valid) {
    if (t.type != DType::kF32) return unpack_all<Io>(load_raw(t, offset, stride, valid).r);
    const auto* p = static_cast<const float*>(t.data) + offset;
    Acc a;
    KDA_UNROLL
    for (int e = 0; e < 8; ++e) a.x[e] = row(e) < valid ? p[row(e) * stride + col(e)] : 0.0f;
    return a;
  }
  static KDA_FN RowVec load_rows(const Tensor& t, int64_t offset, int64_t stride, int valid) {
    RowVec v;
    KDA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int r = row(2 * i);
      const int64_t at = offset + r * stride;
      v.x[i] = 0;
      if (r < valid)
        v.x[i] = t.type == DType::kF32 ? static_cast<const float*>(t.data)[at]
                                       : unpack<Io>(static_cast<const uint16_t*>(t.data)[at], 0);
    }
    return v;
  }
  static KDA_FN void store(void* data, DType, int64_t offset, int64_t stride, const Acc& a,
                           int valid) {
    auto* p = static_cast<uint16_t*>(data) + offset;
    KDA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int r = row(2 * i);
      if (r < valid)
        *reinterpret_cast<uint32_t*>(p + r * stride + col(2 * i)) =
            pack<Io>(a.x[2 * i], a.x[2 * i + 1]);
    }
  }
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
