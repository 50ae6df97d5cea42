# Everything happens in $(VENV) and build/; `make clean` removes both. See BUILD.md.
#
#   make demo           set up, build, prefill real text with the command-line tool, resume one document
#   make test           set up and run the test suite        (make test-slow: the slow tests too)
#   make parity-test    the models against transformers, with torch (several GB: extra `parity`)
#   make lint types     ruff, mypy
#   make native         rebuild the native code
#   make cpp-test       C++ unit tests of the native code    (make sanitize: under ASan and UBSan)
#   make bench          benchmark this machine's CPU, write benchmarks/results/
#   make amd-tools      Debian, as root: a HIP compiler for AMD GPUs, without ROCm and without a GPU
#   make amd-compile    all AMD kernels, with a gate on registers, LDS, occupancy and matrix instructions
#   make amd-library    kda_jax's ROCm library, linked against a stub of the HIP runtime
#   make amd-test       loads it, and executes the compiled kernels in the interpreter of tests/cdna_sim
#   make amd-aot        compiles the prefill and a layer for MI300X and MI350X with XLA's ROCm backend (Python >= 3.12)
#   make amd-static     writes benchmarks/results/amd_static.md: what the kernels execute, counted, not timed
#
# Variables: PYTHON (an interpreter >= 3.11), VENV, JAX (a pip requirement, e.g. JAX='jax==0.10.2'),
# KDA_JAX_NATIVE (required: a failed native build is an error; auto: go on without; off: do not try), GPU (off: the
# CPU's kernel alone; auto: also those for CUDA and ROCm whose compiler is on the PATH, which takes minutes),
# PYTEST_ARGS, BENCH_ARGS.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
JAX ?= jax
PYTEST_ARGS ?=
BENCH_ARGS ?=
KDA_JAX_NATIVE ?= required
export KDA_JAX_NATIVE
GPU ?= off
ifeq ($(GPU),off)
export CMAKE_ARGS += -DKDA_CUDA=OFF -DKDA_ROCM=OFF
endif
export PIP_DISABLE_PIP_VERSION_CHECK := 1

PY := $(VENV)/bin/python
BUILD_DIR := build/$(notdir $(VENV))
FFI_HEADERS := build/ffi-headers/jaxlib/include
FFI_SOURCES := $(shell find ffi -type f 2>/dev/null)
CPP_TESTS = $(VENV)/bin/cmake -S ffi -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV))/bin/ninja \
	-DCMAKE_BUILD_TYPE=RelWithDebInfo -DKDA_TESTS=ON -DKDA_PYTHON=OFF

.PHONY: help demo test test-slow parity-test lint types bench native cpp-test sanitize amd-tools amd-compile amd-library amd-test amd-aot amd-static venv clean

help:
	@sed -n '3,/^$$/s/^# \{0,1\}//p' Makefile

# The first interpreter that is new enough and can make a venv (Debian's own python3 cannot, without python3-venv).
FIND_PYTHON = for p in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14); do \
	  if "$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then echo "$$p"; exit 0; fi; done; \
	echo "make: no Python >= 3.11 with the venv module $(if $(PYTHON),at PYTHON=$(PYTHON),on the PATH);" \
	  "install one (Debian: apt install python3-venv) or name it: make PYTHON=/path/to/python3.12 ..." >&2; exit 1

$(VENV)/tools.stamp:
	@python=$$($(FIND_PYTHON)); echo "creating $(VENV) with $$("$$python" --version)"; "$$python" -m venv $(VENV)
	$(PY) -m pip install --upgrade "pip>=25" "scikit-build-core>=1.1" "pybind11>=3.0" cmake ninja
	@touch $@

