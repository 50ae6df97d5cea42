"""Timing: several functions in turns, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class Timing:
    """Seconds per call, over ``samples`` samples of ``calls`` calls: median, quartiles, best."""

    median: float
    low: float
    high: float
    best: float
    samples: int
    calls: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    functions: Mapping[str, Callable[[], Any]],
    *,
    budget: float = 2.0,
    min_samples: int = 5,
    min_slow_samples: int = 3,
    max_samples: int = 200,
    sample_time: float = 0.02,
    queued: bool = False,
) -> dict[str, Timing]:
    """Time each function until its result is ready.

    Args:
      functions: what to time, by name; each is called twice before (compilation, warm-up).
      budget: seconds to spend on each function, more if the least number of samples needs more.
      min_samples, max_samples: bounds on the number of samples of each function.
      min_slow_samples: replaces min_samples where one call alone takes the whole budget.
      sample_time: short functions are repeated until a sample lasts this long, in seconds.
      queued: wait once per sample, after its last call, instead of after each. A device then works
        without gaps, and where a call keeps it busy for longer than the host needs to queue the
        next one, this is the device's time.
    """
    calls: dict[str, int] = {}
    rounds = max_samples
    for name, function in functions.items():
        jax.block_until_ready(function())
        once = _sample(function, 1, queued)
        calls[name] = max(1, int(sample_time / once))
        rounds = min(rounds, int(budget / (once * calls[name])))
    rounds = max(rounds, min_samples if rounds else min_slow_samples)

    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            samples[name].append(_sample(function, calls[name], queued))
    return {name: _summary(values, calls[name]) for name, values in samples.items()}


def _sample(function: Callable[[], Any], calls: int, queued: bool) -> float:
    result = None
    begin = time.perf_counter()
    for _ in range(calls):
        result = None  # its memory serves the next call, which then finds it where the last one did
        result = function()
        if not queued:
            jax.block_until_ready(result)
    jax.block_until_ready(result)
    return max((time.perf_counter() - begin) / calls, 1e-9)


def _summary(values: list[float], calls: int) -> Timing:
    low, median, high = np.percentile(values, [25, 50, 75])
    return Timing(float(median), float(low), float(high), min(values), len(values), calls)
