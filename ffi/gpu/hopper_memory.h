// What the walk on Hopper (hopper_walk.h) has in shared memory.
#pragma once

#include "hopper_lanes.h"
#include "hopper_units.h"
#include "kernels.h"
#include "nvidia_async.h"
#include "wgmma.h"

namespace kda {
inline namespace KDA_ISA {

// A chunk's operands. A product has 64 rows, so that a column of a triangle has rows of zeros before it. They come and go in three parts, each as early as it can: what a step starts with, what goes
// into the state, what makes the outputs.
template <class Tiles, int K, int C, int N>
struct HopperStage {
  using Storage = typename Tiles::Storage;
  using Layout = Blob<Tiles, K, C>;
  static constexpr int NT = Layout::NT;
  static_assert(C == 64, "");
  alignas(128) Storage operands[3 * Layout::kMatrix];
  Storage columns[2][NT][NT * kTileElements];  // of Aqk, of the inverse
  float decay[K];
  int32_t beyond[kBeyondBytes / 4];
  alignas(128) uint16_t values[C * N];
  // For those who carry the state, and for those who make the outputs.
  alignas(16) ChunkRow row, output_row;
  HopperUnit unit;
  int chunk;
  int output_head, output_value;  // of the unit: head and first_value; below 0: no more units

  KDA_FN void clear() {
    for (int col = 1; col < NT; ++col)
      for (int i = int(threadIdx.x); i < col * kTileElements; i += int(blockDim.x))
        columns[0][col][i] = columns[1][col][i] = 0;
  }
  static constexpr int kMatrixBytes = Layout::kMatrix * int(sizeof(Storage));
  static constexpr int kTriangleBytes = Layout::kTriangle * int(sizeof(Storage));
  // Without the values.
  template <class S>
  KDA_FN void fetch_start(const S& s, int64_t chunk, int head, Barrier& full) {
    const Storage* blob = s.blob(chunk, head);
    full.expect(kMatrixBytes + Layout::kTailBytes);
    full.copy(operands, blob, kMatrixBytes);
    full.copy(decay, blob + Layout::kElements, Layout::kTailBytes);
  }
  template <class S>
  KDA_FN void fetch_for_state(const S& s, int64_t chunk, int head, Barrier& full) {
    const Storage* blob = s.blob(chunk, head);
    full.expect(kMatrixBytes + kTriangleBytes);
    fetch_triangle(1, blob, full);
    full.copy(operands + 2 * Layout::kMatrix, blob + 2 * Layout::kMatrix, kMatrixBytes);
  }
  template <class S>
  KDA_FN void fetch_for_outputs(const S& s, int64_t chunk, int head, Barrier& full) {
    const Storage* blob = s.blob(chunk, head);
    full.expect(kMatrixBytes + kTriangleBytes);
    full.copy(operands + Layout::kMatrix, blob + Layout::kMatrix, kMatrixBytes);
    fetch_triangle(0, blob, full);
  }
  KDA_FN void fetch_triangle(int which, const Storage* blob, Barrier& full) {
    KDA_UNROLL
    for (int col = 0; col < NT; ++col) {
      const int from = (which ? Layout::inverse(col, col) : Layout::aqk(col, col)).offset;
      full.copy(columns[which][col] + col * kTileElements, blob + from, (NT - col) * kTileElements * int(sizeof(Storage)));
    }
  }
  // v by a warp, 16 bytes each. A load takes rows two apart, which must not meet in the same banks.
  static constexpr int kPieces = N / 8;
  static KDA_FN int place(int row, int piece) {
    const int at = row * kPieces + piece;
    return (N >= 32 ? at ^ (row & 2) << 1 : at) * 8;
  }
  KDA_FN void fetch_values(const Problem& p, const ChunkRow& chunk, int head, int first) {
    const int lane = int(threadIdx.x) & 31, piece = lane % kPieces;
    int token = lane / kPieces;
    const int64_t step = int64_t(32 / kPieces) * p.H * p.V;
    const auto* from =
        static_cast<const uint16_t*>(p.v.data) + row_offset(chunk.first + token, head, p.H, p.V) + first + 8 * piece;
    const auto* none = static_cast<const uint16_t*>(p.v.data);
#pragma unroll 4  // registers are few
    for (int i = 0; i < C * kPieces / 32; ++i, token += 32 / kPieces, from += step) {
      const bool valid = token < chunk.valid;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(values + place(token, piece))),
                   "l"(valid ? from : none), "r"(valid ? 16 : 0)
                   : "memory");
    }
  }
  // Left operands, from the tile's first 64 rows.
  KDA_FN wgmma::Matrix left(TileAt at, int rows = 128) const {
    return wgmma::Matrix(operands, at.half * int(sizeof(Storage)), rows)
        .at(int(at.offset) * int(sizeof(Storage)));
  }
  KDA_FN wgmma::Matrix triangle(int which, int j) const {
    return wgmma::Matrix(columns[which][j], 128, 256);
  }
};

