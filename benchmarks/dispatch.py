"""What one call of the operator costs beside its arithmetic: a tiny shape against an empty jit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kda_jax import ChunkMetadata, chunk_kda_prefill, supports

from .timing import measure

H, K, TOKENS = 1, 64, 16


def run(backends: tuple[str, ...], budget: float = 1.0) -> dict[str, Any]:
    """Time a jitted call on 16 tokens of one 64-channel head, and jits that do nothing.

    Seconds per call, until the result is ready. The empty jit takes the same arguments and returns
    one of them plus one; what the operator takes longer is its dispatch and its 16 tokens.
    """
    metadata = ChunkMetadata.from_seq_lens([TOKENS])
    x = jnp.ones((1, TOKENS, H, K), jnp.float32)
    arrays = (x, x, x, x, x[..., 0], jnp.zeros(H), jnp.zeros((H, K)))

    def empty(args: Any, metadata: Any = None) -> jax.Array:
        return args[5] + 1

    plain, packed = jax.jit(empty), jax.jit(empty)
    functions = {
        "empty jit, same arrays": lambda: plain(arrays),
        "empty jit, same arrays and metadata": lambda: packed(arrays, metadata),
    }
    left_out = {}
    for name in backends:
        support = supports(name, dtype="float32", K=K, V=K, H=H)
        if not support:
            left_out[name] = support.reason
            continue
        functions[name] = _call(name, arrays, metadata)
    timings = measure(functions, budget=budget)
    base = timings["empty jit, same arrays and metadata"].median
    return {
        "shape": f"T = {TOKENS}, H = {H}, K = V = {K}, float32",
        "rows": [
            {"what": name, "over_empty_s": timing.median - base, **timing.to_json()}
            for name, timing in timings.items()
        ],
        "left_out": left_out,
    }


def _call(backend: str, arrays: tuple[jax.Array, ...], metadata: ChunkMetadata) -> Any:
    @jax.jit
    def step(arrays: Any, metadata: Any) -> Any:
        return chunk_kda_prefill(*arrays, metadata=metadata, backend=backend)

    return lambda: step(arrays, metadata)
