// The walk on Hopper's wgmma (sm_90a), chunks of 64. A block has N rows of V of one (sequence, head); the state is
// held transposed, so that tokens and channels are the 64 rows of a product and V its columns, few or many:
//
//   r = v + (-kd) S^T,   v' = inverse r,   S^T = diag(2^G_last) S^T + kg^T v',   o = qg S^T + Aqk v'
//
// One warpgroup carries the state through these, another brings the operands and makes the outputs.
// What one product leaves in registers goes to shared memory, in 16 bits, as right operand of the next.
#pragma once

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
  KDA_FN void fetch_values(const Problem& p, const ChunkRow& chunk, int head, int first, int thread,
                           Barrier& full) {
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
    full.arrive_after_copies();
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
  Barrier full[Stages], empty[Stages];
  Barrier state_ready, state_read, residual_done, delta_ready, delta_read;
};

// Where the registers of a product of 64 rows are: register 4 j + 2 i + e of lane 4 g + t has row g + 8 i of the
// warp's sixteen and column 8 j + 2 t + e. Columns are rows of V in an order that lets a lane move 16 bytes.
template <int N>
struct HopperLanes {
  static constexpr int kWidth = N == 16 ? 4 : 8, kBlock = 4 * kWidth;  // values of a lane side by side, of a row
  static constexpr int kBlocks = N / kBlock;
  static KDA_FN int group() { return (threadIdx.x & 31) >> 2; }
  static KDA_FN int quarter() { return threadIdx.x & 3; }
  static KDA_FN int value(int block) { return block * kBlock + kWidth * quarter(); }
  // Register of value(block) + c in row i of the two.
  static constexpr KDA_FN int reg(int block, int c, int i) {
    return 4 * (block * kWidth / 2 + c / 2) + 2 * i + c % 2;
  }
};

template <int Words>
KDA_FN void load_words(uint32_t (&x)[Words], const uint16_t* from) {  // 8 or 16 bytes
  const auto v = *reinterpret_cast<const std::conditional_t<Words == 2, uint2, uint4>*>(from);
  x[0] = v.x, x[1] = v.y;
  if constexpr (Words == 4) x[2] = v.z, x[3] = v.w;
}
template <int Words>
KDA_FN void store_words(uint16_t* to, const uint32_t (&x)[Words]) {
  if constexpr (Words == 2) {
    *reinterpret_cast<uint2*>(to) = {x[0], x[1]};
  } else {
    *reinterpret_cast<uint4*>(to) = {x[0], x[1], x[2], x[3]};
  }
}

// A warp's part of the state in memory, [V, K] or [K, V]. Of K = 128 it has 32 channels, a lane those that are even
// or odd among eight; the lane beside it has the others, and the two change them so that each stores four.
template <int K, int N>
struct StateAccess {
  using Lanes = HopperLanes<N>;
  using State = float[K / 64][N / 2];
  int64_t value_stride, channel_stride;
  int first_value, warp;

  template <class S>
  KDA_FN StateAccess(S strides, int first_value, int warp)
      : value_stride(strides.value), channel_stride(strides.channel), first_value(first_value), warp(warp) {}

