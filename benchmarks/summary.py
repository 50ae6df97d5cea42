"""`python -m benchmarks.summary`: writes the result section of benchmarks/README.md from results/.

What it says comes from the result files alone: where the operator is faster than every peer that
ran, where its target is met, where neither, and which pages there are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import gpu_table, peers
from .output import RESULTS
from .report import table

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
README = Path(__file__).parent / "README.md"


def section(folder: Path) -> str:
    """The section for the result files in a folder."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        results = json.loads(path.read_text())
        if "peers" in results and "rows" in results:
            parts.append(standing(results, f"results/{path.stem}.md"))
    pages = [
        f"- [{page.read_text().splitlines()[0].lstrip('# ')}](results/{page.name})"
        for page in sorted(folder.glob("*.md"))
    ]
    return "\n\n".join([*parts, "### All pages", "\n".join(pages)])


def standing(results: dict[str, Any], link: str) -> str:
    """One card's table in short: verdicts, with the shapes and the ratios to each peer."""
    groups: dict[str, list[str]] = {}
    for row in results["rows"]:
        groups.setdefault(gpu_table.verdict(results, row), []).append(_shape(results, row))
    rows = [[verdict, str(len(names)), "; ".join(names)] for verdict, names in groups.items()]
    head = f"### [{results['device']['kind']}]({link}), {results['machine']['date']}"
    note = "Times of the fused operator over those of each peer that ran, and over the floor."
    return "\n\n".join([head, note, table(["", "shapes", ""], rows)])


def _shape(results: dict[str, Any], row: dict[str, Any]) -> str:
    facts = [
        f"{x:.2f} of {name}"
        for name in peers.NAMES
        if (x := gpu_table.ratio(results, row, name)) is not None
    ]
    ours = gpu_table.seconds(row)
    if ours and gpu_table.correct(row):
        facts.append(f"{ours / gpu_table.floor_of(results, row):.1f} floors")
    return f"{row['shape']} ({', '.join(facts)})" if facts else row["shape"]


def updated(text: str, found: str) -> str:
    """The README with its result section replaced.

    Raises:
      ValueError: the marks of the section are not there.
    """
    before, mark, rest = text.partition(BEGIN)
    _, other, after = rest.partition(END)
    if not mark or not other:
        raise ValueError(f"the page has no section between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{found}\n\n{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser("python -m benchmarks.summary", description=__doc__).parse_args(argv)
    README.write_text(updated(README.read_text(), section(RESULTS)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
