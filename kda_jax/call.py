"""One call of the operator: its options and states checked, a backend chosen, the batch packed."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

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


class PoolArguments(NamedTuple):
    """As the caller gave them."""

    state_cache: Any
    state_indices: Any
    checkpoint_state_indices: Any


def prefill(
    inputs: KDAInputs,
    rows: PoolArguments,
    metadata: ChunkMetadata | None,
    gate: Gate,
    lower_bound: float,
    l2norm: bool,
    scale: float | None,
    state_layout: StateLayout,
    backend: str,
    groups: int | None,
) -> KDAResult | KDAPoolResult:
    """Checks what the public functions have in common, picks the backend and runs it."""
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
    spec = CallSpec.of(current_platform(), inputs[:5], metadata, gate, groups)
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
    try:
        return _run(chosen, config, inputs, pool, metadata)
    except TypeError as error:
        if "forward-mode" not in str(error):  # JAX's words on a rule for reverse mode alone
            raise
        raise TypeError(
            f"backend {chosen.name!r} has no forward-mode derivative (jax.jvp, jax.jacfwd,"
            " jax.hessian): pass backend='chunked' or 'scan', which have one"
        ) from error


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
    results = KDAResult(*[0] * 3) if pool is None else KDAPoolResult(*[0] * 2)  # type: ignore[arg-type]
    result = run_on_auto_axes(run, v, results, packed, pool, metadata)
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
