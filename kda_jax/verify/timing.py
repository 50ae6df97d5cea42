"""A short timing: not a benchmark, but enough to see that the native kernel is what runs."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax

from ..ops import chunk_kda_prefill
from ..testing import make_case
from .path import Path

# Tokens and heads: a prompt that takes milliseconds there.
_SHAPES = {"cpu": (1024, 2), "cuda": (8192, 32), "rocm": (8192, 32)}
_SCAN_TOKENS = 256  # it goes token by token


def measure(path: Path, *, calls: int = 7) -> dict[str, Any]:
    """Median wall time of a warm call whose arguments are on the device, in seconds."""
    tokens, heads = _SHAPES.get(path.platform, _SHAPES["cpu"])
    if path.backend == "scan":
        tokens = _SCAN_TOKENS
    dtype = "float32" if path.platform == "cpu" else "bfloat16"  # one for all backends
    case = make_case("k3", seq_lens=[tokens], H=heads, dtype=dtype, initial_state=False)
    with jax.default_device(path.device):
        args, metadata = jax.device_put((case.args, case.metadata))

        def call() -> Any:
            return chunk_kda_prefill(*args, metadata=metadata, backend=path.backend)

        jax.block_until_ready(call())
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            jax.block_until_ready(call())
            times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    shape = {"tokens": tokens, "H": heads, "K": 128, "V": 128, "dtype": dtype}
    return {**shape, "seconds": seconds, "tokens_per_second": tokens / seconds}
