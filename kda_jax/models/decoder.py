"""The two sublayers of every layer, and what the models share around them.

Each sublayer is jitted on its own: layers of one kind have equal shapes, so a deep model is traced
and lowered once per kind of layer, and XLA inlines the calls.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ..layer import KimiDeltaAttention
from ..layer_pool import step_in_pool
from ..layer_types import KDACache, KDAState
from .batch import Axes, Batch
from .cache import Checkpoints, LayerState, ModelCache
from .config import ModelConfig, check_x64
from .limits import Lost, find_lost
from .mla import MLA, MLACache, MLAPages
from .mlp import MLP
from .moe import MoE
from .norm import RMSNorm
from .vocab import Vocab


class Attended(NamedTuple):
    """What the attention of one layer returns."""

    y: jax.Array
    prefill: LayerState | None
    checkpoint: KDAState | None
    decode: LayerState | None


class States(NamedTuple):
    """What all layers return beside their outputs, one entry per layer."""

    prefill: tuple[LayerState | None, ...]
    checkpoint: tuple[KDAState | None, ...]
    decode: tuple[LayerState | None, ...]


class DecoderLayer(nnx.Module):
    """input_layernorm, self_attn (KDA or MLA), post_attention_layernorm, mlp (dense or experts)."""

    def __init__(self, config: ModelConfig, index: int, *, rngs: nnx.Rngs | None):
        hidden, eps, dtype = config.hidden_size, config.rms_norm_eps, config.dtype
        self.input_layernorm = RMSNorm(hidden, eps, dtype)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype)
        self.self_attn = (
            MLA(config, rngs=rngs)
            if config.is_full_attention(index)
            else KimiDeltaAttention(config.kda, rngs=rngs)
        )
        self.mlp = (
            MoE(config, rngs=rngs)
            if config.is_moe(index)
            else MLP(hidden, config.intermediate_size, config.activation, dtype, rngs=rngs)
        )

    def attention(
        self,
        x: jax.Array,
        batch: Batch,
        prefill: LayerState | None,
        decode: LayerState | None,
        backend: str | None,
        axes: Axes,
    ) -> Attended:
        """The norm and the attention of x [D + T, hidden]; without the residual."""
        y, *states = _attention(
            self.input_layernorm, self.self_attn, x, batch, prefill, decode, backend, axes
        )
        return Attended(y, *states)

    def feed_forward(self, x: jax.Array, batch: Batch, axes: Axes) -> jax.Array:
        """The norm and the MLP of x [D + T, hidden]; without the residual."""
        return _feed_forward(self.post_attention_layernorm, self.mlp, x, batch, axes)


@functools.partial(jax.jit, static_argnames=("backend", "axes"))
def _attention(
    norm: RMSNorm,
    attention: nnx.Module,
    x: jax.Array,
    batch: Batch,
    prefill: LayerState | None,
    decode: LayerState | None,
    backend: str | None,
    axes: Axes,
) -> tuple:
    x = norm(x)
    if isinstance(attention, MLA):
        assert not isinstance(prefill, KDAState)
        assert decode is None or isinstance(decode, MLACache)
        y, after, decoded = attention(x, batch, prefill, decode)
        return axes.sum_model(y), after, None, decoded
    assert isinstance(attention, KimiDeltaAttention)
    assert not isinstance(prefill, MLACache | MLAPages)
    assert not isinstance(decode, MLACache | MLAPages)
    if batch.in_pools:
        assert prefill is not None
        y, pool = step_in_pool(
            attention,
            x,
            prefill,
            batch.metadata,
            batch.rows,
            batch.decode_rows,
            active=batch.active,
            backend=backend,
        )
        return axes.sum_model(y), pool, None, None
    cache = None
    if prefill is not None:
        assert batch.start is not None
        cache = KDACache(prefill, batch.start > 0)
    if decode is not None:  # a request without a past has no state, whatever its row holds
        assert batch.decode_start is not None
        decode = _rows(batch.decode_start > 0, decode, jax.tree.map(jnp.zeros_like, decode))
    y, states, state = attention.step(
        x, batch.metadata, cache, decode, active=batch.active, backend=backend
    )
    final, inside = (None, None) if states is None else (states.final, states.checkpoint)
    if final is not None and prefill is not None:
        # The operator returns zeros for rows of padding, but such a row is somebody's state.
        assert batch.metadata is not None
        final = _rows(jnp.asarray(batch.metadata.seqs)[:, 1] >= 0, final, prefill)
    return axes.sum_model(y), final, inside, state


def _rows(keep: jax.Array, these: KDAState, those: KDAState) -> KDAState:
    """`these` in the rows to keep, bool [N], else `those`."""

    def choose(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(keep.reshape(-1, *[1] * (x.ndim - 1)), x, y.astype(x.dtype))

    return jax.tree.map(choose, these, those)


@functools.partial(jax.jit, static_argnames=("axes",))
def _feed_forward(
    norm: RMSNorm, mlp: nnx.Module, x: jax.Array, batch: Batch, axes: Axes
) -> jax.Array:
    y = norm(x)
    if isinstance(mlp, MoE):
        return mlp(y, batch.valid(y.shape[0]), axes)
    assert isinstance(mlp, MLP)
    return axes.sum_model(mlp(y))


class Outputs(NamedTuple):
    """What a step returns beside the caches.

    logits: float32, [D + N, V], of the last token of each request (zeros where a sequence is empty
    or a row idle), or [D + T, V] of every row. hidden_states: the stream before each layer and the
    normalised one at the end, [D + T, hidden] each; empty unless asked for. checkpoints: None
    without a prefill.

    Logits, and the normalised stream, are NaN for a token outside the vocabulary, for one past the
    end of its MLA cache, and for all later tokens of the request, in later steps too (see
    `ModelCache`). The rows of other requests, and of earlier tokens, are not touched.
    """

    logits: jax.Array
    hidden_states: tuple[jax.Array, ...] = ()
    checkpoints: Checkpoints | None = None


class LanguageModel(nnx.Module):
    """Embedding, layers, norm and head. A model file says how the layers are strung together."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs | None):
        check_x64(config.dtype)
        hidden, dtype = config.hidden_size, config.dtype
        self.config = config
        self.embed_tokens = Vocab(config.vocab_size, hidden, dtype, 1.0, rngs=rngs)
        self.layers = nnx.List(
            [DecoderLayer(config, i, rngs=rngs) for i in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm(hidden, config.rms_norm_eps, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Vocab(config.vocab_size, hidden, dtype, hidden**-0.5, rngs=rngs)

    def stack(
        self,
        x: jax.Array,
        batch: Batch,
        prefill: tuple[LayerState | None, ...],
        decode: tuple[LayerState | None, ...],
        backend: str | None,
        axes: Axes,
    ) -> tuple[jax.Array, States, list[jax.Array]]:
        """x [D + T, hidden] -> the stream after the last layer, states, the stream before each."""
        raise NotImplementedError

    def head(self, x: jax.Array) -> jax.Array:
        """Logits of normalised rows."""
        return (self.embed_tokens if self.config.tie_word_embeddings else self.lm_head).logits(x)


def forward(
    model: LanguageModel,
    tokens: jax.Array,
    batch: Batch,
    prefill: ModelCache | None,
    decode: ModelCache | None,
    *,
    backend: str | None = None,
    all_logits: bool = False,
    hidden_states: bool = False,
    axes: Axes = Axes(),  # noqa: B008
) -> tuple[Outputs, ModelCache | None, ModelCache | None]:
    """One step of decode rows, then a packed prefill: tokens int32 [D + T].

    Returns the outputs and both caches after the step.
    """
    none = (None,) * model.config.num_hidden_layers
    before = none if prefill is None else prefill.layers
    running = none if decode is None else decode.layers
    x = model.embed_tokens.embed(tokens, batch.valid(tokens.shape[0]), axes)
    x, states, streams = model.stack(x, batch, before, running, backend, axes)
    x = model.norm(x)
    lost = find_lost(tokens, model.config.vocab_size, batch, prefill, decode)
    if all_logits or hidden_states:
        x = lost.without(x, every_row=True)
        chosen = x if all_logits else _last_rows(x, batch)
    else:
        chosen = lost.without(_last_rows(x, batch), every_row=False)
    checkpoints = None
    if prefill is not None:
        checkpoints = _checkpoints(states.checkpoint, batch, lost)
        length = lost.prefill_length(prefill.length)
        prefill = ModelCache(states.prefill, length)  # type: ignore[arg-type]
    if decode is not None:
        length = lost.decode_length(decode.length)
        decode = ModelCache(states.decode, length)  # type: ignore[arg-type]
    streams = (*streams, x) if hidden_states else ()  # type: ignore[assignment]
    return Outputs(model.head(chosen), tuple(streams), checkpoints), prefill, decode


def forward_in_pools(
    model: LanguageModel,
    tokens: jax.Array,
    batch: Batch,
    layers: tuple[LayerState, ...],
    *,
    backend: str | None = None,
    axes: Axes = Axes(),  # noqa: B008
) -> tuple[jax.Array, tuple[LayerState, ...]]:
    """`forward` where the states of all requests, and of all checkpoints, lie in pools.

    Args:
      model: the weights.
      tokens: int32 [D + T].
      batch: with `rows` and `decode_rows`, `table` and `decode_table` for the parts that it has.
      layers: per layer, KDAState with a row of the pool each, or MLAPages.
      backend: of the operator; None is the config's.
      axes: as in `forward`.

    Returns:
      The logits of the rows that predict, float32 [D + N, V], and the pools after the step.
    """
    none = (None,) * model.config.num_hidden_layers
    x = model.embed_tokens.embed(tokens, batch.valid(tokens.shape[0]), axes)
    x, states, _ = model.stack(x, batch, layers, none, backend, axes)
    return model.head(_last_rows(model.norm(x), batch)), states.prefill  # type: ignore[return-value]


def _last_rows(x: jax.Array, batch: Batch) -> jax.Array:
    """The rows that predict: the decode rows, and the last of each sequence."""
    D, parts = batch.decodes, []
    if D:
        assert batch.active is not None
        parts.append(jnp.where(batch.active[:, None], x[:D], 0))
    if batch.metadata is not None:
        seqs = jnp.asarray(batch.metadata.seqs)
        index = jnp.clip(D + seqs[:, 0] + seqs[:, 1] - 1, 0, x.shape[0] - 1)
        parts.append(jnp.where(seqs[:, 1:2] > 0, x[index], 0))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _checkpoints(layers: tuple[KDAState | None, ...], batch: Batch, lost: Lost) -> Checkpoints:
    assert batch.metadata is not None and batch.start is not None
    table = jnp.asarray(batch.metadata.checkpoints)
    sequence, offset = table[:, 0], table[:, 1]
    row = jnp.maximum(sequence, 0)
    length = lost.checkpoint_length(row, batch.start[row] + offset)
    return Checkpoints(layers, sequence, jnp.where(sequence >= 0, length, 0))
