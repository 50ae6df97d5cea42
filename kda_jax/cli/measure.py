"""Errors and times of a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def relative_error(x: Any, reference: Any) -> float:
    """||x - reference|| / ||reference|| in float64; the norm of x where the reference is zero."""
    x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
    norm = float(np.linalg.norm(reference))
    difference = float(np.linalg.norm(x - reference))
    return difference / norm if norm else difference


def median_seconds(
    call: Callable[[], Any], *, budget: float = 1.5, at_least: int = 3, at_most: int = 30
) -> float:
    """Median wall time of a call that has run before, over as many calls as `budget` seconds."""
    times: list[float] = []
    while len(times) < at_least or (len(times) < at_most and sum(times) < budget):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)
