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
    tiles are joined wherever both are at hand: not in the diagonal blocks of the prologue, whose
    other operand is made in between, and in its solve from the third block of 16 tokens on.
    """
    what = stage(kernel)
    if what.startswith("groups, scan"):
        return {"f32 16x16x4"}
    second, prologue = "second pass" in what, what.startswith("prologue")
    fp16_arrays = prologue and "CdnaTiles<kda::F16>" in kernel
    types = {"bf16"} if second and not fp16_arrays else {"bf16", "f16"}
    shapes = {f"{kind} 16x16x16" for kind in types}
    if target != "gfx950":
        return shapes
    joined = {f"{kind} 16x16x32" for kind in types}
    if not prologue:  # a walk's bf16 products are all pairs; second: the odd tiles of Aqk are bf16
        return joined | {"bf16 16x16x16" if second else "f16 16x16x16"}
    chunk = int(re.search(r"\d+, (\d+), (?:true|false)>", kernel)[1])
    if chunk == 32 and not fp16_arrays:
        joined.discard("f16 16x16x32")
    return shapes | joined


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
