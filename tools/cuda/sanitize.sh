#!/usr/bin/env bash
# compute-sanitizer over the edge cases of the CUDA kernel. Needs an NVIDIA GPU, compute-sanitizer on the PATH, and
# kda_jax with its CUDA module importable by $PYTHON. Prints one line for each tool; exit code 1 if one is not clean.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# One cudaMalloc for each array: in XLA's own pool an access past an array's end is still inside the pool.
export XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_PYTHON_CLIENT_ALLOCATOR=platform

run() { compute-sanitizer --error-exitcode 9 "$@" 2>&1; }

# First that the tool finds what it should find, on this very kernel.
if out=$(run --tool memcheck "$python" tools/cuda/edge_cases.py --plant); then
  echo "control: memcheck did NOT find the planted access"; exit 1
fi
grep -q "Invalid __global__ .*" <<<"$out" && grep -q "kernel" <<<"$out" || { echo "control: failed otherwise"; tail -5 <<<"$out"; exit 1; }
echo "control: memcheck finds a planted access out of bounds"

status=0
for tool in memcheck racecheck initcheck; do
  if out=$(run --tool $tool "$python" tools/cuda/edge_cases.py) && grep -q "edge cases ok" <<<"$out"; then
    echo "$tool: $(grep -E "SUMMARY" <<<"$out" | sed 's/^=* *//')"
  else
    echo "$tool: FAILED"; grep -E "=====|Error" <<<"$out" | head -20; status=1
  fi
done
exit $status
