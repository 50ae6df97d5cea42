"""States in a pool: the results of the call without one, in place, and nothing else written."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ..testing import relative_error
from ..testing_pool import PoolCase, pool_case
from .path import Path, same_bits

_PLAIN = 1e-5  # XLA may compile a plain JAX backend otherwise where it gathers and scatters


def _compare(path: Path, p: PoolCase) -> None:
    want = path.call(p.case)
    out, pool, moved = path.call_in_pool(p)
    if moved:
        raise AssertionError("a donated pool does not stay where it is")
    same_bits(pool[p.others], p.pool[p.others], "rows of the pool that the call does not write")
    after = p.after(want)
    if path.backend == "fused":
        same_bits(out, want.out, "out with states in a pool")
        same_bits(pool, after, "the pool")
        return
    _near(out, want.out, "out with states in a pool")
    for row in p.written:
        _near(pool[row], after[row], f"row {row} of the pool")


def _near(got: Any, want: Any, what: str) -> None:
    error = relative_error(got, want)
    bound = _PLAIN if got.dtype == np.float32 else 5e-3
    if not error <= bound:
        raise AssertionError(f"{what}: relative error {error:.1e}, bound {bound:.0e}")


def results(path: Path) -> None:
    """With all rows, and with sequences and checkpoints that have none."""
    _compare(path, pool_case(path.pack()))
    _compare(path, pool_case(path.pack(), without=[0, 2], dropped=[1], seed=1))


def second_pass(path: Path) -> None:
    """A state far out of fp16, which the final state replaces: whole, and in one row of V."""
    case = path.case("random", [130, 65], checkpoint_offsets=[[64, 100], [17]])
    for rows in (slice(None), slice(17, 18)):
        state = np.array(case.initial_state)
        state[0, :, rows] *= 1e6
        _compare(path, pool_case(dataclasses.replace(case, initial_state=state)))
