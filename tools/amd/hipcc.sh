#!/usr/bin/env bash
# hipcc on a machine without ROCm: clang-22 with what tools/amd/install.sh found.
#
#   tools/amd/hipcc.sh --route                                  "headers" or "shim", see install.sh
#   tools/amd/hipcc.sh --arch gfx942,gfx950 ARGS...             clang's arguments; HIP is the source language
#   tools/amd/hipcc.sh --arch gfx942 --device -O3 -o k.co k.hip one plain ELF code object for one target
#   tools/amd/hipcc.sh --report build/amd/k.txt ARGS...         compiler's resource report per kernel and target
#   tools/amd/hipcc.sh --command ARGS...                        print the command line instead of running it
#
# HIPCC, or a hipcc on the PATH, is used instead of clang-22 where there is one. --arch defaults to
# gfx90a,gfx942,gfx950. The options above come first.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
rocm=$(cd "$here/../.." && pwd)/build/amd/rocm
bitcode=$rocm/usr/lib/llvm-22/lib/clang/22/amdgcn/bitcode

archs=gfx90a,gfx942,gfx950 device= report= show=
while [ $# -gt 0 ]; do
  case $1 in
    --route) show=route; break ;;
    --arch) archs=$2; shift 2 ;;
    --device) device=1; shift ;;
    --report) report=$2; shift 2 ;;
    --command) show=command; shift ;;
    *) break ;;
  esac
done

route=headers
if [ "${KDA_AMD_ROUTE:-}" = shim ]; then
  route=shim
elif command -v "${HIPCC:-hipcc}" >/dev/null; then
  command=("${HIPCC:-hipcc}" -x hip)
elif [ -d "$bitcode" ]; then
  command=(clang++-22 -x hip "--rocm-path=$rocm/usr" "--rocm-device-lib-path=$bitcode" -no-hip-rt)
else
  route=shim
fi
if [ $route = shim ]; then
  command=("${CLANG:-clang++-22}" -x hip -nogpuinc -nogpulib -no-hip-rt -isystem "$here/shim")
fi
[ "$show" != route ] || { echo $route; exit; }

for arch in ${archs//,/ }; do command+=("--offload-arch=$arch"); done
[ -z "$device" ] || command+=(--cuda-device-only --no-gpu-bundle-output)
[ -z "$report" ] || command+=(-Rpass-analysis=kernel-resource-usage)
command+=("$@")
if [ "$show" = command ]; then
  printf '%q ' "${command[@]}"; echo
elif [ -n "$report" ]; then
  mkdir -p "$(dirname "$report")"
  "${command[@]}" 2>"$report" || { status=$?; cat "$report" >&2; exit $status; }
  grep -E '(warning|error):' "$report" >&2 || true
else
  exec "${command[@]}"
fi
