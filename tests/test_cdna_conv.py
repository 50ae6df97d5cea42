"""Short convolutions (ffi/gpu/conv.h): AMD machine code in the interpreter, against the loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("tinygrad", reason="tinygrad decodes AMD machine code (extra: amd)")

import cdna_conv
import cdna_prefill
import ml_dtypes
from test_cdna_kernels import missing
from test_conv import loop

from kda_jax import Capacity, ChunkMetadata

LENS, OFFSETS = [19, 0, 1, 2, 16, 35], [[1, 3, 19], [], [1], [], [16], []]
TOKENS, CHANNELS = 80, (16, 8, 24)
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
ROUNDING = {"bfloat16": 3e-3, "float16": 4e-4}


@pytest.fixture(scope="module", autouse=True)
def tool_chain() -> None:
    if reason := cdna_prefill.why_not():
        missing(reason)


def arrays(dtype: str) -> tuple[list[Any], list[Any], list[Any]]:
    """Rows of no sequence and states that must not be read are NaN."""
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal((TOKENS, C)).astype(DTYPES[dtype]) for C in CHANNELS]
    weights = [rng.standard_normal((C, 4)).astype(DTYPES[dtype]) for C in CHANNELS]
    weights[1] = weights[1].astype(np.float32)
    states = [rng.standard_normal((8, C, 3)).astype(DTYPES[dtype]) for C in CHANNELS]
    for x in xs:
        x[sum(LENS) :] = np.nan
    return xs, weights, states


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", cdna_prefill.ARCHITECTURES)
def test_a_pack(arch: str, dtype: str, with_state: bool) -> None:
    capacity = Capacity(tokens=TOKENS, sequences=8, chunks=8, checkpoints=6)
    metadata = ChunkMetadata.from_seq_lens(LENS, checkpoint_offsets=OFFSETS, capacity=capacity)
    has = np.array([True, True, False, True, False, True, False, False])
    xs, weights, states = arrays(dtype)
    for state in states:
        state[~has] = np.nan
    given = (states, has) if with_state else (None, None)
    silu = arch == "gfx950"
    found = cdna_conv.convolve(arch, xs, weights, *given, metadata, silu=silu)
    M = sum(map(len, OFFSETS))
    parts = zip(xs, weights, states, *found[:3], strict=True)
    for x, weight, state, y, final, inside in parts:
        wide = [a.astype(np.float64) for a in (x, weight, state)]
        wide[2] = np.where(has[:, None, None] & with_state, wide[2], 0)
        want = loop(*wide[:2], LENS, wide[2], OFFSETS, silu=silu)
        got = y.astype(np.float64)
        error = np.linalg.norm(got[: sum(LENS)] - want[0]) / np.linalg.norm(want[0])
        assert error <= ROUNDING[dtype]
        assert not np.any(got[sum(LENS) :])
        np.testing.assert_array_equal(final[: len(LENS)].astype(np.float64), want[1])
        np.testing.assert_array_equal(inside[:M].astype(np.float64), want[2])
        assert not np.any(final[len(LENS) :].astype("f"))
        assert not np.any(inside[M:].astype("f"))
    total = 2 * sum((TOKENS + 3 * (8 + 6)) * C for C in CHANNELS)
    assert found[3].global_stored == total  # each result once
