"""Servers as processes of their own."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parent)}
WAIT = 120


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server, and its URL, once it listens."""
    command = [sys.executable, *arguments]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if found := re.search(r"is served at (http://\S+)", line):
                yield server, found[1]
                break
        else:
            raise AssertionError(f"the server ended with {server.wait(WAIT)}")
    finally:
        server.kill()
        server.wait(WAIT)
        server.stdout.close()
