// What the prologue leaves for the walk: one contiguous blob for each (chunk, head).
//
// Every tile lies in the order in which the walk reads it (the tile layer's business). Sections, in
// elements of the tile layer's 16-bit or float32 storage, NT = C/16, KT = K/16:
//
//   kd      NT x KT     right operands  -k 2^G                     rows: token,  contraction: K
//   qg      NT x KT     left operands   q 2^G                      rows: token,  contraction: K
//   kg      KT x NT     right operands  (k 2^(G_last - G))^T       rows: K,      contraction: token
//   aqk     NT(NT+1)/2  left operands   masked q k^T, lower tiles  rows: token,  contraction: token
//   inverse NT(NT+1)/2  right operands  (I + Akk)^-1 diag(beta)    rows: token,  contraction: token
//   decay   KT          float32 column vectors 2^G_last
//   beyond  int32, for each 16 tokens: the first one whose values a narrow policy does not hold, or kNone
#pragma once

#include <cstdint>

#include "ops.h"
#include "problem.h"
#include "target.h"

namespace kda {

// Where an operand's tile lies: its first element, and how far behind it the last eight of the sixteen contracted
// columns and the last eight rows begin. Only layers with kSplitHalves have tiles as four 8 x 8 matrices.
struct TileAt {
  int offset, half, rows;
};

constexpr int kBeyondBytes = 128;  // keeps blobs at multiples of 128 bytes
constexpr int32_t kNone = 0x7fffffff;

template <class Tiles, int K, int C>
struct Blob {
  static constexpr int KT = K / kTile, NT = C / kTile;
  static constexpr int kMatrix = NT * KT * kTileElements;

  static constexpr TileAt kd(int token, int channel) { return at(0, NT, KT, token, channel); }
  static constexpr TileAt qg(int token, int channel) { return at(kMatrix, NT, KT, token, channel); }
  static constexpr TileAt kg(int channel, int token) {
    return at(2 * kMatrix, KT, NT, channel, token);
  }
  static constexpr TileAt aqk(int row, int col) { return lower(0, row, col); }
  static constexpr TileAt inverse(int row, int col) { return lower(1, row, col); }
  static constexpr int kTriangle = NT * (NT + 1) / 2 * kTileElements;
  // Elements before the decay, which is float32 whatever the storage type is.
  static constexpr int kElements = 3 * kMatrix + 2 * kTriangle;
  static constexpr int kTailBytes = K * int(sizeof(float)) + kBeyondBytes;  // decay and beyond
  static constexpr int64_t kBytes =
      kElements * int64_t(sizeof(typename Tiles::Storage)) + kTailBytes;

 private:
  // Tile (row, col), col <= row, of one of the two lower triangles of tiles: row by row, or column by column, for
  // products with whole columns. With split halves eight rows of a column have their two matrices side by side.
  static constexpr TileAt lower(int which, int row, int col) {
    const int by_row = row * (row + 1) / 2 + col, by_col = int(unsigned(col * (2 * NT - 1 - col)) / 2) + row;
    return {3 * kMatrix + which * kTriangle + (Tiles::kSplitHalves ? by_col : by_row) * kTileElements, kTileElements / 4,
            kTileElements / 2};
  }

  // Tile (row, step) of a matrix with `rows` x `steps` tiles. With split halves the rows of one half
  // step follow each other, sixteen bytes each, so that a matrix unit can read them all.
  static constexpr TileAt at(int base, int rows, int steps, int row, int step) {
    if (!Tiles::kSplitHalves) return {base + (row * steps + step) * kTileElements, 0, 0};
    return {base + step * rows * kTileElements + row * (kTileElements / 2),
            rows * kTileElements / 2, kTileElements / 4};
  }
};

// Row blocks that a chunk's roles work on. A layer that can loop to a bound of run time leaves out the
// blocks without valid rows; where tiles are registers all loops are unrolled, and such blocks are zeros.
template <class Tiles, int NT>
KDA_FN int active_blocks(const ChunkRow& chunk) {
  return Tiles::kSkipsEmptyBlocks ? (chunk.valid + kTile - 1) / kTile : NT;
}

}  // namespace kda
