"""What the short convolutions check of their arguments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .metadata import ChunkMetadata
from .pool_arguments import check_cache
from .validate import check_flags


def check_parts(xs: tuple[jax.Array, ...], weights: tuple[jax.Array, ...]) -> tuple[int, int]:
    """The channels of all parts together, and the width."""
    if not xs or len(xs) != len(weights):
        raise ValueError(
            f"xs has {len(xs)} arrays, weights {len(weights)}: want sequences of arrays, a weight"
            " for each x"
        )
    for i, (x, weight) in enumerate(zip(xs, weights, strict=True)):
        which = "" if len(xs) == 1 else f"s[{i}]"
        check_weight(x, weight, "[T, C]", f"x{which}", f"weight{which}")
        want, width = (xs[0].shape[0], xs[0].dtype), weights[0].shape[1]
        if (x.shape[0], x.dtype) != want:
            raise ValueError(
                f"xs[{i}] is {x.dtype} with {x.shape[0]} rows, want {want[1]} with {want[0]}, as"
                " xs[0]"
            )
        if weight.shape[1] != width:
            have = weight.shape[1]
            raise ValueError(f"weights[{i}] has width {have}, want {width}, as weights[0]")
    return sum(x.shape[1] for x in xs), weights[0].shape[1]


def check_prefill(
    x: jax.Array,
    channels: int,
    width: int,
    metadata: ChunkMetadata,
    initial_state: jax.Array | None,
    has_initial_state: jax.Array | None,
    activation: str | None,
) -> None:
    if activation not in ("silu", None):
        raise ValueError(f"activation is {activation!r}, want 'silu' or None")
    if not isinstance(metadata, ChunkMetadata):
        raise ValueError(
            f"metadata is a {type(metadata).__name__}, want a ChunkMetadata:"
            " build one with ChunkMetadata.from_seq_lens"
        )
    if x.shape[0] < metadata.capacity.tokens:
        raise ValueError(
            f"x has {x.shape[0]} rows, metadata has room for {metadata.capacity.tokens}:"
            " pad x with metadata.pad_tokens(x, 0)"
        )
    sequences = metadata.capacity.sequences
    if initial_state is not None:
        want_shape = (sequences, channels, width - 1)
        if initial_state.shape != want_shape:
            raise ValueError(
                f"initial_state has shape {initial_state.shape}, want {want_shape}:"
                " [sequences, channels, W - 1]"
            )
        if initial_state.dtype != x.dtype:
            raise ValueError(
                f"initial_state is {initial_state.dtype}, x is {x.dtype}: the state holds rows"
                " of x, pass it in x's dtype"
            )
    if has_initial_state is not None:
        check_flags("has_initial_state", has_initial_state, sequences, "[N], one per sequence")


def check_conv_cache(
    state_cache: Any,
    state_indices: Any,
    dtype: Any,
    weight_shape: tuple[int, ...],
    first_channel: int,
) -> None:
    check_cache("state_cache", state_cache, "state_indices", state_indices)
    channels, width = weight_shape
    integer = isinstance(first_channel, int | np.integer) and not isinstance(first_channel, bool)
    if not integer or first_channel < 0:
        raise ValueError(f"first_channel is {first_channel!r}, want an integer of at least 0")
    shape = tuple(state_cache.shape)
    if len(shape) != 3 or shape[1] < first_channel + channels or shape[2] < width - 1:
        raise ValueError(
            f"state_cache has shape {shape}, want at least (R, {first_channel + channels}, "
            f"{width - 1}): [rows, channels up to the last of x, W - 1]"
        )
    if state_cache.dtype != dtype:
        raise ValueError(
            f"state_cache is {state_cache.dtype}, x is {dtype}: the pool holds rows of x, keep it"
            " in x's dtype"
        )


def check_no_channel(first_channel: int) -> None:
    if first_channel != 0:
        raise ValueError(
            f"first_channel is {first_channel!r} without state_cache, of which it is one; pass both"
        )


def check_weight(
    x: jax.Array, weight: jax.Array, axes: str, x_name: str = "x", weight_name: str = "weight"
) -> None:
    for name, array, want in ((x_name, x, axes), (weight_name, weight, "[C, W]")):
        if array.ndim != 2:
            raise ValueError(f"{name} has shape {array.shape}, want {want}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} is {array.dtype}, want a floating dtype")
    if weight.shape[0] != x.shape[1] or weight.shape[1] == 0:
        raise ValueError(
            f"{weight_name} has shape {weight.shape}, want ({x.shape[1]}, W): one row per channel"
            f" of {x_name}"
        )
