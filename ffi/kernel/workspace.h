// What the prologue leaves for the walk: one contiguous blob for each (chunk, head).
//
// Every tile lies in the order in which the walk's lanes hold it ("native order", the tile layer's
// business), so a tile is one contiguous piece of 256 elements. Sections, in elements of the tile
// layer's 16-bit or float32 storage, NT = C/16, KT = K/16, VT = V/16:
//
//   w    NT x KT  right operands  -T (beta k 2^G)            rows: token,  contraction: K
//   qg   NT x KT  left operands   scale q 2^G                rows: token,  contraction: K
//   kg   KT x NT  right operands  (k 2^(G_last - G))^T       rows: K,      contraction: token
//   aqk  NT(NT+1)/2 left operands masked q k^T, lower tiles  rows: token,  contraction: token
//   u    VT x NT  accumulators    (T (beta v))^T             rows: V,      columns: token
//   decay KT      float32 column vectors 2^G_last
#pragma once

#include <cstdint>

#include "ops.h"
#include "problem.h"
#include "target.h"

namespace kda {

template <int K, int C>
struct Blob {
  static constexpr int KT = K / kTile, NT = C / kTile;
  static constexpr int64_t w(int token, int channel) {
    return int64_t(token * KT + channel) * kTileElements;
  }
  static constexpr int64_t qg(int token, int channel) { return w(NT, 0) + w(token, channel); }
  static constexpr int64_t kg(int channel, int token) {
    return 2 * w(NT, 0) + int64_t(channel * NT + token) * kTileElements;
  }
  static constexpr int64_t aqk(int row, int col) {
    return 3 * w(NT, 0) + int64_t(row * (row + 1) / 2 + col) * kTileElements;
  }
  static constexpr int64_t u(int value, int token) {
    return aqk(NT, 0) + int64_t(value * NT + token) * kTileElements;
  }
  // Elements before the decay, which is float32 whatever the storage type is.
  static constexpr int64_t elements(int V) { return u(V / kTile, 0); }
  static constexpr int64_t bytes(int V, int64_t element_bytes) {
    return elements(V) * element_bytes + K * int64_t(sizeof(float));
  }
};

// Row blocks that a chunk's roles work on. A layer that can loop to a bound of run time leaves out the
// blocks without valid rows; where tiles are registers all loops are unrolled, and such blocks are zeros.
template <class Tiles, int NT>
KDA_FN int active_blocks(const ChunkRow& chunk) {
  return Tiles::kSkipsEmptyBlocks ? (chunk.valid + kTile - 1) / kTile : NT;
}

}  // namespace kda
