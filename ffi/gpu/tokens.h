// A decode step: one token of each sequence, the recurrence itself in float32. A chunk with one token would cost as much
// as one with all of them.
//
//   S = S diag(2^g),   S = S + beta (v - S k) k^T,   o = scale S q = scale (S diag(2^g) q + beta (v - S k) (k . q))
//
// Token n is that of sequence n, so the tables are not looked at. Each state is read and written once, which is what takes
// time, so a block asks for all that it needs before it waits for any of it. The lanes of a row share the channels of K,
// four at a time, side by side.
#pragma once

#include "kernels.h"

namespace kda {
inline namespace KDA_ISA {

// At most so many lanes share a row.
#if defined(__CUDACC__)
constexpr int kTokenLanes = 16;
#else
constexpr int kTokenLanes = 32;  // with 16 half as many waves have room
#endif
constexpr int kTokenThreads = 128, kTokenRows = 4, kTokenBlocks = 5;

template <class Tiles, int K>
struct TokenStep {
  static constexpr int kLanes = kTokenLanes < K / 4 ? kTokenLanes : K / 4;
  static constexpr int kPieces = K / 4 / kLanes, R = kTokenRows, kStep = kTokenThreads / kLanes;
  static constexpr int kBlock = kStep * R;  // rows of V
  using Channels = float[kPieces][4];
  const Problem& p;
  int head, lane, value;  // value: the first of its rows, which are kStep apart
  float state[R][kPieces][4];

  KDA_FN TokenStep(const Problem& p, int head, int part)
      : p(p), head(head), lane(int(threadIdx.x) % kLanes),
        value(part * kBlock + int(threadIdx.x) / kLanes) {}
  static constexpr int parts(const Problem& p) { return (p.V + kBlock - 1) / kBlock; }
  static constexpr int64_t blocks(const Problem& p) { return p.N * p.H * parts(p); }
  KDA_FN int channel(int piece) const { return 4 * (lane + piece * kLanes); }
  KDA_FN bool has(int r) const { return value + r * kStep < p.V; }

  static KDA_FN float sum(float x) {  // of the lanes of a row
    KDA_UNROLL
    for (int d = 1; d < kLanes; d *= 2) x += Tiles::exchange(x, d);
    return x;
  }
  template <class F>
  static KDA_FN void each(F f) {
    KDA_UNROLL
    for (int i = 0; i < kPieces; ++i)
      KDA_UNROLL
      for (int c = 0; c < 4; ++c) f(i, c);
  }
  KDA_FN void load(Channels& x, const Tensor& t, int64_t at) const {
    KDA_UNROLL
    for (int i = 0; i < kPieces; ++i) Tiles::elements4(x[i], t, at + channel(i));
  }
  KDA_FN float factor(const Channels& x) const {  // that normalises a row
    float squares = 0;
    each([&](int i, int c) { squares += x[i][c] * x[i][c]; });
    return p.l2norm ? Tiles::rsqrt(sum(squares) + kNormEpsilon) : 1.0f;
  }

  struct alignas(16) Piece {
    float x[4];
  };
  KDA_FN void load_state(const float* from) {  // null: zeros
    KDA_UNROLL
    for (int r = 0; r < R; ++r) each([&](int i, int c) { state[r][i][c] = 0; });
    if (!from) return;
    if (p.state_kv) {
      KDA_UNROLL
      for (int r = 0; r < R; ++r)
        if (has(r)) each([&](int i, int c) { state[r][i][c] = from[(channel(i) + c) * p.V + value + r * kStep]; });
      return;
    }
    KDA_UNROLL
    for (int r = 0; r < R; ++r)
      KDA_UNROLL
      for (int i = 0; i < kPieces; ++i)
        if (has(r)) {
          const auto s = *reinterpret_cast<const Piece*>(from + (value + r * kStep) * K + channel(i));
          KDA_UNROLL
          for (int c = 0; c < 4; ++c) state[r][i][c] = s.x[c];
        }
  }
  KDA_FN void store_state(float* to) const {
    if (p.state_kv) {
      KDA_UNROLL
      for (int r = 0; r < R; ++r)
        if (has(r)) each([&](int i, int c) { to[(channel(i) + c) * p.V + value + r * kStep] = state[r][i][c]; });
      return;
    }
    KDA_UNROLL
    for (int r = 0; r < R; ++r)
      KDA_UNROLL
      for (int i = 0; i < kPieces; ++i)
        if (has(r)) {
          const float(&s)[4] = state[r][i];
          *reinterpret_cast<Piece*>(to + (value + r * kStep) * K + channel(i)) = {s[0], s[1], s[2], s[3]};
        }
  }

  // Of a token, as they are in memory.
  struct Inputs {
    Channels q, k, g;
    float v[R], beta;
  };
  KDA_FN void load(Inputs& x, int64_t token) const {
    const int64_t row = row_offset(token, head, p.H, K), values = row_offset(token, head, p.H, p.V) + value;
    const auto narrow = [](const Tensor& t) { return Tensor{t.data, DType::kBF16}; };  // never float32
    load(x.q, narrow(p.q), row), load(x.k, narrow(p.k), row), load(x.g, p.g, row);
    KDA_UNROLL
    for (int r = 0; r < R; ++r) x.v[r] = has(r) ? Tiles::element(narrow(p.v), values + r * kStep) : 0.0f;
    x.beta = Tiles::element(p.beta, token * p.H + head);
  }
  KDA_FN void step(Inputs& x, int64_t token) {
    const bool raw = p.gate != Gate::kActivated, bounded = p.gate == Gate::kBounded;
    Channels biases = {};
    if (raw) load(biases, Tensor{p.dt_bias, DType::kF32}, int64_t(head) * K);
    const float rate = raw ? head_rate<Tiles>(p.A_log[head]) : 0.0f, unit = bounded ? p.lower_bound * kLog2E : 1.0f;
    const float beta = raw ? sigmoid<Tiles>(x.beta) : x.beta;
    const float q_factor = factor(x.q), k_factor = factor(x.k);
    float qk = 0, on_k[R] = {}, on_q[R] = {};
    each([&](int i, int c) {
      const float bias = bounded ? rate * biases[i][c] : biases[i][c];
      const float decay = Tiles::exp2(unit * gate_units<Tiles>(p.gate, x.g[i][c], rate, bias));
      const float q = x.q[i][c] * q_factor, k = x.k[i][c] *= k_factor;
      qk += q * k;
      KDA_UNROLL
      for (int r = 0; r < R; ++r) {
        state[r][i][c] *= decay;
        on_k[r] += state[r][i][c] * k, on_q[r] += state[r][i][c] * q;
      }
    });
    qk = sum(qk);
    const int64_t out = row_offset(token, head, p.H, p.V) + value;
    KDA_UNROLL
    for (int r = 0; r < R; ++r) {
      const float error = beta * (x.v[r] - sum(on_k[r]));
      const float o = p.scale * (sum(on_q[r]) + error * qk);
      each([&](int i, int c) { state[r][i][c] += error * x.k[i][c]; });
      if (lane == r && has(r)) Tiles::put(p.out, out + r * kStep, o);  // a lane for each row
    }
  }
};

// One block for each (sequence, head, rows of V).
template <class Tiles, int K>
__global__ void KDA_LAUNCH_BOUNDS(kTokenThreads, kTokenBlocks) tokens_kernel(KDA_PARAMETER Problem p) {
  using Step = TokenStep<Tiles, K>;
  const int parts = Step::parts(p), part = int(blockIdx.x) % parts;
  const int head = int(blockIdx.x) / parts % p.H, seq = int(blockIdx.x) / parts / p.H;
  const int live = hidden(int(live_row(p, seq)));  // asked for first, since the states' addresses depend on it
  const int64_t at = state_offset(p, live, head);
  Step step(p, head, part);
  typename Step::Inputs x;
  step.load(x, seq);
  // Whether it counts is not waited for.
  const bool counts = !p.has_initial_state || p.has_initial_state[seq];
  step.load_state(p.initial_state && live >= 0 ? p.initial_state + at : nullptr);
  if (!counts) step.load_state(nullptr);
  step.step(x, seq);
  if (live >= 0) step.store_state(p.final_state + at);
}

}  // namespace KDA_ISA
}  // namespace kda
