"""`python -m benchmarks.checkpoints`: what checkpoints cost, on and off the chunk grid.

One prefill of 4096 tokens, 12 heads, K = V = 128, float32, with the fused backend. A checkpoint off
the grid cuts a chunk in two: one more serial step.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from kda_jax import ChunkMetadata, chunk_kda_prefill
from kda_jax.testing import make_case

from .timing import measure

TOKENS, H, D = 4096, 12, 128
OFFSETS: dict[str, list[list[int]] | None] = {
    "none": None,
    "one on the grid": [[2048]],
    "one off the grid": [[2000]],
    "every 1024 tokens": [[1024, 2048, 3072]],
    "every 1000 tokens": [[1000, 2000, 3000, 4000]],
}


def main() -> None:
    case = make_case("random", seq_lens=[TOKENS], H=H, K=D, V=D)
    names = ("q", "k", "v", "raw_g", "raw_beta", "A_log", "dt_bias")
    args = jax.device_put([np.asarray(getattr(case, name)) for name in names])
    run = jax.jit(lambda x, m: chunk_kda_prefill(*x, metadata=m, backend="fused"))
    calls = {}
    for name, offsets in OFFSETS.items():
        metadata = ChunkMetadata.from_seq_lens([TOKENS], checkpoint_offsets=offsets)
        calls[name] = functools.partial(run, args, jax.device_put(metadata))
    times = measure(calls)
    columns = ("checkpoints", "median", "quartiles", "over none")
    table = Table(*columns, title=jax.devices()[0].platform)
    for name, t in times.items():
        table.add_row(
            name,
            f"{t.median * 1e3:.1f} ms",
            f"{t.low * 1e3:.1f} - {t.high * 1e3:.1f}",
            f"{(t.median / times['none'].median - 1) * 100:+.1f} %",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
