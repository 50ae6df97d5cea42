#!/usr/bin/env bash
# build/amd/aot-venv for tools/amd/aot.py: kda_jax's requirements with the pinned extra "rocm" of pyproject.toml
# (133 MB), and stand-ins for the ROCm libraries that the ROCm plugin is linked against. No ROCm, no GPU, no root.
#
#   PYTHON=/path/to/python3.12 tools/amd/aot_setup.sh      a Python >= 3.12; does nothing where all is in place
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=build/amd/aot-venv

wanted=$(sha256sum pyproject.toml tools/amd/stub_rocm.py tools/amd/stub_hip.c tools/amd/aot_setup.sh | sha256sum)

version=$("${PYTHON:-false}" -c 'import sys; print("python%d.%d" % sys.version_info[:2])' 2>/dev/null || true)
[ -z "$version" ] || [ -e "$venv/bin/$version" ] || rm -rf $venv  # of another Python than is asked for
if [ ! -x $venv/bin/python ]; then
  for python in ${PYTHON:-python3.13 python3.12 python3.14 python3} none; do
    "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && break
  done
  [ "$python" != none ] || { echo "aot_setup.sh: no Python >= 3.12 with the venv module; name one: PYTHON=..." >&2; exit 1; }
  mkdir -p build/amd
  "$python" -m venv $venv
fi
[ "$(cat $venv/setup.stamp 2>/dev/null)" != "$wanted" ] || exit 0
$venv/bin/python - > $venv/requirements.txt <<'PYTHON'
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["dependencies"], *project["optional-dependencies"]["rocm"], sep="\n")
PYTHON
$venv/bin/pip install --quiet --disable-pip-version-check -r $venv/requirements.txt
$venv/bin/python tools/amd/stub_rocm.py build/amd/stub-rocm
echo "$wanted" > $venv/setup.stamp
