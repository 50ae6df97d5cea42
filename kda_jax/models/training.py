"""Next-token loss of packed text: what a training step differentiates."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..metadata import ChunkMetadata
from .arguments import check_max_length
from .batch import Batch
from .cache import empty_cache
from .decoder import LanguageModel, forward


def next_token_loss(
    model: LanguageModel,
    tokens: jax.Array,
    metadata: ChunkMetadata,
    *,
    max_length: int,
    weights: jax.Array | None = None,
    backend: str | None = None,
) -> jax.Array:
    """Mean cross-entropy, in nats, of each token given those before it in its sequence.

    Args:
      model: the weights; differentiate with respect to it (`jax.grad`). The router's correction
        bias has no gradient: it only chooses.
      tokens: int32 [T], packed.
      metadata: where the sequences lie.
      max_length: of the longest sequence, on the host.
      weights: float32 [T], at least 0: how much the prediction of each token counts in the mean.
        None: all the same. A sequence's first token is never predicted, whatever its weight.
      backend: of the operator. The gradient of "fused" is that of "chunked".

    Returns:
      A float32 scalar; NaN with a token outside the vocabulary (-100 marks none to be ignored:
      weights do), or with a sequence longer than max_length, rounded up to a multiple of 64, that
      only the device can see.

    Raises:
      ValueError: a sequence of metadata on the host is longer than max_length.
    """
    logits = next_token_logits(model, tokens, metadata, max_length=max_length, backend=backend)
    return mean_loss(logits, tokens, metadata, weights)


def next_token_logits(
    model: LanguageModel,
    tokens: jax.Array,
    metadata: ChunkMetadata,
    *,
    max_length: int,
    backend: str | None = None,
) -> jax.Array:
    """What the model expects after each token: float32 [T, V]; arguments as above."""
    check_max_length(metadata, max_length)
    cache = empty_cache(model.config, metadata.capacity.sequences, max_length)
    batch = Batch(metadata=metadata, start=cache.length)
    out, _, _ = forward(model, tokens, batch, cache, None, backend=backend, all_logits=True)
    return out.logits


def mean_loss(
    logits: jax.Array,
    tokens: jax.Array,
    metadata: ChunkMetadata,
    weights: jax.Array | None = None,
) -> jax.Array:
    """`next_token_loss` of logits [T, V] that are there already."""
    log_p = jax.nn.log_softmax(logits[:-1], axis=-1)
    # NaN is what is taken from past the end; an index below 0 would count from there.
    picks = jnp.where(tokens[1:] < 0, logits.shape[1], tokens[1:])
    picked = jnp.take_along_axis(log_p, picks[:, None], axis=-1)[:, 0]
    seqs = jnp.asarray(metadata.seqs)
    ends = seqs[:, 0] + jnp.maximum(seqs[:, 1], 0)
    row = jnp.arange(1, tokens.shape[0])
    # A row predicts the next one unless a sequence begins there or the text has ended.
    inside = (row < jnp.max(ends)) & ~jnp.any(row[:, None] == seqs[:, 0], axis=1)
    count = jnp.where(inside, 1.0 if weights is None else weights[1:], 0.0)
    total = jnp.sum(count)
    return -jnp.sum(jnp.where(inside, picked, 0) * count) / jnp.where(total > 0, total, 1)
