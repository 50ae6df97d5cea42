"""One token of each request: the recurrence's step, for decoding.

The same lines as the token recurrence of backend "scan" (the operator's definition), for a batch of
rows that each have their own state, or a kernel's (fused.py). Rows are independent, so idle ones
may take part.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .backends import fused_loads
from .gate import activate, compute_dtype
from .pool import StepPool
from .pool_arguments import bind_step_rows, check_cache, check_states
from .scan import recurrence
from .types import Gate, KDAConfig, KDAInputs
from .validate import check_flags, check_gate, check_options, check_tensors


def kda_decode_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    raw_g: jax.Array,
    raw_beta: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    state: jax.Array | None = None,
    *,
    active: jax.Array | None = None,
    state_cache: jax.Array | None = None,
    state_indices: Any = None,
    has_initial_state: jax.Array | None = None,
    scale: float | None = None,
    lower_bound: float | None = -5.0,
) -> tuple[jax.Array, jax.Array]:
    """Kimi Delta Attention for one token per row, from raw gates.

    The formulas are those of `kda_jax.chunk_kda_prefill`; on the state of a prefill it is the
    prefill's next token. Plain JAX, but with state_cache on a GPU, where a kernel reads and writes
    each state once (q, k, v in bfloat16 or all in float16, K 64 or 128, V a multiple of 16).
    That call is split over heads and gathers what is sharded over anything else; to export it,
    pass `kda_jax.export_checks()`.

    Args:
      q, k, raw_g: ``[R, H, K]``, K in 1..256; bfloat16, float16 or float32, in any mix (float64
        with jax_enable_x64).
      v: ``[R, H, V]``, V in 1..256.
      raw_beta: ``[R, H]``.
      A_log: ``[H]``. dt_bias: ``[H, K]``.
      state: ``[R, H, V, K]`` float32 (float64 with float64 inputs).
      active: bool ``[R]``; a False row keeps its state and has zeros for an output. None: all.
      state_cache: instead of state, a pool of states ``[P, H, V, K]``, of which each request has a
        row. Donate it to the jitted step, and it is updated where it lies.
      state_indices: int32 ``[R]``, the row of each request; those that are active must differ.
        Negative: it starts from zeros, and nothing is written. NumPy indices are checked; one
        outside of the pool is skipped on the device.
      has_initial_state: bool ``[R]``, with state_cache only: a False row is written without being
        read; it starts from zeros. None: all are read.
      scale: factor on the outputs; None is ``K ** -0.5``.
      lower_bound: of the bounded gate, in [-5, 0); None selects the softplus gate.

    Returns:
      out ``[R, H, V]`` in v's dtype, and the new state, or the pool after the step: rows that it
      does not write keep their bits.

    Raises:
      ValueError: an argument is wrong, or state and state_cache are both given; names it and says
        what it should be.
    """
    R, H, K, V = check_tensors(q, k, v, raw_g, raw_beta, "raw_g", "raw_beta", rows="R")
    check_gate(A_log, dt_bias, lower_bound, H, K)
    check_options(scale, "vk", None)
    if active is not None:
        check_flags("active", active, R, "[R], one per row")
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
    want = (H, V, K)
    step = jax.vmap(recurrence)
    token = activate(inputs, config, valid)
    if state_cache is not None or state_indices is not None:
        if state is not None:
            raise ValueError("state and state_cache are both given: want one of them")
        check_cache("state_cache", state_cache, "state_indices", state_indices)
        check_states(state_cache, want, "[P, H, V, K]", inputs)
        pool = bind_step_rows(state_cache, state_indices, has_initial_state, active, R)
        done = _by_kernel(inputs, pool, valid, config)
        if done is None:
            after, out = step(pool.read(), token)
            return out.astype(v.dtype), pool.write(after)
        return done
    if has_initial_state is not None:
        raise ValueError("has_initial_state is given without state_cache; pass both")
    if state is None:
        raise ValueError(f"state is None: want {(R, *want)}, one row per token, or state_cache")
    if np.shape(state) != (R, *want):
        raise ValueError(f"state has shape {np.shape(state)}, want {(R, *want)}: one row per token")
    if state.dtype != compute_dtype(inputs):
        raise ValueError(f"state has dtype {state.dtype}, want {compute_dtype(inputs)}; cast it")
    after, out = step(state, token)
    return out.astype(v.dtype), after


def _by_kernel(
    inputs: KDAInputs, pool: StepPool, valid: jax.Array, config: KDAConfig
) -> tuple[jax.Array, jax.Array] | None:
    if not fused_loads():
        return None
    from .decode_kernel import decode_in_pool  # like the fused backend, not needed by the rest

    return decode_in_pool(inputs, pool, valid, config)
