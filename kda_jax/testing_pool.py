"""Cases whose states lie in a pool, for tests of a `PoolBackend` or of a layer on one.

p = pool_case(make_case("random", seq_lens=[300, 1, 65], initial_state=[True] * 3))
got = my_prefill(*p.case.args, state_cache=jnp.asarray(p.pool), **p.options)
want = chunk_kda_prefill(*p.case.args, **p.case.kwargs)   # the same call, states by sequence
np.testing.assert_allclose(got.state_cache, p.after(want), rtol=1e-4)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from .pool_rows import StepRows, step_rows
from .testing import Case
from .types import KDAResult, StateLayout

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class PoolCase:
    """A call in a pool.

    Attributes:
      case: the same call with its states by sequence and by checkpoint.
      pool: ``[R, H, V, K]`` or ``[R, H, K, V]`` in float32, NaN in every row that is not read.
      rows: of the step.
      written: row of the pool -> which result it gets, and the row of that: what `after` puts in.
    """

    case: Case
    pool: Array
    rows: StepRows
    written: dict[int, tuple[str, int]]

    @property
    def options(self) -> dict[str, Any]:
        """All keyword arguments of the operator but the pool."""
        named = {"metadata": self.case.metadata, "lower_bound": self.case.lower_bound}
        return named | self.rows._asdict()

    @property
    def others(self) -> list[int]:
        """The rows that the call must leave as they are."""
        return [row for row in range(self.pool.shape[0]) if row not in self.written]

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
    state_layout: StateLayout = "vk",
    spare_rows: int = 5,
    seed: int = 0,
) -> PoolCase:
    """Puts the states of a case into a pool, in rows of random order.

    Args:
      case: with initial_state and has_initial_state.
      without: sequences without a row: they start from zeros, and their state goes nowhere.
      dropped: checkpoints without a row.
      state_layout: of the pool.
      spare_rows: rows that the call has nothing to do with.
      seed: of their order.
    """
    if case.initial_state is None or case.has_initial_state is None:
        raise ValueError("case has no initial_state: make it with initial_state=[True, ...]")
    metadata = case.metadata
    N, M = metadata.num_sequences, metadata.num_checkpoints
    order = np.random.default_rng(seed).permutation(N + M + spare_rows).astype(np.int32)
    live, saved = order[:N].copy(), order[N : N + M].copy()
    live[list(without)] = -1 - np.arange(len(without))
    saved[list(dropped)] = -7

    has, state = case.has_initial_state.copy(), case.initial_state
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
