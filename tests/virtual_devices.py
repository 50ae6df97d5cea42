"""Checks that need several devices: they run in one process of their own, on 8 virtual CPU devices.

A test file makes a `Checks`, registers its checks and, as a script, prints what each of them found;
as a test it starts itself as a script once.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DEVICES = 8


class Checks:
    """The checks of one file."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.all: dict[str, Callable[[], None]] = {}

    def check(self, *names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Registers a check; with names, once for each, which is its argument."""

        def register(fn: Callable[..., None]) -> Callable[..., None]:
            for name in names or ("",):
                label = f"{fn.__name__}[{name}]" if name else fn.__name__
                self.all[label] = functools.partial(fn, *filter(None, [name]))
            return fn

        return register

    def main(self) -> None:
        """Runs them all and prints what they raised."""
        found = {}
        for name, fn in self.all.items():
            try:
                fn()
                found[name] = ""
            except Exception:
                found[name] = traceback.format_exc(limit=-4)
        json.dump(found, sys.stdout)

    @functools.cached_property
    def outcomes(self) -> Any:
        """What a process of their own printed."""
        flags = os.environ.get("XLA_FLAGS", "")
        flags += f" --xla_force_host_platform_device_count={DEVICES}"
        flags += " --xla_backend_optimization_level=0"  # compiles in half the time
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
        command = [sys.executable, self.file]
        run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)

    def assert_found_nothing(self, name: str) -> None:
        """Fails with the check's traceback; skips what needs the kernel where there is none."""
        from kda_jax import supports

        support = supports("fused")
        if not support and not any(x in name for x in ("auto", "chunked", "scan")):
            pytest.skip(support.reason)
        assert not self.outcomes[name], self.outcomes[name]
