"""One step on the device: decode rows and packed parts of prompts, sampled tokens out.

All that requests keep lies in pools that the step is given and gives back (donated): a row of the
KDA layers' states for each request and each checkpoint, and pages of the MLA layers' rows. Nothing
here is read by the host but the sampled tokens, and decode rows take their last token from the
device, so that a step can be submitted before the one before it has ended.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..grid import Array
from ..layer_types import KDAState
from ..metadata import ChunkMetadata
from ..models.batch import Batch
from ..models.cache import LayerState, ModelCache
from ..models.config import ModelConfig
from ..models.decoder import LanguageModel, forward
from ..models.mla import MLAPages
from .engine_config import EngineConfig, PoolSizes
from .sampling import Sampling, sample_rows


class DeviceState(NamedTuple):
    """layers: per layer, KDAState with a row of the pool each, or MLAPages.

    tokens: int32 [max_requests], the last token of the request in each slot.
    """

    layers: tuple[LayerState, ...]
    tokens: jax.Array


class PrefillInputs(NamedTuple):
    """tokens: int32 [T]. metadata: of N parts and M checkpoints. Of the parts, int32 [N]:

    start: tokens before. source: the row with the states after these. row: where the states after
    the part go. slot: where the sampled token goes. table: int32 [N, W]. checkpoint_row: int32 [M].
    A row or slot past the last is nowhere.
    """

    tokens: Array
    metadata: ChunkMetadata
    start: Array
    source: Array
    row: Array
    slot: Array
    table: Array
    checkpoint_row: Array


class DecodeInputs(NamedTuple):
    """Of D rows, int32 [D]: start, row, slot as in `PrefillInputs`; active: bool [D];

    table: int32 [D, W].
    """

    start: Array
    row: Array
    slot: Array
    active: Array
    table: Array


def empty_state(config: EngineConfig, sizes: PoolSizes, model: ModelConfig) -> DeviceState:
    """Pools of zeros."""
    spec = sizes.spec
    width = model.kv_lora_rank + model.qk_rope_head_dim

    def layer(index: int) -> LayerState:
        if model.is_full_attention(index):
            return MLAPages(jnp.zeros((sizes.blocks, config.block_size, width), model.dtype))
        return KDAState(
            recurrent=jnp.zeros((sizes.rows, *spec.state_shape), spec.state_dtype),
            conv=jnp.zeros((sizes.rows, *spec.conv_shape), spec.conv_dtype),
        )

    layers = tuple(layer(i) for i in range(model.num_hidden_layers))
    return DeviceState(layers, jnp.zeros((config.max_requests,), jnp.int32))


@functools.partial(jax.jit, static_argnames=("backend",), donate_argnames=("state",))
def run_step(
    model: LanguageModel,
    state: DeviceState,
    prefill: PrefillInputs | None,
    decode: DecodeInputs | None,
    sampling: Sampling,
    *,
    backend: str,
) -> tuple[jax.Array, DeviceState]:
    """Runs D decode rows, then N parts of prompts; either may be missing.

    Args:
      model: the weights.
      state: donated; use the one that comes back.
      prefill, decode: the rows.
      sampling: of D + N rows.
      backend: of the operator.

    Returns:
      The sampled tokens, int32 [D + N], those of inactive rows and of rows of padding without a
      meaning, and the state after the step.
    """
    batch, tokens, slots = Batch(), [], []
    running = prefilled = None
    if decode is not None:
        batch = _with(batch, active=decode.active, decode_start=decode.start)
        batch = _with(batch, decode_table=decode.table)
        tokens.append(state.tokens.at[decode.slot].get(mode="fill", fill_value=0))
        slots.append(jnp.where(decode.active, decode.slot, state.tokens.shape[0]))
        layers = _take(state.layers, decode.row, pages=prefill is None)
        running = ModelCache(layers, decode.start)
    if prefill is not None:
        batch = _with(batch, metadata=prefill.metadata, start=prefill.start, table=prefill.table)
        tokens.append(prefill.tokens)
        slots.append(prefill.slot)
        prefilled = ModelCache(_take(state.layers, prefill.source, pages=True), prefill.start)
    out, prefilled, running = forward(
        model, jnp.concatenate(tokens), batch, prefilled, running, backend=backend
    )
    layers = state.layers
    if decode is not None and running is not None:
        row = jnp.where(decode.active, decode.row, _NOWHERE)
        layers = _put(layers, row, running.layers)
    if prefill is not None and prefilled is not None and out.checkpoints is not None:
        layers = _put(layers, prefill.row, prefilled.layers)
        layers = _put(layers, prefill.checkpoint_row, out.checkpoints.layers)
    sampled = sample_rows(out.logits, sampling)
    last = state.tokens.at[jnp.concatenate(slots)].set(sampled, mode="drop")
    return sampled, DeviceState(layers, last)


_NOWHERE = 2**31 - 1


def _with(batch: Batch, **changes: jax.Array) -> Batch:
    return dataclasses.replace(batch, **changes)


def _take(layers: tuple[LayerState, ...], rows: jax.Array, pages: bool) -> tuple:
    """The states in these rows of the pools; the pages, all of them, or not."""

    def take(layer: LayerState) -> LayerState | None:
        if isinstance(layer, KDAState):
            return jax.tree.map(lambda pool: pool.at[rows].get(mode="clip"), layer)
        return layer if pages else None

    return tuple(map(take, layers))


def _put(layers: tuple[LayerState, ...], rows: jax.Array, after: tuple) -> tuple[LayerState, ...]:
    """The pools with these states in their rows; the pages after the step."""

    def put(layer: LayerState, new: LayerState | None) -> LayerState:
        if new is None:
            return layer
        if not isinstance(layer, KDAState):
            return new
        return jax.tree.map(
            lambda pool, x: pool.at[rows].set(x.astype(pool.dtype), mode="drop"), layer, new
        )

    return tuple(map(put, layers, after))