# Only the headers of jaxlib 0.7.1 (FFI API 0.1) are needed, not that jaxlib: one download, three files.
$(FFI_HEADERS)/headers.stamp: | $(VENV)/tools.stamp
	$(PY) -m pip download --no-deps --only-binary=:all: --python-version 3.13 -d build/ffi-headers jaxlib==0.7.1
	@$(PY) -c "import glob, zipfile; z = zipfile.ZipFile(glob.glob('build/ffi-headers/*.whl')[0]); \
	  z.extractall('build/ffi-headers', [n for n in z.namelist() if n.startswith('jaxlib/include/xla/ffi/')])"
	@rm build/ffi-headers/*.whl; touch $@

$(VENV)/package.stamp: pyproject.toml $(FFI_SOURCES) $(VENV)/tools.stamp \
	  $(if $(filter off,$(KDA_JAX_NATIVE)),,$(FFI_HEADERS)/headers.stamp)
	@[ "$(KDA_JAX_NATIVE)" != required ] || command -v "$${CXX:-c++}" g++ clang++ >/dev/null || { \
	  echo "make: no C++17 compiler found; install g++ or clang++, or go on without the native code:" \
	  "make KDA_JAX_NATIVE=off ..." >&2; exit 1; }
	$(PY) -m pip install --no-build-isolation --editable ".[plot,test,dev]" "$(JAX)" \
	  -C build-dir=$(BUILD_DIR)/native -C cmake.define.KDA_FFI_INCLUDE_DIR=$(abspath $(FFI_HEADERS))
	@touch $@

venv: $(VENV)/package.stamp

native:
	@rm -f $(VENV)/package.stamp
	@$(MAKE) --no-print-directory $(VENV)/package.stamp

demo: $(VENV)/package.stamp
	@mkdir -p build/demo
	$(PY) -m kda_jax prefill README.md BUILD.md LICENSE --checkpoint-every 256 \
	  --save build/demo/states.safetensors --plot build/demo/prefill.png
	$(PY) -m kda_jax resume README.md --states build/demo/states.safetensors

test: $(VENV)/package.stamp
	$(PY) -m pytest -m "not slow" $(PYTEST_ARGS)

test-slow: $(VENV)/package.stamp
	$(PY) -m pytest $(PYTEST_ARGS)

parity-test: $(VENV)/package.stamp
	$(PY) -m pip install --quiet "kda-jax[parity]"  # is installed: this adds the extra
	$(PY) -c "import torch, transformers"  # without them pytest would skip
	$(PY) -m pytest tests/test_transformers.py $(PYTEST_ARGS)

lint: $(VENV)/package.stamp
	$(PY) -m ruff check .

types: $(VENV)/package.stamp
	$(PY) -m mypy

bench: $(VENV)/package.stamp
	$(PY) -m benchmarks.run $(BENCH_ARGS)

cpp-test: $(VENV)/tools.stamp
	$(CPP_TESTS) -B $(BUILD_DIR)/cpp-test
	$(VENV)/bin/cmake --build $(BUILD_DIR)/cpp-test
	$(VENV)/bin/ctest --test-dir $(BUILD_DIR)/cpp-test --output-on-failure

sanitize: $(VENV)/tools.stamp
	$(CPP_TESTS) -B $(BUILD_DIR)/sanitize -DKDA_SANITIZE=ON
	$(VENV)/bin/cmake --build $(BUILD_DIR)/sanitize
	$(VENV)/bin/ctest --test-dir $(BUILD_DIR)/sanitize --output-on-failure

amd-tools:
	tools/amd/install.sh

amd-compile: amd-tools
	tools/amd/compile.sh

amd-library: amd-tools $(VENV)/tools.stamp $(FFI_HEADERS)/headers.stamp
	PYTHON=$(abspath $(PY)) FFI_HEADERS=$(FFI_HEADERS) tools/amd/library.sh

AMD_TESTS := tests/test_cdna_kernels.py tests/test_cdna_tokens.py tests/test_cdna_conv.py tests/test_cdna_resources.py tests/test_rocm_library.py tests/cdna_sim
amd-test: amd-library $(VENV)/package.stamp
	@$(PY) -c "import tinygrad"  # without it pytest would skip
	KDA_AMD=required $(PY) -m pytest $(AMD_TESTS) $(PYTEST_ARGS)

amd-aot: amd-library
	PYTHON=$$($(PY) -c 'import sys; print(sys._base_executable)') tools/amd/aot_setup.sh
	build/amd/aot-venv/bin/python tools/amd/aot.py check
	build/amd/aot-venv/bin/python tools/amd/aot_prefill.py

amd-static: amd-tools $(VENV)/package.stamp
	$(PY) tools/amd/static_figures.py

clean:
	rm -rf build $(VENV) .mypy_cache .pytest_cache .ruff_cache
