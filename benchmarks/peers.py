"""The peers of the GPU's table: who they are, whether they are here, and their times.

Each runs in processes of its own, before this one touches the GPU, so that neither memory nor
contexts mix. What is missing or fails is left out with the reason.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import output
from .shapes import SHAPES

ROOT = Path(__file__).parent.parent
NAMES = ("FLA", "jla")
# Module and distribution of what each needs, beside JAX.
_NEEDS = {
    "FLA": (("fla", "fla-core"), ("torch", "torch"), ("triton", "triton"), ("einops", "einops")),
    "jla": (("jla", "jax-linear-attention"),),
}
TUNINGS = {
    "bounded": "every candidate of its kernels at the first number of heads, the best three of"
    " each kernel at the others",
    "full": "every candidate of its kernels at each number of heads",
}
_COMPILERS = 16  # processes at most; each needs 3 GB and half a GB of the GPU
Peers = dict[str, Any]
Report = Callable[[str], None]


def missing(name: str) -> str | None:
    """Why a peer cannot run here, as far as that shows without running it."""
    absent = [package for module, package in _NEEDS[name] if not importlib.util.find_spec(module)]
    return f"not installed: pip install {' '.join(absent)}" if absent else None


def run(
    shapes: Sequence[str], *, tuning: str = "bounded", budget: float = 0.3, report: Report = print
) -> Peers:
    """Time the peers that are here on the named shapes; returns a JSON-compatible object.

    ``rows`` holds for each peer and shape the time, or under "failed" why there is none;
    ``left_out`` tells why a whole peer is missing.
    """
    peers: Peers = {"rows": [], "left_out": {}, "versions": {}}
    for name in NAMES:
        if why := missing(name):
            peers["left_out"][name] = why
            continue
        try:
            rows = _fla(shapes, tuning, report) if name == "FLA" else _jla(shapes, budget, report)
        except RuntimeError as error:
            peers["left_out"][name] = str(error)
            continue
        peers["rows"] += rows
        for shape in shapes:
            if row_of(peers, name, shape) is None:
                why = "its process ended before this shape"
                peers["rows"].append({"peer": name, "shape": shape, "failed": why})
        peers["versions"] |= {p: importlib.metadata.version(p) for _, p in _NEEDS[name]}
        if name == "FLA":
            peers["tuning"] = TUNINGS[tuning]
    return peers


def load(path: Path) -> tuple[Peers, str | None]:
    """The peers in a result file of an earlier run, and the kind of device they ran on."""
    found = json.loads(path.read_text())
    peers = dict(found["peers"])
    peers.setdefault("reused", found["machine"]["date"])
    return peers, found["device"]["kind"]


def time_of(peers: Peers, name: str, shape: str) -> float | None:
    """Median seconds of a peer on a shape, if it ran."""
    row = row_of(peers, name, shape)
    return None if row is None else row.get("median")


def row_of(peers: Peers, name: str, shape: str) -> dict[str, Any] | None:
    rows = (row for row in peers["rows"] if (row["peer"], row["shape"]) == (name, shape))
    return next(rows, None)


def _fla(shapes: Sequence[str], tuning: str, report: Report) -> list[dict[str, Any]]:
    """Compile side by side, then time; with bounded tuning the first number of heads leads."""
    heads = list(dict.fromkeys(SHAPES[name].H for name in shapes))
    first = [name for name in shapes if SHAPES[name].H in heads[:1]]
    others = [name for name in shapes if name not in first]
    if tuning == "full" or not others:
        _compile(shapes, [], report)
        return _lines("peer_fla", ["time", "--shapes", *shapes], "FLA", report)
    with tempfile.TemporaryDirectory() as folder:
        configs = ["--configs", str(Path(folder) / "configs.json")]
        _compile(first, [], report)
        arguments = ["time", "--shapes", *first, *configs, "--write-configs"]
        rows = _lines("peer_fla", arguments, "FLA", report)
        _compile(others, configs, report)
        return rows + _lines("peer_fla", ["time", "--shapes", *others, *configs], "FLA", report)


def _compile(shapes: Sequence[str], configs: list[str], report: Report) -> None:
    """Fill Triton's cache; a part that fails only leaves its work to the timing process."""
    report("FLA: compiling")
    heads = list(dict.fromkeys(SHAPES[name].H for name in shapes))
    parts = max(1, min(_COMPILERS, os.cpu_count() or 1) // len(heads))
    running = []
    for H in heads:
        names = [name for name in shapes if SHAPES[name].H == H]
        for part in range(parts):
            which = ["--part", str(part), "--parts", str(parts)]
            command = _command("peer_fla", ["tune", "--shapes", *names, *which, *configs])
            null = subprocess.DEVNULL
            running.append(subprocess.Popen(command, cwd=ROOT, stdout=null, stderr=null))
    for process in running:
        process.wait()


def _jla(shapes: Sequence[str], budget: float, report: Report) -> list[dict[str, Any]]:
    return _lines("peer_jla", ["--shapes", *shapes, "--budget", str(budget)], "jla", report)


def _command(module: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.{module}", *arguments]


def _lines(
    module: str, arguments: Sequence[str], name: str, report: Report
) -> list[dict[str, Any]]:
    """The JSON lines that a peer's process prints.

    Raises:
      RuntimeError: it failed; says with which words.
    """
    report(f"{name}: starting")
    rows = []
    with tempfile.TemporaryFile("w+") as errors:
        command = _command(module, arguments)
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    rows.append(json.loads(line))
                    report(f"{name}: {rows[-1]['shape']}")
        errors.seek(0)
        why = output.last_error(errors.read())
    if process.returncode and not rows:
        raise RuntimeError(f"its process failed with code {process.returncode}: {why}")
    return rows
