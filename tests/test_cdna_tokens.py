"""Decode steps (ffi/gpu/tokens.h): the AMD machine code in the interpreter, against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tinygrad", reason="tinygrad decodes AMD machine code (extra: amd)")

import cdna_prefill
from test_cdna_kernels import as_vk, missing

from kda_jax import KDAResult
from kda_jax.decode_kernel import token_each
from kda_jax.testing import Case, make_case, relative_error, scan_in_float64
from kda_jax.testing_pool import pool_case

# float32 inside: outputs lose what their type rounds, states nothing.
OUT, STATE = {"bfloat16": 2.5e-3, "float16": 4e-4}, 1e-6


def in_tokens(case: Case) -> Case:
    """The case with a chunk for each sequence, which has a token."""
    return dataclasses.replace(case, metadata=token_each(case.metadata.num_sequences))


CELLS: dict[str, dict[str, Any]] = {
    "bfloat16": {"seq_lens": [1] * 3, "V": 48, "H": 2},
    "float16": {"seq_lens": [1] * 4, "K": 64, "dtype": "float16"},
    "softplus": {"seq_lens": [1] * 4, "K": 64, "V": 80, "lower_bound": None},
}


def of(name: str) -> Case:
    sizes: dict[str, Any] = {"H": 1, "K": 128, "V": 16, "dtype": "bfloat16"}
    case = {"initial_state": [True, False, True, True][: len(CELLS[name]["seq_lens"])]}
    return make_case("random", **sizes | case | CELLS[name])


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
    got = cdna_prefill.prefill(arch, dataclasses.replace(p, case=in_tokens(p.case))).result
    assert relative_error(got.out, want.out) <= OUT["bfloat16"]
    after = p.after(want)
    for row in p.written:
        assert relative_error(got.state_cache[row], after[row]) <= STATE
    np.testing.assert_array_equal(
        got.state_cache[p.others].view(np.uint32), p.pool[p.others].view(np.uint32)
    )


@pytest.mark.parametrize("arch", cdna_prefill.ARCHITECTURES)
def test_nothing_but_the_results_is_stored(arch: str) -> None:
    case = in_tokens(of("bfloat16"))
    (stats,) = cdna_prefill.prefill(arch, case).stats["tokens"]
    requests, H, V, K = case.metadata.capacity.sequences, 2, 48, 128
    assert stats.global_stored == requests * H * V * (4 * K + 2)  # the states, and bfloat16 outputs
