"""Time of a computation on the device: many independent calls of it inside of one program.

A program holds R calls, each on arguments of its own, so nothing is computed once for two calls,
nothing is left out (all results are results of the program), and the next call's arguments are not
in a cache because the last call had the same. Programs are queued one after the other; the time of
a queue over the calls in it is the time of a call, with the host's part divided by R.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from .timing import Timing, measure

_DATA = 1 << 30  # bytes of all sets together: several times any cache
_MEMORY_SHARE = 0.4  # of the device's memory that arguments and results of a program may take


def calls_for(set_bytes: float, memory: int | None, least: int = 8, most: int = 32) -> int:
    """How many calls a program holds whose arguments and results take ``set_bytes`` each.

    As many as make the data larger than any cache, between ``least`` and ``most``; fewer, but at
    least two, where the memory does not hold them. (Two programs are in flight at a time.)
    """
    wanted = min(most, max(least, -int(-_DATA // max(set_bytes, 1.0))))
    if memory is not None:
        wanted = min(wanted, int(_MEMORY_SHARE * memory / max(set_bytes, 1.0)))
    return max(2, wanted)


def program(step: Callable[..., Any], shared: Any = ()) -> Callable[[Sequence[Any]], Any]:
    """A jitted function of R sets of arguments that returns ``step(*arguments, *shared)`` of each.

    ``shared`` becomes an argument of the program, so that nothing of it is a constant in it.
    """

    @jax.jit
    def run(sets: Sequence[Any], shared: Any) -> list[Any]:
        return [step(*each, *shared) for each in sets]

    return lambda sets: run(sets, shared)


def per_call(
    programs: Mapping[str, tuple[Callable[[Sequence[Any]], Any], Sequence[Any]]],
    *,
    budget: float,
    **options: Any,
) -> dict[str, Timing]:
    """Seconds per call of each (program, sets), timed in turns; options as in `timing.measure`."""
    functions = {name: functools.partial(run, sets) for name, (run, sets) in programs.items()}
    timings = measure(functions, budget=budget, queued=True, **options)
    return {name: _divided(timings[name], len(sets)) for name, (_, sets) in programs.items()}


def host_time(run: Callable[[Sequence[Any]], Any], sets: Sequence[Any]) -> float:
    """Seconds per call that the host takes to queue a program.

    Where that is about as long as the device's time per call, the device may have waited.
    """
    samples = []
    for _ in range(5):
        begin = time.perf_counter()
        result = run(sets)
        samples.append(time.perf_counter() - begin)
        jax.block_until_ready(result)
    return min(samples) / len(sets)


def _divided(timing: Timing, by: int) -> Timing:
    names = ("median", "low", "high", "best")
    return replace(timing, **{name: getattr(timing, name) / by for name in names})
