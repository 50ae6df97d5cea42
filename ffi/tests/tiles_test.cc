// Each operation of the tile layer against what it means, written with plain loops.
//
// The tests see tiles only through load, store and the operations, so that another target's layer can
// be put in HostTiles' place.
#include <cmath>
#include <cstring>
#include <random>

#include "../host/tiles.h"
#include "check.h"

using namespace kda;
using T = HostTiles;

namespace {

struct Matrix {
  double x[kTile][kTile];
};
std::mt19937 rng(1);

Matrix random_matrix() {
  std::normal_distribution<float> n;
  Matrix m;
  for (auto& row : m.x)
    for (double& e : row) e = n(rng);
  return m;
}
T::Acc tile(const Matrix& m) {
  float f[kTile][kTile];
  for (int r = 0; r < kTile; ++r)
    for (int c = 0; c < kTile; ++c) f[r][c] = float(m.x[r][c]);
  return T::load_f32(&f[0][0], kTile, 1);
}
Matrix matrix(const T::Acc& a) {
  float f[kTile][kTile];
  T::store_f32(&f[0][0], kTile, 1, a);
  Matrix m;
  for (int r = 0; r < kTile; ++r)
    for (int c = 0; c < kTile; ++c) m.x[r][c] = f[r][c];
  return m;
}
double distance(const Matrix& a, const Matrix& b) {
  double d = 0;
  for (int r = 0; r < kTile; ++r)
    for (int c = 0; c < kTile; ++c) {
      const double e = std::fabs(a.x[r][c] - b.x[r][c]);
      d = e > d || std::isnan(e) ? e : d;
    }
  return d;
}
template <class F>
Matrix build(F f) {
  Matrix m;
  for (int r = 0; r < kTile; ++r)
    for (int c = 0; c < kTile; ++c) m.x[r][c] = f(r, c);
  return m;
}
float f32(double x) { return float(x); }

}  // namespace

TEST(loads_and_stores_with_strides) {
  const Matrix m = random_matrix();
  float wide[kTile * 40];
  T::store_f32(wide, 40, 1, tile(m));
  CHECK(distance(matrix(T::load_f32(wide, 40, 1)), m) == 0);
  T::store_f32(wide, 1, 40, tile(m));  // the transpose, as a [K, V] state
  CHECK(distance(matrix(T::load_f32(wide, 1, 40)), m) == 0);
  CHECK(wide[3 * 40 + 5] == f32(m.x[5][3]));
}

TEST(reads_only_valid_rows) {
  float rows[kTile * 20];
  for (float& x : rows) x = NAN;
  for (int r = 0; r < 5; ++r)
    for (int c = 0; c < kTile; ++c) rows[r * 20 + c] = float(r * 100 + c);
  const Matrix got = matrix(T::load({rows, DType::kF32}, 0, 20, 5));
  CHECK(distance(got, build([](int r, int c) { return r < 5 ? r * 100 + c : 0; })) == 0);
  const T::RowVec v = T::load_rows({rows, DType::kF32}, 2, 20, 3);
  CHECK(T::at(v, 2, 0) == 202 && T::at(v, 3, 0) == 0);
}

TEST(stores_only_the_rows_asked_for) {
  float out[kTile * kTile];
  for (float& x : out) x = -1;
  const Matrix m = random_matrix();
  T::store(out, DType::kF32, 0, kTile, tile(m), 3, 7);
  CHECK(out[6 * kTile + 15] == f32(m.x[6][15]));
  CHECK(out[7 * kTile] == -1 && out[2 * kTile + 15] == -1);
}

