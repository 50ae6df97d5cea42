// The recurrence itself, token by token and in float32: decode steps, whose sequences have a token each. A chunk with one
// token would cost as much as one with all of them.
//
//   S = S diag(2^g),   S = S + beta (v - S k) k^T,   o = scale S q = scale (S diag(2^g) q + beta (v - S k) (k . q))
//
// It reads and writes each state once. 32 lanes have four rows of V and share the channels of K; a block has 16 rows.
#pragma once

#include "kernels.h"

namespace kda {
inline namespace KDA_ISA {

constexpr int kTokenThreads = 128, kTokenLanes = 32, kTokenRows = kTile / (kTokenThreads / kTokenLanes);

template <class Tiles, int K>
struct TokenStep {
  static constexpr int kChannels = K / kTokenLanes, R = kTokenRows;
  const Problem& p;
  int head, channel, value;  // channel, value: the first of this lane's
  float rate, unit;
  float state[R][kChannels], bias[kChannels];

  KDA_FN TokenStep(const Problem& p, int head, int slice)
      : p(p), head(head), channel((int(threadIdx.x) & (kTokenLanes - 1)) * kChannels),
        value(slice * kTile + int(threadIdx.x) / kTokenLanes * R) {
    const bool raw = p.gate != Gate::kActivated, bounded = p.gate == Gate::kBounded;
    rate = raw ? head_rate<Tiles>(p.A_log[head]) : 0.0f;
    unit = bounded ? p.lower_bound * kLog2E : 1.0f;
    KDA_UNROLL
    for (int c = 0; c < kChannels; ++c) {
      const float b = raw ? p.dt_bias[int64_t(head) * K + channel + c] : 0.0f;
      bias[c] = bounded ? rate * b : b;
    }
  }

  static KDA_FN float sum(float x) {  // of the 32 lanes
    KDA_UNROLL
    for (int d = 1; d < kTokenLanes; d *= 2) x += Tiles::exchange(x, d);
    return x;
  }
  KDA_FN void load(float (&x)[kChannels], const Tensor& t, int64_t at) const {
    KDA_UNROLL
    for (int c = 0; c < kChannels; ++c) x[c] = Tiles::element(t, at + c);
  }
  KDA_FN float factor(const float (&x)[kChannels]) const {  // that normalises a row
    float squares = 0;
    KDA_UNROLL
    for (int c = 0; c < kChannels; ++c) squares += x[c] * x[c];
    return p.l2norm ? Tiles::rsqrt(sum(squares) + kNormEpsilon) : 1.0f;
  }

  struct alignas(4 * kChannels) Channels {
    float x[kChannels];
  };
  KDA_FN void load_state(const float* from) {  // null: zeros
    KDA_UNROLL
    for (int r = 0; r < R; ++r) {
      Channels s = {};
      if (from && !p.state_kv) s = *reinterpret_cast<const Channels*>(from + (value + r) * K + channel);
      KDA_UNROLL
      for (int c = 0; c < kChannels; ++c)
        state[r][c] = from && p.state_kv ? from[(channel + c) * p.V + value + r] : s.x[c];
    }
  }
  KDA_FN void store_state(float* to) const {
    KDA_UNROLL
    for (int r = 0; r < R; ++r) {
      Channels s;
      KDA_UNROLL
      for (int c = 0; c < kChannels; ++c) {
        s.x[c] = state[r][c];
        if (p.state_kv) to[(channel + c) * p.V + value + r] = s.x[c];
      }
      if (!p.state_kv) *reinterpret_cast<Channels*>(to + (value + r) * K + channel) = s;
    }
  }

  KDA_FN void step(int64_t token) {
    const int64_t row = row_offset(token, head, p.H, K) + channel, out = row_offset(token, head, p.H, p.V) + value;
    float q[kChannels], k[kChannels], g[kChannels], v[R];
    load(q, p.q, row), load(k, p.k, row), load(g, p.g, row);
    KDA_UNROLL
    for (int r = 0; r < R; ++r) v[r] = Tiles::element(p.v, out + r);
    float beta = Tiles::element(p.beta, token * p.H + head);
    if (p.gate != Gate::kActivated) beta = sigmoid<Tiles>(beta);
    const float q_factor = factor(q), k_factor = factor(k);
    float qk = 0, on_k[R] = {}, on_q[R] = {};
    KDA_UNROLL
    for (int c = 0; c < kChannels; ++c) {
      const float decay = Tiles::exp2(unit * gate_units<Tiles>(p.gate, g[c], rate, bias[c]));
      q[c] *= q_factor, k[c] *= k_factor, qk += q[c] * k[c];
      KDA_UNROLL
      for (int r = 0; r < R; ++r) {
        state[r][c] *= decay;
        on_k[r] += state[r][c] * k[c], on_q[r] += state[r][c] * q[c];
      }
    }
    qk = sum(qk);
    KDA_UNROLL
    for (int r = 0; r < R; ++r) {
      const float error = beta * (v[r] - sum(on_k[r]));
      const float o = p.scale * (sum(on_q[r]) + error * qk);
      KDA_UNROLL
      for (int c = 0; c < kChannels; ++c) state[r][c] += error * k[c];
      if (channel == r * kChannels) Tiles::put(p.out, out + r, o);  // a lane for each row
    }
  }
};

// One block for each (sequence, head, 16 rows of V).
template <class Tiles, int K>
__global__ void __launch_bounds__(kTokenThreads) tokens_kernel(KDA_PARAMETER Problem p) {
  const Schedule<Tiles, MixedPolicy, K, 32> s{p, 0, p.NC};  // of which the layout of a blob is not looked at
  fill(s);
  const int slices = p.V / kTile, slice = int(blockIdx.x) % slices, head = int(blockIdx.x) / slices % p.H;
  const int seq = int(blockIdx.x) / slices / p.H;
  if (seq >= p.N) return;
  const SeqRow row = s.seq_row(seq);
  if (row.num_chunks == 0) return;  // padding, or no tokens
  TokenStep<Tiles, K> step(p, head, slice);
  step.load_state(s.origin(seq, head));
  for (int c = row.first_chunk; c < row.first_chunk + row.num_chunks; ++c) {
    const ChunkRow chunk = s.chunk_row(c);
    for (int t = 0; t < chunk.valid; ++t) step.step(chunk.first + t);
    if (float* to = s.checkpoint_state(chunk.checkpoint, head)) step.store_state(to);
  }
  if (float* to = s.final_state(seq, head, slice)) step.store_state(to);
}

}  // namespace KDA_ISA
}  // namespace kda
