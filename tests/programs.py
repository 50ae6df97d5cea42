"""What the tests of compiled programs share: compiling them fast, and counting compiles."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest

from kda_jax import supports

needs_fused = pytest.mark.skipif(not supports("fused"), reason=supports("fused").reason)
FUSED = pytest.param("fused", marks=needs_fused)
BACKENDS = [FUSED, "auto", "chunked", "scan"]

# Most of the time of these tests is XLA's code generation; what they look at does not depend on it.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

_compiles: list[str] = []


def _on_event(event: str, duration: float, **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compiles.append(event)


jax.monitoring.register_event_duration_secs_listener(_on_event)


@contextmanager
def count_compiles() -> Iterator[list[str]]:
    """A list that gets one entry for each program that XLA compiles in the block."""
    start, counted = len(_compiles), []
    yield counted
    counted.extend(_compiles[start:])


def assert_trees_equal(got: Any, want: Any) -> None:
    """The same structure, and each leaf the same bit for bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)
