#!/usr/bin/env bash
# hipcc on a machine without ROCm: clang-22 with what tools/amd/install.sh found.
#
#   tools/amd/hipcc.sh --route                         "headers" or "shim", see install.sh
#   tools/amd/hipcc.sh [--arch LIST] ARGS...           clang's arguments; HIP is the source language
#   tools/amd/hipcc.sh [--arch LIST] --objects DIR [--suffix TEXT] FLAGS... SOURCE...
#       for each source and target the plain ELF code object DIR/STEM.ARCH.co and the compiler's resource report
#       DIR/STEM.ARCH.txt (resources.py reads it); STEM is the source's name and TEXT; JOBS compilers at once
#
# LIST is comma-separated; gfx90a,gfx942,gfx950 without --arch and --offload-arch. HIPCC, or a hipcc on the PATH, is used instead of
# clang-22 where there is one. KDA_AMD_ROUTE=shim compiles against tools/amd/shim/ in any case.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
rocm=$(cd "$here/../.." && pwd)/build/amd/rocm
bitcode=$rocm/usr/lib/llvm-22/lib/clang/22/amdgcn/bitcode

route=headers
if [ "${KDA_AMD_ROUTE:-}" = shim ]; then
  route=shim
elif command -v "${HIPCC:-hipcc}" >/dev/null; then
  compiler=("${HIPCC:-hipcc}")
elif [ -d "$bitcode" ]; then
  compiler=(clang++-22 "--rocm-path=$rocm/usr" "--rocm-device-lib-path=$bitcode" -no-hip-rt)
else
  route=shim
fi
if [ $route = shim ]; then
  compiler=(clang++-22 -nogpuinc -nogpulib -no-hip-rt -isystem "$here/shim")
fi
compiler+=(-Wno-unused-command-line-argument)

archs=gfx90a,gfx942,gfx950 objects= suffix=
while [ $# -gt 0 ]; do
  case $1 in
    --route) echo $route; exit ;;
    --arch) archs=$2; shift 2 ;;
    --objects) objects=$2; shift 2 ;;
    --suffix) suffix=$2; shift 2 ;;
    *) break ;;
  esac
done

if [ -z "$objects" ]; then
  case " $*" in
    *" --offload-arch="*) ;;  # the caller's own list
    *) for arch in ${archs//,/ }; do compiler+=("--offload-arch=$arch"); done ;;
  esac
  # The source language holds for the sources alone: -x hip would make clang read objects as sources.
  args=()
  for arg in "$@"; do
    case $arg in
      *.hip | *.cc | *.cpp | *.cu) args+=(-x hip "$arg" -x none) ;;
      *) args+=("$arg") ;;
    esac
  done
  exec "${compiler[@]}" "${args[@]}"
fi

flags=() sources=()
for arg in "$@"; do
  case $arg in
    *.hip | *.cc | *.cpp | *.cu) sources+=("$arg") ;;
    *) flags+=("$arg") ;;
  esac
done
mkdir -p "$objects"

compile() {  # compile SOURCE ARCH
  local out report
  out=$objects/$(basename "${1%.*}")$suffix.$2
  report=$out.txt
  if ! "${compiler[@]}" -x hip --offload-arch="$2" --cuda-device-only --no-gpu-bundle-output \
    -Rpass-analysis=kernel-resource-usage "${flags[@]}" -o "$out.co" "$1" 2>"$report.new"; then
    cat "$report.new" >&2
    return 1
  fi
  grep -E '(warning|error):' "$report.new" >&2 || true
  mv "$report.new" "$report"
  echo "$out.co"
}

pids=()
for source in "${sources[@]}"; do
  for arch in ${archs//,/ }; do
    while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-$(nproc)}" ]; do sleep 0.1; done
    compile "$source" "$arch" &
    pids+=($!)
  done
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=1; done
exit $status
