"""From raw inputs to what the recurrence takes: normalized q and k, log decay g, write strength.

Formulas: Kimi Linear (arXiv:2510.26692), section 3, and the bounded gate of Kimi-K3.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .types import KDAConfig, KDAInputs

L2_EPS = 1e-6


class Activated(NamedTuple):
    """The operands of the recurrence, in the compute dtype; rows of padding are zeros.

    q (times ``scale``), k and g ``[..., H, K]``, v ``[..., H, V]``, beta ``[..., H]``; g is a
    natural-log decay.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array


def compute_dtype(inputs: KDAInputs) -> jnp.dtype:
    """float64 if any of q, k, v is float64, else float32."""
    wide = any(x.dtype == jnp.float64 for x in (inputs.q, inputs.k, inputs.v))
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def l2_normalize(x: jax.Array) -> jax.Array:
    """``x * rsqrt(sum(x^2) + 1e-6)`` over the last axis: the sum, and the epsilon inside the root.

    So a zero row stays zero and has a finite gradient.
    """
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


def log_decay(
    raw_g: jax.Array, A_log: jax.Array, dt_bias: jax.Array, lower_bound: float | None
) -> jax.Array:
    """The gate: natural-log decay <= 0.

    bounded:   ``lower_bound * sigmoid(exp(A_log) * (raw_g + dt_bias))``  (Kimi-K3: -5)
    softplus:  ``-exp(A_log) * softplus(raw_g + dt_bias)``  for ``lower_bound=None`` (Kimi-Linear)

    Args:
      raw_g: ``[..., H, K]``.
      A_log: ``[H]``.
      dt_bias: ``[H, K]``.
      lower_bound: in [-5, 0), or None.
    """
    rate = jnp.exp(A_log)[:, None]
    x = raw_g + dt_bias
    if lower_bound is None:
        return -rate * jax.nn.softplus(x)
    return lower_bound * jax.nn.sigmoid(rate * x)


def activate(inputs: KDAInputs, config: KDAConfig, valid: jax.Array) -> Activated:
    """Applies the gate, the sigmoid of beta and the L2 norm; turns rows of padding into no-ops.

    Args:
      inputs: q, k, v, g and beta may have any leading axes instead of ``[T]``; the states are
        not looked at.
      config: the options of the call.
      valid: bool with these leading axes. Where False, the row's content has no effect, not even
        as NaN and not in the gradient: it is replaced by select before anything is computed.
        Such a row decays nothing (g is 0, not what the gate makes of 0) and writes nothing.
    """
    dtype = compute_dtype(inputs)
    in_head = valid[..., None]
    in_channel = valid[..., None, None]

    def load(x: jax.Array) -> jax.Array:
        return jnp.where(in_head if x.ndim == in_head.ndim else in_channel, x, 0).astype(dtype)

    q, k, v, g, beta = map(load, (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta))
    if config.l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    if config.gate != "activated":
        assert inputs.A_log is not None and inputs.dt_bias is not None
        bound = config.lower_bound if config.gate == "bounded" else None
        g = log_decay(g, inputs.A_log.astype(dtype), inputs.dt_bias.astype(dtype), bound)
        g = jnp.where(in_channel, g, 0)
        beta = jnp.where(in_head, jax.nn.sigmoid(beta), 0)
    return Activated(config.scale * q, k, v, g, beta)


def starting_states(inputs: KDAInputs, config: KDAConfig, seqs: jax.Array) -> jax.Array:
    """The state before the first token of each sequence, ``[N, H, V, K]``, in the compute dtype.

    Zeros where there is none: no initial_state, has_initial_state False, or a row of padding; by
    select, so that the content of such a row has no effect.
    """
    dtype = compute_dtype(inputs)
    n = seqs.shape[0]
    heads, key_dim, value_dim = *inputs.k.shape[-2:], inputs.v.shape[-1]
    # Like q: under `jax.shard_map` a loop must start from something that differs between devices.
    zeros = jnp.zeros_like(inputs.q, dtype, shape=(n, heads, value_dim, key_dim))
    if inputs.initial_state is None:
        return zeros
    given = seqs[:, 1] >= 0
    if inputs.has_initial_state is not None:
        given &= inputs.has_initial_state
    state = state_from_layout(inputs.initial_state.astype(dtype), config)
    return jnp.where(given[:, None, None, None], state, zeros)


def state_from_layout(state: jax.Array, config: KDAConfig) -> jax.Array:
    """Between the caller's state layout and ``[.., V, K]``; its own inverse."""
    return state.swapaxes(-1, -2) if config.state_layout == "kv" else state
