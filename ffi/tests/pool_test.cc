// States in a pool: the same bits as states by sequence and by checkpoint, in place, and nothing else written.
#include <cstring>
#include <numeric>

#include "case.h"
#include "check.h"

using namespace test;

namespace {

// A pool for a case: every sequence and checkpoint has a row in random order, but for those that are named as
// without; rows that nobody reads hold NaN.
struct Pool {
  const Case& c;
  int64_t row_size;
  std::vector<float> states;
  std::vector<int32_t> live, saved;

  Pool(const Case& from, std::vector<int> without_row = {}, std::vector<int> without_checkpoint = {})
      : c(from), row_size(c.state_size() * c.o.H) {
    const int spare = 3, num_rows = c.N + c.M + spare;
    std::vector<int32_t> rows(size_t(num_rows), 0);
    std::iota(rows.begin(), rows.end(), 0);
    std::shuffle(rows.begin(), rows.end(), std::mt19937(3));
    live.assign(rows.begin(), rows.begin() + c.N);
    saved.assign(rows.begin() + c.N, rows.begin() + c.N + c.M);
    states.assign(size_t(num_rows * row_size), NAN);
    for (int n = 0; n < c.N; ++n)
      if (c.has[size_t(n)])
        std::copy_n(c.initial.begin() + n * row_size, row_size, states.begin() + live[size_t(n)] * row_size);
    // Both ends of what is outside.
    for (int n : without_row) live[size_t(n)] = n % 2 ? -1 - n : num_rows + n;
    for (int m : without_checkpoint) saved[size_t(m)] = m % 2 ? INT32_MIN : INT32_MAX;
  }
  int64_t num_rows() const { return int64_t(states.size()) / row_size; }
  bool inside(int64_t row) const { return row >= 0 && row < num_rows(); }

  Run run() {
    auto memory = exact(states);
    auto live_rows = exact(live), saved_rows = exact(saved);
    std::vector<char> workspace;
    const Run r = c.call([&](Problem& p) {
      p.in_pool = true, p.pool_rows = uint32_t(num_rows());
      p.initial_state = p.final_state = p.checkpoint_state = memory.get();
      p.state_rows = live_rows.get(), p.checkpoint_rows = saved_rows.get();
      p.workspace_bytes = host::workspace_bytes(p);
      workspace.assign(size_t(p.workspace_bytes) + 64, char(0xff));
      p.workspace = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 63) / 64 * 64);
    });
    std::copy_n(memory.get(), states.size(), states.begin());
    return r;
  }
};

// Where the two first differ, in rows of the pool; -1: nowhere.
int64_t first_difference(const std::vector<float>& a, const std::vector<float>& b, int64_t row_size) {
  for (size_t i = 0; i < a.size(); i += size_t(row_size))
    if (std::memcmp(&a[i], &b[i], size_t(row_size) * sizeof(float)) != 0) return int64_t(i) / row_size;
  return -1;
}

// The same call with states by sequence and by checkpoint: out and the pool must hold its bits.
void expect_the_same(const Case& c, std::vector<int> without_row = {},
                     std::vector<int> without_checkpoint = {}) {
  Case by_sequence = c;
  for (int n : without_row) by_sequence.has[size_t(n)] = 0;
  const Run want = by_sequence.call();
  CHECK(want.error.empty(), "%s", want.error.c_str());

  Pool pool(c, without_row, without_checkpoint);
  std::vector<float> states = pool.states;
  auto put = [&](int64_t row, const std::vector<float>& from, int64_t i) {
    if (pool.inside(row))
      std::copy_n(from.begin() + i * pool.row_size, pool.row_size, states.begin() + row * pool.row_size);
  };
  for (int n = 0; n < int(c.o.lens.size()); ++n) put(pool.live[size_t(n)], want.final_state, n);
  for (int m = 0; m < int(c.o.checkpoints.size()); ++m) put(pool.saved[size_t(m)], want.checkpoints, m);

  const Run got = pool.run();
  CHECK(got.error.empty(), "%s", got.error.c_str());
  CHECK(first_difference(got.out, want.out, c.o.V) == -1, "row %d of out",
        int(first_difference(got.out, want.out, c.o.V)));
  CHECK(first_difference(pool.states, states, pool.row_size) == -1, "row %d of the pool",
        int(first_difference(pool.states, states, pool.row_size)));
}