TEST(pairs_of_channel_tiles) {
  const Matrix a = random_matrix(), b = random_matrix();
  float wide[kTile * 40], column[40 * kTile];
  T::store_state2(wide, 40, 1, tile(a), tile(b));
  T::store_state2(column, 1, kTile, tile(a), tile(b));  // a [K, V] state
  T::Acc x, y;
  T::load_state2(x, y, wide, 40, 1);
  CHECK(distance(matrix(x), a) == 0 && distance(matrix(y), b) == 0);
  CHECK(wide[3 * 40 + 20] == f32(b.x[3][4]) && column[20 * kTile + 3] == f32(b.x[3][4]));
  T::load2(x, y, {wide, DType::kF32}, 0, 40, 5);
  CHECK(matrix(y).x[4][9] == f32(b.x[4][9]) && matrix(y).x[5][9] == 0);
  T::set_identity2(x, y, 16);
  CHECK(matrix(x).x[3][3] == 0 && matrix(y).x[3][3] == 1 && matrix(y).x[3][4] == 0);
}

TEST(sums_of_squares_of_rows) {
  const Matrix a = random_matrix(), b = random_matrix();
  const T::Raw both[2] = {tile(a), tile(b)};
  const T::RowVec got = T::row_squares(both);
  for (int r = 0; r < kTile; ++r) {
    double want = 0;
    for (int c = 0; c < kTile; ++c) want += a.x[r][c] * a.x[r][c] + b.x[r][c] * b.x[r][c];
    CHECK(std::fabs(T::at(got, r, 0) - want) < 1e-5 * want);
  }
  CHECK(T::at(T::row_numbers(), 7, 0) == 7);
}

TEST(finds_the_first_column_or_row_beyond_a_limit) {
  Matrix m = random_matrix();
  int32_t first = kNone;
  T::first_beyond(first, tile(m), 100, 50);
  CHECK(first == kNone);
  m.x[3][9] = -200, m.x[15][7] = 200;
  T::first_beyond(first, tile(m), 100, 50);
  CHECK(first == 57);
  m.x[0][2] = INFINITY;
  T::first_beyond(first, tile(m), 100, 50);
  CHECK(first == 52);
  T::first_beyond(first, tile(m), 100, 60);  // a later tile changes nothing
  CHECK(first == 52);
  first = kNone;
  T::first_beyond<true>(first, tile(m), 100, 50);  // by row
  CHECK(first == 50);
  m.x[0][2] = 0;
  first = kNone;
  T::first_beyond<true>(first, tile(m), 100, 50);
  CHECK(first == 53);
  int32_t most = 5;
  T::atomic_max(&most, 3);
  CHECK(most == 5);
  T::atomic_max(&most, 8);
  CHECK(most == 8);
}

TEST(clamps_to_what_fp16_holds) {
  Matrix m = random_matrix();
  m.x[1][2] = 1e6, m.x[2][1] = -INFINITY, m.x[3][3] = NAN;
  const Matrix narrow = matrix(T::left_clamped<F16>(tile(m)));
  CHECK(narrow.x[1][2] == 65504 && narrow.x[2][1] == -65504 && std::isnan(narrow.x[3][3]));
  CHECK(std::isinf(matrix(T::left_clamped<BF16>(tile(m))).x[2][1]));
}

TEST(half_precision_round_trips) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const bool nan16 = (h & 0x7c00) == 0x7c00 && (h & 0x3ff);
    const float x = scalar::f16_to_f32(uint16_t(h));
    if (nan16) {
      CHECK(std::isnan(x) && std::isnan(scalar::f16_to_f32(scalar::f32_to_f16(x))));
    } else {
      CHECK(scalar::f32_to_f16(x) == h, "fp16 %04x", h);
      CHECK(scalar::round_to_f16(x) == x);
    }
    const float b = scalar::bf16_to_f32(uint16_t(h));
    if (std::isnan(b)) {
      CHECK(std::isnan(scalar::from_bits(scalar::round_to_bf16(b))));
    } else {
      CHECK(scalar::round_to_bf16(b) >> 16 == h, "bf16 %04x", h);
    }
  }
}

