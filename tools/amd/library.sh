#!/usr/bin/env bash
# Builds kda_jax._native_rocm for gfx90a, gfx942 and gfx950 on a machine without ROCm, in build/amd/native.
#
#   PYTHON=.venv/bin/python FFI_HEADERS=DIR tools/amd/library.sh
#
# PYTHON has cmake, ninja and pybind11 installed (make's venvs have); the module is for its version alone. DIR holds
# xla/ffi/api/ffi.h. Linked against the stub of tools/amd/install.sh, whose name is that of ROCm's library.
# To use it: LD_LIBRARY_PATH=build/amd/stub, and kda_jax.__path__.append("build/amd/native") before
# kda_jax.native.status().
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$(command -v "$PYTHON")
bin=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')

# --fresh: what was found for another Python must not stay. The kernels' objects do stay.
"$bin/cmake" --fresh -S ffi -B build/amd/native -G Ninja "-DCMAKE_MAKE_PROGRAM=$bin/ninja" \
  -DCMAKE_SKIP_BUILD_RPATH=ON -DKDA_CUDA=OFF -DKDA_ROCM=ON "-DKDA_HIPCC=$PWD/tools/amd/hipcc.sh" \
  "-DKDA_AMDHIP64=$PWD/build/amd/stub/libamdhip64.so.7" "-DKDA_FFI_INCLUDE_DIR=$(realpath "$FFI_HEADERS")" \
  "-DPython_EXECUTABLE=$python" "-Dpybind11_DIR=$("$python" -m pybind11 --cmakedir)"
"$bin/cmake" --build build/amd/native --target _native_rocm
