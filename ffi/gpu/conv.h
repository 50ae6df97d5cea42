// The short convolution in front of the operator. A thread has eight channels of some tokens, whose rows it asks for at
// once; further threads copy the windows at the ends of the sequences and at the checkpoints.
#pragma once

#include "../kernel/gate.h"
#include "conv_problem.h"
#include "kernels.h"

namespace kda {
inline namespace KDA_ISA {

constexpr int kConvThreads = 128, kConvRun = 16;  // the latter: tokens of a thread
constexpr int64_t conv_rows(const ConvProblem& p) { return (p.T + kConvRun - 1) / kConvRun + p.N + p.M; }
constexpr int64_t conv_blocks(const ConvProblem& p, const ConvPart& part) {
  return (conv_rows(p) * (part.C / kConvChannels) + kConvThreads - 1) / kConvThreads;
}

template <class Tiles>
struct Convolution {
  static constexpr int kReach = kConvWidth - 1, kWords = kConvChannels / 2;
  struct alignas(16) Row {  // of eight channels
    uint32_t pair[kWords];
  };
  using Floats = float[kConvChannels];
  const ConvProblem& p;
  const ConvPart& part;
  int channel;  // the first of eight

  KDA_FN SeqRow sequence(int64_t n) const { return reinterpret_cast<const SeqRow*>(p.seqs)[n]; }
  static KDA_FN int64_t end_of(const SeqRow& s) { return int64_t(s.first) + (s.length > 0 ? s.length : 0); }
  KDA_FN Row row(int64_t token) const {
    return *reinterpret_cast<const Row*>(static_cast<const uint16_t*>(part.x) + token * part.C + channel);
  }

  // Of sequence n the rows before `token`, from x and what was there before it.
  KDA_FN void rows_before(Row (&rows)[kReach], int64_t n, int64_t first, int64_t token) const {
    const bool starts = part.initial && (!p.has_initial || p.has_initial[n]);
    const auto* state = static_cast<const uint16_t*>(part.initial) + (n * part.C + channel) * kReach;
    KDA_UNROLL
    for (int j = 0; j < kReach; ++j) {
      const int64_t from = token - kReach + j;
      rows[j] = {};
      if (from >= first) {
        rows[j] = row(from);
      } else if (starts) {
        const auto* column = state + (from - first + kReach);
        KDA_UNROLL
        for (int i = 0; i < kWords; ++i)
          rows[j].pair[i] = column[2 * i * kReach] | uint32_t(column[(2 * i + 1) * kReach]) << 16;
      }
    }
  }

  static KDA_FN void widen(Floats& x, const Row& row) {
    KDA_UNROLL
    for (int c = 0; c < kConvChannels; ++c) x[c] = Tiles::widen(row.pair[c / 2], c & 1);
  }
  KDA_FN void load_weights(float (&w)[kConvWidth][kConvChannels]) const {
    KDA_UNROLL
    for (int c = 0; c < kConvChannels; ++c) {
      float taps[kConvWidth];
      Tiles::elements4(taps, part.weight, (int64_t(channel) + c) * kConvWidth);
      KDA_UNROLL
      for (int j = 0; j < kConvWidth; ++j) w[j][c] = taps[j];
    }
  }

  // The outputs of tokens [t, t + count) of a sequence, behind the rows before them.
  KDA_FN void outputs(const float (&w)[kConvWidth][kConvChannels], const Row (&before)[kReach],
                      const Row (&rows)[kConvRun], int64_t t, int count) const {
    Floats x[kConvWidth];  // the last rows, in turn
    KDA_UNROLL
    for (int j = 0; j < kReach; ++j) widen(x[j], before[j]);
    KDA_UNROLL
    for (int u = 0; u < kConvRun; ++u) {
      if (u < count) output(w, x, rows[u], u, t + u);
    }
  }
  KDA_FN void output(const float (&w)[kConvWidth][kConvChannels], Floats (&x)[kConvWidth], const Row& row, int u,
                     int64_t token) const {
    widen(x[(u + kReach) % kConvWidth], row);
    Floats y;
    KDA_UNROLL
    for (int c = 0; c < kConvChannels; ++c) {
      y[c] = 0;
      KDA_UNROLL
      for (int j = 0; j < kConvWidth; ++j) y[c] += x[(u + j) % kConvWidth][c] * w[j][c];
      if (p.silu) y[c] *= sigmoid<Tiles>(y[c]);
    }
    Row out;
    KDA_UNROLL
    for (int i = 0; i < kWords; ++i) out.pair[i] = Tiles::pair(y[2 * i], y[2 * i + 1]);
    store(token, out);
  }
  KDA_FN void store(int64_t token, const Row& y) const {
    *reinterpret_cast<Row*>(static_cast<uint16_t*>(part.y) + token * part.C + channel) = y;
  }

  KDA_FN void run(int64_t t) const {
    const int64_t stop = t + kConvRun < p.T ? t + kConvRun : p.T;
    float w[kConvWidth][kConvChannels];
    load_weights(w);
    // Ends never decrease: the first one behind a token is that of its sequence.
    int64_t n = 0;
    for (int64_t behind = p.N; n < behind;) {
      const int64_t middle = (n + behind) / 2;
      if (end_of(sequence(middle)) > t) behind = middle; else n = middle + 1;
    }
    for (; t < stop && n < p.N; ++n) {
      const SeqRow s = sequence(n);
      const int64_t end = end_of(s) < stop ? end_of(s) : stop;
      if (end <= t) continue;
      Row before[kReach], rows[kConvRun];
      KDA_UNROLL
      for (int u = 0; u < kConvRun; ++u) {
        rows[u] = {};
        if (t + u < end) rows[u] = row(t + u);
      }
      rows_before(before, n, s.first, t);
      outputs(w, before, rows, t, int(end - t));
      t = end;
    }
    for (; t < stop; ++t) store(t, Row{});
  }

  // The window behind `offset` tokens of sequence n; below 0: zeros.
  KDA_FN void window(void* to, int64_t n, int64_t offset) const {
    Row rows[kReach] = {};
    if (offset >= 0) {
      const int64_t first = sequence(n).first;
      rows_before(rows, n, first, first + offset);
    }
    auto half = [&](int e) { return rows[e % kReach].pair[e / kReach / 2] >> 16 * (e / kReach & 1) & 0xffff; };
    auto* words = static_cast<uint32_t*>(to) + channel / 2 * kReach;
    KDA_UNROLL
    for (int i = 0; i < kReach * kWords; ++i) words[i] = half(2 * i) | half(2 * i + 1) << 16;
  }
};

template <class Tiles>
__global__ void KDA_LAUNCH_BOUNDS(kConvThreads, 3) conv_kernel(KDA_PARAMETER ConvProblem p) {
  int which = 0;
  while (which + 1 < p.num_parts && int(blockIdx.x) >= p.parts[which + 1].first_block) ++which;
  const ConvPart& part = p.parts[which];
  const int groups = part.C / kConvChannels;
  const int i = (int(blockIdx.x) - part.first_block) * kConvThreads + int(threadIdx.x);
  const Convolution<Tiles> on{p, part, i % groups * kConvChannels};
  const int64_t runs = (p.T + kConvRun - 1) / kConvRun;
  int64_t row = i / groups;
  if (row < runs) return on.run(row * kConvRun);
  row -= runs;
  const int64_t window = int64_t(part.C) * (kConvWidth - 1);
  if (row < p.N) return on.window(static_cast<uint16_t*>(part.final) + row * window, row, on.sequence(row).length);
  row -= p.N;
  if (row < p.M) {
    const int32_t n = p.checkpoints[2 * row];
    on.window(static_cast<uint16_t*>(part.saved) + row * window, n, n < 0 ? -1 : p.checkpoints[2 * row + 1]);
  }
}

}  // namespace KDA_ISA
}  // namespace kda
