// The GPU handler of `kda_conv_v1`, for ROCm and CUDA alike; one launch, so a command buffer may record it.
//
//   operands  seqs, checkpoints, has_initial_state, and for each part x, weight, initial_state
//   results   for each part y, final_state, checkpoint_state
#include "../gpu/conv_problem.h"
#include "checker.h"
#include "handlers.h"

namespace kda {
namespace {

constexpr const char* kTarget = "kda_conv_v1";

ffi::Error convolve(void* stream, ffi::AnyBuffer seqs, ffi::AnyBuffer checkpoints, ffi::AnyBuffer has_initial,
                    ffi::RemainingArgs arrays, ffi::RemainingRets results, bool silu) {
  Checker check(kTarget);
  ConvProblem p = {};
  const size_t parts = arrays.size() / 3;
  if (parts < 1 || parts > kConvParts || arrays.size() != 3 * parts || results.size() != 3 * parts) {
    check.fail("parts", "must be 1 to " + std::to_string(kConvParts) + ", each with three operands and three results");
    return check.verdict();
  }
  p.num_parts = int32_t(parts), p.silu = silu;
  p.N = seqs.dimensions().size() == 2 ? seqs.dimensions()[0] : -1;
  p.M = checkpoints.dimensions().size() == 2 ? checkpoints.dimensions()[0] : -1;
  check.shape("seqs", seqs, {p.N, 4}), check.type("seqs", seqs, ffi::DataType::S32);
  check.shape("checkpoints", checkpoints, {p.M, 2}), check.type("checkpoints", checkpoints, ffi::DataType::S32);
  check.type("has_initial_state", has_initial, ffi::DataType::PRED);
  if (has_initial.element_count()) check.shape("has_initial_state", has_initial, {p.N});
  p.seqs = optional<int32_t>(seqs), p.checkpoints = optional<int32_t>(checkpoints);
  p.has_initial = optional<uint8_t>(has_initial);
  for (size_t i = 0; i < parts; ++i) {
    const ffi::AnyBuffer x = *arrays.get<ffi::AnyBuffer>(3 * i), weight = *arrays.get<ffi::AnyBuffer>(3 * i + 1);
    const ffi::AnyBuffer initial = *arrays.get<ffi::AnyBuffer>(3 * i + 2);
    const ffi::AnyBuffer y = **results.get<ffi::AnyBuffer>(3 * i), final = **results.get<ffi::AnyBuffer>(3 * i + 1);
    const ffi::AnyBuffer saved = **results.get<ffi::AnyBuffer>(3 * i + 2);
    if (x.dimensions().size() != 2) {
      check.fail("x", "must have rank 2: [T, C]");
      return check.verdict();
    }
    const int64_t T = x.dimensions()[0], C = x.dimensions()[1];
    if (i == 0) p.T = T, p.type = check.tensor("x", x).type;
    if (p.type == DType::kF32) check.fail("x", "must be bfloat16 or float16");
    if (C % kConvChannels || C > INT32_MAX) check.fail("x", "must have a multiple of 8 channels");
    const ffi::DataType type = x.element_type();
    check.shape("x", x, {p.T, C}), check.type("x", x, arrays.get<ffi::AnyBuffer>(0)->element_type());
    check.shape("weight", weight, {C, kConvWidth});
    check.shape("y", y, {T, C}), check.type("y", y, type);
    if (initial.element_count()) check.shape("initial_state", initial, {p.N, C, kConvWidth - 1});
    check.type("initial_state", initial, type);
    check.shape("final_state", final, {p.N, C, kConvWidth - 1}), check.type("final_state", final, type);
    check.shape("checkpoint_state", saved, {p.M, C, kConvWidth - 1}), check.type("checkpoint_state", saved, type);
    p.parts[i] = {x.untyped_data(),      check.tensor("weight", weight), optional<void>(initial), y.untyped_data(),
                  final.untyped_data(), saved.untyped_data(),           int32_t(C),              0};
    if (p.parts[i].weight.type != DType::kF32 && p.parts[i].weight.type != p.type)
      check.fail("weight", "must have the type of x or be float32");
  }
  if (ffi::Error error = check.verdict(); error.failure()) return error;
  if (std::string what = gpu::convolve(p, stream); !what.empty())
    return ffi::Error::InvalidArgument(std::string(kTarget) + ": " + what);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KdaConvGpu, convolve,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<bool>("silu"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace kda
