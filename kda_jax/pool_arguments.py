"""The arguments of a call in a state pool: checked before anything runs, and made complete.

Shapes, dtypes and Python values are looked at, so that the checks work on tracers; the values of
indices only where they lie on the host.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import validate
from .gate import compute_dtype
from .metadata import ChunkMetadata
from .pool import StepPool, rows_in_use
from .pool_rows import check_rows
from .types import KDAInputs, StateLayout, StatePool


def bind_step_rows(
    state_cache: Any,
    state_indices: Any,
    has_initial_state: Any,
    active: Any,
    requests: int,
) -> StepPool:
    """The rows of a decode step, checked.

    Raises:
      ValueError: naming the argument and what it should be.
    """
    R = state_cache.shape[0]
    axes = "[D], one per request"
    indices = read_indices("state_indices", state_indices, (requests,), axes)
    for name, flags in (("has_initial_state", has_initial_state), ("active", active)):
        if flags is not None:
            validate.check_flags(name, flags, requests, axes)
    if isinstance(indices, np.ndarray):
        on_host = active is None or isinstance(active, np.ndarray)
        used = True if active is None else active
        check_rows(R, np.where(used, _signed(indices), -1) if on_host else None, None)
    everyone = jnp.ones((requests,), jnp.bool_)
    written = rows_in_use(jnp.asarray(to_int32(indices)), everyone if active is None else active, R)
    has = everyone if has_initial_state is None else has_initial_state
    return StepPool(state_cache, jnp.where(has, written, R), written)


def bind_pool(
    inputs: KDAInputs,
    state_cache: Any,
    state_indices: Any,
    checkpoint_state_indices: Any,
    metadata: ChunkMetadata,
    state: tuple[int, ...],
    state_layout: StateLayout,
) -> StatePool:
    """The pool arguments of a call of the operator, checked and complete.

    Raises:
      ValueError: naming the argument and what it should be.
    """
    if inputs.initial_state is not None:
        raise ValueError("initial_state and state_cache are both given: want one of them")
    check_cache("state_cache", state_cache, "state_indices", state_indices)
    axes = "[R, H, V, K]" if state_layout == "vk" else "[R, H, K, V]"
    check_states(state_cache, state, f"{axes} with state_layout={state_layout!r}", inputs)
    return bind_rows(
        state_cache, state_indices, inputs.has_initial_state, checkpoint_state_indices, metadata
    )


def bind_rows(
    state_cache: Any,
    state_indices: Any,
    has_initial_state: Any,
    checkpoint_state_indices: Any,
    metadata: ChunkMetadata,
) -> StatePool:
    """The rows of a prefill, checked and complete.

    Raises:
      ValueError: naming the argument and what it should be.
    """
    N, M = metadata.capacity.sequences, metadata.capacity.checkpoints
    if checkpoint_state_indices is None and M:
        raise ValueError(
            f"checkpoint_state_indices is not given, but the metadata has room for {M} "
            "checkpoints: pass a row of state_cache for each, negative to drop it"
        )
    if checkpoint_state_indices is None:
        checkpoint_state_indices = np.zeros(0, np.int32)
    live = read_indices("state_indices", state_indices, (N,), "[N], one per sequence")
    saved = read_indices(
        "checkpoint_state_indices", checkpoint_state_indices, (M,), "[M], one per checkpoint"
    )
    if has_initial_state is None:
        has_initial_state = np.ones(N, np.bool_)
    else:
        validate.check_flags("has_initial_state", has_initial_state, N, "[N], one per sequence")
    check_indices(state_cache.shape[0], live, saved, metadata)
    return StatePool(state_cache, to_int32(live), has_initial_state, to_int32(saved))


def check_states(state_cache: Any, state: tuple[int, ...], axes: str, inputs: KDAInputs) -> None:
    """Refuses a pool whose rows are not states of the shape ``state`` in the compute dtype."""
    if state_cache.ndim != 4 or state_cache.shape[1:] != state:
        want = ", ".join(map(str, ("R", *state)))
        raise ValueError(
            f"state_cache has shape {tuple(state_cache.shape)}, want ({want}): {axes}. Rows lie "
            "one after the other: a pool with padding, or one that shares its rows with other "
            "arrays, must be split first"
        )
    dtype = compute_dtype(inputs)
    if state_cache.dtype != dtype:
        raise ValueError(
            f"state_cache has dtype {state_cache.dtype}, want {dtype}: states are updated where "
            "they lie, in the dtype that they are computed in"
        )


def check_cache(name: str, cache: Any, rows_name: str, rows: Any) -> None:
    """Refuses a pool that cannot be updated where it lies, and one without the other argument."""
    if cache is None or rows is None:
        missing, given = (name, rows_name) if cache is None else (rows_name, name)
        raise ValueError(f"{given} is given without {missing}; pass both")
    if not isinstance(cache, jax.Array):
        raise ValueError(
            f"{name} is a {type(cache).__name__}, want a jax.Array: a pool lies on the device, "
            "contiguous, and is updated there (jnp.asarray makes one)"
        )


def read_indices(name: str, rows: Any, want: tuple[int, ...], axes: str) -> Any:
    """int32 indices of that shape, or a NumPy array of other integers; see `to_int32`."""
    if not isinstance(rows, jax.Array | np.ndarray):
        raise ValueError(f"{name} is a {type(rows).__name__}, want an int32 array {axes}")
    validate.check_shape(name, rows, want, axes)
    if rows.dtype != jnp.int32 and not (isinstance(rows, np.ndarray) and rows.dtype.kind in "iu"):
        raise ValueError(f"{name} has dtype {rows.dtype}, want int32")
    return rows


def to_int32(rows: Any) -> Any:
    """What `read_indices` let pass, as int32; what does not fit stays outside of any pool."""
    if rows.dtype == jnp.int32:
        return rows
    info = np.iinfo(np.int32)
    return np.clip(rows, info.min, info.max).astype(np.int32)


def _signed(rows: np.ndarray) -> np.ndarray:
    """As int64: unsigned integers have no -1."""
    if rows.dtype == np.uint64:
        rows = np.minimum(rows, np.uint64(np.iinfo(np.int64).max))
    return rows.astype(np.int64)


def check_indices(num_rows: int, live: Any, saved: Any, metadata: ChunkMetadata) -> None:
    """`check_rows` for what lies on the host, without what is padding there."""

    def on_host(rows: Any, used: Any) -> Any:
        if not isinstance(rows, np.ndarray):
            return None
        return np.where(used, _signed(rows), -1)

    if metadata.on_host:
        check_rows(
            num_rows,
            on_host(live, metadata.seqs[:, 1] >= 0),
            on_host(saved, metadata.checkpoints[:, 0] >= 0),
        )
