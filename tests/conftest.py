"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

from kda_jax import backends


@pytest.fixture
def x64() -> Iterator[None]:
    """float64 arrays and arithmetic."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends that the test registers are gone after it."""
    monkeypatch.setattr(backends, "_registry", dict(backends._registry))
