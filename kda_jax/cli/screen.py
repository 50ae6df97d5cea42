"""What the terminal shows: tables that fit 80 columns, progress on a terminal only."""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

WIDTH = 80


def console() -> Console:
    """Plain text at 80 columns (fewer on a narrower terminal), so a log reads like the screen."""
    out = Console(highlight=False, markup=False, emoji=False)
    out.width = min(out.width, WIDTH) if out.is_terminal else WIDTH
    return out


def table(title: str, first: str, *numbers: str) -> Table:
    """A table whose first column is text and shrinks, the others numbers that never do."""
    made = Table(title=title, title_justify="left", width=None)
    made.add_column(first, overflow="ellipsis", no_wrap=True, ratio=None)
    for name in numbers:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def progress(*, hidden: bool = False) -> Progress:
    """A bar on stderr; silent unless stderr is a terminal, and in CI."""
    quiet = hidden or not sys.stderr.isatty() or bool(os.environ.get("CI"))
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True, markup=False),
        disable=quiet,
        transient=True,
    )


def fit(name: str, width: int = 18) -> str:
    """The end of a long path is the part that tells documents apart."""
    return name if len(name) <= width else "..." + name[-(width - 3) :]


def error_text(value: float) -> str:
    return "exact" if value == 0 else f"{value:.1e}"
