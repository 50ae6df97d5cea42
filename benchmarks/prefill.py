"""One cell of the table: a shape and a dtype, every backend checked first and then timed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax import ChunkMetadata, KDAResult, chunk_kda_prefill, supports
from kda_jax.testing import relative_error

from .floor import Ceilings, floor
from .shapes import Shape
from .timing import measure

# Largest relative error against `scan` in float64 for a timing to count: (out, state).
LIMITS = {"float32": (1e-5, 1e-5), "bfloat16": (5.1e-3, 4.2e-3)}
NAMES = ("q", "k", "v", "raw_g", "raw_beta", "A_log", "dt_bias")


def inputs(shape: Shape, dtype: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs like those of a Kimi-K3 layer: most channels decay slowly; dt_bias in [-7.8, -1.4]."""
    random = np.random.default_rng(seed)
    rows, H, K, V = (1, shape.tokens), shape.H, shape.K, shape.V

    def normal(*dims: int) -> np.ndarray:
        return random.standard_normal(dims, np.float32).astype(jnp.dtype(dtype))

    return {
        "q": normal(*rows, H, K),
        "k": normal(*rows, H, K),
        "v": normal(*rows, H, V),
        "raw_g": normal(*rows, H, K),
        "raw_beta": normal(*rows, H),
        "A_log": np.log(random.uniform(1.0, 4.0, H)).astype(np.float32),
        "dt_bias": random.uniform(-7.8, -1.4, (H, K)).astype(np.float32),
    }


def run(
    shape: Shape,
    dtype: str,
    backends: tuple[str, ...],
    ceilings: Ceilings,
    *,
    budget: float = 2.0,
    step: Any = chunk_kda_prefill,
) -> dict[str, Any]:
    """Check and time the backends on one shape; returns a JSON-compatible row.

    A backend that does not run here is left out with the reason; one whose results are off keeps
    its time in the JSON, and the report prints no ratio for it.
    """
    arrays = inputs(shape, dtype)
    metadata = ChunkMetadata.from_seq_lens(shape.seq_lens)
    reference = _reference(arrays, metadata)
    on_device = [jnp.asarray(arrays[name]) for name in NAMES]
    functions, rows, left_out = {}, {}, {}
    for name in backends:
        support = supports(name, dtype=dtype, K=shape.K, V=shape.V, H=shape.H)
        if not support:
            left_out[name] = support.reason
            continue
        call = _call(name, on_device, metadata, step)
        result = call()
        errors = [
            relative_error(np.asarray(x, np.float64), want)
            for x, want in zip(result[:2], reference, strict=True)
        ]
        rows[name] = {
            "error_out": errors[0],
            "error_state": errors[1],
            # Written so that NaN fails.
            "parity": all(e <= limit for e, limit in zip(errors, LIMITS[dtype], strict=True)),
        }
        functions[name] = call
    for name, timing in measure(functions, budget=budget).items():
        rows[name].update(timing.to_json())
    return {
        "shape": shape.name,
        "tokens": shape.tokens,
        "sequences": len(shape.seq_lens),
        "H": shape.H,
        "K": shape.K,
        "V": shape.V,
        "dtype": dtype,
        "floor_s": floor(shape, dtype, ceilings),
        "backends": rows,
        "left_out": left_out,
    }


def _call(backend: str, arrays: list[jax.Array], metadata: ChunkMetadata, step: Any) -> Any:
    @jax.jit
    def prefill(arrays: Any, metadata: Any) -> KDAResult:
        return step(*arrays, metadata=metadata, backend=backend)

    return lambda: prefill(arrays, metadata)


def _reference(
    arrays: dict[str, np.ndarray], metadata: ChunkMetadata
) -> tuple[np.ndarray, np.ndarray]:
    """(out, final_state) of the token recurrence in float64, on the same rounded inputs."""
    with jax.enable_x64(True):
        wide = [np.asarray(arrays[name], np.float64) for name in NAMES]
        result = chunk_kda_prefill(*wide, metadata=metadata, backend="scan")
        return np.asarray(result.out), np.asarray(result.final_state)
