"""Every backend against the recurrence in float64, through the public selector.

`assert_matches_scan` also checks shapes and dtypes, and that every element is finite although all
padding holds NaN.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from cases import (
    BASE,
    DIMS,
    DTYPE,
    MIXED,
    PATHS,
    activated,
    all_paths,
    base_case,
    bounds,
    make_case,
    prefill,
    sigmoid,
)

from kda_jax import Capacity, supports
from kda_jax.testing import (
    Case,
    assert_matches_scan,
    default_cases,
    relative_error,
    scan_in_float64,
)

LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 100, 513, 1000]
PACKS = {
    "empty between": [65, 0, 1, 130, 0, 0, 16],
    "empty at both ends": [0, 100, 1, 0],
    "only one-token sequences": [1] * 8,
    "whole chunks": [64, 128, 0, 64],
    "full": [1000, 1, 0, 279],
}


@pytest.mark.parametrize("bound", [-5.0, -0.7, None])
def test_scan_is_the_formula(bound: float | None, x64: None) -> None:
    # The reference of all other tests, against the definition written down once more.
    case = make_case("random", seq_lens=[40], H=2, K=6, V=4, lower_bound=bound)
    q, k, v, raw_g, raw_beta, A_log, dt_bias = (x.astype(np.float64) for x in case.args)
    got = scan_in_float64(case)
    for h in range(2):
        S = case.initial_state[0, h].astype(np.float64)
        for t in range(40):
            q_t = q[0, t, h] / np.sqrt(np.sum(q[0, t, h] ** 2) + 1e-6)
            k_t = k[0, t, h] / np.sqrt(np.sum(k[0, t, h] ** 2) + 1e-6)
            x = raw_g[0, t, h] + dt_bias[h]
            if bound is None:
                g = -np.exp(A_log[h]) * np.log1p(np.exp(x))
            else:
                g = bound * sigmoid(np.exp(A_log[h]) * x)
            S = S * np.exp(g)
            S = S + sigmoid(raw_beta[0, t, h]) * np.outer(v[0, t, h] - S @ k_t, k_t)
            np.testing.assert_allclose(got.out[0, t, h], 6**-0.5 * S @ q_t, rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(got.final_state[0, h], S, rtol=1e-11, atol=1e-13)


@all_paths([*PATHS, "auto"])
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(path: str, length: int) -> None:
    case = base_case(
        "random",
        [length],
        seed=length,
        initial_state=length % 2 == 1,
        checkpoint_offsets=[[(length + 1) // 2]],
    )
    assert_matches_scan(prefill(path), case, **bounds(path))


@all_paths([*PATHS, "auto"])
@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS.keys())
def test_packs(path: str, lengths: list[int]) -> None:
    case = base_case(
        "k3",
        lengths,
        initial_state=[i % 3 != 1 for i in range(len(lengths))],
        checkpoint_offsets=[sorted({1, (n + 1) // 2, n}) if n else [] for n in lengths[:5]]
        + [[]] * len(lengths[5:]),
    )
    assert_matches_scan(prefill(path), case, **bounds(path))


@pytest.mark.parametrize("backend", ["fused", "mixed"])
@pytest.mark.parametrize("groups", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("bound", [-5.0, None])
def test_groups(backend: str, groups: int, bound: float | None) -> None:
    # More groups than chunks in most sequences, fewer in the first.
    case = base_case(
        "k3",
        [700, 65, 1, 0, 130, 256],
        lower_bound=bound,
        initial_state=[True, False, True, True, False, True],
        checkpoint_offsets=[[64, 65, 699], [65], [1], [], [100], [128]],
    )
    assert_matches_scan(prefill(backend), case, groups=groups, **bounds(backend))


# Every value of every option with most values of the others: gate, chunk size, layout, dtype,
# which sequences have an initial state ("none": no such argument), checkpoints.
Options = tuple[float | None, int, str, str, str, bool]
OPTIONS: list[Options] = [
    (-5.0, 16, "vk", "bfloat16", "none", True),
    (-5.0, 32, "kv", "float16", "some", False),
    (-2.5, 64, "kv", "float32", "all", True),
    (None, 16, "kv", "float32", "some", True),
    (None, 32, "vk", "bfloat16", "all", False),
    (None, 64, "vk", "float16", "none", False),
]
MORE_OPTIONS: list[Options] = [
    (bound, chunk_size, layout, dtype, "some", True)
    for bound in (-5.0, None)
    for chunk_size in (16, 32, 64)
    for layout in ("vk", "kv")
    for dtype in ("float32", "bfloat16", "float16")
    if (layout == "kv") == (chunk_size == 32)  # halves the programs of the reference
]


def options_case(options: Options) -> tuple[Case, dict[str, Any]]:
    bound, chunk_size, layout, dtype, states, checkpoints = options
    case = make_case(
        "random",
        seq_lens=[65, 0, 1, 80],
        dtype=dtype,
        lower_bound=bound,
        initial_state={"none": False, "all": True, "some": [True, False, False, True]}[states],
        checkpoint_offsets=[[17, 64], [], [1], [80]] if checkpoints else None,
        capacity=Capacity(160, 4, 160 // chunk_size + 8, 4 if checkpoints else 0),
        chunk_size=chunk_size,
        **DIMS,
    )
    return case, {"state_layout": layout, "scale": -3.0 if states == "all" else None}


@all_paths()
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(path: str, options: Options) -> None:
    case, kwargs = options_case(options)
    limits = bounds(path) if options[3] == "float32" else {}
    assert_matches_scan(prefill(path, once=True), case, **kwargs, **limits)


@all_paths(["fused", "fused in 4 groups"])
@pytest.mark.parametrize("options", MORE_OPTIONS, ids=str)
def test_more_options(path: str, options: Options) -> None:
    case, kwargs = options_case(options)
    assert_matches_scan(prefill(path), case, **kwargs)


@all_paths(["scan", "chunked", "fused", "fused in 4 groups"])
@pytest.mark.parametrize("l2norm", [True, False])
@pytest.mark.parametrize("bound", [-5.0, None])
def test_activated_inputs(path: str, l2norm: bool, bound: float | None) -> None:
    if path == "chunked" and l2norm:
        pytest.skip("test_chunked has it; compiling it again takes long")
    case = base_case(
        "random",
        [65, 0, 1, 130],
        lower_bound=bound,
        initial_state=[True, False, True, False],
        checkpoint_offsets=[[64], [], [1], [17, 100]],
    )
    assert_matches_scan(activated(path, l2norm), case)


DTYPE_MIXES = [
    ("bfloat16", "bfloat16", "float32", "float32", "float32"),
    ("float32", "float16", "bfloat16", "bfloat16", "float16"),
    ("float16", "float32", "float16", "float16", "bfloat16"),
]


@all_paths(["scan", "chunked", "fused", "fused in 4 groups", "mixed"])
@pytest.mark.parametrize("dtypes", DTYPE_MIXES, ids=" ".join)
def test_dtype_mixes(path: str, dtypes: tuple[str, ...]) -> None:
    if path == "chunked" and dtypes != DTYPE_MIXES[1]:
        pytest.skip("one mix is enough: it loads all dtypes in one place")
    case, kwargs = options_case((-5.0, 16, "vk", "float32", "some", True))
    names = ("q", "k", "v", "raw_g", "raw_beta")
    mixed = {
        name: getattr(case, name).astype(np.dtype(dtype) if dtype != "bfloat16" else _bfloat16())
        for name, dtype in zip(names, dtypes, strict=True)
    }
    assert_matches_scan(prefill(path, once=True), dataclasses.replace(case, **mixed), **kwargs)


def _bfloat16() -> Any:
    return make_case("random", seq_lens=[1], H=1, K=1, V=1, dtype="bfloat16").q.dtype


@all_paths(["scan", "chunked"])
@pytest.mark.parametrize(
    ("K", "V", "chunk_size"), [(100, 37, 64), (256, 256, 16), (3, 256, 32), (1, 1, 16)]
)
def test_any_dims(path: str, K: int, V: int, chunk_size: int) -> None:
    case = make_case(
        "k3",
        seq_lens=[70, 1, 33],
        H=1,
        K=K,
        V=V,
        checkpoint_offsets=[[50], [], [16]],
        chunk_size=chunk_size,
    )
    assert_matches_scan(prefill(path, once=True), case)
    assert supports("auto", K=K, V=V).backend == "chunked"
    assert not supports("fused", K=K, V=V)


@all_paths(["fused", "fused in 4 groups", "mixed"])
@pytest.mark.parametrize(
    ("K", "V", "chunk_size"), [(64, 16, 64), (64, 256, 16), (128, 48, 32), (128, 128, 64)]
)
def test_dims_of_fused(path: str, K: int, V: int, chunk_size: int) -> None:
    case = make_case(
        "random",
        seq_lens=[100, 1, 33],
        H=3,
        K=K,
        V=V,
        checkpoint_offsets=[[50], [], [16]],
        chunk_size=chunk_size,
    )
    assert_matches_scan(prefill(path), case, **bounds(path))


def test_default_cases_of_the_test_library() -> None:
    assert_matches_scan(prefill("fused"), default_cases(DTYPE))


# PEERS: fla-core 0.6.0 in bfloat16, against float64.
FLA = {"random": (4.1e-3, 3.1e-3), "k3": (5.1e-3, 4.2e-3)}


@all_paths()
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["random", "k3"])
def test_half_precision_is_as_good_as_fla(path: str, kind: str, dtype: str) -> None:
    if path == "chunked" and dtype == "float16":
        pytest.skip("test_options has it; compiling it again takes long")
    case = base_case(kind, [1100, 130], K=128, V=128, dtype=dtype)
    out, state = FLA[kind]
    assert_matches_scan(prefill(path, once=True), case, rtol_out=out, rtol_state=state)


@all_paths(["mixed", "mixed in 3 groups"])
@pytest.mark.parametrize("kind", ["random", "saturated", "k3", "slow"])
def test_accuracy_of_16_bit_operands(path: str, kind: str) -> None:
    case = base_case(kind, [1100, 130], K=128, V=128, dtype="bfloat16")
    assert_matches_scan(prefill(path), case, **bounds(path))


def test_accuracy_of_16_bit_operands_is_theirs() -> None:
    # Guards the tests above: were "mixed" silently float32, they would all pass.
    case = base_case("random", [1100, 130], K=128, V=128)
    got = prefill("mixed")(*case.args, **case.kwargs)
    want = scan_in_float64(case)
    assert 1e-4 < relative_error(got.out, want.out) < MIXED[0]
    assert 1e-6 < relative_error(got.final_state, want.final_state) < MIXED[1]
    assert case.metadata.capacity == BASE
