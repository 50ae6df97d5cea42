"""Next-token loss of packed text: what a training step differentiates."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..metadata import ChunkMetadata
from .batch import Batch
from .cache import empty_cache
from .decoder import LanguageModel, forward


def next_token_loss(
    model: LanguageModel,
    tokens: jax.Array,
    metadata: ChunkMetadata,
    *,
    max_length: int,
    backend: str | None = None,
) -> jax.Array:
    """Mean cross-entropy, in nats, of each token given those before it in its sequence.

    Args:
      model: the weights; differentiate with respect to it (`jax.grad`). The router's correction
        bias has no gradient: it only chooses.
      tokens: int32 [T], packed.
      metadata: where the sequences lie.
      max_length: of the longest sequence, on the host.
      backend: of the operator. The gradient of "fused" is that of "chunked".

    Returns:
      A float32 scalar.
    """
    cache = empty_cache(model.config, metadata.capacity.sequences, max_length)
    batch = Batch(metadata=metadata, start=cache.length)
    out, _, _ = forward(model, tokens, batch, cache, None, backend=backend, all_logits=True)
    log_p = jax.nn.log_softmax(out.logits[:-1], axis=-1)
    picked = jnp.take_along_axis(log_p, tokens[1:, None], axis=-1)[:, 0]
    seqs = jnp.asarray(metadata.seqs)
    ends = seqs[:, 0] + jnp.maximum(seqs[:, 1], 0)
    row = jnp.arange(1, tokens.shape[0])
    # A row predicts the next one unless a sequence begins there or the text has ended.
    inside = (row < jnp.max(ends)) & ~jnp.any(row[:, None] == seqs[:, 0], axis=1)
    return -jnp.sum(jnp.where(inside, picked, 0)) / jnp.maximum(jnp.sum(inside), 1)
