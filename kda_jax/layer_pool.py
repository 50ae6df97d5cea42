"""A KDA layer's step in a state pool: what serving runs.

The layer's arithmetic is `KimiDeltaAttention`'s; the states stay where they are. All requests and
all checkpoints have a row of the pool, and a step reads and writes the rows that it is given.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .conv import causal_conv1d_parts_in_pool, causal_conv1d_step
from .decode import kda_decode_step
from .layer import KimiDeltaAttention, OpInputs, Projected
from .layer_types import KDAState
from .metadata import ChunkMetadata
from .ops import chunk_kda_prefill
from .pool_rows import StepRows


def step_in_pool(
    layer: KimiDeltaAttention,
    x: jax.Array,
    pool: KDAState,
    metadata: ChunkMetadata | None,
    rows: StepRows | None,
    decode_rows: jax.Array | None,
    *,
    active: jax.Array | None = None,
    backend: str | None = None,
) -> tuple[jax.Array, KDAState]:
    """Decode rows first, then a packed prefill; either part may be missing.

    Args:
      layer: the weights.
      x: [D + T, hidden] in the layer's dtype, zeros in padded rows of the prefill.
      pool: recurrent [P, H, V, K] and conv [P, 3 * H * K, W - 1]; donate it to the jitted step.
      metadata: of the last T rows; None: there are none.
      rows: of the pool, for the prefill's N sequences and M checkpoints: `step_rows`.
      decode_rows: int32 [D], the row of each of the first D tokens; negative: none. None: there are
        no such tokens. No row of the prefill may be among them.
      active: bool [D]; a False row keeps its state. None: all.
      backend: of the prefill; None is the layer's.

    Returns:
      y [D + T, hidden], and the pool after the step.

    Raises:
      ValueError, NotImplementedError: as chunk_kda_prefill and causal_conv1d do.
    """
    if metadata is None and decode_rows is None:
        raise ValueError(
            "metadata and decode_rows are both None: want a prefill, decode rows or both"
        )
    D = 0 if decode_rows is None else decode_rows.shape[0]
    raw = layer.project(x)
    out = []
    if decode_rows is not None:
        o, pool = _decode(layer, jax.tree.map(lambda r: r[:D], raw), pool, decode_rows, active)
        out.append(o)
    if metadata is not None:
        if rows is None:
            raise ValueError("rows is None with metadata given; want the StepRows of the prefill")
        packed = jax.tree.map(lambda r: r[D:], raw)
        o, pool = _prefill(layer, packed, pool, metadata, rows, backend)
        out.append(o)
    o = out[0] if len(out) == 1 else jnp.concatenate(out)
    return layer.o_proj(layer.gated_norm(o, x)), pool


def _decode(
    layer: KimiDeltaAttention,
    raw: Projected,
    pool: KDAState,
    rows: jax.Array,
    active: jax.Array | None,
) -> tuple[jax.Array, KDAState]:
    shape = (raw.raw_g.shape[0], -1, layer.config.head_dim)
    convolved, conv = [], pool.conv
    for part, (x, weight) in enumerate(zip(raw.qkv, layer.conv_weights(), strict=True)):
        y, conv = causal_conv1d_step(
            x,
            weight,
            active=active,
            state_cache=conv,
            state_indices=rows,
            first_channel=part * x.shape[1],
        )
        convolved.append(y.reshape(shape))
    q, k, v = convolved
    o, recurrent = kda_decode_step(
        *OpInputs(q, k, v, raw.raw_g.reshape(shape), raw.raw_beta),
        layer.A_log[...],
        layer.dt_bias_by_head(),
        active=active,
        state_cache=pool.recurrent,
        state_indices=rows,
        lower_bound=layer.config.lower_bound,
    )
    return o, KDAState(recurrent, conv)


def _prefill(
    layer: KimiDeltaAttention,
    raw: Projected,
    pool: KDAState,
    metadata: ChunkMetadata,
    rows: StepRows,
    backend: str | None,
) -> tuple[jax.Array, KDAState]:
    result = causal_conv1d_parts_in_pool(
        raw.qkv, layer.conv_weights(), metadata, state_cache=pool.conv, **rows._asdict()
    )
    shape = 1, raw.raw_g.shape[0], -1, layer.config.head_dim
    q, k, v = (y.reshape(shape) for y in result.ys)
    done = chunk_kda_prefill(
        *OpInputs(q, k, v, raw.raw_g.reshape(q.shape), raw.raw_beta[None]),
        layer.A_log[...],
        layer.dt_bias_by_head(),
        metadata=metadata,
        state_cache=pool.recurrent,
        lower_bound=layer.config.lower_bound,
        backend=layer.config.backend if backend is None else backend,
        **rows._asdict(),
    )
    return done.out[0], KDAState(done.state_cache, result.state_cache)
