// Denormal numbers become zero while one of these lives.
//
// Decayed keys reach 2^-115 and less, and an x86 core takes over a hundred cycles for each denormal
// operand: without this a strongly decaying prompt walks 40 times slower. XLA flushes them on its own
// threads; this makes the result the same on any thread.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kda::host {

class FlushDenormals {
#if defined(__x86_64__)
 public:
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }  // FTZ and DAZ
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  const unsigned saved_;
#elif defined(__aarch64__)
 public:
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ | (uint64_t(1) << 24)));  // FZ
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#else
 public:
  FlushDenormals() {}
  ~FlushDenormals() {}  // nothing to do, and no warning about an unused variable
#endif
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;
};

}  // namespace kda::host
