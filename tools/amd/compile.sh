#!/usr/bin/env bash
# Compiles the AMD kernels as they ship and checks what the compiler made of them. No GPU.
#
#   tools/amd/compile.sh [--update]     --update: writes tools/amd/resources.json again
#
# 1. ffi/gpu/driver.hip for every type, K and target, and conv.hip, to build/amd/objects; any warning is an error.
# 2. The dynamic LDS in resources.json is what the kernels take (shared_sizes.py writes a source with the assertions).
# 3. resources.py: no spills, no scratch, LDS within the limit, occupancy at least that of the table.
# 4. matrix_ops.py: each stage has the matrix instructions that it should have, and no others.
# 5. The shim's headers still have all that the sources ask for, also where HIP's own were taken.
set -euo pipefail
cd "$(dirname "$0")/../.."
objects=build/amd/objects table=tools/amd/resources.json
python=${PYTHON:-python3}
flags=(-O3 -DNDEBUG -std=c++17 -Wall -Wextra -Werror)  # -O3 and the rest as in ffi/rocm.cmake

echo "route: $(tools/amd/hipcc.sh --route)"
rm -rf "$objects"
for io in BF16 F16; do
  for k in 64 128; do
    tools/amd/hipcc.sh --objects "$objects" --suffix ".${io}_$k" "${flags[@]}" "-DKDA_IO=$io" "-DKDA_K=$k" \
      ffi/gpu/driver.hip
  done
  tools/amd/hipcc.sh --objects "$objects" --suffix ".$io" "${flags[@]}" "-DKDA_IO=$io" ffi/gpu/conv.hip
done
"$python" tools/amd/shared_sizes.py "$table" > "$objects/shared_sizes.hip"
tools/amd/hipcc.sh --arch gfx942 --cuda-device-only -fsyntax-only -std=c++17 -Iffi/gpu "$objects/shared_sizes.hip"
"$python" tools/amd/resources.py "$objects" --table "$table" "$@"
"$python" tools/amd/matrix_ops.py "$objects"
KDA_AMD_ROUTE=shim tools/amd/hipcc.sh --arch gfx942 -fsyntax-only "${flags[@]}" -DKDA_IO=BF16 -DKDA_K=128 ffi/gpu/driver.hip
echo "ok: the sources compile against the shim"
