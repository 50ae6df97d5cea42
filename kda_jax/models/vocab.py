"""Token embedding and output head, both [vocab, hidden], whole or split over the vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ..linear import normal
from .batch import Axes


class Vocab(nnx.Module):
    """weight: [V, hidden]; the same kind of table embeds tokens and scores them."""

    def __init__(self, vocab: int, hidden: int, dtype: str, scale: float, *, rngs: nnx.Rngs | None):
        self.weight = normal(rngs, (vocab, hidden), dtype, scale)

    def embed(self, tokens: jax.Array, valid: jax.Array, axes: Axes) -> jax.Array:
        """tokens int32 [R] -> [R, hidden], zeros where not valid."""
        weight = self.weight[...]
        index = tokens - axes.first(axes.model, weight.shape[0])
        here = valid & (index >= 0) & (index < weight.shape[0])
        rows = weight[jnp.clip(index, 0, weight.shape[0] - 1)]
        return axes.sum_model(jnp.where(here[:, None], rows, 0))

    def logits(self, x: jax.Array) -> jax.Array:
        """x [R, hidden] -> [R, V] in float32; of a split table, this device's columns."""
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return jnp.einsum(
            "rh,vh->rv",
            x,
            self.weight[...],
            precision=lax.Precision.HIGHEST,
            preferred_element_type=wide,
        )
