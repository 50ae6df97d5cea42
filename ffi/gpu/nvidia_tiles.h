// The NVIDIA tile layer: sm_80 and newer. Where a lane's elements are, is in nvidia_lanes.h; here is how they come
// from memory and go there.
#pragma once

#include <cstdint>

#include "../kernel/ops.h"
#include "../kernel/problem.h"
#include "../kernel/target.h"
#include "../kernel/workspace.h"
#include "nvidia_products.h"
#include "vendor.h"

namespace kda {
inline namespace KDA_ISA {

// `Io` is the type of q, k, v and out: BF16 or F16. `Staged`: the walk's operands are in shared memory.
template <class Io, bool Staged = false>
struct NvidiaTiles : NvidiaProducts {
  using Storage = uint16_t;
  static constexpr bool kSkipsEmptyBlocks = false;
  static constexpr bool kLoops = true;  // kernels.h
  static constexpr bool kSplitHalves = true;
  static constexpr bool kOverlaps = true;  // a walk beside the prologue: Schedule::progress
  using IoType = Io;
  using Raw = Operand<Io>;

  // ---- native-order memory -----------------------------------------------------------------------
  template <class Op>
  static KDA_FN Operand<Op> load_left(const Storage* p) {
    const uint4 v = reinterpret_cast<const uint4*>(p)[lane()];
    return {{v.x, v.y, v.z, v.w}};
  }
  template <class Op>
  static KDA_FN RightOperand<Op> load_right(const Storage* p) {
    return as_right(load_left<Op>(p));
  }
  template <class Op>
  static KDA_FN void store(Storage* p, const Operand<Op>& a) {
    reinterpret_cast<uint4*>(p)[lane()] = make_uint4(a.r[0], a.r[1], a.r[2], a.r[3]);
  }
  template <class Op>
  static KDA_FN void store(Storage* p, const RightOperand<Op>& a) {
    store(p, Operand<Op>{{a.r[0], a.r[1], a.r[2], a.r[3]}});
  }

  // ---- the walk's operands -----------------------------------------------------------------------
  // A tile is four 8 x 8 matrices of 128 bytes: what ldmatrix and wgmma read.
  template <class Op>
  static KDA_FN void store_blob(Storage* p, TileAt at, const Operand<Op>& a) {
    auto* low = reinterpret_cast<uint32_t*>(p + at.offset) + lane();
    auto* high = low + at.half / 2;
    const int rows = at.rows / 2;
    low[0] = a.r[0], low[rows] = a.r[1], high[0] = a.r[2], high[rows] = a.r[3];
  }
  template <class Op>
  static KDA_FN void store_blob(Storage* p, TileAt at, const RightOperand<Op>& a) {
    store_blob(p, at, Operand<Op>{{a.r[0], a.r[2], a.r[1], a.r[3]}});
  }
  // `right`: with the registers of a right operand, for as_right.
  template <class Op>
  static KDA_FN Operand<Op> load_blob(const Storage* p, TileAt at, bool right) {
    const int next = right ? at.half : at.rows, last = right ? at.rows : at.half;
    Operand<Op> a;
    if constexpr (Staged) {
      const int l = lane();
      p += at.offset + (l >> 4) * last + (l >> 3 & 1) * next + (l & 7) * 8;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(a.r[0]), "=r"(a.r[1]), "=r"(a.r[2]), "=r"(a.r[3])
                   : "r"(unsigned(__cvta_generic_to_shared(p))));
    } else {
      const auto* low = reinterpret_cast<const uint32_t*>(p + at.offset) + lane();
      const auto* high = low + last / 2;
      a = {{low[0], low[next / 2], high[0], high[next / 2]}};
    }
    return a;
  }
  template <class Op>
  static KDA_FN RightOperand<Op> as_right(const Operand<Op>& a) {
    return {{a.r[0], a.r[1], a.r[2], a.r[3]}};
  }
  template <class Op>
  static KDA_FN Operand<Op> load_blob_left(const Storage* p, TileAt at) {
    return load_blob<Op>(p, at, false);
  }
  template <class Op>
  static KDA_FN RightOperand<Op> load_blob_right(const Storage* p, TileAt at) {
    return as_right(load_blob<Op>(p, at, true));
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
  static KDA_FN float widen(uint32_t pair, int which) { return unpack<Io>(pair, which); }
  static KDA_FN uint32_t pair(float lo, float hi) { return pack<Io>(lo, hi); }
  static KDA_FN float element(const Tensor& t, int64_t at) {
    return t.type == DType::kF32 ? static_cast<const float*>(t.data)[at]
                                 : unpack<Io>(static_cast<const uint16_t*>(t.data)[at], 0);
  }
  static KDA_FN void elements4(float (&x)[4], const Tensor& t, int64_t at) {  // `at`: a multiple of 4
    if (t.type == DType::kF32) {
      const float4 v = *reinterpret_cast<const float4*>(static_cast<const float*>(t.data) + at);
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
      const uint2 v = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(t.data) + at);
      x[0] = widen(v.x, 0), x[1] = widen(v.x, 1), x[2] = widen(v.y, 0), x[3] = widen(v.y, 1);
    }
  }
  static KDA_FN void put(void* data, int64_t at, float x) {
    static_cast<uint16_t*>(data)[at] = uint16_t(pack<Io>(x, 0.0f));
  }
  static KDA_FN float exchange(float x, int d) { return __shfl_xor_sync(~0u, x, d); }
  static KDA_FN RowVec load_rows(const Tensor& t, int64_t offset, int64_t stride, int valid) {
    RowVec v;
    KDA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int r = token_row(2 * i);
      const int64_t at = offset + r * stride;
      v.x[i] = r < valid ? element(t, at) : 0;
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
