"""`python -m benchmarks.run`: check and time every backend, write JSON, a page and a plot."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kda_jax.testing import TOLERANCES

from . import dispatch, floor, machine, metadata, plot, prefill, report
from .shapes import CPU, SHAPES

BACKENDS = ("fused", "chunked", "scan")
DTYPES = ("float32", "bfloat16")
RESULTS = Path(__file__).parent / "results"


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    console = Console()
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True,
    ) as progress:  # fmt: skip
        results = _run(args, progress)
    args.output.mkdir(parents=True, exist_ok=True)
    stem = args.output / args.name
    stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    image = None
    try:
        if plot.save(results, stem.with_suffix(".png")):
            image = f"{args.name}.png"
    except ImportError:
        console.print("no plot: matplotlib is missing, pip install 'kda-jax[plot]'")
    stem.with_suffix(".md").write_text(report.markdown(results, image))
    _print(console, results)
    console.print(f"wrote {stem}.json and {stem}.md", highlight=False)
    wrong = [row for row in results["prefill"] if not _all_right(row)]
    for row in wrong:
        console.print(f"[red]{row['shape']} {row['dtype']}: a backend is off, see {stem}.json[/]")
    return 1 if wrong else 0


def _run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    cells = [(SHAPES[name], dtype) for dtype in args.dtypes for name in args.shapes]
    task = progress.add_task("ceilings of this machine", total=len(cells) + 3)

    def done(next_step: str) -> None:
        progress.update(task, advance=1, description=next_step)

    ceilings = floor.measure_ceilings(budget=args.budget)
    done("metadata")
    host = metadata.run(args.budget)
    done("dispatch")
    calls = dispatch.run(tuple(args.backends), args.budget)
    rows = []
    for shape, dtype in cells:
        done(f"{shape.name} {dtype}")
        rows.append(prefill.run(shape, dtype, tuple(args.backends), ceilings, budget=args.budget))
    return {
        "machine": machine.describe(),
        "ceilings": ceilings.to_json(),
        "backends": list(args.backends),
        "limits": {dtype: list(TOLERANCES[dtype]) for dtype in args.dtypes},
        "prefill": rows,
        "metadata": host,
        "dispatch": calls,
    }


def _all_right(row: dict[str, Any]) -> bool:
    return all(cell["parity"] for cell in row["backends"].values())


def _print(console: Console, results: dict[str, Any]) -> None:
    table = Table("shape", "dtype", *results["backends"], "floor", "fused over other")
    for row in results["prefill"]:
        times = [
            report.duration(cell["median"]) if (cell := row["backends"].get(name)) else "-"
            for name in results["backends"]
        ]
        ratio = report.speedup(row)
        last = "-" if ratio is None else f"{ratio:.2f}x"
        table.add_row(row["shape"], row["dtype"], *times, report.duration(row["floor_s"]), last)
    console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--backends", nargs="+", default=BACKENDS, metavar="NAME")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=CPU, metavar="SHAPE")
    parser.add_argument(
        "--budget", type=float, default=3.0, help="seconds per timed function (default 3)"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the results")
    parser.add_argument("--name", default="cpu", help="stem of the files' names (default cpu)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