Options several() {
  Options o{{130, 1, 0, 64, 200}, {{0, 128}, {0, 7}, {4, 200}, {3, 64}, {4, 90}}};
  o.pad_rows = 5, o.pad_seqs = 2, o.pad_chunks = 2;
  return o;
}

}  // namespace

TEST(a_pool_holds_the_same_bits) {
  for (bool kv : {false, true})
    for (int groups : {1, 3})
      for (int slab : {1, 3, 100}) {
        Options o = several();
        o.state_kv = kv, o.groups = groups, o.slab = slab;
        expect_the_same(Case(o));
        expect_the_same(Case(o), {0, 3, 4}, {1, 2});
        expect_the_same(Case(o), {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4});
      }
}
// Tasks between two barriers may run in any order. Here the second slab begins with the end of one sequence and
// ends with the beginning of the other: a state waits where no other one is read.
TEST(any_order_of_tasks) {
  for (int workers : {1, 7})
    for (bool backwards : {false, true}) {
      Options o{{200, 300}};
      o.workers = workers, o.V = 64, o.H = 3, o.slab = 3, o.backwards = backwards;
      expect_the_same(Case(o));
    }
}
// An empty sequence keeps its row; one that is not read has zeros written to it.
TEST(empty_sequences) {
  Options o{{0, 0, 0, 30}};
  o.pad_seqs = 1;
  Case c(o);
  c.has = {1, 0, 1, 1, 1};
  expect_the_same(c, {2});
  for (int& n : o.lens) n = 0;
  Case nothing(o);
  nothing.has = {1, 0, 1, 1, 1};
  expect_the_same(nothing, {2});
}

// What fp16 does not hold is done again from its first token on, from the row that the final state is written
// to. `where`: the tokens at which one head's v is large; `slices`: in which rows of V.
TEST(second_pass) {
  for (bool kv : {false, true})
    for (int groups : {1, 2, 5})
      for (int slab : {1, 2, 100})
        for (int token : {0, 70, 129, 250}) {
          Options o = several();
          o.mixed = true, o.state_kv = kv, o.groups = groups, o.slab = slab, o.V = 48;
          Case c(o);
          c.v[(size_t(token) * 2 + 1) * 48 + 17] = 1e30f;  // head 1, the second slice
          expect_the_same(c);
          expect_the_same(c, {4}, {0});
        }
}
// A state that is too large spoils the first chunk already: of every slice, or of the one that holds it alone,
// beside which the others keep the final state of the first pass.
TEST(second_pass_from_a_large_state) {
  for (int groups : {1, 3})
    for (int slab : {1, 100})
      for (bool all : {false, true}) {
        Options o = several();
        o.mixed = true, o.groups = groups, o.slab = slab, o.V = 48;
        Case c(o);
        for (size_t i = 0; i < c.initial.size(); ++i)
          if (all || i / size_t(o.K) % 48 / 16 == 1) c.initial[i] *= 1e6f;
        expect_the_same(c);
      }
}

// The address of a state, far beyond 2^31 elements: the last row of a pool of a million rows of Kimi-K3.
TEST(addresses_of_rows_beyond_32_bits) {
  constexpr Problem p = [] {
    Problem q{};
    q.H = 96, q.K = 128, q.V = 128, q.in_pool = true, q.pool_rows = INT32_MAX;
    return q;
  }();
  static_assert(state_offset(p, 1'000'000, 95) == INT64_C(1'572'865'556'480));
  static constexpr int32_t rows[] = {INT32_MAX - 1, -1, INT32_MIN, 5, INT32_MAX};
  static_assert(state_row(p, rows, 0) == INT32_MAX - 1 && state_row(p, rows, 3) == 5);
  static_assert(state_row(p, rows, 1) == -1 && state_row(p, rows, 2) == -1);
  static_assert(state_row(p, rows, 4) == -1);
  static_assert(state_offset(p, state_row(p, rows, 0), 95) > INT64_C(1) << 51);
  constexpr Problem by_sequence{};
  static_assert(live_row(by_sequence, 7) == 7 && saved_row(by_sequence, 9) == 9);
}

RUN_TESTS()
