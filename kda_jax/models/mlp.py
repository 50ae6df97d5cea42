"""The gated MLP, and its two activations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ..linear import Linear
from .config import Activation


def gated(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    """What goes into the down projection, of gate and up ``[..., I]``, in their dtype.

    silu:  ``silu(gate) * up``
    situ:  ``b * tanh(gate / b) * sigmoid(gate) * c * tanh(up / c)``, computed in float32 (Kimi-K3:
           b = 4, c = 25)
    """
    if activation.name == "silu":
        return jax.nn.silu(gate) * up
    wide = jnp.promote_types(gate.dtype, jnp.float32)
    g, u = gate.astype(wide), up.astype(wide)
    b, c = activation.beta, activation.linear_beta
    out = b * jnp.tanh(g / b) * jax.nn.sigmoid(g) * (c * jnp.tanh(u / c))
    return out.astype(gate.dtype)


class MLP(nnx.Module):
    """``down_proj(gated(gate_proj(x), up_proj(x)))``; with split columns, a part of a sum."""

    def __init__(
        self, hidden: int, inner: int, activation: Activation, dtype: str, *, rngs: nnx.Rngs | None
    ):
        self.activation = activation
        self.gate_proj = Linear(hidden, inner, dtype, rngs=rngs)
        self.up_proj = Linear(hidden, inner, dtype, rngs=rngs)
        self.down_proj = Linear(inner, hidden, dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[R, hidden]`` -> ``[R, hidden]``."""
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.activation))
