// A Python extension module: hands out capsules and facts about the build, nothing else. Compiled once
// for each platform, as kda_jax._native (cpu), _native_cuda and _native_rocm.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "xla/handlers.h"
#ifdef KDA_CPU
#include "host/launch.h"
#endif

namespace py = pybind11;

PYBIND11_MODULE(KDA_MODULE, m) {
  m.doc() = "XLA FFI handlers of kda_jax; kda_jax.native registers them.";
  m.def(
      "handlers",
      [] {
        return std::map<std::string, py::capsule>{
#ifndef KDA_CPU
            {"kda_conv_v1", py::capsule(reinterpret_cast<void*>(kda::KdaConvGpu))},
#endif
            {"kda_prefill_v1", py::capsule(reinterpret_cast<void*>(KDA_HANDLER))},
            {"kda_prefill_pool_v1", py::capsule(reinterpret_cast<void*>(KDA_POOL_HANDLER))}};
      },
      "Capsules by target name.");
  m.def(
      "ffi_version", [] { return std::make_pair(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "(major, minor) of the FFI headers that the handlers were built with.");
#ifdef KDA_CPU
  m.def("instruction_set", &kda::host::instruction_set,
        "Instruction set of the kernel on this machine.");
#else
  m.def(
      "architectures", [] { return std::string(KDA_ARCHITECTURES); },
      "GPU architectures that the kernel was compiled for, separated by commas.");
  m.attr("token_chunks") = true;  // the handlers take chunks of one token
#endif
}