  static KDA_FN float other(float x) { return __shfl_xor_sync(~0u, x, 4); }
  KDA_FN int channel(int a, int i) const {  // NvidiaTiles::load_state2
    const int g = Lanes::group(), tile = K == 128 ? 2 * warp + i : warp, half = K == 128 ? a : i;
    return tile / 2 * 32 + 8 * (g / 2) + 4 * (tile & 1) + (g & 1) + 2 * half;
  }
  // A stride that the compiler does not know: what depends on it is computed where it is used, not kept in registers
  // through the walk.
  static KDA_FN int64_t hidden(int64_t stride) {
    asm volatile("" : "+l"(stride));
    return stride;
  }
  // For each value, f(its block, its registers with i = 0, with i = 1, offset of the four channels that this lane stores).
  template <class F>
  KDA_FN void for_fours(F f) const {
    const int g = Lanes::group();
    const int64_t stride = hidden(value_stride);
    KDA_UNROLL
    for (int b = 0; b < Lanes::kBlocks; ++b) {
      int64_t at = (first_value + Lanes::value(b)) * stride + 32 * warp + 8 * (g / 2) + 4 * (g & 1);
      KDA_UNROLL
      for (int c = 0; c < Lanes::kWidth; ++c, at += stride) {
        f(b, Lanes::reg(b, c, 0), Lanes::reg(b, c, 1), at);
        asm volatile("" ::: "memory");  // one at a time: registers
      }
    }
  }
  template <class F>
  KDA_FN void for_each(F f) const {
    const int64_t stride = hidden(value_stride);
    KDA_UNROLL
    for (int a = 0; a < K / 64; ++a)
      KDA_UNROLL
      for (int i = 0; i < 2; ++i)
        KDA_UNROLL
        for (int b = 0; b < Lanes::kBlocks; ++b) {
          int64_t at = (first_value + Lanes::value(b)) * stride + channel(a, i) * channel_stride;
          KDA_UNROLL
          for (int c = 0; c < Lanes::kWidth; ++c, at += stride) f(b, a, Lanes::reg(b, c, i), at);
        }
  }
  // `slices`: a bit for each 16 values, whether they are stored.
  KDA_FN void store(const State& s, float* to, unsigned slices) const {
    if constexpr (K == 128 && N < 128)  // with more values ptxas spills the state over the shuffles
      if (channel_stride == 1) {
        const bool odd = Lanes::group() & 1;
        for_fours([&](int b, int low, int high, int64_t at) {
          const float x = other(odd ? s[0][low] : s[0][high]), y = other(odd ? s[1][low] : s[1][high]);
          if (slices >> Lanes::value(b) / kTile & 1)
            *reinterpret_cast<float4*>(to + at) = odd ? float4{x, s[0][high], y, s[1][high]}
                                                    : float4{s[0][low], x, s[1][low], y};
        });
        return;
      }
    for_each([&](int b, int a, int r, int64_t at) {
      if (slices >> Lanes::value(b) / kTile & 1) to[at] = s[a][r];
    });
  }
  KDA_FN void load(State& s, const float* from) const {  // null: zeros
    for_each([&](int, int a, int r, int64_t at) { s[a][r] = from ? from[at] : 0; });
  }
};

constexpr int kHopperThreads = 2 * 128;

