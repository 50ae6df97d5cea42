"""A decode step in a pool by the fused kernel, as a call with chunks of one token.

XLA gathers the requests' rows into a copy, reads that three times and scatters the result; the
kernel reads and writes each state once.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from . import fused
from .capacity import Capacity
from .gate import activate
from .metadata import ChunkMetadata
from .pool import StepPool
from .scan import recurrence
from .sharding import run_on_auto_axes
from .types import KDAConfig, KDAInputs, KDAPoolResult, StatePool

Step = tuple[jax.Array, jax.Array]  # out [R, H, V], states


def decode_in_pool(
    inputs: KDAInputs, pool: StepPool, valid: jax.Array, config: KDAConfig
) -> Step | None:
    """One token of each request.

    Args:
      inputs: q, k, v, g ``[R, H, .]`` and beta ``[R, H]``, no initial state.
      pool: the requests' rows.
      valid: bool ``[R]``; the others have outputs of zeros, and no row.
      config: state_layout "vk", groups None.

    Returns:
      None where no platform here has a kernel for it, or where its call cannot be split: with R
      unknown, or on a mesh of which `jax.shard_map` has some axes alone.
    """
    requests = inputs.q.shape[0]
    if not isinstance(requests, int) or requests == 0:
        return None
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes and not mesh.are_all_axes_manual:
        return None
    if not fused.able(inputs, token_each(requests), config):
        return None
    return _step(config, inputs, pool, valid)


def step_in_plain_jax(
    config: KDAConfig, inputs: KDAInputs, pool: StepPool, valid: jax.Array
) -> Step:
    """The same as XLA does it."""
    states, out = jax.vmap(recurrence)(pool.read(), activate(inputs, config, valid))
    return out.astype(inputs.v.dtype), pool.write(states)


@functools.partial(jax.jit, static_argnames="config")  # so that eager steps compile once
def _step(config: KDAConfig, inputs: KDAInputs, pool: StepPool, valid: jax.Array) -> Step:
    # Derivatives are those of plain JAX, forward mode included.
    step = jax.custom_jvp(functools.partial(_by_kernel, config))
    step.defjvp(functools.partial(jax.jvp, functools.partial(step_in_plain_jax, config)))
    return step(inputs, pool, valid)


def _by_kernel(config: KDAConfig, inputs: KDAInputs, pool: StepPool, valid: jax.Array) -> Step:
    assert inputs.A_log is not None and inputs.dt_bias is not None
    A_log, dt_bias = inputs.A_log.astype(jnp.float32), inputs.dt_bias.astype(jnp.float32)
    inputs = inputs._replace(A_log=A_log, dt_bias=dt_bias)

    def run(inputs: KDAInputs, pool: StatePool | None, metadata: ChunkMetadata) -> KDAPoolResult:
        assert pool is not None
        return fused.FUSED_AUTO.run_in_pool(inputs, pool, config, metadata)

    metadata = token_each(inputs.q.shape[0])
    kind = KDAPoolResult(0, 0)  # type: ignore[arg-type]
    result = run_on_auto_axes(run, inputs.v, kind, inputs, pool.of_kernel(), metadata)
    return jnp.where(valid[:, None, None], result.out, 0), result.state_cache


@functools.lru_cache
def token_each(requests: int) -> ChunkMetadata:
    """The layout of a decode step: sequences, and chunks, of one token."""
    i = np.arange(requests, dtype=np.int32)
    one, none = np.ones_like(i), np.full_like(i, -1)
    return ChunkMetadata(
        seqs=np.stack([i, one, i, one], axis=1),
        chunks=np.stack([i, i, one, none], axis=1),
        checkpoints=np.zeros((0, 2), np.int32),
        chunk_size=1,
        capacity=Capacity(requests, requests, requests),
    )
