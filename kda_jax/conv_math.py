"""The arithmetic of the short convolution: packed sequences, and one token of each request.

Formula and arguments: conv.py, which checks them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from .metadata import ChunkMetadata


def token_positions(metadata: ChunkMetadata, num_rows: int) -> jax.Array:
    """Position of each packed row inside its sequence, int32 [num_rows]; -1: padding."""
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    if metadata.seqs.shape[0] == 0:
        return jnp.full_like(rows, -1)
    first = jnp.asarray(metadata.seqs)[:, 0]
    end = first + jnp.maximum(jnp.asarray(metadata.seqs)[:, 1], 0)
    # Ends never decrease and an empty sequence ends where it starts, so the first end past a row
    # belongs to the row's sequence.
    sequence = jnp.searchsorted(end, rows, side="right", method="scan_unrolled")
    start = first[jnp.minimum(sequence, end.shape[0] - 1)]
    return jnp.where(sequence < end.shape[0], rows - start, -1)


@functools.partial(jax.jit, static_argnames=("activation",))
def convolve(
    x: jax.Array,
    weight: jax.Array,
    metadata: ChunkMetadata,
    initial_state: jax.Array | None,
    has_initial_state: jax.Array | None,
    *,
    activation: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """y, the final states and the checkpoint states."""
    num_rows, width = x.shape[0], weight.shape[1]
    seqs, checkpoints = jnp.asarray(metadata.seqs), jnp.asarray(metadata.checkpoints)

    state = None
    if initial_state is not None:
        used = seqs[:, 1] >= 0
        if has_initial_state is not None:
            used = used & has_initial_state
        state = jnp.where(used[:, None, None], initial_state, jnp.zeros((), x.dtype))

    final = _window(x, state, seqs, jnp.arange(seqs.shape[0]), seqs[:, 1], width)
    # A padded checkpoint row names sequence -1: read any row, then blank it by the offset.
    offset = jnp.where(checkpoints[:, 0] >= 0, checkpoints[:, 1], -1)
    inside = _window(x, state, seqs, jnp.maximum(checkpoints[:, 0], 0), offset, width)

    position = token_positions(metadata, num_rows)
    rows = [
        jnp.where((position >= lag)[:, None], _shift(x, lag), jnp.zeros((), x.dtype))
        for lag in range(width - 1, -1, -1)
    ]
    y = _weighted_sum(rows, weight, activation)
    if state is not None and width > 1 and num_rows > 0:
        y = _write_heads(y, x, state, weight, seqs, activation)
    return y, final, inside


def _shift(x: jax.Array, lag: int) -> jax.Array:
    """Row t becomes row t - lag; the first `lag` rows are zeros."""
    return jnp.pad(x, ((lag, 0), (0, 0)))[: x.shape[0]]


def _weighted_sum(rows: list[jax.Array], weight: jax.Array, activation: str | None) -> jax.Array:
    """The W rows [..., C] under the taps of one token, oldest first -> that token's output."""
    dtype = jnp.promote_types(rows[0].dtype, jnp.float32)
    total = sum(row.astype(dtype) * weight[:, j].astype(dtype) for j, row in enumerate(rows))
    if activation == "silu":
        total = jax.nn.silu(total)
    return jnp.asarray(total, rows[0].dtype)


def _write_heads(
    y: jax.Array,
    x: jax.Array,
    state: jax.Array,
    weight: jax.Array,
    seqs: jax.Array,
    activation: str | None,
) -> jax.Array:
    """Overwrite the first W-1 outputs of each sequence: the only ones that see its old state.

    Working on N * (W-1) rows instead of selecting among T rows keeps the cost of a state off the
    long dimension.
    """
    num_rows, reach = x.shape[0], weight.shape[1] - 1
    first, length = seqs[:, 0:1], seqs[:, 1:2]
    step = jnp.arange(reach)[None, :]
    index = first + step
    head = x[jnp.minimum(index, num_rows - 1)]
    window = jnp.concatenate([state.swapaxes(1, 2), head], axis=1)  # [N, 2 (W-1), C]
    out = _weighted_sum([window[:, j : j + reach] for j in range(reach + 1)], weight, activation)
    # A short sequence has fewer rows than that: what lies past its end goes out of range.
    index = jnp.where(step < length, index, num_rows)
    return y.at[index.reshape(-1)].set(out.reshape(-1, out.shape[-1]), mode="drop")


def _window(
    x: jax.Array,
    state: jax.Array | None,
    seqs: jax.Array,
    sequence: jax.Array,
    offset: jax.Array,
    width: int,
) -> jax.Array:
    """The W-1 raw rows before token `offset` of each named sequence: [R, C, W-1]; offset -1: 0."""
    rows, channels, reach = sequence.shape[0], x.shape[1], width - 1
    if rows == 0 or seqs.shape[0] == 0 or reach == 0:
        return jnp.zeros((rows, channels, reach), x.dtype)
    zero = jnp.zeros((), x.dtype)
    source = x if x.shape[0] else jnp.zeros((1, channels), x.dtype)
    token = offset[:, None] - reach + jnp.arange(reach)[None, :]  # [R, W-1], negative: old rows
    index = jnp.clip(seqs[sequence, 0][:, None] + token, 0, source.shape[0] - 1)
    taken = source[index].swapaxes(1, 2)
    old = zero
    if state is not None:
        column = jnp.clip(token + reach, 0, reach - 1)
        old = jnp.take_along_axis(state[sequence], column[:, None, :], axis=2)
    window = jnp.where((token >= 0)[:, None, :], taken, old)
    return jnp.where((offset >= 0)[:, None, None], window, zero)


def step(
    x: jax.Array, weight: jax.Array, state: jax.Array, active: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """y and the new state."""
    window = jnp.concatenate([state, x[..., None]], axis=2)
    y = _weighted_sum([window[..., j] for j in range(weight.shape[1])], weight, "silu")
    after = window[..., 1:]
    return y, after if active is None else jnp.where(active[:, None, None], after, state)
