"""Which matrix instructions each kernel holds, and a gate on it.

    python tools/amd/matrix_ops.py build/amd/objects

The directory holds STEM.ARCH.co, written by `hipcc.sh --objects`. EXPECTED says per stage which
shapes must be there; another one is an error, too.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from resources import demangle

_HALVES = {"bf16 16x16x16", "f16 16x16x16"}
# On gfx950 two tiles are joined where both are at hand. The prologue's bf16 sums take one tile at a
# time (the other operand is made in between); its solve joins f16 tiles from the third block of 16
# tokens on.
_JOINED = {"bf16 16x16x32", "f16 16x16x32", "f16 16x16x16"}
_WALKS = ("walk", "groups, first walk", "groups, second walk")
EXPECTED = {
    target: {"prologue": _HALVES, "groups, scan": {"f32 16x16x4"}, "fill": set()}
    | dict.fromkeys(_WALKS, _JOINED if target == "gfx950" else _HALVES)
    for target in ("gfx90a", "gfx942", "gfx950")
}
EXPECTED["gfx950"]["prologue of 64"] = _HALVES | {"f16 16x16x32"}

_GROUP_STAGES = {"1": "groups, first walk", "2": "groups, scan", "3": "groups, second walk"}
_FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
_MFMA = re.compile(r"\bv_mfma_f32_(16x16x\d+)_?(bf16|f16|f32)(?:_1k)?\b")


def stage(kernel: str) -> str:
    """The stage that a (demangled) kernel is."""
    name, arguments = re.fullmatch(r"kda::base::(\w+)_kernel<(.*)>", kernel).groups()
    values = arguments.split(", ")
    if name == "group":
        return _GROUP_STAGES[values[-1]]
    return "prologue of 64" if name == "prologue" and values[-2] == "64" else name


def objdump() -> str:
    """llvm-objdump of clang-22 or of ROCm."""
    for name in ("llvm-objdump-22", "/opt/rocm/llvm/bin/llvm-objdump"):
        if path := shutil.which(name):
            return path
    raise SystemExit("matrix_ops.py: no llvm-objdump; run tools/amd/install.sh")


def matrix_ops(path: Path) -> dict[str, Counter[str]]:
    """Matrix instructions such as "bf16 16x16x16" by kernel of a code object."""
    command = [objdump(), "-d", "--no-show-raw-insn", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts: dict[str, Counter[str]] = {}
    current: Counter[str] = Counter()
    for line in text.splitlines():
        if match := _FUNCTION.match(line):
            current = counts.setdefault(match.group(1), Counter())
        elif "v_mfma" in line or "v_smfmac" in line:
            shape = _MFMA.search(line)
            current[f"{shape[2]} {shape[1]}" if shape else line.split()[0]] += 1
    return dict(zip(demangle(list(counts)), counts.values(), strict=True))


def main() -> int:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    paths, failed, total = sorted(Path(sys.argv[1]).glob("*.gfx*.co")), [], 0
    for path in paths:
        target = path.name.split(".")[-2]
        for kernel, counts in sorted(matrix_ops(path).items()):
            what = stage(kernel)
            expected = EXPECTED[target].get(what, EXPECTED[target].get(what.split(" of ")[0]))
            have = ", ".join(f"{n} {shape}" for shape, n in sorted(counts.items())) or "none"
            total += 1
            if counts.keys() != expected:
                want = ", ".join(sorted(expected)) or "none"
                failed.append(f"FAILED {kernel} {target}: {have}; expected: {want}")
            elif "<kda::base::CdnaTiles<kda::BF16>" in kernel and "128, 64" in kernel:
                print(f"{target} {what}, bf16, K = 128, C = 64: {have}")
    for line in failed:
        print(line)
    if not failed and total:
        print(f"ok: {total} kernels hold the matrix instructions that they should, and no others")
    return int(bool(failed) or not total)


if __name__ == "__main__":
    sys.exit(main())
