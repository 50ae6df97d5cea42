#!/usr/bin/env bash
# A HIP compiler for gfx90a, gfx942 and gfx950 on a Debian 12 machine without ROCm and without an AMD GPU.
#
#   tools/amd/install.sh        as root; about 150 MB of packages; does nothing where all is in place
#
# 1. clang-22, lld-22, clang-tools-22 (offload bundler) and llvm-22 (objdump) are installed with apt. They are in
#    the security suite of Debian 12.
# 2. HIP 7 headers and the ROCm device bitcode are unpacked, not installed, into build/amd/rocm. They are in
#    Debian's experimental suite, which this script reads through an apt state of its own, from the mirror that
#    this machine already uses: nothing of the machine's own apt configuration changes.
# 3. A stub libamdhip64.so.7, to link against and to load without ROCm, is built in build/amd/stub.
#
# The last line on stdout is the route that tools/amd/hipcc.sh then takes:
#   route: headers   HIP's headers and device bitcode (or a ROCm installation: HIPCC or hipcc on the PATH)
#   route: shim      HIP could not be had: tools/amd/shim/, with -nogpuinc -nogpulib
# KDA_AMD_ROUTE=shim takes the second one on purpose.
set -euo pipefail
cd "$(dirname "$0")/../.."
dest=$PWD/build/amd/rocm
version=22
lock=(-o DPkg::Lock::Timeout=300)
export DEBIAN_FRONTEND=noninteractive

missing=()
for package in "clang-$version" "lld-$version" "clang-tools-$version" "llvm-$version"; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
command -v g++ >/dev/null || missing+=(g++)  # the C++ library of the host side, and the stub
if [ ${#missing[@]} != 0 ]; then
  [ "$(id -u)" = 0 ] || { echo "install.sh: run as root to install: ${missing[*]}" >&2; exit 1; }
  apt-get "${lock[@]}" update -qq
  apt-get "${lock[@]}" install -y -qq --no-install-recommends "${missing[@]}"
fi
"clang-$version" --version | head -1

unpack_hip() {  # download libamdhip64-dev and the device bitcode, unpack them into $dest
  local state=$PWD/build/amd/apt keyring=/usr/share/keyrings/debian-archive-keyring.gpg mirror
  mirror=$({ grep -rhoP '^URIs:\s*\K\S+|^deb (\[[^]]*\] )?\K\S+' /etc/apt/sources.list /etc/apt/sources.list.d \
    2>/dev/null || true; } | sed -n '\|/debian/\?$|{p;q}')
  [ -n "$mirror" ] || { echo "no Debian mirror among this machine's apt sources"; return 1; }
  rm -rf "$state" "$dest.new"
  mkdir -p "$state/lists/partial" "$state/archives/partial" "$dest.new"
  : > "$state/status"
  printf 'deb [signed-by=%s] %s %s main\n' "$keyring" "$mirror" sid "$keyring" "$mirror" experimental \
    > "$state/sources.list"
  local apt=(apt-get -o "Dir::Etc::sourcelist=$state/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o Dir::Etc::preferencesparts=/dev/null -o "Dir::State::lists=$state/lists" -o "Dir::State::status=$state/status"
    -o "Dir::Cache=$state" -o "Dir::Cache::archives=$state/archives" -o APT::Sandbox::User=root
    -o Acquire::Check-Valid-Until=false -o Acquire::Retries=3)
  "${apt[@]}" update -qq || return 1
  ( cd "$state" && "${apt[@]}" -t experimental download -qq libamdhip64-dev "rocm-device-libs-$version" ) || return 1
  local deb
  for deb in "$state"/*.deb; do
    dpkg -x "$deb" "$dest.new" || return 1
    dpkg-deb -f "$deb" Package Version | paste -sd' ' | sed 's/Package: //; s/Version: //' >> "$dest.new/packages.txt"
  done
  rm -rf "$state" "$dest"
  mv "$dest.new" "$dest"
}

if [ "${KDA_AMD_ROUTE:-}" != shim ] && [ ! -f "$dest/packages.txt" ] && ! command -v "${HIPCC:-hipcc}" >/dev/null; then
  mkdir -p build/amd
  unpack_hip >&2 || echo "install.sh: HIP's headers could not be had (see above)" >&2
fi
[ ! -f "$dest/packages.txt" ] || cat "$dest/packages.txt"

# Libraries link against this and load with it: see stub_hip.c.
mkdir -p build/amd/stub
cc -shared -fPIC -O1 -Wl,-soname,libamdhip64.so.7 -o build/amd/stub/libamdhip64.so.7 tools/amd/stub_hip.c
ln -sf libamdhip64.so.7 build/amd/stub/libamdhip64.so

echo "route: $(tools/amd/hipcc.sh --route)"
