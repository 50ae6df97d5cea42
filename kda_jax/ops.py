"""The public operator: checks the tensors and hands them on."""

from __future__ import annotations

from typing import Any, overload

from . import validate
from .call import PoolArguments, prefill
from .metadata import ChunkMetadata
from .types import Gate, KDAInputs, KDAPoolResult, KDAResult, StateLayout


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

    The recurrence and the softplus gate are those of Kimi Linear (arXiv:2510.26692, section 3), the
    bounded gate is Kimi-K3's.

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
    lies: by "fused" inside its custom call, row by row, and around any other backend by a gather
    and a scatter. A pool that is not donated is copied first and stays as it was. With
    has_initial_state a False row is written without being read. Rows of padding in the metadata
    have no row, whatever their index says. All other rows keep their bits.

    The rows that one call writes must be distinct, and no sequence may hold the row that a
    checkpoint goes to. NumPy indices are checked for that; others never leave the device, so take
    them from `kda_jax.serving.step_rows`, which checks them on the host. An index outside of the
    pool is skipped on the device.

    A pool may be sharded over heads, and goes into an exported program as it is; sharded over
    rows it is gathered first. Under `jax.vmap` each call has a pool of its own, whose rows are
    gathered and scattered, whatever the backend. A derivative needs the pool as it was, so that it
    is copied.

    Raises:
      ValueError: an argument is wrong; names it and says what it should be.
      NotImplementedError: the named backend cannot run this call; says why and what to do.
      TypeError: "fused", which "auto" may choose, in forward mode (`jax.jvp`, `jax.jacfwd`): only
        "chunked" and "scan" have that derivative. All have the reverse one. Where a jit lies
        between, the error is JAX's own, on a custom_vjp function.
    """
    B, T, H, K, V = validate.check_tensors(q, k, v, raw_g, raw_beta, "raw_g", "raw_beta")
    validate.check_gate(A_log, dt_bias, lower_bound, H, K)
    gate: Gate = "softplus" if lower_bound is None else "bounded"
    inputs = KDAInputs(q, k, v, raw_g, raw_beta, A_log, dt_bias, initial_state, has_initial_state)
    rows = PoolArguments(state_cache, state_indices, checkpoint_state_indices)
    bound = 0.0 if lower_bound is None else float(lower_bound)
    return prefill(inputs, rows, metadata, gate, bound, True, scale, state_layout, backend, groups)


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
    """`chunk_kda_prefill` for gates that are activated already: its formulas from S on.

    Args:
      q, k, v: as there, ``[B, T, H, K]``, ``[B, T, H, K]`` and ``[B, T, H, V]``.
      g: ``[B, T, H, K]``, the decay of each channel as natural logarithm, <= 0.
      beta: ``[B, T, H]``, in (0, 1).
      use_qk_l2norm: whether to L2-normalize q and k here.
      metadata, initial_state, has_initial_state, state_cache, state_indices,
        checkpoint_state_indices, scale, state_layout, backend, groups: as there.

    Returns:
      `KDAResult`, or with state_cache `KDAPoolResult`, as there.

    Raises:
      ValueError, NotImplementedError: as there. The values of g and beta are not checked: that
        would wait for the device.
    """
    validate.check_tensors(q, k, v, g, beta, "g", "beta")
    if not isinstance(use_qk_l2norm, bool):
        raise ValueError(f"use_qk_l2norm is {use_qk_l2norm!r}, want True or False")
    inputs = KDAInputs(q, k, v, g, beta, None, None, initial_state, has_initial_state)
    return prefill(
        inputs,
        PoolArguments(state_cache, state_indices, checkpoint_state_indices),
        metadata,
        "activated",
        0.0,
        use_qk_l2norm,
        scale,
        state_layout,
        backend,
        groups,
    )
