"""The custom calls of "fused" for one platform: their operands, results and attributes.

`kda_prefill_v1` takes and returns states by sequence and by checkpoint, `kda_prefill_pool_v1` reads
and writes rows of a pool, which is an operand and, at the same place in memory, a result. Both are
versioned by name: ffi/xla/prefill.h is the other side.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import native
from .groups import choose_groups
from .metadata import ChunkMetadata
from .sharding import varying_like
from .types import KDAConfig, KDAInputs, KDAPoolResult, KDAResult, StatePool
from .workspace import workspace

_GATES = {"bounded": 0, "softplus": 1, "activated": 2}


def custom_call(
    inputs: KDAInputs,
    pool: StatePool | None,
    metadata: ChunkMetadata,
    *,
    platform: str,
    config: KDAConfig,
    mixed: bool,
) -> KDAResult | KDAPoolResult:
    """The call on "cpu", "cuda" or "rocm"; with a pool, ``inputs`` has no initial state."""
    _, H, K = inputs.q.shape
    V, (N, M) = inputs.v.shape[-1], (metadata.capacity.sequences, metadata.capacity.checkpoints)
    groups = config.groups
    if groups is None:
        groups = choose_groups(platform, N, H, V, metadata.capacity.chunks)
    slab, num_bytes = workspace(platform, H, K, V, metadata, groups, pool is not None)
    attributes: dict[str, Any] = {
        "scale": np.float32(config.scale),
        "lower_bound": np.float32(config.lower_bound),
        "gate": np.int32(_GATES[config.gate]),
        "chunk_size": np.int32(metadata.chunk_size),
        "groups": np.int32(groups),
        "slab_chunks": np.int32(slab),
        "l2norm": config.l2norm,
        "state_kv": config.state_layout == "kv",
        "mixed": mixed,
    }
    state = (V, K) if config.state_layout == "vk" else (K, V)
    out = jax.ShapeDtypeStruct(inputs.v.shape, inputs.v.dtype)
    scratch = jax.ShapeDtypeStruct((num_bytes,), jnp.uint8)
    absent = jnp.zeros((0,), jnp.float32)
    operands = [*inputs[:5], *(absent if x is None else x for x in inputs[5:7])]
    tables = (metadata.seqs, metadata.chunks, metadata.checkpoints)
    if pool is not None:
        cache = jax.ShapeDtypeStruct(pool.states.shape, pool.states.dtype)
        call = jax.ffi.ffi_call(
            native.POOL_TARGET,
            (out, cache, scratch),
            input_output_aliases={len(operands): 1},
        )
        o, states, _ = call(*operands, *pool, *tables, **attributes)
        return varying_like((inputs, pool, metadata), KDAPoolResult(o, states))
    call = jax.ffi.ffi_call(
        native.TARGET,
        (
            out,
            jax.ShapeDtypeStruct((N, H, *state), jnp.float32),
            jax.ShapeDtypeStruct((M, H, *state), jnp.float32),
            scratch,
        ),
    )
    initial, has = inputs.initial_state, inputs.has_initial_state
    o, final, saved, _ = call(
        *operands,
        absent if initial is None else initial,
        jnp.zeros((0,), jnp.bool_) if has is None else has,
        *tables,
        **attributes,
    )
    return varying_like((inputs, metadata), KDAResult(o, final, saved))
