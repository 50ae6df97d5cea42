"""One token of each request: the recurrence's step, for decoding.

The same lines as the token recurrence of backend "scan" (the operator's definition), for a batch of
rows that each have their own state. Rows are independent, so idle ones may take part.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .gate import activate
from .scan import recurrence
from .types import Gate, KDAConfig, KDAInputs


def kda_decode_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    raw_g: jax.Array,
    raw_beta: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    state: jax.Array,
    *,
    active: jax.Array | None = None,
    scale: float | None = None,
    lower_bound: float | None = -5.0,
) -> tuple[jax.Array, jax.Array]:
    """Kimi Delta Attention for one token per row, from raw gates.

    Args:
      q, k, raw_g: ``[R, H, K]``, floating.
      v: ``[R, H, V]``.
      raw_beta: ``[R, H]``.
      A_log: ``[H]``. dt_bias: ``[H, K]``.
      state: ``[R, H, V, K]`` float32 (float64 with float64 inputs).
      active: bool ``[R]``; a False row keeps its state and has zeros for an output. None: all.
      scale: factor on the outputs; None is ``K ** -0.5``.
      lower_bound: of the bounded gate, in [-5, 0); None selects the softplus gate.

    Returns:
      out ``[R, H, V]`` in v's dtype, and the new state.

    Raises:
      ValueError: state does not fit the rows.
    """
    R, H, K = q.shape
    if state.shape != (R, H, v.shape[-1], K):
        raise ValueError(
            f"state has shape {state.shape}, want {(R, H, v.shape[-1], K)}: one row per token"
        )
    gate: Gate = "softplus" if lower_bound is None else "bounded"
    config = KDAConfig(
        scale=K**-0.5 if scale is None else scale,
        gate=gate,
        lower_bound=0.0 if lower_bound is None else lower_bound,
        l2norm=True,
        state_layout="vk",
    )
    valid = jnp.ones((R,), jnp.bool_) if active is None else active
    inputs = KDAInputs(q, k, v, raw_g, raw_beta, A_log, dt_bias, None, None)
    state, out = jax.vmap(recurrence)(state, activate(inputs, config, valid))
    return out.astype(v.dtype), state
