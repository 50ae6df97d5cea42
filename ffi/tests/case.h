// A prefill call with random inputs, and the token recurrence in double that it is compared with.
//
// Results, workspace and rows of padding are NaN before each call, and every array is its own
// allocation of exactly the right size, so that a sanitizer sees one element too far.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../host/launch.h"

namespace test {

using namespace kda;

struct Options {
  std::vector<int> lens;
  std::vector<std::pair<int, int>> checkpoints = {};  // (sequence, offset), in order
  Gate gate = Gate::kBounded;
  int H = 2, K = 64, V = 32, C = 64, groups = 1, pad_rows = 0, pad_seqs = 0, pad_chunks = 0;
  bool state_kv = false, initial = true, l2norm = true, mixed = false;
  DType type = DType::kF32;
  int slab = 3, workers = 2;
  bool backwards = false;  // a worker takes its tasks from the last to the first
  float saturate = 0;  // added to raw_g
};

struct Run {
  std::vector<float> out, final_state, checkpoints;
  std::string error;
};

// Exact-size allocations, so that a sanitizer sees one element too far.
template <class T>
std::unique_ptr<T[]> exact(const std::vector<T>& v) {
  std::unique_ptr<T[]> p(new T[v.size()]);
  std::copy(v.begin(), v.end(), p.get());
  return p;
}

inline uint16_t to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
inline float from_bf16(uint16_t h) {
  const uint32_t u = uint32_t(h) << 16;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

struct Case {
  Options o;
  int T = 0, used = 0, N, M;
  std::vector<float> q, k, v, g, beta, A_log, dt_bias, initial;
  std::vector<uint8_t> has;
  std::vector<int32_t> seqs, chunks, checkpoints;

  explicit Case(const Options& options) : o(options) {
    std::mt19937 rng(7);
    std::normal_distribution<float> normal;
    auto random = [&](size_t n) {
      std::vector<float> x(n);
      for (float& e : x) {
        e = normal(rng);
        if (o.type == DType::kBF16) e = from_bf16(to_bf16(e));
      }
      return x;
    };
    for (int n : o.lens) used += n;
    T = used + o.pad_rows;
    N = int(o.lens.size()) + o.pad_seqs;
    M = int(o.checkpoints.size()) + 1;  // one row of padding
    const size_t rows = size_t(T) * o.H;
    q = random(rows * o.K), k = random(rows * o.K), v = random(rows * o.V);
    g = random(rows * o.K), beta = random(rows);
    for (float& x : g) {
      x += o.saturate;
      if (o.gate == Gate::kActivated) x = -std::fabs(x);
      if (o.type == DType::kBF16) x = from_bf16(to_bf16(x));
    }
    if (o.gate == Gate::kActivated)
      for (float& x : beta) x = from_bf16(to_bf16(1 / (1 + std::exp(-x))));
    for (size_t i = size_t(used) * o.H; i < rows; ++i) {  // padding must have no effect
      beta[i] = NAN;
      for (int c = 0; c < o.K; ++c) q[i * o.K + c] = k[i * o.K + c] = g[i * o.K + c] = NAN;
      for (int c = 0; c < o.V; ++c) v[i * o.V + c] = NAN;
    }
    A_log = random(size_t(o.H)), dt_bias = random(size_t(o.H) * o.K);
    initial = random(size_t(N) * o.H * o.K * o.V);
    has.assign(size_t(N), 1);
    if (N > 1) {  // a row that does not count may hold anything
      has[1] = 0;
      const size_t size = size_t(o.H) * o.K * o.V;
      std::fill_n(initial.begin() + std::ptrdiff_t(size), size, NAN);
    }
    tables();
  }

  void tables() {
    int first = 0;
    for (int s = 0; s < int(o.lens.size()); ++s) {
      const int first_chunk = int(chunks.size() / 4);
      for (int at = 0; at < o.lens[size_t(s)];) {
        int end = std::min((at / o.C + 1) * o.C, o.lens[size_t(s)]), row = -1;
        for (const auto& c : o.checkpoints)
          if (c.first == s && c.second > at && c.second <= end) end = c.second;
        for (size_t i = 0; i < o.checkpoints.size(); ++i)
          if (o.checkpoints[i] == std::make_pair(s, end)) row = int(i);
        chunks.insert(chunks.end(), {s, first + at, end - at, row});
        at = end;
      }
      seqs.insert(seqs.end(), {first, o.lens[size_t(s)], first_chunk,
                               int(chunks.size() / 4) - first_chunk});
      first += o.lens[size_t(s)];
    }
    for (int s = 0; s < o.pad_seqs; ++s)
      seqs.insert(seqs.end(), {used, -1, int(chunks.size() / 4), 0});
    for (int i = 0; i < o.pad_chunks; ++i) chunks.insert(chunks.end(), {-1, used, 0, -1});
    for (const auto& c : o.checkpoints) checkpoints.insert(checkpoints.end(), {c.first, c.second});
    checkpoints.insert(checkpoints.end(), {-1, 0});
  }

  int64_t state_size() const { return int64_t(o.K) * o.V; }

  template <class F>
  Run call(F change) const {
    const bool half = o.type == DType::kBF16;
    std::vector<std::unique_ptr<uint16_t[]>> halves;
    std::vector<std::unique_ptr<float[]>> floats;
    auto tensor = [&](const std::vector<float>& x) -> Tensor {
      if (!half) return {floats.emplace_back(exact(x)).get(), DType::kF32};
      std::vector<uint16_t> h(x.size());
      for (size_t i = 0; i < x.size(); ++i) h[i] = to_bf16(x[i]);
      return {halves.emplace_back(exact(h)).get(), DType::kBF16};
    };
    auto table_s = exact(seqs), table_c = exact(chunks), table_m = exact(checkpoints);
    auto has_copy = exact(has);
    Run r;
    r.out.assign(size_t(T) * o.H * o.V, NAN);
    r.final_state.assign(size_t(N) * o.H * size_t(state_size()), NAN);
    r.checkpoints.assign(size_t(M) * o.H * size_t(state_size()), NAN);
    std::vector<uint16_t> out_half(r.out.size(), 0x7fc0);

    Problem p{};
    p.q = tensor(q), p.k = tensor(k), p.v = tensor(v), p.g = tensor(g), p.beta = tensor(beta);
    p.A_log = A_log.data(), p.dt_bias = dt_bias.data();
    if (o.initial) p.initial_state = initial.data(), p.has_initial_state = has_copy.get();
    p.seqs = table_s.get(), p.chunks = table_c.get(), p.checkpoints = table_m.get();
    p.out = half ? static_cast<void*>(out_half.data()) : r.out.data();
    p.final_state = r.final_state.data(), p.checkpoint_state = r.checkpoints.data();
    p.T = T, p.N = N, p.NC = int64_t(chunks.size() / 4), p.M = M;
    p.H = o.H, p.K = o.K, p.V = o.V, p.C = o.C;
    p.scale = 0.125f, p.lower_bound = -5, p.gate = o.gate, p.l2norm = o.l2norm;
    p.state_kv = o.state_kv, p.mixed = o.mixed, p.groups = o.groups;
    p.slab_chunks = o.groups > 1 ? std::max(1, int(p.NC)) : o.slab;
    p.workspace_bytes = host::workspace_bytes(p);
    struct Free {
      void operator()(void* m) const { std::free(m); }
    };
    const size_t bytes = size_t(p.workspace_bytes + 63) / 64 * 64;
    std::unique_ptr<void, Free> workspace(std::aligned_alloc(64, std::max<size_t>(bytes, 64)));
    std::memset(workspace.get(), 0xff, bytes);
    p.workspace = workspace.get();
    change(p);

    host::Parallel parallel;
    parallel.workers = o.workers;
    parallel.run = [&](int64_t n, const std::function<void(int, int64_t)>& task) {
      std::vector<std::thread> threads;
      for (int w = 0; w < o.workers; ++w)
        threads.emplace_back([&, w] {
          for (int64_t i = w; i < n; i += o.workers) task(w, o.backwards ? n - 1 - i : i);
        });
      for (auto& t : threads) t.join();
    };
    r.error = host::prefill(p, parallel);
    if (half)
      for (size_t i = 0; i < r.out.size(); ++i) r.out[i] = from_bf16(out_half[i]);
    return r;
  }
  Run call() const {
    return call([](Problem&) {});
  }

  Run recurrence() const;
};

inline double relative_error(const std::vector<float>& x, const std::vector<float>& ref) {
  double diff = 0, norm = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    diff += std::pow(double(x[i]) - ref[i], 2), norm += std::pow(double(ref[i]), 2);
  }
  return norm > 0 ? std::sqrt(diff / norm) : std::sqrt(diff);
}

inline Run Case::recurrence() const {
  Run r;
  const int K = o.K, V = o.V, H = o.H;
  r.out.assign(size_t(T) * H * V, 0);
  r.final_state.assign(size_t(N) * H * size_t(state_size()), 0);
  r.checkpoints.assign(size_t(M) * H * size_t(state_size()), 0);
  auto element = [&](int v_, int k_) { return o.state_kv ? k_ * V + v_ : v_ * K + k_; };
  for (int s = 0; s < int(o.lens.size()); ++s)
    for (int h = 0; h < H; ++h) {
      std::vector<double> S(size_t(V) * K, 0);
      auto save = [&](std::vector<float>& to, int64_t row) {
        for (int a = 0; a < V; ++a)
          for (int b = 0; b < K; ++b)
            to[size_t((row * H + h) * state_size() + element(a, b))] = float(S[size_t(a * K + b)]);
      };
      if (o.initial && has[size_t(s)])
        for (int a = 0; a < V; ++a)
          for (int b = 0; b < K; ++b)
            S[size_t(a * K + b)] = initial[size_t((int64_t(s) * H + h) * state_size() + element(a, b))];
      for (int t = 0; t < o.lens[size_t(s)]; ++t) {
        const size_t row = size_t(seqs[size_t(4 * s)] + t) * H + h;
        std::vector<double> qn, kn;
        for (int c = 0; c < K; ++c) qn.push_back(q[row * K + c]), kn.push_back(k[row * K + c]);
        if (o.l2norm)
          for (auto* x : {&qn, &kn}) {
            double sum = 1e-6;
            for (double e : *x) sum += e * e;
            for (double& e : *x) e /= std::sqrt(sum);
          }
        const double b = o.gate == Gate::kActivated ? beta[row] : 1 / (1 + std::exp(-double(beta[row])));
        for (int c = 0; c < K; ++c) {
          const double raw = g[row * K + c], rate = std::exp(double(A_log[h])),
                       x = raw + dt_bias[size_t(h) * K + c];
          const double decay = o.gate == Gate::kBounded    ? -5 / (1 + std::exp(-rate * x))
                               : o.gate == Gate::kSoftplus ? -rate * (std::fmax(x, 0) + std::log1p(std::exp(-std::fabs(x))))
                                                           : raw;
          for (int a = 0; a < V; ++a) S[size_t(a * K + c)] *= std::exp(decay);
        }
        for (int a = 0; a < V; ++a) {
          double error = v[row * V + a], read = 0;
          for (int c = 0; c < K; ++c) error -= S[size_t(a * K + c)] * kn[c];
          for (int c = 0; c < K; ++c) read += (S[size_t(a * K + c)] += b * error * kn[c]) * qn[c];
          r.out[row * V + a] = float(0.125 * read);
        }
        for (size_t i = 0; i < o.checkpoints.size(); ++i)
          if (o.checkpoints[i] == std::make_pair(s, t + 1)) save(r.checkpoints, int64_t(i));
      }
      save(r.final_state, s);
    }
  return r;
}

}  // namespace test
