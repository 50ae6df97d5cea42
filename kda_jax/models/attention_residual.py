"""Kimi-K3's attention residuals: each sublayer reads a mix of the stream and of past blocks.

key   = RMSNorm(candidate) * norm         candidates: the block values, and the running sum
mix   = softmax over candidates of (key . proj)
value = sum of mix * candidate                           (the raw ones), all in float32
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ..linear import normal
from .norm import rms_normalize


class AttentionResidual(nnx.Module):
    """norm: [hidden], proj: [hidden]."""

    def __init__(self, hidden: int, eps: float, dtype: str, *, rngs: nnx.Rngs | None):
        self.eps = eps
        self.norm = nnx.Param(jnp.ones((hidden,), jnp.dtype(dtype)))
        self.proj = normal(rngs, (hidden,), dtype, hidden**-0.5)

    def __call__(self, stream: jax.Array, bank: Sequence[jax.Array]) -> jax.Array:
        """stream [R, hidden] and the block values so far, each [R, hidden] -> [R, hidden].

        With an empty bank it is the identity.
        """
        if not bank:
            return stream
        return _mix((*bank, stream), self.norm[...], self.proj[...], eps=self.eps)


# Jitted on its own so that a deep model traces it once per number of blocks.
@functools.partial(jax.jit, static_argnames=("eps",))
def _mix(
    candidates: tuple[jax.Array, ...], norm: jax.Array, proj: jax.Array, *, eps: float
) -> jax.Array:
    dtype = candidates[-1].dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    query = norm.astype(wide) * proj.astype(wide)
    logits = jnp.stack(
        [
            jnp.matmul(rms_normalize(c, eps), query, precision=lax.Precision.HIGHEST)
            for c in candidates
        ]
    )
    mix = jax.nn.softmax(logits, axis=0)
    out = sum(m[:, None] * c.astype(wide) for m, c in zip(mix, candidates, strict=True))
    return jnp.asarray(out, dtype)
