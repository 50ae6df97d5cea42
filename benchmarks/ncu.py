"""Nsight Compute: which counters to ask for, how to run it, what its CSV says of each kernel."""

from __future__ import annotations

import csv
import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# Sections hold what a chip has under the names that it has there.
SECTIONS = (
    "SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis", "SchedulerStats",
    "WarpStateStats", "LaunchStats", "Occupancy",
)  # fmt: skip
_TIME, _READ, _WRITTEN = "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"
_ISSUE = "smsp__issue_active.avg.pct_of_peak_sustained_active"
_WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active"
_ALWAYS = (_TIME, _READ, _WRITTEN, _ISSUE, _WARPS)
# By chip one or the other; asked for where the tool lists it.
_SOMETIMES = tuple(
    f"{name}.avg.pct_of_peak_sustained_active"
    for name in (
        "sm__pipe_tensor_cycles_active",
        "sm__pipe_tensor_op_hmma_cycles_active",
        "sm__inst_executed_pipe_tensor",
    )
)
_STALL = re.compile(r"issue_stalled_(\w+?)(?:_per_issue_active)?\.ratio$")
Kernel = dict[str, Any]


def metrics(tool: str) -> tuple[str, ...]:
    """The counters to ask for by name."""
    listed = subprocess.run([tool, "--query-metrics"], capture_output=True, text=True)
    names = set(re.findall(r"^(\w+__\w+)", listed.stdout, re.MULTILINE))
    return _ALWAYS + tuple(name for name in _SOMETIMES if name.split(".")[0] in names)


def profile(tool: str, command: Sequence[str], log: Path, cwd: Path) -> list[Kernel]:
    """Run a command under the profiler; one entry for each launch that it saw.

    Raises:
      RuntimeError: it saw none; says with which words.
    """
    sections = [word for name in SECTIONS for word in ("--section", name)]
    options = [
        "--target-processes", "all", "--profile-from-start", "off", "--clock-control", "none",
        "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log),
    ]  # fmt: skip
    line = [tool, *options, *sections, "--metrics", ",".join(metrics(tool)), *command]
    done = subprocess.run(line, cwd=cwd, env=_environment(), capture_output=True, text=True)
    text = log.read_text() if log.exists() else ""
    found = parse(text.splitlines())
    if not found:
        words = [x for x in (text + done.stdout + done.stderr).splitlines() if "ERROR" in x.upper()]
        raise RuntimeError(
            f"{tool} profiled no kernel: {' '.join(words[-3:])[:500] or 'no message'}"
        )
    return found


def _environment() -> dict[str, str]:
    """Kernels launched one by one: inside of a graph they would not all be seen."""
    flags = os.environ.get("XLA_FLAGS", "")
    return os.environ | {"XLA_FLAGS": f"{flags} --xla_gpu_enable_command_buffer=".strip()}


def parse(lines: Iterable[str]) -> list[Kernel]:
    """The launches in the raw page's CSV: names in the first row, units in the second."""
    rows = list(csv.reader(line for line in lines if line.startswith('"')))
    if not rows:
        return []
    names = rows[0]
    kernels = []
    for row in rows[1:]:
        cells = dict(zip(names, row, strict=False))
        if cells.get("ID", "").strip().isdigit():  # not the row of units
            kernels.append(_kernel(cells))
    return kernels


def _kernel(cells: dict[str, str]) -> Kernel:
    name = cells.get("Kernel Name", "?")
    tensor = [_number(x) for key, x in cells.items() if "pipe_tensor" in key and "pct_of" in key]
    stalls = {
        found[1]: _number(x) or 0.0
        for key, x in cells.items()
        if (found := _STALL.search(key)) and "not_issued" not in key
    }
    total = sum(stalls.values()) or 1.0
    return {
        "name": short(name),
        "full_name": name,
        "seconds": (_number(cells.get(_TIME)) or 0.0) * 1e-9,
        "read": _number(cells.get(_READ)) or 0.0,
        "written": _number(cells.get(_WRITTEN)) or 0.0,
        "tensor": max((x for x in tensor if x is not None), default=None),
        "issue": _number(cells.get(_ISSUE)),
        "occupancy": _number(cells.get(_WARPS)),
        "registers": _number(cells.get("launch__registers_per_thread")),
        "shared": _number(cells.get("launch__shared_mem_per_block")),
        "grid": cells.get("Grid Size", ""),
        "block": cells.get("Block Size", ""),
        "stalls": {key: x / total for key, x in sorted(stalls.items(), key=lambda s: -s[1])},
    }


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def short(name: str) -> str:
    """A kernel's own name, without its arguments, template arguments and namespaces."""
    plain, depth = "", 0
    for letter in name.replace("(anonymous namespace)::", ""):
        depth += letter == "<"
        if letter == "(" and depth == 0 and plain.strip():
            break
        if depth == 0:
            plain += letter
        depth -= letter == ">"
    words = plain.split()
    return words[-1].split("::")[-1] if words else name


def by_kernel(launches: Sequence[Kernel]) -> list[Kernel]:
    """Launches of the same kernel as one: times and bytes summed, shares weighted by time."""
    groups: dict[str, list[Kernel]] = {}
    for launch in launches:
        groups.setdefault(launch["name"], []).append(launch)
    return [_joined(group) for group in groups.values()]


def _joined(group: list[Kernel]) -> Kernel:
    longest = max(group, key=lambda launch: launch["seconds"])
    joined = dict(longest, launches=len(group))
    for key in ("seconds", "read", "written"):
        joined[key] = sum(launch[key] for launch in group)
    for key in ("tensor", "issue", "occupancy"):
        known = [(x[key], x["seconds"]) for x in group if x[key] is not None]
        weight = sum(seconds for _, seconds in known)
        joined[key] = sum(x * s for x, s in known) / weight if weight else None
    return joined
