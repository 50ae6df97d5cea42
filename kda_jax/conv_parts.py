"""Short convolutions of several arrays that share their sequences, as q, k and v do.

Formula, states and borders: conv.py. The states of the parts lie side by side, in order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .conv_checks import check_conv_cache, check_parts, check_prefill
from .conv_kernel import ConvInputs, convolve_parts
from .metadata import ChunkMetadata
from .pool import around_rows
from .pool_arguments import bind_rows
from .types import StatePool

Arrays = tuple[jax.Array, ...]


class ConvPartsResult(NamedTuple):
    """ys, a [T, C] of each part; of the other two the channels of all parts, side by side."""

    ys: Arrays
    final_state: jax.Array
    checkpoint_state: jax.Array


class ConvPartsPoolResult(NamedTuple):
    """ys, a [T, C] of each part; state_cache: the pool after the call."""

    ys: Arrays
    state_cache: jax.Array


def causal_conv1d_parts(
    xs: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    metadata: ChunkMetadata,
    *,
    initial_state: jax.Array | None = None,
    has_initial_state: jax.Array | None = None,
    activation: str | None = "silu",
) -> ConvPartsResult:
    """`kda_jax.conv.causal_conv1d` of each part; on a GPU one call for up to three of them.

    Args:
      xs: the x of each part, [T, C], in one dtype.
      weights: the weight of each part, [C, W], of one W.
      initial_state: [N, C, W-1], C the channels of all parts in order.
      metadata, has_initial_state, activation: as there.

    Returns:
      ConvPartsResult.

    Raises:
      ValueError: a wrong shape or dtype, naming the argument and what it should be.
    """
    xs, weights = tuple(xs), tuple(weights)
    channels, width = check_parts(xs, weights)
    check_prefill(xs[0], channels, width, metadata, initial_state, has_initial_state, activation)
    if has_initial_state is not None and initial_state is None:
        raise ValueError("has_initial_state is given without initial_state: pass both or neither")
    ys, final, inside = _convolve(
        xs, weights, metadata, initial_state, has_initial_state, activation=activation
    )
    return ConvPartsResult(ys, final, inside)


def causal_conv1d_parts_in_pool(
    xs: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    metadata: ChunkMetadata,
    *,
    state_cache: Any,
    state_indices: Any,
    has_initial_state: jax.Array | None = None,
    checkpoint_state_indices: Any = None,
    first_channel: int = 0,
    activation: str | None = "silu",
) -> ConvPartsPoolResult:
    """`causal_conv1d_parts` with its states in a pool.

    Args:
      xs, weights, metadata: as there.
      state_cache: a pool of windows [R, C', S], of which the channels of all parts, in order, begin
        at first_channel.
      state_indices, checkpoint_state_indices, has_initial_state, activation: as in
        `kda_jax.conv.causal_conv1d`.

    Returns:
      ConvPartsPoolResult.

    Raises:
      ValueError: a wrong shape or dtype, naming the argument and what it should be.
    """
    xs, weights = tuple(xs), tuple(weights)
    channels, width = check_parts(xs, weights)
    check_prefill(xs[0], channels, width, metadata, None, has_initial_state, activation)
    check_conv_cache(state_cache, state_indices, xs[0].dtype, (channels, width), first_channel)
    pool = bind_rows(
        state_cache, state_indices, has_initial_state, checkpoint_state_indices, metadata
    )
    ys, cache = _convolve_in_pool(
        xs, weights, metadata, pool, first_channel=first_channel, activation=activation
    )
    return ConvPartsPoolResult(ys, cache)


@functools.partial(jax.jit, static_argnames="activation")
def _convolve(
    xs: Arrays,
    weights: Arrays,
    metadata: ChunkMetadata,
    state: jax.Array | None,
    has: jax.Array | None,
    *,
    activation: str | None,
) -> tuple[Arrays, jax.Array, jax.Array]:
    states = None
    if state is not None:
        borders = itertools.accumulate(x.shape[1] for x in xs[:-1])
        states = tuple(jnp.split(state, list(borders), axis=1))
    inputs = ConvInputs(xs, weights, states, has)
    ys, finals, insides = convolve_parts(inputs, metadata, activation=activation)
    return ys, _together(finals), _together(insides)


def _together(parts: Arrays) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


@functools.partial(jax.jit, static_argnames=("first_channel", "activation"))
def _convolve_in_pool(
    xs: Arrays,
    weights: Arrays,
    metadata: ChunkMetadata,
    pool: StatePool,
    *,
    first_channel: int,
    activation: str | None,
) -> tuple[Arrays, jax.Array]:
    channels, reach = sum(x.shape[1] for x in xs), weights[0].shape[1] - 1
    run = functools.partial(_convolve, xs, weights, metadata, activation=activation)
    within = slice(first_channel, first_channel + channels), slice(0, reach)
    return around_rows(run, pool, metadata, *within)
