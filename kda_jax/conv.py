"""The short causal convolution in front of the operator, over a packed batch.

Each of q, k and v of a KDA layer passes a depthwise causal convolution of width W (4 in every
released model) and silu. Per channel c and token t of one sequence:

    y[t] = silu(sum_j weight[c, j] * x[t - (W - 1) + j])        j = 0 .. W-1

Rows before the sequence's first token come from its state, the last W-1 *raw* rows (before the
convolution), or are zeros. Sequence borders are int32 arrays of ChunkMetadata, so the lengths may
change from step to step without a retrace; nothing here reads a device value. On a GPU with the
native library bfloat16 and float16 prefills of width 4 are a kernel's (conv_kernel.py); the rest is
plain JAX.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, overload

import jax

from .conv_checks import check_conv_cache, check_no_channel, check_weight
from .conv_math import step, token_positions
from .conv_parts import causal_conv1d_parts, causal_conv1d_parts_in_pool
from .metadata import ChunkMetadata
from .pool import StepPool
from .pool_arguments import bind_step_rows
from .validate import check_flags

__all__ = [
    "ConvPoolResult",
    "ConvResult",
    "causal_conv1d",
    "causal_conv1d_parts",
    "causal_conv1d_parts_in_pool",
    "causal_conv1d_step",
    "token_positions",
]


class ConvResult(NamedTuple):
    """y [T, C]; final_state [N, C, W-1]; checkpoint_state [M, C, W-1]; all in x's dtype."""

    y: jax.Array
    final_state: jax.Array
    checkpoint_state: jax.Array


class ConvPoolResult(NamedTuple):
    """y [T, C]; state_cache: the pool after the call, what it does not write as it was."""

    y: jax.Array
    state_cache: jax.Array


@overload
def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    metadata: ChunkMetadata,
    *,
    initial_state: jax.Array | None = None,
    has_initial_state: jax.Array | None = None,
    activation: str | None = "silu",
) -> ConvResult: ...
@overload
def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    metadata: ChunkMetadata,
    *,
    has_initial_state: jax.Array | None = None,
    state_cache: jax.Array,
    state_indices: Any,
    checkpoint_state_indices: Any = None,
    first_channel: int = 0,
    activation: str | None = "silu",
) -> ConvPoolResult: ...
def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    metadata: ChunkMetadata,
    *,
    initial_state: jax.Array | None = None,
    has_initial_state: jax.Array | None = None,
    state_cache: jax.Array | None = None,
    state_indices: Any = None,
    checkpoint_state_indices: Any = None,
    first_channel: int = 0,
    activation: str | None = "silu",
) -> ConvResult | ConvPoolResult:
    """Depthwise causal convolution of packed sequences, with states at the end and inside.

    Args:
      x: [T, C], floating, T >= metadata's token capacity. Rows outside every sequence may hold
        anything; their rows of y are zeros.
      weight: [C, W], floating; column W-1 multiplies the token itself.
      metadata: borders and checkpoints of the N = capacity.sequences sequences.
      initial_state: [N, C, W-1] in x's dtype, oldest row first. None: zeros.
      has_initial_state: bool [N]; a False row starts from zeros, whatever its state holds. None:
        every row has one if initial_state is given.
      state_cache: instead of initial_state, a pool of windows [R, C', S] in x's dtype: channels
        first_channel .. first_channel + C - 1 and columns 0 .. W-2 of a row are its window. Other
        channels (of other convolutions) and columns (of drafted tokens) stay as they are.
      state_indices, checkpoint_state_indices: int32 [N] and [M], rows of the pool; what they mean,
        and how a pool is donated, is said at `kda_jax.chunk_kda_prefill`.
      activation: "silu" or None.

    Returns:
      ConvResult. y is accumulated in float32 (float64 for a float64 x). final_state holds the last
      W-1 raw rows of each sequence, checkpoint_state those before each checkpoint's offset, which
      is what final_state would be if the sequence ended there. A sequence shorter than W-1 shifts
      its old state. Rows of padding are zeros. With state_cache ConvPoolResult.

    Raises:
      ValueError: a wrong shape or dtype, naming the argument and what it should be.
    """
    if state_cache is None and state_indices is None:
        if checkpoint_state_indices is not None:
            raise ValueError("checkpoint_state_indices is given without state_cache; pass both")
        check_no_channel(first_channel)
        (y,), final, inside = causal_conv1d_parts(
            (x,),
            (weight,),
            metadata,
            initial_state=initial_state,
            has_initial_state=has_initial_state,
            activation=activation,
        )
        return ConvResult(y, final, inside)
    if initial_state is not None:
        raise ValueError("initial_state and state_cache are both given: want one of them")
    (y,), pool = causal_conv1d_parts_in_pool(
        (x,),
        (weight,),
        metadata,
        state_cache=state_cache,
        state_indices=state_indices,
        has_initial_state=has_initial_state,
        checkpoint_state_indices=checkpoint_state_indices,
        first_channel=first_channel,
        activation=activation,
    )
    return ConvPoolResult(y, pool)


def causal_conv1d_step(
    x: jax.Array,
    weight: jax.Array,
    state: jax.Array | None = None,
    *,
    active: jax.Array | None = None,
    state_cache: jax.Array | None = None,
    state_indices: Any = None,
    has_initial_state: jax.Array | None = None,
    first_channel: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """`causal_conv1d` with silu for one token of each request.

    Args:
      x: [R, C]. weight: [C, W]. state: [R, C, W-1] in x's dtype, oldest row first.
      active: bool [R]; a False row keeps its state (its y means nothing). None: all.
      state_cache: instead of state, a pool as in `causal_conv1d`, with first_channel.
      state_indices: int32 [R], the row of each request. Negative: it starts from zeros, and
        nothing is written.
      has_initial_state: bool [R], with state_cache only: a False row starts from zeros. None: all
        have one.

    Returns:
      y [R, C] in x's dtype, and the new state, or the pool after the step.

    Raises:
      ValueError: a wrong shape or dtype, naming the argument and what it should be; or state and
        state_cache are both given.
    """
    check_weight(x, weight, "[R, C]")
    if active is not None:
        check_flags("active", active, x.shape[0], "[R], one per row")
    if state_cache is None and state_indices is None:
        if has_initial_state is not None:
            raise ValueError("has_initial_state is given without state_cache; pass both")
        check_no_channel(first_channel)
        want = (*x.shape, weight.shape[1] - 1)
        if state is None or state.shape != want or state.dtype != x.dtype:
            have = None if state is None else f"{state.dtype} {state.shape}"
            raise ValueError(f"state is {have}, want {x.dtype} {want}: [rows, channels, W - 1]")
        return step(x, weight, state, active)
    if state is not None:
        raise ValueError("state and state_cache are both given: want one of them")
    check_conv_cache(state_cache, state_indices, x.dtype, weight.shape, first_channel)
    rows = bind_step_rows(state_cache, state_indices, has_initial_state, active, x.shape[0])
    return _step_in_pool(x, weight, rows, first_channel=first_channel)


@functools.partial(jax.jit, static_argnames=("first_channel",))
def _step_in_pool(
    x: jax.Array, weight: jax.Array, pool: StepPool, *, first_channel: int
) -> tuple[jax.Array, jax.Array]:
    within = slice(first_channel, first_channel + x.shape[1]), slice(0, weight.shape[1] - 1)
    y, after = step(x, weight, pool.read(*within), None)
    return y, pool.write(after, *within)
