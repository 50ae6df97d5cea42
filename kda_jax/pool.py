"""States in a pool: the rows that a call reads and writes, for every backend.

A serving engine keeps the states of all requests and of all cached prefixes in one array per layer,
``[rows, ...]``. A call names rows of it: one per sequence, read at its start and written at its
end, and one per checkpoint. An index outside of the pool means no row, so whatever a traced index
holds, nothing outside of the pool is touched.

Around a backend that has no pool of its own (`PoolBackend`) the rows are gathered, and scattered
after it. XLA does both in place when the pool is donated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from .metadata import ChunkMetadata
from .types import KDAInputs, KDAPoolResult, KDAResult, StatePool

Output = TypeVar("Output")


def rows_in_use(indices: jax.Array, used: jax.Array, num_rows: int) -> jax.Array:
    """The rows that ``indices`` name, int32; ``num_rows`` where they name none or are not used."""
    inside = used & (indices >= 0) & (indices < num_rows)
    return jnp.where(inside, indices, num_rows)


def read_rows(states: jax.Array, rows: jax.Array, *within: slice) -> jax.Array:
    """``states[rows, *within]``; row ``num_rows`` of `rows_in_use` reads anything."""
    if states.shape[0] == 0:  # no row at all: of these zeros
        states = jnp.zeros((1, *states.shape[1:]), states.dtype)
    # Without the barrier XLA reads the rows again wherever they are used, also behind the write of
    # the new ones, and copies the whole pool first so that they are still there.
    return jax.lax.optimization_barrier(states.at[(rows, *within)].get(mode="clip"))


def write_rows(states: jax.Array, rows: jax.Array, values: jax.Array, *within: slice) -> jax.Array:
    """``states`` with ``values`` in ``[rows, *within]``; row ``num_rows`` is not written."""
    if rows.shape[0] == 0 or states.shape[0] == 0:
        return states
    # Distinct rows past the end: XLA may then write all rows at once.
    past = states.shape[0] + jnp.arange(rows.shape[0], dtype=rows.dtype)
    rows = jnp.where(rows < states.shape[0], rows, past)
    # Nor may the write be done again for each reader.
    return jax.lax.optimization_barrier(
        states.at[(rows, *within)].set(values, mode="drop", unique_indices=True)
    )


def around_rows(
    run: Callable[[jax.Array, jax.Array], tuple[Output, jax.Array, jax.Array]],
    pool: StatePool,
    metadata: ChunkMetadata,
    *within: slice,
) -> tuple[Output, jax.Array]:
    """Gathers the rows of the sequences, runs, scatters the final and the checkpoint states.

    Args:
      run: from states ``[N, ...]`` and which of them count, bool ``[N]``, to (output, final states
        ``[N, ...]``, checkpoint states ``[M, ...]``).
      pool: the states may have any axes behind the first one.
      within: the part of a row that holds its state.

    Returns:
      The output, and the pool's states after the call.
    """
    num_rows = pool.states.shape[0]
    live, saved = (
        jnp.asarray(metadata.seqs)[:, 1] >= 0,
        jnp.asarray(metadata.checkpoints)[:, 0] >= 0,
    )
    rows = rows_in_use(pool.state_indices, live, num_rows)
    start = read_rows(pool.states, rows, *within)
    out, final, inside = run(start, pool.has_initial_state & (rows < num_rows))
    states = write_rows(pool.states, rows, final, *within)
    rows = rows_in_use(pool.checkpoint_state_indices, saved, num_rows)
    return out, write_rows(states, rows, inside, *within)


def gather_run_scatter(
    run: Callable[[KDAInputs], KDAResult],
    inputs: KDAInputs,
    pool: StatePool,
    metadata: ChunkMetadata,
) -> KDAPoolResult:
    """A call in a pool by ``run``, which takes and returns states one row per sequence."""

    def on_states(state: jax.Array, has: jax.Array) -> KDAResult:
        return run(inputs._replace(initial_state=state, has_initial_state=has))

    return KDAPoolResult(*around_rows(on_states, pool, metadata))


class StepPool(NamedTuple):
    """The rows of a pool that a decode step uses, one per request; device arrays.

    states ``[R, ...]``; read and written int32 ``[D]``, R where there is none.
    """

    states: jax.Array
    rows_read: jax.Array
    rows_written: jax.Array

    def of_kernel(self) -> StatePool:
        """The same for a kernel's call, without checkpoints."""
        has = self.rows_read < self.states.shape[0]
        return StatePool(self.states, self.rows_written, has, jnp.zeros((0,), jnp.int32))

    def read(self, *within: slice) -> jax.Array:
        """The states of the requests, zeros where a request has none."""
        state = read_rows(self.states, self.rows_read, *within)
        has = self.rows_read < self.states.shape[0]
        return jnp.where(has.reshape(-1, *[1] * (state.ndim - 1)), state, 0)

    def write(self, values: jax.Array, *within: slice) -> jax.Array:
        """The pool's states with ``values`` in the requests' rows."""
        return write_rows(self.states, self.rows_written, values, *within)
