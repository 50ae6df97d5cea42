"""A projection without bias, the only kind that the models have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax


class Linear(nnx.Module):
    """``y = x @ kernel``; kernel ``[in, out]``, the transpose of the published weight.

    Float32 products are float32 ones (no TF32); for half precision the setting changes nothing.
    """

    def __init__(self, fan_in: int, fan_out: int, dtype: str, *, rngs: nnx.Rngs):
        values = jax.random.normal(rngs.params(), (fan_in, fan_out), jnp.dtype(dtype))
        self.kernel = nnx.Param(values * jnp.asarray(fan_in**-0.5, values.dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., in]`` -> ``[..., out]``, in the kernel's dtype."""
        kernel = self.kernel[...]
        return jnp.matmul(x.astype(kernel.dtype), kernel, precision=lax.Precision.HIGHEST)
