// What the walk on Hopper (hopper_walk.h) has in shared memory.
#pragma once

#include "hopper_lanes.h"
#include "hopper_units.h"
#include "kernels.h"
#include "nvidia_async.h"
#include "wgmma.h"

namespace kda {
inline namespace KDA_ISA {

// A chunk's operands, in the order of the blob. A product has 64 rows, so that the second block of a triangle has
// rows of zeros before it.
template <class Tiles, int K, int C, int N>
struct HopperStage {
  using Storage = typename Tiles::Storage;
  using Layout = Blob<Tiles, K, C>;
  static constexpr int kBlock = 4 * kTileElements;  // 32 rows of two columns of tiles
  static_assert(C == 64, "");
  struct SecondBlock {
    Storage zeros[kBlock], x[kBlock];
  };
  alignas(128) Storage operands[3 * Layout::kMatrix];
  Storage first[2][2 * kBlock];  // of Aqk, of the inverse
  SecondBlock second[2];
  float decay[K];
  int32_t beyond[kBeyondBytes / 4];
  alignas(128) uint16_t values[C * N];
  alignas(16) ChunkRow row;
  int head, first_value;  // of the unit
  static constexpr int kBytes = int(Layout::kBytes) + int(sizeof(ChunkRow));  // without the values

  KDA_FN void clear() {
    for (int i = int(threadIdx.x); i < kBlock; i += int(blockDim.x))
      second[0].zeros[i] = second[1].zeros[i] = 0;
  }
  template <class S>
  KDA_FN void fetch(const S& s, int64_t chunk, int head, Barrier& full) {
    const Storage* blob = s.blob(chunk, head);
    constexpr int kFirst = 3 * Layout::kMatrix + 4 * kBlock;
    full.expect(kBytes);
    full.copy(operands, blob, kFirst * int(sizeof(Storage)));
    full.copy(second[0].x, blob + kFirst, kBlock * int(sizeof(Storage)));
    full.copy(second[1].x, blob + kFirst + kBlock, kBlock * int(sizeof(Storage)) + Layout::kTailBytes);
    full.copy(&row, reinterpret_cast<const ChunkRow*>(s.p.chunks) + chunk, int(sizeof row));
  }
  // v by 128 threads, 16 bytes each. A load takes rows two apart, which must not meet in the same banks.
  static KDA_FN int place(int row, int piece) {
    const int at = row * (N / 8) + piece;
    return (N >= 32 ? at ^ (row & 2) << 1 : at) * 8;
  }
  KDA_FN void fetch_values(const Problem& p, const ChunkRow& chunk, int head, int first, int thread) {
    constexpr int kPieces = N / 8;
    KDA_UNROLL
    for (int i = 0; i < C * kPieces / 128; ++i) {
      const int token = (thread + 128 * i) / kPieces, piece = (thread + 128 * i) % kPieces;
      const bool valid = token < chunk.valid;
      const auto* from = static_cast<const uint16_t*>(p.v.data) +
                         row_offset(chunk.first + (valid ? token : 0), head, p.H, p.V) + first + 8 * piece;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                       shared_address(values + place(token, piece))),
                   "l"(from), "r"(valid ? 16 : 0)
                   : "memory");
    }
  }
  // Left operands, from the tile's first 64 rows.
  KDA_FN wgmma::Matrix left(TileAt at, int rows = 128) const {
    return wgmma::Matrix(operands, at.half * int(sizeof(Storage)), rows)
        .at(int(at.offset) * int(sizeof(Storage)));
  }
  KDA_FN wgmma::Matrix triangle(int which, int j) const {
    return wgmma::Matrix(j < 2 ? first[which] : second[which].zeros, 128, 512).at(j % 2 * 256);
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

template <class Tiles, int K, int C, int N, int Stages>
struct HopperWalkMemory {
  HopperStage<Tiles, K, C, N> stage[Stages];
  RightMatrices<K, N> state;
  RightMatrices<C, N> residual, delta;
  // Of the residuals nobody needs anything while states go to or come from memory: v' has come of all of them.
  KDA_FN float* scratch(int warp) { return reinterpret_cast<float*>(residual.x) + warp * StateAccess<K, N>::kScratch; }
  static_assert(sizeof(RightMatrices<C, N>) >= 4 * StateAccess<K, N>::kScratch * sizeof(float), "");
  Barrier full[Stages], values_full[Stages], empty[Stages];
  Barrier state_ready, state_read, residual_done, delta_ready, delta_read;
  uint8_t order[kOrdered];
};

}  // namespace KDA_ISA
}  // namespace kda
