// What the handlers check of their operands.
#pragma once

#include <initializer_list>
#include <string>

#include "../kernel/problem.h"
#include "xla/ffi/api/ffi.h"

namespace kda {

namespace ffi = xla::ffi;

// Collects the first operand that does not fit.
class Checker {
 public:
  explicit Checker(const char* target) : target_(target) {}
  void shape(const char* name, ffi::AnyBuffer b, std::initializer_list<int64_t> want) {
    const auto have = b.dimensions();
    bool same = have.size() == want.size();
    if (same) {
      size_t i = 0;
      for (int64_t n : want) same = same && have[i++] == n;
    }
    if (!same) fail(name, "has shape " + text(have) + ", want " + text(want));
  }
  void type(const char* name, ffi::AnyBuffer b, ffi::DataType want) {
    if (b.element_type() != want) fail(name, "has another element type than the kernel reads");
  }
  Tensor tensor(const char* name, ffi::AnyBuffer b) {
    switch (b.element_type()) {
      case ffi::DataType::F32:
        return {b.untyped_data(), DType::kF32};
      case ffi::DataType::BF16:
        return {b.untyped_data(), DType::kBF16};
      case ffi::DataType::F16:
        return {b.untyped_data(), DType::kF16};
      default:
        fail(name, "must be float32, bfloat16 or float16");
        return {b.untyped_data(), DType::kF32};
    }
  }
  void fail(const char* name, const std::string& what) {
    if (error_.empty()) error_ = std::string(target_) + ": " + name + " " + what;
  }
  ffi::Error verdict() const {
    return error_.empty() ? ffi::Error::Success() : ffi::Error::InvalidArgument(error_);
  }

 private:
  template <class Dims>
  static std::string text(const Dims& dims) {
    std::string s = "[";
    for (int64_t n : dims) s += (s.size() > 1 ? ", " : "") + std::to_string(n);
    return s + "]";
  }
  const char* const target_;
  std::string error_;
};

// An absent operand is an array without elements.
template <class T>
const T* optional(ffi::AnyBuffer b) {
  return b.element_count() ? static_cast<const T*>(b.untyped_data()) : nullptr;
}

}  // namespace kda
