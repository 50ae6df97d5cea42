// The host kernel on edge cases (case.h). With -DKDA_SANITIZE=ON this is also the memory check.
#include <cstring>

#include "../host/tiles.h"
#include "../kernel/workspace.h"
#include "case.h"
#include "check.h"

using namespace test;

namespace {

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

void expect_match(const Options& o, double out_tolerance, double state_tolerance) {
  const Case c(o);
  const Run got = c.call(), want = c.recurrence();
  CHECK(got.error.empty(), "%s", got.error.c_str());
  CHECK(relative_error(got.out, want.out) < out_tolerance, "%g", relative_error(got.out, want.out));
  CHECK(relative_error(got.final_state, want.final_state) < state_tolerance, "%g",
        relative_error(got.final_state, want.final_state));
  CHECK(relative_error(got.checkpoints, want.checkpoints) < state_tolerance, "%g",
        relative_error(got.checkpoints, want.checkpoints));
  const Run again = c.call();
  CHECK(same_bits(again.out, got.out) && same_bits(again.final_state, got.final_state));
}

}  // namespace

TEST(lengths_around_tiles_and_chunks) {
  for (int n : {1, 2, 15, 16, 17, 63, 64, 65, 130}) expect_match({{n}}, 1e-5, 1e-5);
}
TEST(packs_with_empty_sequences_and_padding) {
  Options o{{1, 64, 65, 0, 17}};
  o.pad_rows = 13, o.pad_seqs = 2, o.pad_chunks = 3;
  expect_match(o, 1e-5, 1e-5);
  o.initial = false;
  expect_match(o, 1e-5, 1e-5);
}
TEST(nothing_to_do) {
  Options o{{0, 0}};
  expect_match(o, 1e-5, 1e-5);
}
TEST(checkpoints_anywhere) {
  expect_match({{130, 70}, {{0, 128}, {0, 70}, {0, 130}, {1, 1}, {1, 64}}}, 1e-5, 1e-5);
}
TEST(every_gate_and_saturation) {
  for (Gate gate : {Gate::kBounded, Gate::kSoftplus, Gate::kActivated})
    for (float saturate : {0.0f, 40.0f, -40.0f}) {
      Options o{{100}};
      o.gate = gate, o.saturate = saturate;
      expect_match(o, 1e-5, 1e-5);
    }
}
TEST(both_head_sizes_chunk_sizes_and_layouts) {
  for (int K : {64, 128})
    for (int C : {16, 32, 64})
      for (bool kv : {false, true}) {
        Options o{{77, 5}, {{0, 40}}};
        o.K = K, o.C = C, o.state_kv = kv, o.V = 48;
        expect_match(o, 1e-5, 1e-5);
      }
}
TEST(groups_more_and_fewer_than_chunks) {
  for (int groups : {2, 3, 4, 8}) {
    Options o{{300, 0, 64, 1}, {{0, 100}, {0, 300}}};
    o.groups = groups;
    expect_match(o, 1e-5, 1e-5);
  }
}
TEST(half_precision_inputs) {
  Options o{{100, 30}};
  o.type = DType::kBF16;
  expect_match(o, 2.5e-3, 1e-5);
}
TEST(mixed_operands) {
  for (Gate gate : {Gate::kBounded, Gate::kSoftplus}) {
    Options o{{200, 30}};
    o.mixed = true, o.gate = gate, o.K = 128;
    expect_match(o, 4e-3, 4e-3);
  }
}
TEST(one_worker_and_many_give_the_same_bits) {
  Options o{{300, 64}};
  o.V = 64;
  o.workers = 1;
  const Run one = Case(o).call();
  o.workers = 7, o.slab = 1;
  const Run many = Case(o).call();
  CHECK(same_bits(one.out, many.out) && same_bits(one.final_state, many.final_state));
}
// 1M tokens * 96 heads * 128 channels: the last row's element is beyond 2^33, in the caller's arrays and
// in the workspace (every address of the kernel is one of these).
TEST(addresses_beyond_32_bits) {
  static_assert(row_offset(1'000'000, 95, 96, 128) == INT64_C(12'288'012'160));
  static_assert(row_offset(int64_t(1) << 31, 0, 1, 256) == INT64_C(549'755'813'888));
  using Layout = Blob<HostTiles, 128, 64>;
  static_assert(Layout::kBytes * 96 * 16384 > int64_t(1) << 37);
  Problem p{};
  p.K = 128, p.V = 128, p.C = 64, p.H = 96, p.groups = 1, p.NC = 16384, p.slab_chunks = 16384;
  const int64_t status = (4 + 127) / 128 * 128;  // p.N is 0
  CHECK(host::workspace_bytes(p) == Layout::kBytes * 96 * 16384 + status);
}
TEST(wrong_sizes_and_tables_are_refused) {
  const Case c(Options{{130}, {{0, 70}}});
  auto error = [&](auto change) { return c.call(change).error; };
  CHECK(error([](Problem& p) { p.K = 96; }).find("K is 96") != std::string::npos);
  CHECK(error([](Problem& p) { p.V = 24; }).find("V is 24") != std::string::npos);
  CHECK(error([](Problem& p) { p.C = 48; }).find("chunk_size is 48") != std::string::npos);
  CHECK(error([](Problem& p) { p.groups = 0; }).find("groups is 0") != std::string::npos);
  CHECK(error([](Problem& p) { p.workspace_bytes -= 1; }).find("workspace") != std::string::npos);
  CHECK(error([](Problem& p) { p.T = 129; }).find("row 3") != std::string::npos);
  CHECK(error([](Problem& p) { p.M = 0; }).find("row 1") != std::string::npos);
  CHECK(error([](Problem& p) { p.NC = 2; }).find("chunk table") != std::string::npos);
  CHECK(error([](Problem& p) { p.N = 0; }).find("no sequence") != std::string::npos);
}

RUN_TESTS()
