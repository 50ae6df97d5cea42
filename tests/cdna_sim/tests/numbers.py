"""Numbers that the tests of compiled kernels share."""

from __future__ import annotations

import numpy as np

F, LANE = np.float32, np.arange(64)


def to_bf16(x: np.ndarray) -> np.ndarray:
    raw = np.asarray(x, F).view(np.uint32)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(F)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)
