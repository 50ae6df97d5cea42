"""What a model keeps of its requests: one row each, of every layer.

A checkpoint inside a prompt is complete with the recurrent state and the convolution's window of
the KDA layers and with the number of rows that count in the MLA layers' caches: those only grow, so
that a prefix of them is the cache of a prefix.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..layer_types import KDAState
from .config import ModelConfig, check_x64
from .mla import MLACache, MLAPages

LayerState = KDAState | MLACache | MLAPages
_ROUND = 64
LOST = 1 << 30  # past the end of every cache, and as far from int32's


class ModelCache(NamedTuple):
    """layers: per layer, KDAState or MLACache with N rows. length: int32 [N], tokens so far.

    A request that had a token outside the vocabulary, or one past the end of its cache, has the
    length `LOST` (2**30), however it goes on: all logits after that token are NaN. Its row can be
    used again, from length 0.
    """

    layers: tuple[LayerState, ...]
    length: jax.Array


class Checkpoints(NamedTuple):
    """The states of the KDA layers at the M checkpoints of a prefill, and what names them.

    layers: per layer, KDAState with M rows; None for an MLA layer. sequence: int32 [M], the row of
    the prefill's cache; length: int32 [M], tokens up to the checkpoint, or as in `ModelCache`. Rows
    of padding: -1 and 0.
    """

    layers: tuple[KDAState | None, ...]
    sequence: jax.Array
    length: jax.Array


def empty_cache(
    config: ModelConfig, sequences: int, max_length: int, *, heads: int | None = None
) -> ModelCache:
    """A cache of zeros for `sequences` requests of up to `max_length` tokens.

    max_length is rounded up to a multiple of 64 (the MLA caches' block). heads: of the KDA layers,
    where a device holds fewer than all.

    Raises:
      ValueError: sequences or max_length is below 1, or the dtype needs jax_enable_x64.
      TypeError: config is no `ModelConfig`, or a number no integer.
    """
    if not isinstance(config, ModelConfig):
        raise TypeError(
            f"config is a {type(config).__name__}, want a ModelConfig: model.config, or"
            " from_config(the dict in a config.json)"
        )
    sizes = {"sequences": sequences, "max_length": max_length}
    for name, value in (sizes if heads is None else sizes | {"heads": heads}).items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{name} is {value!r}, want an integer")
        if value < 1:
            raise ValueError(f"{name} is {value}, want at least 1")
    check_x64(config.dtype)
    room = -(-max_length // _ROUND) * _ROUND
    dtype = jnp.dtype(config.dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    heads = config.linear_num_heads if heads is None else heads
    D, reach = config.linear_head_dim, config.short_conv_kernel_size - 1

    def layer(index: int) -> LayerState:
        if config.is_full_attention(index):
            width = config.kv_lora_rank + config.qk_rope_head_dim
            return MLACache(jnp.zeros((sequences, room, width), dtype))
        return KDAState(
            recurrent=jnp.zeros((sequences, heads, D, D), wide),
            conv=jnp.zeros((sequences, 3 * heads * D, reach), dtype),
        )

    layers = tuple(layer(i) for i in range(config.num_hidden_layers))
    return ModelCache(layers, jnp.zeros((sequences,), jnp.int32))


def take_rows(cache: ModelCache, rows: jax.Array) -> ModelCache:
    """The cache of the requests in `rows`, int [R]."""
    return jax.tree.map(lambda x: x[rows], cache)


def put_rows(cache: ModelCache, rows: jax.Array, part: ModelCache) -> ModelCache:
    """`cache` with `part` in its rows; a row past the last is dropped."""
    return jax.tree.map(lambda x, p: x.at[rows].set(p, mode="drop"), cache, part)


def resume(cache: ModelCache, checkpoints: Checkpoints, row: int) -> ModelCache:
    """A cache of one request that goes on from checkpoint `row`.

    Args:
      cache: the one that the prefill returned, or a later one of the same requests.
      checkpoints: what it returned beside.
      row: which of them, from 0; not a row of padding.

    Raises:
      ValueError: there is no such checkpoint.
    """
    count = checkpoints.sequence.shape[0]
    if not 0 <= row < count:
        raise ValueError(f"row is {row}, want 0 to {count - 1}: there are {count} checkpoints")
    if not isinstance(checkpoints.sequence, jax.core.Tracer) and checkpoints.sequence[row] < 0:
        raise ValueError(f"row is {row}, which is padding: no sequence has this checkpoint")
    sequence = checkpoints.sequence[row]

    def layer(state: LayerState, saved: KDAState | None) -> LayerState:
        source, index = (state, sequence) if saved is None else (saved, row)
        return jax.tree.map(lambda x: x[index][None], source)

    layers = tuple(map(layer, cache.layers, checkpoints.layers))
    return ModelCache(layers, checkpoints.length[row][None])
