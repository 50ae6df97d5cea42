"""Compiling ahead of the first request: one step of every shape that steps can have."""

from __future__ import annotations

import sys
import time

from ..warming import WarmupReport
from .runner import Runner

_SECONDS_BETWEEN_LINES = 10


def warm(runner: Runner, *, limit: int | None = None, progress: bool = True) -> WarmupReport:
    """Compiles and runs a step of every shape, the most useful first.

    Args:
      runner: before its engine starts.
      limit: at most so many shapes, at least 1; None: all.
      progress: a bar on stderr, where that is a terminal; elsewhere (a log) a line now and then.

    Raises:
      ValueError: the limit is below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}, want at least 1")
    from ..cli.screen import progress as bar  # rich only where it is used

    buckets = runner.buckets.all()
    programs = []
    begin = said = time.monotonic()
    with bar(hidden=not progress) as shown:
        chosen = buckets[:limit]
        task = shown.add_task("warm-up", total=len(chosen))
        for i, bucket in enumerate(chosen):
            shown.update(task, description=f"warm-up: {bucket}")
            now = time.monotonic()
            if progress and shown.disable and now - said >= _SECONDS_BETWEEN_LINES:
                said = now
                done = f"{i} of {len(chosen)} shapes in {now - begin:.0f} s"
                print(f"warm-up  {done}; next: {bucket}", file=sys.stderr, flush=True)
            programs.append(runner.warm(bucket))
            shown.update(task, advance=1)
        programs.append(runner.warm_copy())
    return WarmupReport(tuple(programs), len(buckets) + 1)