TEST(half_precision_rounds_to_nearest_even) {
  struct {
    float x, want;
  } const cases[] = {{2049, 2048},      {2051, 2052},         {65519, 65504}, {65520, INFINITY},
                     {-65520, -INFINITY}, {3.0e-8f, 5.9604645e-8f}, {2.9e-8f, 0}, {1e-5f, 1.0013580e-5f}};
  for (const auto& c : cases) CHECK(scalar::round<F16>(c.x) == c.want, "%g", double(c.x));
  CHECK(scalar::round<BF16>(257) == 256 && scalar::round<BF16>(259) == 260);
  CHECK(std::isinf(scalar::round<BF16>(3.4e38f)));
  CHECK(std::isnan(scalar::round<F16>(NAN)) && std::isnan(scalar::round<BF16>(NAN)));
}

TEST(reads_and_writes_half_precision_rows) {
  for (DType type : {DType::kBF16, DType::kF16}) {
    uint16_t memory[kTile * kTile];
    const Matrix m = random_matrix();
    T::store(memory, type, 0, kTile, tile(m), 0, kTile);
    const Matrix got = matrix(T::load({memory, type}, 0, kTile, kTile));
    const double unit = type == DType::kBF16 ? 1.0 / 256 : 1.0 / 2048;
    for (int r = 0; r < kTile; ++r)
      for (int c = 0; c < kTile; ++c)
        CHECK(std::fabs(got.x[r][c] - m.x[r][c]) <= unit * std::fabs(m.x[r][c]) + 1e-7);
  }
}

TEST(exp2_is_accurate) {
  for (float x = -125.9f; x < 127.0f; x += 0.0137f) {
    const double want = std::exp2(double(x));
    CHECK(std::fabs(T::exp2(x) - want) <= 2.4e-7 * want, "at %g", double(x));
  }
  CHECK(T::exp2(0) == 1 && T::exp2(-3) == 0.125f);
  CHECK(T::exp2(-127) == 0 && T::exp2(-1e30f) == 0 && T::exp2(-INFINITY) == 0);
  CHECK(std::isnan(T::exp2(NAN)));
}

TEST(applies_element_by_element) {
  const Matrix a = random_matrix(), b = random_matrix();
  T::RowVec row;
  T::ColVec col;
  float tmp[kTile];
  for (int i = 0; i < kTile; ++i) tmp[i] = float(i + 1);
  col = T::load_cols(tmp);
  row = T::load_rows({tmp, DType::kF32}, 0, 1, kTile);
  T::Acc out;
  T::apply(out, [](float x, float y, float r, float c) { return x + y * r - c; }, tile(a), tile(b),
           row, col);
  CHECK(distance(matrix(out), build([&](int r, int c) {
                   return a.x[r][c] + b.x[r][c] * (r + 1) - (c + 1);
                 })) < 1e-4);
}

TEST(select_drops_what_is_not_finite) {
  T::Acc a = tile(build([](int r, int c) { return r > c ? r * 20 + c : NAN; }));
  T::select(a, [](int r, int c) { return r > c; });
  CHECK(distance(matrix(a), build([](int r, int c) { return r > c ? r * 20 + c : 0; })) == 0);
  T::RowVec v;
  float tmp[kTile];
  for (float& x : tmp) x = NAN;
  v = T::load_rows({tmp, DType::kF32}, 0, 1, kTile);
  T::mask_rows(v, 0);
  CHECK(T::at(v, 0, 0) == 0 && T::at(v, 15, 0) == 0);
}

TEST(sums_and_scans_rows) {
  const Matrix a = random_matrix();
  const T::RowVec sums = T::row_sums(tile(a));
  T::Acc scan = tile(a);
  T::cumsum_rows(scan);
  const Matrix got = matrix(scan);
  for (int r = 0; r < kTile; ++r) {
    double row = 0;
    for (int c = 0; c < kTile; ++c) {
      row += a.x[r][c];
      double down = 0;
      for (int i = 0; i <= r; ++i) down += a.x[i][c];
      CHECK(std::fabs(got.x[r][c] - down) < 1e-5);
    }
    CHECK(std::fabs(T::at(sums, r, 0) - row) < 1e-5);
  }
  const T::ColVec last = T::last_row(scan);
  for (int c = 0; c < kTile; ++c) CHECK(T::at(last, 0, c) == f32(got.x[kTile - 1][c]));
  T::Acc diagonal;
  T::zero(diagonal);
  T::add_diagonal(diagonal, sums);
  CHECK(distance(matrix(diagonal),
                 build([&](int r, int c) { return r == c ? T::at(sums, r, 0) : 0; })) == 0);
}

