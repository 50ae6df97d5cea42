"""The public operator: checks the arguments, packs them, and hands them to a backend."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp

from . import validate
from .backends import check_alignment, current_platform, resolve
from .gate import compute_dtype, starting_states, state_from_layout
from .metadata import ChunkMetadata
from .pool import gather_run_scatter
from .pool_arguments import bind_pool
from .sharding import run_on_auto_axes
from .types import (
    Backend,
    CallSpec,
    Gate,
    KDAConfig,
    KDAInputs,
    KDAPoolResult,
    KDAResult,
    PoolBackend,
    StateLayout,
    StatePool,
)


@overload
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
) -> KDAResult: ...
@overload
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
    state_cache: Any,
    state_indices: Any,
    has_initial_state: Any = None,
    checkpoint_state_indices: Any = None,
    scale: float | None = None,
    lower_bound: float | None = -5.0,
    state_layout: StateLayout = "vk",
    backend: str = "auto",
    groups: int | None = None,
) -> KDAPoolResult: ...
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
    state_cache: Any = None,
    state_indices: Any = None,
    checkpoint_state_indices: Any = None,
    scale: float | None = None,
    lower_bound: float | None = -5.0,
    state_layout: StateLayout = "vk",
    backend: str = "auto",
    groups: int | None = None,
) -> KDAResult | KDAPoolResult:
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
      state_cache: instead of initial_state, a pool of states ``[R, H, V, K]`` in float32 (float64
        when computing in float64), of which this call reads and writes some rows; see below.
      state_indices: int32 ``[N]``, required with state_cache: the row of each sequence, read before
        its first token and written after its last. Negative: it starts from zeros and its final
        state is not written.
      checkpoint_state_indices: int32 ``[M]``, required with state_cache if the metadata has room
        for checkpoints: the row that takes each of these states. Negative: it is not written.
      scale: factor on the outputs; None is ``K ** -0.5``.
      lower_bound: bound of the bounded gate, in [-5, 0); None selects the softplus gate.
      state_layout: "vk", or "kv" for states ``[N, H, K, V]``, given and returned.
      backend: "auto", "fused", "chunked", "scan" or the name of a registered one.
      groups: into how many groups "fused" splits the chunks of a sequence; None lets it choose.

    Returns:
      `KDAResult`: out ``[B, T, H, V]`` in v's dtype, final_state and checkpoint_state in float32.
      With state_cache `KDAPoolResult`: out, and the pool after the call.

    **In a pool.** Donate it (``jax.jit(step, donate_argnames=...)``) and it is updated where it
    lies: the rows are gathered before the backend and scattered after it. A pool that is not
    donated is copied first and stays as it was. With has_initial_state a False row is written
    without being read. Rows of padding in the metadata have no row, whatever their index says. All
    other rows keep their bits.

    The rows that one call writes must be distinct, and no sequence may hold the row that a
    checkpoint goes to. NumPy indices are checked for that; others never leave the device, so take
    them from `kda_jax.serving.step_rows`, which checks them on the host. An index outside of the
    pool is skipped on the device.

    A pool may be sharded over heads. Under `jax.vmap` each call needs a pool of its own, and the
    rows are gathered and scattered, as they are for a derivative.

    Raises:
      ValueError: an argument is wrong; names it and says what it should be.
      NotImplementedError: the named backend cannot run this call; says why and what to do.
    """
    B, T, H, K, V = validate.check_tensors(q, k, v, raw_g, raw_beta, "raw_g", "raw_beta")
    validate.check_gate(A_log, dt_bias, lower_bound, H, K)
    gate: Gate = "softplus" if lower_bound is None else "bounded"
    inputs = KDAInputs(q, k, v, raw_g, raw_beta, A_log, dt_bias, initial_state, has_initial_state)
    rows = _PoolArguments(state_cache, state_indices, checkpoint_state_indices)
    bound = 0.0 if lower_bound is None else float(lower_bound)
    return _prefill(inputs, rows, metadata, gate, bound, True, scale, state_layout, backend, groups)


