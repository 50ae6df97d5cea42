"""Compiling ahead of the first request: one step of every shape that steps can have."""

from __future__ import annotations

from ..warming import WarmupReport
from .runner import Runner


def warm(runner: Runner, *, limit: int | None = None, progress: bool = True) -> WarmupReport:
    """Compiles and runs a step of every shape, the most useful first.

    Args:
      runner: before its engine starts.
      limit: at most so many shapes, at least 1; None: all.
      progress: a bar on stderr, where that is a terminal.

    Raises:
      ValueError: the limit is below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}, want at least 1")
    from ..cli.screen import progress as bar  # rich only where it is used

    buckets = runner.buckets.all()
    programs = []
    with bar(hidden=not progress) as shown:
        chosen = buckets[:limit]
        task = shown.add_task("warm-up", total=len(chosen))
        for bucket in chosen:
            shown.update(task, description=f"warm-up: {bucket}")
            programs.append(runner.warm(bucket))
            shown.update(task, advance=1)
        programs.append(runner.warm_copy())
    return WarmupReport(tuple(programs), len(buckets) + 1)
