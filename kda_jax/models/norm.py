"""RMSNorm, as every layer of the models has it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax


def rms_normalize(x: jax.Array, eps: float) -> jax.Array:
    """``x * rsqrt(mean(x^2) + eps)`` over the last axis, in float32 (float64 stays)."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """``rms_normalize(x) * weight``; the weight as it is, not 1 + weight."""

    def __init__(self, size: int, eps: float, dtype: str):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((size,), jnp.dtype(dtype)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., size]`` in any float dtype, which the result keeps; computed in float32."""
        wide = rms_normalize(x, self.eps)
        return (wide * self.weight[...].astype(wide.dtype)).astype(x.dtype)