template <class Tiles, class Policy, int K, int C, int N, int Stages>
__global__ void __launch_bounds__(kHopperThreads, 1)
    hopper_walk_kernel(KDA_PARAMETER Problem p, int slab_first, int slab_last) {
#if defined(KDA_HAS_WGMMA)
  using S = Schedule<Tiles, Policy, K, C>;
  using W = typename S::W;
  using Layout = typename S::Layout;
  using Decay = typename Policy::Decay;
  using Bounded = typename Policy::Bounded;
  using Lanes = HopperLanes<N>;
  using Io = typename Tiles::IoType;
  static_assert(C == 64 && Policy::kNarrow, "");
  constexpr int NT = C / kTile, KT = K / kTile, M = K / 64, R = N / 2;

  extern __shared__ __attribute__((aligned(128))) char memory[];
  auto& m = *reinterpret_cast<HopperWalkMemory<Tiles, K, C, N, Stages>*>(memory);
  const S s{p, slab_first, slab_last};
  const int parts = p.V / N, first_value = int(blockIdx.x % parts) * N;
  const int64_t row = blockIdx.x / parts, seq = row / p.H;
  const int head = int(row % p.H);
  const typename S::Range range = s.range_in_slab(seq);
  const int first = int(range.first), count = int(range.last - range.first);
  if (count <= 0) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Stages; ++i) m.full[i].init(1 + 128), m.empty[i].init(8);
    m.state_ready.init(4), m.state_read.init(4), m.residual_done.init(4);
    m.delta_ready.init(4), m.delta_read.init(4);
    Barrier::fence_init();
  }
  for (int i = 0; i < Stages; ++i) m.stage[i].clear();
  wgmma::publish();
  after_previous();
  __syncthreads();

  const int wave = wave_index<Tiles>(), warp = wave % 4, g = Lanes::group();
  const bool lane0 = (threadIdx.x & 31) == 0;
  auto signal = [&](Barrier& b) {  // by all lanes of a warp
    __syncwarp();
    if (lane0) b.arrive();
  };
  auto warpgroup_barrier = [] { asm volatile("bar.sync 1, 128;" ::: "memory"); };  // of the state's

  if (wave >= 4) {  // ---- operands and outputs ----
    const int thread = int(threadIdx.x) - 128;
    auto fetch = [&](int n, const ChunkRow& chunk) {
      auto& stage = m.stage[n % Stages];
      Barrier& full = m.full[n % Stages];
      stage.fetch_values(p, chunk, head, first_value, thread, full);
      if (thread == 0) stage.fetch(s, first + n, head, full);
    };
    for (int n = 0; n < Stages && n < count; ++n) fetch(n, s.chunk_row(first + n));
    float o[R];
    for (int n = 0; n < count; ++n) {
      const auto& stage = m.stage[n % Stages];
      ChunkRow next = {};
      if (n + Stages < count) next = s.chunk_row(first + n + Stages);
      m.full[n % Stages].wait(n / Stages & 1);
      m.state_ready.wait(n & 1);
      m.residual_done.wait(n & 1);  // the state's product goes first: it is waited for
      wgmma::fence();
      KDA_UNROLL
      for (int t = 0; t < KT; ++t)
        wgmma::product<Decay>(o, stage.left(Layout::qg(0, t)), m.state.right(t), t > 0);
      wgmma::commit();
      wgmma::wait<0>(o);
      signal(m.state_read);
      const ChunkRow chunk = stage.row;
      m.delta_ready.wait(n & 1);
      wgmma::fence();
      KDA_UNROLL
      for (int j = 0; j < NT; ++j)
        wgmma::product<Bounded>(o, stage.triangle(0, j), m.delta.right(j), true);
      wgmma::commit();
      wgmma::wait<0>(o);
      signal(m.delta_read);
      signal(m.empty[n % Stages]);
      KDA_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int token = warp * kTile + 2 * g + i;
        if (token >= chunk.valid) continue;
        auto* to = static_cast<uint16_t*>(p.out) + row_offset(chunk.first + token, head, p.H, p.V) + first_value;
        KDA_UNROLL
        for (int b = 0; b < Lanes::kBlocks; ++b) {
          uint32_t packed[Lanes::kWidth / 2];
          KDA_UNROLL
          for (int c = 0; c < Lanes::kWidth; c += 2)
            packed[c / 2] = Tiles::template pack<Io>(p.scale * o[Lanes::reg(b, c, i)],
                                                     p.scale * o[Lanes::reg(b, c + 1, i)]);
          store_words(to + Lanes::value(b), packed);
        }
      }
      if (n + Stages < count) {
        m.empty[n % Stages].wait(n / Stages & 1);
        fetch(n + Stages, next);
      }
    }
    return;
  }

  // ---- the state ----
  // Registers 4 j + 2 i + e of state[a] have a channel of tile(i), of its first or second eight as half(a, i) says:
  // with two products of 64 channels each has one half of all tiles, so that a lane's channels are near each other.
  float state[M][R], x[R];  // x: r, then v'
  auto tile = [&](int i) { return M == 2 ? 2 * warp + i : warp; };
  auto half = [&](int a, int i) { return M == 2 ? a : i; };
  auto place = [&](int a, int i) { return tile(i) * kTile + 8 * half(a, i) + g; };
  const StateAccess<K, N> access{W::strides(p), first_value, warp};
  auto publish_state = [&] {
    KDA_UNROLL
    for (int a = 0; a < M; ++a)
      m.state.store(2 * tile(0) + half(a, 0), 2 * tile(1) + half(a, 1), [&](int r) {
        return Tiles::template pack<Decay>(state[a][r], state[a][r + 1]);
      });
    wgmma::publish();
    signal(m.state_ready);
    warpgroup_barrier();
  };
  access.load(state, s.entry(seq, head, range.from_start));
  publish_state();

  // x starts as v.
  auto load_values = [&](int n) {
    m.full[n % Stages].wait(n / Stages & 1);
    const auto& stage = m.stage[n % Stages];
    KDA_UNROLL
    for (int i = 0; i < 2; ++i)
      KDA_UNROLL
      for (int b = 0; b < Lanes::kBlocks; ++b) {
        const int row = warp * kTile + 2 * g + i, value = Lanes::value(b);
        uint32_t words[Lanes::kWidth / 2];
        load_words(words, stage.values + stage.place(row, value / 8) + value % 8);
        KDA_UNROLL
        for (int c = 0; c < Lanes::kWidth; ++c)
          x[Lanes::reg(b, c, i)] = Tiles::template unpack<Io>(words[c / 2], c & 1);
      }
  };
  // Packs x as right operand; the first token of each slice of V that fp16 does not hold, when there is one.
  int32_t beyond[Lanes::kBlocks];
  KDA_UNROLL
  for (int b = 0; b < Lanes::kBlocks; ++b) beyond[b] = kNone;
  auto publish_narrow = [&](RightMatrices<C, N>& to, const ChunkRow& chunk) {
    uint32_t most = 0;
    to.store(2 * warp, 2 * warp + 1, [&](int r) {
      const uint32_t packed = Tiles::pack_clamped(x[r], x[r + 1]);
      asm("{.reg .b32 a;\n\tabs.f16x2 a, %1;\n\tmax.f16x2 %0, %0, a;}" : "+r"(most) : "r"(packed));
      return packed;
    });
    wgmma::publish();
    if ((most & 0xffff) >= 0x7bff || most >> 16 >= 0x7bff) {
      KDA_UNROLL
      for (int i = 1; i >= 0; --i)
        KDA_UNROLL
        for (int b = 0; b < Lanes::kBlocks; ++b)
          KDA_UNROLL
          for (int c = 0; c < Lanes::kWidth; ++c)
            if (fabsf(x[Lanes::reg(b, c, i)]) > kLargest)
              beyond[b] = min(beyond[b], chunk.first + warp * kTile + 2 * g + i);
    }
  };

  load_values(0);
  for (int n = 0; n < count; ++n) {
    const auto& stage = m.stage[n % Stages];
    const ChunkRow chunk = stage.row;
    wgmma::fence();
    KDA_UNROLL
    for (int t = 0; t < KT; ++t)
      wgmma::product<Decay>(x, stage.left(Layout::kd(0, t)), m.state.right(t), true);
    wgmma::commit();
    KDA_UNROLL
    for (int a = 0; a < M; ++a) {
      const float decay[2] = {stage.decay[place(a, 0)], stage.decay[place(a, 1)]};
      KDA_UNROLL
      for (int r = 0; r < R; ++r) state[a][r] *= decay[r >> 1 & 1];
    }
    const int32_t from_prologue = stage.beyond[warp];
    wgmma::wait<0>(x);
    signal(m.residual_done);
    publish_narrow(m.residual, chunk);
    warpgroup_barrier();
    wgmma::fence();
    KDA_UNROLL
    for (int j = 0; j < NT; ++j)
      wgmma::product<Bounded>(x, stage.triangle(1, j), m.residual.right(j), j > 0);
    wgmma::commit();
    wgmma::wait<0>(x);
    if (n > 0) m.delta_read.wait((n - 1) & 1);
    publish_narrow(m.delta, chunk);
    signal(m.delta_ready);
    warpgroup_barrier();
    wgmma::fence();
    KDA_UNROLL
    for (int j = 0; j < NT; ++j)
      KDA_UNROLL
      for (int a = 0; a < M; ++a)
        wgmma::product<Bounded>(state[a],
                                stage.left(Layout::kg(0, j), M * 128).at(128 * a),
                                m.delta.right(j), true);
    wgmma::commit();
    if (n + 1 < count) load_values(n + 1);
    KDA_UNROLL
    for (int b = 0; b < Lanes::kBlocks; ++b) beyond[b] = min(beyond[b], from_prologue);
    KDA_UNROLL
    for (int a = 0; a < M; ++a) wgmma::wait<0>(state[a]);
    signal(m.empty[n % Stages]);
    if (float* to = s.checkpoint_state(chunk.checkpoint, head)) access.store(state, to, ~0u);
    if (n + 1 < count) {
      m.state_read.wait(n & 1);
      publish_state();
    }
  }
  // In a pool a slice goes on to where it is written or not as a whole, and its warps have met different tokens.
  float* leaves = nullptr;
  unsigned slices = 0;
  for (int i = 0; i < N / kTile; ++i) {
    int any = 0;
    if (p.in_pool) {
      KDA_UNROLL
      for (int b = 0; b < Lanes::kBlocks; ++b)
        any |= Lanes::value(b) / kTile == i && beyond[b] != kNone;
      asm volatile("{.reg .pred mine, all;\n\tsetp.ne.b32 mine, %0, 0;\n\t"
                   "barrier.red.or.pred all, 1, 128, mine;\n\tselp.b32 %0, 1, 0, all;}"
                   : "+r"(any)::"memory");
    }
    if (float* to = s.exit(seq, head, first_value / kTile + i, any)) leaves = to, slices |= 1u << i;
  }
  if (leaves) access.store(state, leaves, slices);
  KDA_UNROLL
  for (int b = 0; b < Lanes::kBlocks; ++b)
    s.report(beyond[b], seq, head, (first_value + Lanes::value(b)) / kTile);
#endif
}

}  // namespace KDA_ISA
}  // namespace kda
