// One KDA prefill call as raw pointers and sizes. Nothing here knows XLA, a GPU runtime or a tile.
//
// The tables are those of kda_jax.ChunkMetadata (int32, row major):
//   seqs        [N, 4]   first token, length (-1: padding), first chunk, number of chunks
//   chunks      [NC, 4]  sequence (-1: padding), first token, valid rows, checkpoint row or -1
//   checkpoints [M, 2]   sequence (-1: padding), offset
//
// States lie in rows [H, V, K] or [H, K, V]. With in_pool initial_state, final_state and checkpoint_state are
// one pool of pool_rows rows, which is read and written in place, by the rows that state_rows and
// checkpoint_rows name. live_row and saved_row say which row that is; nothing else looks at these tables.
#pragma once

#include <cstdint>

namespace kda {

enum class DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

// How raw_g becomes the log decay g (kda_jax/gate.py has the formulas).
enum class Gate : int32_t { kBounded = 0, kSoftplus = 1, kActivated = 2 };

struct Tensor {
  const void* data;
  DType type;
};

struct Problem {
  Tensor q, k;                      // [T, H, K]
  Tensor v;                         // [T, H, V]
  Tensor g;                         // [T, H, K]
  Tensor beta;                      // [T, H]
  const float* A_log;               // [H], null when activated
  const float* dt_bias;             // [H, K], null when activated
  const float* initial_state;       // N rows; null: zeros
  const uint8_t* has_initial_state; // [N]; null: every row of initial_state counts
  const int32_t* seqs;
  const int32_t* chunks;
  const int32_t* checkpoints;
  void* out;                        // [T, H, V], v's type
  float* final_state;               // N rows
  float* checkpoint_state;          // M rows
  const int32_t* state_rows;        // [N], in a pool only; outside of 0 .. pool_rows - 1: none
  const int32_t* checkpoint_rows;   // [M], likewise
  void* workspace;
  int64_t workspace_bytes;

  int64_t T, N, NC, M;
  int32_t H, K, V, C;               // C: chunk size
  float scale, lower_bound;
  Gate gate;
  bool l2norm;
  bool state_kv;                    // states are [K, V] instead of [V, K]
  bool mixed;                       // operands in 16 bits, as on a GPU, instead of float32
  bool in_pool;
  int32_t groups;                   // groups of chunks a sequence is split into
  int32_t slab_chunks;              // chunks whose workspace exists at one time
  uint32_t pool_rows;               // that an index can name
};

struct SeqRow {
  int32_t first, length, first_chunk, num_chunks;
};
struct ChunkRow {
  int32_t sequence, first, valid, checkpoint;
};

// Element offset of (row, head, 0) in a [rows, heads, width] array. 64 bits: 1M tokens * 96 heads
// * 128 channels do not fit into 31.
constexpr int64_t row_offset(int64_t row, int64_t head, int64_t heads, int64_t width) {
  return (row * heads + head) * width;
}

// The row of a sequence in initial_state and final_state, and of a checkpoint in checkpoint_state; -1: none, so
// the sequence starts from zeros and nothing is written.
constexpr int64_t state_row(const Problem& p, const int32_t* rows, int64_t i) {
  if (!p.in_pool) return i;
  return uint32_t(rows[i]) < p.pool_rows ? rows[i] : -1;  // a negative one is larger than all
}
constexpr int64_t live_row(const Problem& p, int64_t seq) { return state_row(p, p.state_rows, seq); }
constexpr int64_t saved_row(const Problem& p, int64_t checkpoint) {
  return state_row(p, p.checkpoint_rows, checkpoint);
}
// Elements before a head's state in that row.
constexpr int64_t state_offset(const Problem& p, int64_t row, int64_t head) {
  return row_offset(row, head, p.H, int64_t(p.K) * p.V);
}

constexpr bool unbounded(Gate gate) { return gate != Gate::kBounded; }

}  // namespace kda
