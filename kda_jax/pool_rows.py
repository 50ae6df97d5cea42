"""Host checks of the rows of a state pool, before they go to the device.

NumPy only. On the device an index outside of the pool is skipped, and of two that write the same
row either may win; here both are errors that name the argument, the entry and what to do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .grid import Array, host_integers
from .metadata import ChunkMetadata

_LIVE = "state_indices"
_SAVED = "checkpoint_state_indices"


class StepRows(NamedTuple):
    """The rows of one step, as `chunk_kda_prefill` and `causal_conv1d` take them.

    A decode step takes `state_indices` and `has_initial_state`.

    Attributes:
      state_indices: int32 ``[N]``, -1 where a sequence has no row, and in rows of padding.
      has_initial_state: bool ``[N]``, False in rows of padding.
      checkpoint_state_indices: int32 ``[M]``, -1 where a checkpoint is not kept, and in padding.
    """

    state_indices: Array
    has_initial_state: Array
    checkpoint_state_indices: Array


def step_rows(
    metadata: ChunkMetadata,
    num_rows: int,
    state_indices: Any,
    *,
    has_initial_state: Any = None,
    checkpoint_state_indices: Any = (),
) -> StepRows:
    """Checks a step's rows of a pool and pads them to the metadata's capacity.

    Traced indices cannot be checked, so a jitted step should get its rows from here::

        rows = step_rows(metadata, num_rows, [3, 0], has_initial_state=[True, False])
        out, pool = step(pool, metadata, rows)  # chunk_kda_prefill(..., **rows._asdict())

    Args:
      metadata: of the step, as built on the host.
      num_rows: R, rows of the pool.
      state_indices: for each sequence in use its row, 0..R-1, or a negative number for none.
      has_initial_state: for each sequence in use whether its row is read; None: all.
      checkpoint_state_indices: for each checkpoint in use, in the metadata's order, its row, or a
        negative number for none; `CheckpointPlan.destination` for one.

    Returns:
      `StepRows`, NumPy arrays.

    Raises:
      ValueError: a wrong number of entries, a row that is not in the pool, two writes to one row,
        or a checkpoint's row that a sequence holds; metadata or num_rows of another type.
    """
    if not isinstance(metadata, ChunkMetadata):
        raise ValueError(
            f"metadata is a {type(metadata).__name__}, want a ChunkMetadata"
            " (ChunkMetadata.from_seq_lens(...))"
        )
    if isinstance(num_rows, bool) or not isinstance(num_rows, int | np.integer) or num_rows < 0:
        raise ValueError(f"num_rows is {num_rows!r}, want an integer: the rows of the pool")
    live = host_integers(state_indices, _LIVE)
    saved = host_integers(checkpoint_state_indices, _SAVED)
    _count(_LIVE, live, metadata.num_sequences, "sequences")
    _count(_SAVED, saved, metadata.num_checkpoints, "checkpoints")
    check_rows(num_rows, live, saved)
    if has_initial_state is None:
        has = np.ones(live.size, np.bool_)
    else:
        has = np.asarray(has_initial_state)
        if has.size and has.dtype.kind not in "biu":  # a text is true, whatever it says
            raise ValueError(f"has_initial_state has dtype {has.dtype}, want bool")
        has = has.astype(np.bool_)
        _count("has_initial_state", has, metadata.num_sequences, "sequences")
    return StepRows(
        _padded(live, metadata.capacity.sequences, -1, np.int32),
        _padded(has, metadata.capacity.sequences, False, np.bool_),
        _padded(saved, metadata.capacity.checkpoints, -1, np.int32),
    )


def check_rows(num_rows: int, live: Array | None, saved: Array | None) -> None:
    """Refuses rows that are not in the pool, and writes that meet; None: cannot be read here."""
    for name, rows in ((_LIVE, live), (_SAVED, saved)):
        if rows is None:
            continue
        outside = rows >= num_rows
        if outside.any():
            i = int(np.argmax(outside))
            raise ValueError(
                f"{name}[{i}] is {rows[i]}, want a row of the pool, 0..{num_rows - 1}, or a "
                "negative number for none"
            )
    if live is not None:
        refuse_duplicates(_LIVE, live, "each sequence needs a row of its own")
    if saved is not None:
        refuse_duplicates(_SAVED, saved, "each checkpoint needs a row of its own")
    if live is not None and saved is not None:
        refuse_rows_in_use(_SAVED, saved, live, f"which is in {_LIVE} too")


def refuse_duplicates(name: str, rows: Array, need: str) -> None:
    """Refuses a row >= 0 that is given twice."""
    values, counts = np.unique(rows[rows >= 0], return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"{name} holds {values[counts > 1][0]} twice; {need}")


def refuse_rows_in_use(name: str, rows: Array, in_use: Array, why: str) -> None:
    """Refuses a checkpoint's row that the step reads, or that holds a live state."""
    both = np.intersect1d(rows[rows >= 0], in_use)
    if both.size:
        raise ValueError(
            f"{name} holds {both[0]}, {why}: what the step reads there would depend on which came "
            "first; take a row that is free"
        )


def _count(name: str, rows: Array, want: int, what: str) -> None:
    if rows.shape != (want,):
        raise ValueError(
            f"{name} has {rows.size} entries, want {want}: one for each of the metadata's {what}"
        )


def _padded(rows: Array, size: int, fill: Any, dtype: Any) -> Array:
    out = np.full(size, fill, dtype)
    out[: rows.size] = rows
    return out
