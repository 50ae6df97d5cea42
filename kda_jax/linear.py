"""A projection without bias, the only kind that the models have, and how weights begin."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax


def normal(
    rngs: nnx.Rngs | None, shape: tuple[int, ...], dtype: str | jnp.dtype, scale: float
) -> nnx.Param:
    """Normal values of that scale; zeros without rngs, where only the shapes matter."""
    dtype = jnp.dtype(dtype)
    if rngs is None:
        return nnx.Param(jnp.zeros(shape, dtype))
    values = jax.random.normal(rngs.params(), shape, dtype)
    return nnx.Param(values * jnp.asarray(scale, dtype))


class Linear(nnx.Module):
    """``y = x @ kernel``; kernel ``[in, out]``, the transpose of the published weight.

    Float32 products are float32 ones (no TF32); for half precision the setting changes nothing.
    """

    def __init__(self, fan_in: int, fan_out: int, dtype: str, *, rngs: nnx.Rngs | None):
        self.kernel = normal(rngs, (fan_in, fan_out), dtype, fan_in**-0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., in]`` -> ``[..., out]``, in the kernel's dtype."""
        kernel = self.kernel[...]
        return jnp.matmul(x.astype(kernel.dtype), kernel, precision=lax.Precision.HIGHEST)
