"""Host cost of building ChunkMetadata for one serving step: 256 sequences, 64K tokens in all."""

from __future__ import annotations

from typing import Any

from kda_jax import ChunkMetadata

from .shapes import ragged_lens
from .timing import measure

SEQUENCES, TOKENS = 256, 65536
LIMIT = 200e-6  # seconds


def run(budget: float = 1.0) -> dict[str, Any]:
    """Time the ways to build the metadata of one step; seconds per call."""
    lens = ragged_lens(SEQUENCES, TOKENS)
    halves = [length // 2 for length in lens]
    timings = measure(
        {
            "from_seq_lens": lambda: ChunkMetadata.from_seq_lens(lens),
            "with capacity='bucket'": lambda: ChunkMetadata.from_seq_lens(lens, capacity="bucket"),
            "and one checkpoint per sequence": lambda: ChunkMetadata.from_seq_lens(
                lens, checkpoint_offsets=halves, capacity="bucket"
            ),
        },
        budget=budget,
    )
    return {
        "sequences": SEQUENCES,
        "tokens": TOKENS,
        "limit_s": LIMIT,
        "rows": [{"what": name, **timing.to_json()} for name, timing in timings.items()],
    }
