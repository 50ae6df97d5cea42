// The Python module kda_jax._native: hands out capsules and facts about the build, nothing else.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "host/launch.h"
#include "xla/handlers.h"

namespace py = pybind11;

PYBIND11_MODULE(_native, m) {
  m.doc() = "XLA FFI handlers of kda_jax; kda_jax.native registers them.";
  m.def(
      "handlers",
      [] {
        std::map<std::string, std::map<std::string, py::capsule>> platforms;
        platforms["cpu"]["kda_prefill_v1"] =
            py::capsule(reinterpret_cast<void*>(kda::KdaPrefillCpu));
        return platforms;
      },
      "Capsules by XLA platform and target name.");
  m.def(
      "ffi_version", [] { return std::make_pair(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "(major, minor) of the FFI headers that the handlers were built with.");
  m.def("cpu_instruction_set", &kda::host::instruction_set,
        "Instruction set of the CPU kernel on this machine.");
}