@overload
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
) -> KDAResult: ...
@overload
def chunk_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    metadata: ChunkMetadata | None = None,
    state_cache: Any,
    state_indices: Any,
    has_initial_state: Any = None,
    checkpoint_state_indices: Any = None,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    state_layout: StateLayout = "vk",
    backend: str = "auto",
    groups: int | None = None,
) -> KDAPoolResult: ...
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
    state_cache: Any = None,
    state_indices: Any = None,
    checkpoint_state_indices: Any = None,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    state_layout: StateLayout = "vk",
    backend: str = "auto",
    groups: int | None = None,
) -> KDAResult | KDAPoolResult:
    """`chunk_kda_prefill` for gates that are activated already.

    Args:
      q, k, v: as there.
      g: ``[B, T, H, K]``, the decay of each channel as natural logarithm, <= 0.
      beta: ``[B, T, H]``, in (0, 1).
      use_qk_l2norm: whether to L2-normalize q and k here.
      metadata, initial_state, has_initial_state, state_cache, state_indices,
        checkpoint_state_indices, scale, state_layout, backend, groups: as there.

    Returns and raises as there. The values of g and beta are not checked: that would wait for the
    device.
    """
    validate.check_tensors(q, k, v, g, beta, "g", "beta")
    if not isinstance(use_qk_l2norm, bool):
        raise ValueError(f"use_qk_l2norm is {use_qk_l2norm!r}, want True or False")
    inputs = KDAInputs(q, k, v, g, beta, None, None, initial_state, has_initial_state)
    return _prefill(
        inputs,
        _PoolArguments(state_cache, state_indices, checkpoint_state_indices),
        metadata,
        "activated",
        0.0,
        use_qk_l2norm,
        scale,
        state_layout,
        backend,
        groups,
    )


class _PoolArguments(NamedTuple):
    state_cache: Any
    state_indices: Any
    checkpoint_state_indices: Any


def _prefill(
    inputs: KDAInputs,
    rows: _PoolArguments,
    metadata: ChunkMetadata | None,
    gate: Gate,
    lower_bound: float,
    l2norm: bool,
    scale: float | None,
    state_layout: StateLayout,
    backend: str,
    groups: int | None,
) -> KDAResult | KDAPoolResult:
    B, T, H, K = inputs.q.shape
    V = inputs.v.shape[-1]
    validate.check_options(scale, state_layout, groups)
    if metadata is None:
        metadata = _uniform_metadata(B, T)
    else:
        validate.check_metadata(metadata, B, T)
    state = (H, V, K) if state_layout == "vk" else (H, K, V)
    pool = None
    if rows.state_cache is None and rows.state_indices is None:
        if rows.checkpoint_state_indices is not None:
            raise ValueError("checkpoint_state_indices is given without state_cache; pass both")
        want = (metadata.capacity.sequences, *state)
        validate.check_state(inputs.initial_state, inputs.has_initial_state, want, state_layout)
    else:
        pool = bind_pool(inputs, *rows, metadata, state, state_layout)
        inputs = inputs._replace(initial_state=None, has_initial_state=None)
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
    return _run(chosen, config, inputs, pool, metadata)


@functools.lru_cache(maxsize=256)
def _uniform_metadata(B: int, T: int) -> ChunkMetadata:
    return ChunkMetadata.from_seq_lens([T] * B)


@functools.partial(jax.jit, static_argnames=("backend", "config"))
def _run(
    backend: Backend,
    config: KDAConfig,
    inputs: KDAInputs,
    pool: StatePool | None,
    metadata: ChunkMetadata,
) -> KDAResult | KDAPoolResult:
    """Packs the batch and runs the backend; jitted so that eager calls compile once, too."""
    B, T = inputs.q.shape[:2]
    q, k, v, g, beta = (x.reshape(B * T, *x.shape[2:]) for x in inputs[:5])
    wide = compute_dtype(inputs)
    A_log, dt_bias, state = (None if x is None else x.astype(wide) for x in inputs[5:8])
    packed = KDAInputs(q, k, v, g, beta, A_log, dt_bias, state, inputs.has_initial_state)
    run = functools.partial(_on_backend, backend, config)
    if B * T == 0 or metadata.capacity.sequences == 0:
        run = functools.partial(_nothing_to_run, config)
    result = run_on_auto_axes(run, packed, pool, metadata)
    return result._replace(out=result.out.reshape(B, T, *result.out.shape[1:]))


def _on_backend(
    backend: Backend,
    config: KDAConfig,
    inputs: KDAInputs,
    pool: StatePool | None,
    metadata: ChunkMetadata,
) -> KDAResult | KDAPoolResult:
    if pool is None:
        return backend.run(inputs, config, metadata)
    if isinstance(backend, PoolBackend):
        return backend.run_in_pool(inputs, pool, config, metadata)
    return gather_run_scatter(lambda x: backend.run(x, config, metadata), inputs, pool, metadata)


def _nothing_to_run(
    config: KDAConfig, inputs: KDAInputs, pool: StatePool | None, metadata: ChunkMetadata
) -> KDAResult | KDAPoolResult:
    """No token or no sequence: the states pass through, and there is nothing to launch."""

    def pass_through(inputs: KDAInputs) -> KDAResult:
        start = starting_states(inputs, config, jnp.asarray(metadata.seqs))
        final = state_from_layout(start, config)
        saved = jnp.zeros((metadata.capacity.checkpoints, *final.shape[1:]), final.dtype)
        return KDAResult(jnp.zeros_like(inputs.v), final, saved)

    if pool is None:
        return pass_through(inputs)
    return gather_run_scatter(pass_through, inputs, pool, metadata)
