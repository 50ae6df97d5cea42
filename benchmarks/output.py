"""What the commands share: options, a progress bar, and where results go."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import device

RESULTS = Path(__file__).parent / "results"


def parser(module: str, description: str | None, budget: float | None = None) -> Any:
    """A parser with --output, --name and, if ``budget`` is its default, --budget."""
    found = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--output", type=Path, default=RESULTS, help="directory of the results")
    found.add_argument("--name", help="stem of the files' names (default: after the device)")
    if budget is not None:
        found.add_argument(
            "--budget",
            type=float,
            default=budget,
            help=f"seconds per timed function (default {budget:g})",
        )
    return found


def console() -> Console:
    """For pages: prints text as it is, however wide."""
    return Console(highlight=False, markup=False, soft_wrap=True)


def progress(to: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=to,
        transient=True,
    )


def last_error(text: str) -> str:
    """The line of a process's error output that says why it failed, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    return (named or lines or ["no message"])[-1][:300]


def write(stem: Path, results: dict[str, Any], page: str) -> None:
    """STEM.json holds all numbers, STEM.md is the page generated from them."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    stem.with_suffix(".md").write_text(page)


def publish(args: argparse.Namespace, what: str, results: dict[str, Any], page: str) -> None:
    """Writes results and their page, named after what was measured and where, and prints the page.

    Args:
      args: with --output and --name of `parser`.
      what: was measured.
      results: with `device.describe` under "device".
      page: in Markdown.
    """
    name = args.name or f"{what}_{device.slug(results['device']['kind'])}"
    write(args.output / name, results, page)
    console().print(page)
