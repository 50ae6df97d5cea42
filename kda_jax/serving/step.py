"""One step on the device: decode rows and packed parts of prompts, sampled tokens out.

All that requests keep lies in pools that the step is given and gives back (donated): a row of the
KDA layers' states for each request and each checkpoint, and pages of the MLA layers' rows. Nothing
here is read by the host but the sampled tokens, and decode rows take their last token from the
device, so that a step can be submitted before the one before it has ended.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..layer_types import KDAState
from ..metadata import ChunkMetadata
from ..models.batch import Batch
from ..models.cache import LayerState
from ..models.config import ModelConfig
from ..models.decoder import LanguageModel, forward_in_pools
from ..models.mla import MLAPages
from ..pool_rows import StepRows
from .engine_config import EngineConfig, PoolSizes
from .sampling import Sampling, sample_rows

Array = Any  # NumPy on the host, traced in the step


class DeviceState(NamedTuple):
    """layers: per layer, KDAState with a row of the pool each, or MLAPages.

    tokens: int32 [max_requests], the last token of the request in each slot.
    """

    layers: tuple[LayerState, ...]
    tokens: jax.Array


class PrefillInputs(NamedTuple):
    """tokens: int32 [T]. metadata: of N parts and M checkpoints. rows: of the KDA pools. Of parts:

    start: int32 [N], tokens before. slot: int32 [N], where the sampled token goes; past the last:
    nowhere. table: int32 [N, W], MLA pages.
    """

    tokens: Array
    metadata: ChunkMetadata
    rows: StepRows
    start: Array
    slot: Array
    table: Array


class DecodeInputs(NamedTuple):
    """Of D rows: start, row, slot: int32 [D]; active: bool [D]; table: int32 [D, W]."""

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
      The sampled tokens, int32 [D + N], without a meaning in idle rows and in rows of padding, and
      the state after the step.
    """
    slots, tokens, parts = state.tokens.shape[0], [], []
    batch = Batch()
    if decode is not None:
        batch = Batch(
            active=decode.active,
            decode_start=decode.start,
            decode_rows=decode.row,
            decode_table=decode.table,
        )
        tokens.append(state.tokens.at[decode.slot].get(mode="clip"))
        parts.append(jnp.where(decode.active, decode.slot, slots))
    if prefill is not None:
        batch = dataclasses.replace(
            batch,
            metadata=prefill.metadata,
            start=prefill.start,
            rows=prefill.rows,
            table=prefill.table,
        )
        tokens.append(prefill.tokens)
        parts.append(prefill.slot)
    logits, layers = forward_in_pools(
        model, jnp.concatenate(tokens), batch, state.layers, backend=backend
    )
    sampled = sample_rows(logits, sampling)
    last = state.tokens.at[jnp.concatenate(parts)].set(sampled, mode="drop")
    return sampled, DeviceState(layers, last)


@functools.partial(jax.jit, donate_argnames=("state",))
def copy_rows(state: DeviceState, source: jax.Array, destination: jax.Array) -> DeviceState:
    """Copies rows of the KDA pools, int32 [N] each; a destination past the last is nowhere.

    A request that starts from a checkpoint gets a copy, for its steps change the row and other
    requests may start from it, too.
    """

    def copy(layer: LayerState) -> LayerState:
        if not isinstance(layer, KDAState):
            return layer
        return jax.tree.map(
            lambda pool: pool.at[destination].set(pool.at[source].get(mode="clip"), mode="drop"),
            layer,
        )

    return state._replace(layers=tuple(map(copy, state.layers)))
