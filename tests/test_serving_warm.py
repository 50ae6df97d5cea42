"""What the warm-up says while it runs, where no terminal shows a bar."""

from __future__ import annotations

import importlib
import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kda_jax.serving import warm
from kda_jax.serving.buckets import Buckets
from kda_jax.warming import WarmProgram


class Instant:
    """A runner that compiles nothing; every shape takes 4 seconds of the test's clock."""

    def __init__(self, clock: SimpleNamespace) -> None:
        self.buckets = Buckets(budget=256, max_requests=2, max_prefills=1, checkpoints=0)
        self.clock = clock

    def warm(self, bucket: Any) -> WarmProgram:
        self.clock.now += 4
        return WarmProgram(bucket, 4.0, "compiled")

    def warm_copy(self) -> WarmProgram:
        return WarmProgram("copies", 0.0, "compiled")


@pytest.mark.parametrize("progress", [True, False])
def test_lines_in_a_log(monkeypatch: pytest.MonkeyPatch, progress: bool) -> None:
    clock = SimpleNamespace(now=100.0)
    module = importlib.import_module("kda_jax.serving.warm")  # of the package, that is the function
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    report = warm(Instant(clock), progress=progress)
    assert len(report.programs) == 9
    want = [
        "warm-up  3 of 8 shapes in 12 s; next: 2 decodes",
        "warm-up  6 of 8 shapes in 24 s; next: 128 tokens of prompts, 2 decodes",
    ]
    assert log.getvalue().splitlines() == (want if progress else [])
