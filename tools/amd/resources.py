"""What the compiler says that each kernel uses, and a gate on it.

    python tools/amd/resources.py build/amd/objects                        print the table
    python tools/amd/resources.py build/amd/objects --table FILE           gate: exits 1 if it fails
    python tools/amd/resources.py build/amd/objects --table FILE --update  write the table (JSON)

The directory holds STEM.ARCH.txt, written by `hipcc.sh --objects`: the remarks of clang's
-Rpass-analysis=kernel-resource-usage. The gate: no spills, no scratch, no dynamic stack; LDS within
what one workgroup may have; occupancy (waves per SIMD) at least the number in the table; the same
kernels and targets as in the table. Registers are in the table to be seen in a diff, not gated.

The compiler knows static LDS only. For a kernel launched with dynamic LDS the table's "launch" says
how, by kernel, and is kept by --update:

    "launch": {"walk": {"dynamic_lds": 65536, "threads": 256}}

The bytes then count towards the limit, and the occupancy is lowered to what the LDS of a compute
unit allows.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

LDS_LIMIT = {"gfx90a": 64 * 1024, "gfx942": 64 * 1024, "gfx950": 160 * 1024}
SIMDS, LANES = 4, 64  # of a compute unit; of a wave

# Name in the remarks -> name in the table, in the order of the printed columns.
FIELDS = {
    "VGPRs": "vgprs",
    "AGPRs": "agprs",
    "TotalSGPRs": "sgprs",
    "VGPRs Spill": "vgpr_spills",
    "SGPRs Spill": "sgpr_spills",
    "ScratchSize": "scratch",
    "LDS Size": "lds",
    "Occupancy": "occupancy",
}
ZERO = ("vgpr_spills", "sgpr_spills", "scratch")
_REMARK = re.compile(r"remark:\s+([A-Za-z ]+?)(?: \[[^\]]*\])?: (\S+) \[-Rpass-analysis=kernel")

Usage = dict[str, dict[str, dict[str, Any]]]  # kernel -> target -> field -> value


def parse(text: str) -> dict[str, dict[str, Any]]:
    """Resource remarks of one compilation for one target, by mangled kernel name."""
    kernels: dict[str, dict[str, Any]] = {}
    current: dict[str, Any] = {}
    for key, value in _REMARK.findall(text):
        if key == "Function Name":
            current = kernels.setdefault(value, {})
        elif key == "Dynamic Stack":
            current["dynamic_stack"] = value == "True"
        elif key in FIELDS:
            current[FIELDS[key]] = int(value)
    for name, usage in kernels.items():
        missing = {*FIELDS.values(), "dynamic_stack"} - usage.keys()
        if missing:
            raise ValueError(f"{name}: the compiler's report has no {', '.join(sorted(missing))}")
    return kernels


def demangle(names: list[str]) -> list[str]:
    """C++ names without return type and arguments; unchanged where there is no c++filt."""
    tool = shutil.which("c++filt") or shutil.which("llvm-cxxfilt-22")
    if not names or not tool:
        return names
    done = subprocess.run(
        [tool], input="\n".join(names), capture_output=True, text=True, check=True
    )
    names = [n.removeprefix("void ").replace("> >", ">>") for n in done.stdout.splitlines()]
    return [re.sub(r"\(.*\)$", "", n) for n in names]


def read(folder: Path) -> Usage:
    """All reports of a folder."""
    usage: Usage = {}
    reports = sorted(folder.glob("*.gfx*.txt"))
    if not reports:
        raise SystemExit(f"{folder}: no reports (run tools/amd/hipcc.sh --objects {folder} ...)")
    for path in reports:
        target = path.name.split(".")[-2]
        kernels = parse(path.read_text())
        for name, values in zip(demangle(list(kernels)), kernels.values(), strict=True):
            # A template may be in several sources; a library has one kernel of that name.
            if usage.setdefault(name, {}).setdefault(target, values) != values:
                raise SystemExit(f"{path}: {name} is in another source, too, and differs")
    return usage


def add_dynamic_lds(usage: Usage, launch: dict[str, Any]) -> list[str]:
    """Count dynamic LDS; returns complaints about entries that fit no kernel."""
    unknown = []
    for kernel, how in launch.items():
        if kernel not in usage:
            unknown.append(f"{kernel}: in the table's launch, but not compiled")
        for target, values in usage.get(kernel, {}).items():
            values["lds"] += how["dynamic_lds"]
            groups = LDS_LIMIT[target] // max(values["lds"], 1)
            waves = groups * -(-how["threads"] // LANES)
            values["occupancy"] = min(values["occupancy"], -(-waves // SIMDS))
    return unknown


def problems(usage: Usage, table: Usage | None) -> list[str]:
    """What the gate objects to."""
    found = []
    for kernel, targets in sorted(usage.items()):
        for target, values in targets.items():
            where = f"{kernel} {target}"
            found += [f"{where}: {name} = {values[name]}" for name in ZERO if values[name]]
            if values["dynamic_stack"]:
                found.append(f"{where}: dynamic stack")
            if values["lds"] > LDS_LIMIT[target]:
                found.append(
                    f"{where}: {values['lds']} bytes of LDS, the limit is {LDS_LIMIT[target]}"
                )
            if table is None:
                continue
            expected = table.get(kernel, {}).get(target)
            if expected is None:
                found.append(f"{where}: not in the table (--update writes it)")
            elif values["occupancy"] < expected["occupancy"]:
                found.append(f"{where}: occupancy {values['occupancy']} < {expected['occupancy']}")
    for kernel, targets in sorted((table or {}).items()):
        gone = sorted(targets.keys() - usage.get(kernel, {}).keys())
        found += [f"{kernel} {target}: in the table, but not compiled" for target in gone]
    return found


def show(usage: Usage) -> str:
    """The table for people."""
    rows = [["kernel", "target", *FIELDS.values()]]
    for kernel, targets in sorted(usage.items()):
        for target, values in sorted(targets.items()):
            rows.append([kernel, target, *(str(values[name]) for name in FIELDS.values())])
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            c.ljust(w) if k < 2 else c.rjust(w)
            for k, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def dump(stored: dict[str, Any]) -> str:
    """The table as JSON, one line for each kernel and target."""
    text = json.dumps(stored, indent=1, sort_keys=True)
    return re.sub(r"\{[^{}]*\}", lambda m: " ".join(m.group().split()), text) + "\n"


def main() -> int:
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--update", action="store_true", help="write the table")
    args = parser.parse_args()
    usage = read(args.folder)
    exists = args.table is not None and args.table.exists()
    stored = json.loads(args.table.read_text()) if exists else {"launch": {}, "kernels": {}}
    found = add_dynamic_lds(usage, stored["launch"])
    print(show(usage))
    if args.update:
        stored["kernels"] = usage
        args.table.write_text(dump(stored))
    found += problems(usage, stored["kernels"] if args.table else None)
    for problem in found:
        print(f"FAILED {problem}")
    if not found:
        print(f"ok: {sum(map(len, usage.values()))} kernels and targets pass the gate")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
