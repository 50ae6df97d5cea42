"""Named shapes that the tests and the benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One packed batch: ``seq_lens`` tokens per sequence, H heads, K key and V value channels."""

    name: str
    seq_lens: tuple[int, ...]
    H: int
    K: int = 128
    V: int = 128

    @property
    def tokens(self) -> int:
        return sum(self.seq_lens)


# Kimi-K3 has 96 heads of 128 channels: 12 of them on each of 8 devices.
LENGTHS = (256, 1024, 4096, 16384)
HEADS = (4, 12)

PACKS = {
    "ragged": (1300, 547, 2048, 963, 271, 3063),
    "8x1024": (1024,) * 8,
    "64x128": (128,) * 64,
}

ONE_SEQUENCE = tuple(Shape(f"T{T}_H{H}", (T,), H) for H in HEADS for T in LENGTHS)
PACKED = tuple(Shape(f"{name}_H{H}", lens, H) for H in HEADS for name, lens in PACKS.items())

# The table for GPUs, and the time of each shape that is aimed at, as a ratio to FLA's in one run.
GPU_TARGETS = {
    Shape("T1024_H12", (1024,), 12): 0.31,
    Shape("T8192_H12", (8192,), 12): 0.29,
    Shape("T65536_H12", (65536,), 12): 0.32,
    Shape("T8192_H32", (8192,), 32): 0.35,
    Shape("T8192_H64", (8192,), 64): 0.35,
    Shape("T8192_H96", (8192,), 96): 0.31,
    Shape("8x1024_H12", PACKS["8x1024"], 12): 0.31,
    Shape("8x1024_H96", PACKS["8x1024"], 96): 0.28,
    Shape("ragged_H12", PACKS["ragged"], 12): 0.33,
    Shape("ragged_H96", PACKS["ragged"], 96): 0.31,
    Shape("64x128_H12", PACKS["64x128"], 12): 0.33,
    Shape("64x128_H96", PACKS["64x128"], 96): 0.29,
}

SHAPES = {shape.name: shape for shape in (*ONE_SEQUENCE, *PACKED, *GPU_TARGETS)}
TARGETS = {shape.name: ratio for shape, ratio in GPU_TARGETS.items()}

# What `python -m benchmarks.gpu` runs.
GPU = tuple(TARGETS)

# What `make bench` runs.
CPU = (*(shape.name for shape in ONE_SEQUENCE), "ragged_H4", "ragged_H12")


def ragged_lens(sequences: int, tokens: int) -> list[int]:
    """``sequences`` different lengths, none empty, that sum to ``tokens``; always the same ones."""
    weights = [1 + (37 * i) % 64 for i in range(sequences)]
    spare = tokens - sequences
    lens = [1 + spare * w // sum(weights) for w in weights]
    lens[0] += tokens - sum(lens)
    return lens
