"""Chunks of one token (ffi/gpu/tokens.h): the AMD machine code in the interpreter, against float64.

The library asks for them in decode steps alone; the kernel takes sequences of any length, and so do
these tests.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tinygrad", reason="tinygrad decodes AMD machine code (extra: amd)")

import cdna_prefill
from test_cdna_kernels import as_vk, missing

from kda_jax import ChunkMetadata, KDAResult
from kda_jax.decode_kernel import token_each
from kda_jax.testing import Case, make_case, relative_error, scan_in_float64
from kda_jax.testing_pool import pool_case

# float32 inside: outputs lose what their type rounds, states nothing.
OUT, STATE = {"bfloat16": 2.5e-3, "float16": 4e-4}, 1e-6


def in_tokens(case: Case) -> Case:
    """The case with a chunk for each token."""
    m = case.metadata
    seqs, chunks = np.array(m.seqs), np.full((m.capacity.tokens, 4), -1, np.int32)
    chunks[:, 1:3] = 0
    saved = {(s, offset): i for i, (s, offset) in enumerate(np.array(m.checkpoints).tolist())}
    for s, (first, length, _, _) in enumerate(seqs.tolist()):
        for t in range(length):
            chunks[first + t] = s, first + t, 1, saved.get((s, t + 1), -1)
        if length >= 0:
            seqs[s, 2:] = first, length
    capacity = dataclasses.replace(m.capacity, chunks=m.capacity.tokens)
    return dataclasses.replace(
        case, metadata=ChunkMetadata(seqs, chunks, m.checkpoints, 1, capacity)
    )


PACK: dict[str, Any] = {
    "initial_state": [True, False, True, True],
    "checkpoint_offsets": [[2], [], [], [1]],
    "capacity": "bucket",  # padding holds NaN
}
CELLS: dict[str, dict[str, Any]] = {
    "decode steps": {"seq_lens": [1] * 3, "V": 32, "H": 2},
    "pack, float16": {"seq_lens": [3, 1, 0, 1], "K": 64, "dtype": "float16", **PACK},
    "pack, softplus": {"seq_lens": [2, 1, 0, 2], "lower_bound": None, **PACK},
}


def of(name: str) -> Case:
    sizes: dict[str, Any] = {"H": 1, "K": 128, "V": 16, "dtype": "bfloat16"}
    return make_case("random", **sizes | CELLS[name])


@pytest.fixture(scope="module", autouse=True)
def tool_chain() -> None:
    if reason := cdna_prefill.why_not():
        missing(reason)


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("arch", cdna_prefill.ARCHITECTURES)
def test_tokens(arch: str, name: str, layout: str) -> None:
    case = of(name)
    got = as_vk(cdna_prefill.prefill(arch, in_tokens(case), layout=layout).result, layout)
    want = scan_in_float64(case)
    bounds = (OUT[case.q.dtype.name], STATE, STATE)
    for what, x, ref, bound in zip(KDAResult._fields, got, want, bounds, strict=True):
        error = relative_error(x, ref)  # NaN, of which every result is full at first, is not <=
        assert error <= bound, f"{what}: {error:.2e} from float64"


@pytest.mark.parametrize("arch", cdna_prefill.ARCHITECTURES)
def test_rows_of_a_pool(arch: str) -> None:
    """The rows that are named are written, one of them not read; all others keep their bits."""
    case = make_case(
        "random",
        seq_lens=[1] * 4,
        H=2,
        K=64,
        V=32,
        dtype="bfloat16",
        initial_state=[True, False, True, True],
    )
    p = pool_case(case, without=[3])
    want = scan_in_float64(p.case)
    token = dataclasses.replace(p.case, metadata=token_each(4))
    got = cdna_prefill.prefill(arch, dataclasses.replace(p, case=token)).result
    assert relative_error(got.out, want.out) <= OUT["bfloat16"]
    after = p.after(want)
    for row in p.written:
        assert relative_error(got.state_cache[row], after[row]) <= STATE
    np.testing.assert_array_equal(
        got.state_cache[p.others].view(np.uint32), p.pool[p.others].view(np.uint32)
    )


@pytest.mark.parametrize("arch", cdna_prefill.ARCHITECTURES)
def test_nothing_but_the_results_is_stored(arch: str) -> None:
    case = in_tokens(of("decode steps"))
    (stats,) = cdna_prefill.prefill(arch, case).stats["tokens"]
    requests, H, V, K = case.metadata.capacity.sequences, 2, 32, 128
    assert stats.global_stored == requests * H * V * (4 * K + 2)  # the states, and bfloat16 outputs
