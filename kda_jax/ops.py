"""The public operator: checks the arguments, packs them, and hands them to a backend."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from . import validate
from .backends import check_alignment, current_platform, resolve
from .gate import compute_dtype, starting_states, state_from_layout
from .metadata import ChunkMetadata
from .sharding import run_on_auto_axes
from .types import Backend, CallSpec, Gate, KDAConfig, KDAInputs, KDAResult, StateLayout


def chunk_kda_prefill(
    q: Any,
    k: Any,
    v: Any,
    raw_g: Any,
    raw_beta: Any,
    A_log: Any,
    dt_bias: Any,
    *,
    metadata: ChunkMetadata | None = None,
    initial_state: Any = None,
    has_initial_state: Any = None,
    scale: float | None = None,
    lower_bound: float | None = -5.0,
    state_layout: StateLayout = "vk",
    backend: str = "auto",
    groups: int | None = None,
) -> KDAResult:
    """Kimi Delta Attention over whole prompts, from raw gates.

    For each token of each head, with S the state ``[V, K]``::

        q, k = q * rsqrt(sum(q^2) + 1e-6), k * rsqrt(sum(k^2) + 1e-6)
        beta = sigmoid(raw_beta)
        g    = lower_bound * sigmoid(exp(A_log) * (raw_g + dt_bias))
             | -exp(A_log) * softplus(raw_g + dt_bias)           if lower_bound is None
        S    = S * exp(g)                                        along K
        S    = S + beta * (v - S k) k^T
        out  = scale * S q

    Args:
      q, k, raw_g: ``[B, T, H, K]``, K in 1..256. bfloat16, float16 or float32, in any mix (float64
        with jax_enable_x64 on the backends that have it).
      v: ``[B, T, H, V]``, V in 1..256.
      raw_beta: ``[B, T, H]``.
      A_log: ``[H]``.
      dt_bias: ``[H, K]``.
      metadata: where the sequences lie on a packed token axis (then B is 1), and where to export
        states. None: each batch row is a sequence of T tokens.
      initial_state: the state before the first token of each sequence, ``[N, H, V, K]``. None:
        zeros.
      has_initial_state: bool ``[N]``: which rows of initial_state count; the others start from
        zeros, whatever they hold. None: all.
      scale: factor on the outputs; None is ``K ** -0.5``.
      lower_bound: bound of the bounded gate, in [-5, 0); None selects the softplus gate.
      state_layout: "vk", or "kv" for states ``[N, H, K, V]``, given and returned.
      backend: "auto", "fused", "chunked", "scan" or the name of a registered one.
      groups: into how many groups "fused" splits the chunks of a sequence; None lets it choose.

    Returns:
      `KDAResult`: out ``[B, T, H, V]`` in v's dtype, final_state and checkpoint_state in float32.

    Raises:
      ValueError: an argument is wrong; names it and says what it should be.
      NotImplementedError: the named backend cannot run this call; says why and what to do.
    """
    B, T, H, K, V = validate.check_tensors(q, k, v, raw_g, raw_beta, "raw_g", "raw_beta")
    validate.check_gate(A_log, dt_bias, lower_bound, H, K)
    gate: Gate = "softplus" if lower_bound is None else "bounded"
    inputs = KDAInputs(q, k, v, raw_g, raw_beta, A_log, dt_bias, initial_state, has_initial_state)
    bound = 0.0 if lower_bound is None else float(lower_bound)
    return _prefill(inputs, metadata, gate, bound, True, scale, state_layout, backend, groups)


def chunk_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    metadata: ChunkMetadata | None = None,
    initial_state: Any = None,
    has_initial_state: Any = None,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    state_layout: StateLayout = "vk",
    backend: str = "auto",
    groups: int | None = None,
) -> KDAResult:
    """`chunk_kda_prefill` for gates that are activated already.

    Args:
      q, k, v: as there.
      g: ``[B, T, H, K]``, the decay of each channel as natural logarithm, <= 0.
      beta: ``[B, T, H]``, in (0, 1).
      use_qk_l2norm: whether to L2-normalize q and k here.
      metadata, initial_state, has_initial_state, scale, state_layout, backend, groups: as there.

    Returns and raises as there. The values of g and beta are not checked: that would wait for the
    device.
    """
    validate.check_tensors(q, k, v, g, beta, "g", "beta")
    if not isinstance(use_qk_l2norm, bool):
        raise ValueError(f"use_qk_l2norm is {use_qk_l2norm!r}, want True or False")
    inputs = KDAInputs(q, k, v, g, beta, None, None, initial_state, has_initial_state)
    return _prefill(
        inputs,
        metadata,
        "activated",
        0.0,
        use_qk_l2norm,
        scale,
        state_layout,
        backend,
        groups,
    )


def _prefill(
    inputs: KDAInputs,
    metadata: ChunkMetadata | None,
    gate: Gate,
    lower_bound: float,
    l2norm: bool,
    scale: float | None,
    state_layout: StateLayout,
    backend: str,
    groups: int | None,
) -> KDAResult:
    B, T, H, K = inputs.q.shape
    V = inputs.v.shape[-1]
    validate.check_options(scale, state_layout, groups)
    if metadata is None:
        metadata = _uniform_metadata(B, T)
    else:
        validate.check_metadata(metadata, B, T)
    state_dims = (V, K) if state_layout == "vk" else (K, V)
    validate.check_state(
        inputs.initial_state,
        inputs.has_initial_state,
        (metadata.capacity.sequences, H, *state_dims),
        state_layout,
    )
    spec = CallSpec(
        platform=current_platform(),
        q_dtype=inputs.q.dtype.name,
        k_dtype=inputs.k.dtype.name,
        v_dtype=inputs.v.dtype.name,
        g_dtype=inputs.g.dtype.name,
        beta_dtype=inputs.beta.dtype.name,
        H=H,
        K=K,
        V=V,
        gate=gate,
        chunk_size=metadata.chunk_size,
        checkpoints=metadata.capacity.checkpoints > 0,
        groups=groups,
    )
    chosen, _ = resolve(backend, spec)
    check_alignment(chosen, metadata)
    config = KDAConfig(
        scale=K**-0.5 if scale is None else float(scale),
        gate=gate,
        lower_bound=lower_bound,
        l2norm=l2norm,
        state_layout=state_layout,
        groups=None if groups is None else int(groups),
    )
    return _run(chosen, config, inputs, metadata)


@functools.lru_cache(maxsize=256)
def _uniform_metadata(B: int, T: int) -> ChunkMetadata:
    return ChunkMetadata.from_seq_lens([T] * B)


@functools.partial(jax.jit, static_argnames=("backend", "config"))
def _run(
    backend: Backend, config: KDAConfig, inputs: KDAInputs, metadata: ChunkMetadata
) -> KDAResult:
    """Packs the batch and runs the backend; jitted so that eager calls compile once, too."""
    B, T = inputs.q.shape[:2]
    q, k, v, g, beta = (x.reshape(B * T, *x.shape[2:]) for x in inputs[:5])
    wide = compute_dtype(inputs)
    A_log, dt_bias, state = (None if x is None else x.astype(wide) for x in inputs[5:8])
    packed = KDAInputs(q, k, v, g, beta, A_log, dt_bias, state, inputs.has_initial_state)
    if B * T == 0 or metadata.capacity.sequences == 0:
        result = _nothing_to_run(packed, config, metadata)
    else:
        result = run_on_auto_axes(backend, packed, config, metadata)
    return result._replace(out=result.out.reshape(B, T, *result.out.shape[1:]))


def _nothing_to_run(inputs: KDAInputs, config: KDAConfig, metadata: ChunkMetadata) -> KDAResult:
    """No token or no sequence: the states pass through, and there is nothing to launch."""
    final = state_from_layout(starting_states(inputs, config, jnp.asarray(metadata.seqs)), config)
    saved = jnp.zeros((metadata.capacity.checkpoints, *final.shape[1:]), final.dtype)
    return KDAResult(jnp.zeros_like(inputs.v), final, saved)
