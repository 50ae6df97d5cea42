// A test runner of forty lines: TEST(name) { CHECK(...); } and RUN_TESTS() as main.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*run)();
};
inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}
inline int& failures() {
  static int n = 0;
  return n;
}
struct Register {
  Register(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

inline int run_all() {
  int passed = 0, failed = 0;
  for (const Test& t : tests()) {
    const int before = failures();
    t.run();
    const bool ok = failures() == before;
    std::printf("%s %s\n", ok ? "ok    " : "FAILED", t.name);
    ok ? ++passed : ++failed;
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace check

#define TEST(name)                                              \
  static void test_##name();                                    \
  static const check::Register register_##name(#name, test_##name); \
  static void test_##name()
#define CHECK(condition, ...)                                        \
  do {                                                               \
    if (!(condition)) {                                              \
      ++check::failures();                                           \
      std::printf("%s:%d: %s", __FILE__, __LINE__, #condition);      \
      std::printf(" " __VA_ARGS__);                                  \
      std::printf("\n");                                             \
    }                                                                \
  } while (0)
#define RUN_TESTS() \
  int main() { return check::run_all(); }
