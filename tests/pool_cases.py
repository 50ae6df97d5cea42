"""Cases whose states lie in a pool: rows in random order, NaN in every row that is not read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import assert_same_bits

from kda_jax import KDAPoolResult, KDAResult
from kda_jax.serving import StepRows, step_rows
from kda_jax.testing import Case, relative_error, scan_in_float64

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class PoolCase:
    """A call in a pool. `case` is the same call with its states by sequence and by checkpoint.

    pool: ``[R, ...]``. rows: of the step. written: row of the pool -> the result and its row.
    """

    case: Case
    pool: Array
    rows: StepRows
    written: dict[int, tuple[str, int]]

    @property
    def options(self) -> dict[str, Any]:
        """All keyword arguments but the pool."""
        named = {"metadata": self.case.metadata, "lower_bound": self.case.lower_bound}
        return named | self.rows._asdict()

    def call(self, fn: Callable[..., Any], **options: Any) -> KDAPoolResult:
        """The results of one call, as NumPy arrays; the pool is not donated."""
        pool = jnp.asarray(self.pool)
        got = fn(*self.case.args, state_cache=pool, **self.options | options)
        assert isinstance(got, KDAPoolResult)
        assert_same_bits(pool, self.pool, "the caller's pool")
        return KDAPoolResult(*jax.device_get(tuple(got)))

    def after(self, result: KDAResult) -> Array:
        """The pool that a call must leave whose states by sequence are these."""
        pool = self.pool.copy()
        for row, (name, i) in self.written.items():
            pool[row] = getattr(result, name)[i]
        return pool


def pool_case(
    case: Case,
    *,
    without: Sequence[int] = (),
    dropped: Sequence[int] = (),
    state_layout: str = "vk",
    spare_rows: int = 5,
    seed: int = 0,
) -> PoolCase:
    """Puts the states of a case into a pool.

    Args:
      case: with an initial state and has_initial_state.
      without: sequences without a row: they start from zeros, and their state goes nowhere.
      dropped: checkpoints without a row.
      state_layout: of the pool.
      spare_rows: rows that the call has nothing to do with.
      seed: of their order.
    """
    metadata = case.metadata
    N, M = metadata.num_sequences, metadata.num_checkpoints
    rng = np.random.default_rng(seed)
    order = rng.permutation(N + M + spare_rows).astype(np.int32)
    live, saved = order[:N].copy(), order[N : N + M].copy()
    live[list(without)] = -1 - np.arange(len(without))
    saved[list(dropped)] = -7

    assert case.initial_state is not None and case.has_initial_state is not None
    has = case.has_initial_state.copy()
    state = case.initial_state
    if state_layout == "kv":
        state = np.ascontiguousarray(state.swapaxes(-1, -2))
    pool = np.full((order.size, *state.shape[1:]), np.nan, np.float32)
    for n in range(N):
        if has[n] and live[n] >= 0:
            pool[live[n]] = state[n]
    rows = step_rows(
        metadata,
        pool.shape[0],
        live,
        has_initial_state=has[:N],
        checkpoint_state_indices=saved,
    )
    has[list(without)] = False
    written = {int(live[n]): ("final_state", n) for n in range(N) if live[n] >= 0}
    written |= {int(saved[m]): ("checkpoint_state", m) for m in range(M) if saved[m] >= 0}
    by_sequence = dataclasses.replace(case, initial_state=state, has_initial_state=has)
    return PoolCase(by_sequence, pool, rows, written)


def assert_right(
    got: KDAPoolResult, p: PoolCase, rtol_out: float, rtol_state: float, **options: Any
) -> None:
    """Against the recurrence in float64: out, every row written; all other rows bit for bit."""
    want = scan_in_float64(p.case, **options)
    used = p.case.metadata.num_tokens
    assert not np.asarray(got.out[:, used:], np.float32).any(), "rows of padding"
    error = relative_error(got.out[:, :used], want.out[:, :used])
    assert error <= rtol_out, f"out: relative error {error:.2e}, bound {rtol_out:.1e}"
    for row, (name, i) in p.written.items():
        error = relative_error(got.state_cache[row], getattr(want, name)[i])
        assert error <= rtol_state, f"{name}[{i}] in row {row}: relative error {error:.2e}"
    others = [row for row in range(p.pool.shape[0]) if row not in p.written]
    assert_same_bits(got.state_cache[others], p.pool[others], f"rows {others} of the pool")
