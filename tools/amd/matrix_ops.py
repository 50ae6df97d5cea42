"""Which matrix instructions each kernel holds, and a gate on it.

    python tools/amd/matrix_ops.py build/amd/objects

The directory holds STEM.ARCH.co, written by `hipcc.sh --objects`. `expected` says which shapes a
kernel must hold; another one is an error, too.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from resources import demangle

_GROUP_STAGES = {"1": "groups, first walk", "2": "groups, scan", "3": "groups, second walk"}
_FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
_MFMA = re.compile(r"\bv_mfma_f32_(16x16x\d+)_?(bf16|f16|f32)(?:_1k)?\b")


def stage(kernel: str) -> str:
    """The stage that a (demangled) kernel is."""
    name, arguments = re.fullmatch(r"kda::base::(\w+)_kernel<(.*)>", kernel).groups()
    if name == "group":
        return _GROUP_STAGES[arguments.split(", ")[-1]]
    return f"{name}, second pass" if "WidePolicy" in arguments else name


def expected(kernel: str, target: str) -> set[str]:
    """The matrix instructions that a kernel must hold, and no others.

    A second pass has no fp16 operands but those that the caller's fp16 arrays are. On gfx950 two
    tiles are joined wherever both are at hand. A prologue's diagonal blocks and its substitution
    multiply one tile at a time; so does a walk where it transposes v and in the odd tiles of the
    triangles. Token by token there is nothing for them, nor in a convolution.
    """
    what = stage(kernel)
    if what in ("tokens", "conv"):
        return set()
    if what.startswith("groups, scan"):
        return {"f32 16x16x4"}
    caller = "f16" if "CdnaTiles<kda::F16>" in kernel else "bf16"
    bounded = "bf16" if "second pass" in what else "f16"
    if what.startswith("prologue"):
        ones, pairs = {"bf16", bounded}, {"bf16", caller}
    else:
        ones, pairs = {caller, bounded}, {"bf16", bounded}
    joined = "16x16x32" if target == "gfx950" else "16x16x16"
    return {f"{kind} 16x16x16" for kind in ones} | {f"{kind} {joined}" for kind in pairs}


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
            what, wanted = stage(kernel), expected(kernel, target)
            have = ", ".join(f"{n} {shape}" for shape, n in sorted(counts.items())) or "none"
            total += 1
            if counts.keys() != wanted:
                want = ", ".join(sorted(wanted)) or "none"
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
