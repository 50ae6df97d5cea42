// The CDNA tile layer: gfx90a, gfx942 and gfx950. Where a lane's elements are, is in cdna_lanes.h; here is how they
// come from memory and go there.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../kernel/ops.h"
#include "../kernel/problem.h"
#include "../kernel/target.h"
#include "../kernel/workspace.h"
#include "cdna_products.h"
#include "vendor.h"

namespace kda {
inline namespace KDA_ISA {

// `Io` is the type of q, k, v and out: BF16 or F16.
template <class Io>
struct CdnaTiles : CdnaProducts {
  using Storage = uint16_t;
  static constexpr bool kSkipsEmptyBlocks = false;
  static constexpr bool kLoops = false;  // kernels.h
  static constexpr bool kSplitHalves = false;
  static constexpr bool kOverlaps = false;  // a walk beside the prologue: Schedule::progress
  using Raw = Operand<Io>;

  // ---- native-order memory -----------------------------------------------------------------------
  template <class Op>
  static KDA_FN Operand<Op> load_left(const Storage* p) {
    return {reinterpret_cast<const Vector<Op>*>(p)[lane()]};
  }
  template <class Op>
  static KDA_FN Operand<Op> load_right(const Storage* p) {
    return load_left<Op>(p);
  }
  template <class Op>
  static KDA_FN void store(Storage* p, const Operand<Op>& a) {
    reinterpret_cast<Vector<Op>*>(p)[lane()] = a.x;
  }
  // Operands that the walk reads; here they lie like all others.
  template <class Op>
  static KDA_FN void store_blob(Storage* p, TileAt at, const Operand<Op>& a) {
    store(p + at.offset, a);
  }
  template <class Op>
  static KDA_FN Operand<Op> load_blob_left(const Storage* p, TileAt at) {
    return load_left<Op>(p + at.offset);
  }
  template <class Op>
  static KDA_FN Operand<Op> load_blob_right(const Storage* p, TileAt at) {
    return load_left<Op>(p + at.offset);
  }
  // Vectors in LDS and in the workspace: by place, not by channel.
  static KDA_FN ColVec load_cols(const float* p) {
    return {reinterpret_cast<const Float4*>(p)[lane() >> 4]};
  }
  static KDA_FN void store_cols(float* p, const ColVec& v) {
    if (row() == 0) reinterpret_cast<Float4*>(p)[lane() >> 4] = v.x;
  }
  static KDA_FN void store_rows(float* p, const RowVec& v) {
    if (lane() < kTile) p[lane()] = v.x;
  }

  // ---- the caller's arrays -----------------------------------------------------------------------
  static KDA_FN Raw load_raw(const Tensor& t, int64_t offset, int64_t stride, int valid) {
    Raw a = {Vector<Io>{0, 0, 0, 0}};
    if (row() < valid) {
      const auto* p = static_cast<const uint16_t*>(t.data) + offset + row() * stride + col(0);
      a.x = *reinterpret_cast<const Vector<Io>*>(p);
    }
    return a;
  }
  static KDA_FN void load_raw2(Raw& a, Raw& b, const Tensor& t, int64_t offset, int64_t stride,
                               int valid) {
    using Pair = std::conditional_t<std::is_same_v<Io, BF16>, Bf16x8, Half8>;
    Pair x = {0, 0, 0, 0, 0, 0, 0, 0};
    if (row() < valid)
      x = *reinterpret_cast<const Pair*>(static_cast<const uint16_t*>(t.data) + offset +
                                         row() * stride + 2 * col(0));
    a.x = __builtin_shufflevector(x, x, 0, 1, 2, 3);
    b.x = __builtin_shufflevector(x, x, 4, 5, 6, 7);
  }
  static KDA_FN void load2(Acc& a, Acc& b, const Tensor& t, int64_t offset, int64_t stride,
                           int valid) {
    if (t.type != DType::kF32) {
      Raw x, y;
      load_raw2(x, y, t, offset, stride, valid);
      a.x = __builtin_convertvector(x.x, Float4), b.x = __builtin_convertvector(y.x, Float4);
      return;
    }
    zero(a), zero(b);
    if (row() < valid) {
      const auto* p = reinterpret_cast<const Float4*>(static_cast<const float*>(t.data) + offset +
                                                      row() * stride + 2 * col(0));
      a.x = p[0], b.x = p[1];
    }
  }
  static KDA_FN void load_cols2(ColVec& a, ColVec& b, const float* p) {
    const auto* x = reinterpret_cast<const Float4*>(p + 2 * col(0));
    a.x = x[0], b.x = x[1];
  }
  using Element = std::conditional_t<std::is_same_v<Io, BF16>, __bf16, _Float16>;
  static KDA_FN float widen(uint32_t pair, int which) {
    return float(__builtin_bit_cast(Element, uint16_t(which ? pair >> 16 : pair)));
  }
  static KDA_FN uint32_t pair(float lo, float hi) {
    return __builtin_bit_cast(uint16_t, Element(lo)) | uint32_t(__builtin_bit_cast(uint16_t, Element(hi))) << 16;
  }
  static KDA_FN float element(const Tensor& t, int64_t at) {
    return t.type == DType::kF32 ? static_cast<const float*>(t.data)[at]
                                 : float(static_cast<const Element*>(t.data)[at]);
  }
  struct alignas(8) Elements4 {
    Element x[4];
  };
  static KDA_FN void elements4(float (&x)[4], const Tensor& t, int64_t at) {  // `at`: a multiple of 4
    if (t.type == DType::kF32) {
      const Float4 v = *reinterpret_cast<const Float4*>(static_cast<const float*>(t.data) + at);
      x[0] = v[0], x[1] = v[1], x[2] = v[2], x[3] = v[3];
    } else {
      const auto v = *reinterpret_cast<const Elements4*>(static_cast<const Element*>(t.data) + at);
      KDA_UNROLL
      for (int i = 0; i < 4; ++i) x[i] = float(v.x[i]);
    }
  }
  static KDA_FN void put(void* data, int64_t at, float x) { static_cast<Element*>(data)[at] = Element(x); }
  static KDA_FN float exchange(float x, int d) { return shuffle(x, lane() ^ d); }
  static KDA_FN RowVec load_rows(const Tensor& t, int64_t offset, int64_t stride, int valid) {
    if (row() >= valid) return {0};
    return {element(t, offset + row() * stride)};
  }
  static KDA_FN void store(void* data, DType, int64_t offset, int64_t stride, const Acc& a,
                           int from, int to) {  // rows [from, to)
    if (row() < from || row() >= to) return;
    auto* p = static_cast<uint16_t*>(data) + offset + row() * stride + col(0);
    *reinterpret_cast<Vector<Io>*>(p) = left<Io>(a).x;
  }
  // States: rows are values, columns a pair of channel tiles.
  static KDA_FN void load_state2(Acc& a, Acc& b, const float* p, int64_t row_stride,
                                 int64_t col_stride) {
    p += row() * row_stride + 2 * col(0) * col_stride;
    KDA_UNROLL
    for (int e = 0; e < 4; ++e)
      a.x[e] = p[e * col_stride], b.x[e] = p[(e + 4) * col_stride];
  }
  static KDA_FN void store_state2(float* p, int64_t row_stride, int64_t col_stride, const Acc& a,
                                  const Acc& b) {
    p += row() * row_stride + 2 * col(0) * col_stride;
    KDA_UNROLL
    for (int e = 0; e < 4; ++e)
      p[e * col_stride] = a.x[e], p[(e + 4) * col_stride] = b.x[e];
  }
  // In plain order.
  static KDA_FN Acc load_f32(const float* p, int64_t row_stride, int64_t col_stride) {
    Acc a;
    KDA_UNROLL
    for (int e = 0; e < 4; ++e) a.x[e] = p[row() * row_stride + col(e) * col_stride];
    return a;
  }
  static KDA_FN void store_f32(float* p, int64_t row_stride, int64_t col_stride, const Acc& a) {
    KDA_UNROLL
    for (int e = 0; e < 4; ++e) p[row() * row_stride + col(e) * col_stride] = a.x[e];
  }
};

}  // namespace KDA_ISA
}  // namespace kda