TEST(moves_rows_and_transposes) {
  const Matrix a = random_matrix();
  CHECK(distance(matrix(T::transpose(tile(a))), build([&](int r, int c) { return a.x[c][r]; })) == 0);
  const T::Acc moved = T::gather_rows(tile(a), [](int r) { return (r & ~3) + 1; });
  CHECK(distance(matrix(moved), build([&](int r, int c) { return a.x[(r & ~3) + 1][c]; })) == 0);
}

TEST(inverts_unit_lower_triangles) {
  // Equal keys with beta near 1: the powers of L grow to 1e11 in a doubling product.
  for (double fill : {0.3, 1.0}) {
    T::Acc a = tile(build([&](int, int) { return fill; }));
    T::select(a, [](int r, int c) { return r > c; });
    const Matrix inverse = matrix(T::unit_lower_inverse(a)), lower = matrix(a);
    const Matrix product = build([&](int r, int c) {
      double s = inverse.x[r][c];
      for (int k = 0; k < kTile; ++k) s += lower.x[r][k] * inverse.x[k][c];
      return s;
    });
    CHECK(distance(product, build([](int r, int c) { return r == c; })) < 1e-5);
  }
}

template <class Op>
void check_products(double tolerance) {
  const Matrix d = random_matrix();
  Matrix a[3], b[3];
  for (int i = 0; i < 3; ++i) a[i] = random_matrix(), b[i] = random_matrix();
  auto want = [&](int n) {
    return build([&](int r, int c) {
      double s = d.x[r][c];
      for (int i = 0; i < n; ++i)
        for (int k = 0; k < kTile; ++k) s += a[i].x[r][k] * b[i].x[c][k];
      return s;
    });
  };
  for (int n = 0; n <= 3; ++n) {
    // right(x) and right_t(x^T) are the same operand; both go through native-order memory.
    T::Left<Op> left[3];
    alignas(64) T::Storage stored[3][kTileElements];
    for (int i = 0; i < n; ++i) {
      left[i] = T::left<Op>(tile(a[i]));
      if (i % 2) {
        T::store(stored[i], T::right<Op>(tile(b[i])));
      } else {
        T::store(stored[i], T::right_t<Op>(T::transpose(tile(b[i]))));
      }
    }
    T::Acc sum = tile(d);
    T::mma(sum, n, [&](int i) -> decltype(auto) { return (left[i]); },
           [&](int i) -> decltype(auto) { return T::load_right<Op>(stored[i]); });
    CHECK(distance(matrix(sum), want(n)) <= (n ? tolerance : 0), "n = %d", n);
  }
  // Stored left operands.
  alignas(64) T::Storage p[kTileElements];
  T::store(p, T::left<Op>(tile(a[0])));
  const auto right = T::right<Op>(tile(b[0]));
  T::Acc sum = tile(d);
  T::mma(sum, 1, [&](int) -> decltype(auto) { return T::load_left<Op>(p); },
         [&](int) -> decltype(auto) { return (right); });
  CHECK(distance(matrix(sum), want(1)) <= tolerance);
  // left_t(x) and left(x^T) are the same operand.
  T::store(p, T::left_t<Op>(T::transpose(tile(a[0]))));
  sum = tile(d);
  T::mma(sum, 1, [&](int) -> decltype(auto) { return T::load_left<Op>(p); },
         [&](int) -> decltype(auto) { return (right); });
  CHECK(distance(matrix(sum), want(1)) <= tolerance);
}

TEST(multiplies_float32) { check_products<F32>(2e-5); }
TEST(multiplies_bf16) { check_products<BF16>(0.15); }
TEST(multiplies_fp16) { check_products<F16>(0.02); }

RUN_TESTS()
