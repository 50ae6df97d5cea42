"""Stand-ins for the ROCm libraries that the installed JAX ROCm plugin is linked against.

    build/amd/aot-venv/bin/python tools/amd/stub_rocm.py DIRECTORY

The plugin's compiler needs no GPU, but its shared objects only load if the runtime, rocBLAS, MIOpen
and so on are there. Each stub exports, with the right symbol version, the functions that the plugin
imports; all of them return 100, hipErrorNoDevice.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

_PACKAGES = ("jax_plugins.xla_rocm7", "jax_rocm7_plugin")
_SYSTEM = re.compile(r"(lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so|ld-linux)")
_NOT_ROCM = re.compile(r"_ZN?K?St|_ZNS|_ZS|__gmon|_ITM|Py|_Py")
_TEXT = ("hipGetErrorString", "hipGetErrorName")
_HIP = "libamdhip64"  # also has what kda_jax's own library imports, from stub_hip.c

Symbols = dict[str, dict[str, set[str]]]  # library -> version ("" if none) -> names


def plugin_libraries() -> list[Path]:
    """Shared objects of the ROCm plugin in this Python's site-packages."""
    folders = []
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit(f"stub_rocm.py: {package} is not installed")
        folders += [Path(path) for path in spec.submodule_search_locations]
    return sorted(path for folder in folders for path in folder.glob("*.so"))


def _readelf(*arguments: str) -> list[str]:
    command = ["readelf", "-W", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def _needed(library: Path) -> list[str]:
    found = (re.search(r"NEEDED.*\[(.*)\]", line) for line in _readelf("-d", str(library)))
    return [m.group(1) for m in found if m and not _SYSTEM.match(m.group(1))]


def _version_owners(library: Path) -> dict[str, str]:
    """Which needed library each symbol version comes from."""
    owners, owner, in_needs = {}, "", False
    for line in _readelf("-V", str(library)):
        if line.startswith("Version "):
            in_needs = "needs" in line
        if in_needs and (m := re.search(r"File: (\S+)", line)):
            owner = m.group(1)
        elif in_needs and (m := re.search(r"Name: (\S+)", line)):
            owners[m.group(1)] = owner
    return owners


def imported(libraries: list[Path]) -> Symbols:
    """What the plugin imports from ROCm libraries."""
    symbols: Symbols = {}
    unversioned: set[str] = set()
    for library in libraries:
        for name in _needed(library):
            symbols.setdefault(name, defaultdict(set))
        owners = _version_owners(library)
        for line in _readelf("--dyn-syms", str(library)):
            columns = line.split()
            if len(columns) < 8 or columns[6] != "UND" or columns[4] == "WEAK":
                continue
            name, _, version = columns[7].partition("@")
            version = version.strip("@")
            if not version and not _NOT_ROCM.match(name):
                unversioned.add(name)
            elif owners.get(version) in symbols:
                symbols[owners[version]][version].add(name)
    # It does not matter which of the libraries exports a name without a version.
    symbols[min(symbols)][""] |= unversioned
    return symbols


def build(library: str, versions: dict[str, set[str]], folder: Path) -> None:
    """Compile one stub."""
    source, script = folder / f"{library}.c", folder / f"{library}.map"
    lines = []
    ours = Path(__file__).with_name("stub_hip.c").read_text() if library.startswith(_HIP) else ""
    lines.append(ours)
    for name in sorted(set().union(*versions.values())):
        if re.search(rf"\b{name}\(|\({name}\)", ours):
            continue
        if name in _TEXT:
            lines.append(f'const char* {name}(int e) {{ return "stub"; }}')
        else:
            lines.append(f"long {name}(void) {{ return 100; }}")
    source.write_text("\n".join(lines) + "\n")
    exports = {v: " ".join(f"{n};" for n in sorted(names)) for v, names in versions.items() if v}
    script.write_text("".join(f"{v} {{ global: {names} }};\n" for v, names in exports.items()))
    command = ["cc", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{library}"]
    command += [f"-Wl,--version-script={script}"] if exports else []
    subprocess.run([*command, "-o", str(folder / library), str(source)], check=True)


def main() -> int:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for library, versions in sorted(imported(plugin_libraries()).items()):
        build(library, versions, folder)
        print(f"{library}: {sum(map(len, versions.values()))} functions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