// A right operand: `Depth` contracted rows of N columns as 8 x 8 matrices, the rows' groups of eight first.
template <int Depth, int N>
struct RightMatrices {
  alignas(128) uint16_t x[N / 8][Depth / 8][64];

  KDA_FN wgmma::Matrix right(int step) const {  // sixteen rows
    return wgmma::Matrix(x, 128, int(sizeof x[0])).at(256 * step);
  }
  // Rows 8 group0.. and 8 group1.. of a product's registers: `pack(r)` of register r and the next.
  template <class Pack>
  KDA_FN void store(int group0, int group1, Pack pack) {
    const int lane = threadIdx.x & 31, row = lane & 7;
    uint16_t* at = &x[lane >> 4][lane & 8 ? group1 : group0][row * 8];
    KDA_UNROLL
    for (int j = 0; j < N / 8; j += 2, at += 2 * (Depth / 8) * 64)
      wgmma::store_matrices(at, {pack(4 * j), pack(4 * j + 2), pack(4 * j + 4), pack(4 * j + 6)});
  }
};

// Whoever carries the state has at most 64 rows of V, so that blocks of 128 have two such warpgroups.
template <int N>
struct HopperThreads {
  static constexpr int kRows = N < 64 ? N : 64, kCarriers = N / kRows, kCarrying = 128 * kCarriers, kOutputs = 128;
  static constexpr int kAll = kCarrying + kOutputs + 128;
  // With three warpgroups a thread has registers enough. With four those who bring operands leave some to the carriers.
  static constexpr bool kMoves = kCarriers == 2;
  static constexpr int kCarrierRegisters = 168, kOperandRegisters = 48;
};

template <class Tiles, int K, int C, int N, int Stages>
struct HopperWalkMemory {
  using Threads = HopperThreads<N>;
  static constexpr int kRows = Threads::kRows, kCarriers = Threads::kCarriers, kStages = Stages;
  HopperStage<Tiles, K, C, N> stage[Stages];
  // Side by side, for products with all rows.
  RightMatrices<K, kRows> state[kCarriers];
  RightMatrices<C, kRows> residual[kCarriers], delta[kCarriers];
  // Of the residuals nobody needs anything while states go to or come from memory: v' has come of all of them.
  KDA_FN float* scratch(int carrier, int warp) {
    return reinterpret_cast<float*>(residual[carrier].x) + warp * StateAccess<K, kRows>::kScratch;
  }
  static_assert(sizeof(RightMatrices<C, kRows>) >= 4 * StateAccess<K, kRows>::kScratch * sizeof(float), "");
  Barrier known[Stages], start_full[Stages], values_full[Stages], for_state_full[Stages], for_outputs_full[Stages];
  Barrier start_empty[Stages], for_state_empty[Stages], for_outputs_empty[Stages];
  Barrier state_ready, state_read, delta_ready, delta_read;
  HopperOrder order;

  KDA_FN void init() {
    for (int i = 0; i < Stages; ++i) {
      known[i].init(1), start_full[i].init(1), values_full[i].init(32), for_state_full[i].init(1), for_outputs_full[i].init(1);
      start_empty[i].init(Threads::kCarrying + 2), for_state_empty[i].init(Threads::kCarrying);
      for_outputs_empty[i].init(Threads::kOutputs);
    }
    state_ready.init(Threads::kCarrying), state_read.init(Threads::kOutputs);
    delta_ready.init(Threads::kCarrying), delta_read.init(Threads::kOutputs);
    Barrier::fence_init();
  }
};

}  // namespace KDA_ISA
}  // namespace kda
