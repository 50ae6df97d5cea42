"""Rows of HAZARDS.md about right results: bug reports of this operator elsewhere, as cases.

Rows about bit-for-bit statements are in test_isolation.py. Row 13 (64-bit addresses) needs more
memory than a test has: it is a matter of the native code's `row_offset` alone.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    BASE,
    DIMS,
    DTYPE,
    HALF,
    NATIVE,
    all_paths,
    assert_same_bits,
    base_case,
    bounds,
    call,
    make_case,
    piece,
    prefill,
)

from kda_jax import Capacity, ChunkMetadata, chunk_kda, chunk_kda_prefill
from kda_jax.testing import (
    Case,
    assert_matches_scan,
    relative_error,
    scan_in_float64,
)

BIG = Capacity(tokens=8192, sequences=64, chunks=192, checkpoints=0)


@all_paths()
def test_hazard_01_empty_sequences(path: str) -> None:
    fn = prefill(path)
    case = base_case("random", [0, 5, 0, 70, 0], initial_state=[True, True, False, False, True])
    got = call(fn, case)
    start = np.where(case.has_initial_state[:, None, None, None], case.initial_state, 0)
    for empty in (0, 2, 4):
        assert_same_bits(got.final_state[empty], start[empty])
    # The others are as without the empty ones.
    dense = base_case("random", [5, 70], initial_state=[True, False])
    dense.initial_state[0] = case.initial_state[1]
    want = call(fn, dense)
    assert_same_bits(got.out, want.out)
    assert_same_bits(got.final_state[[1, 3]], want.final_state[:2])


@all_paths()
@pytest.mark.parametrize("T", [0, 7])
def test_hazard_02_nothing_but_empty_sequences(path: str, T: int) -> None:
    case = make_case("random", seq_lens=[0, 0], initial_state=[True, False], **DIMS)
    args = [np.full((1, T, *x.shape[2:]), np.nan, x.dtype) for x in case.args[:5]]
    args += case.args[5:]
    step = jax.jit(lambda args, kw: prefill(path)(*args, **case.kwargs | kw))
    states = {x: getattr(case, x) for x in ("initial_state", "has_initial_state")}
    got = step(args, states)
    assert_same_bits(got.final_state[0], case.initial_state[0])
    assert_same_bits(got.final_state[1], np.zeros_like(case.initial_state[1]))
    assert_same_bits(got.out, np.zeros((1, T, 2, 32), case.v.dtype))
    if T == 0:
        text = step.lower(args, states).as_text()
        assert "kda_prefill" not in text and "while" not in text


@all_paths()
def test_hazard_03_fresh_row_with_nan(path: str) -> None:
    fn = prefill(path)
    case = base_case("random", [70, 33, 1], initial_state=[False, True, False])
    assert np.isnan(case.initial_state[0]).all()
    got = call(fn, case)
    case.initial_state[[0, 2]] = 0
    for x, y in zip(got, call(fn, case), strict=True):
        assert_same_bits(x, y)
    assert_matches_scan(fn, case, **bounds(path))


@all_paths()
@pytest.mark.parametrize(
    "lengths",
    [[1, 2, 63, 64, 65, 100, 500, 1000], [8191, 1], [1, 1, 1, 61], [1] * 64],
    ids=["mixed", "8191 and 1", "1 1 1 61", "64 of 1"],
)
def test_hazard_04_lengths(path: str, lengths: list[int]) -> None:
    # Alone they are in test_parity.py. NaN lies behind the tokens, so reading it would show.
    case = base_case("random", lengths, capacity=BIG)
    assert_matches_scan(prefill(path), case, **bounds(path))


@all_paths()
def test_hazard_05_every_gate_near_the_bound(path: str) -> None:
    case = make_case("saturated", seq_lens=[63, 65], H=16, K=128, V=128)
    assert_matches_scan(prefill(path, once=True), case, **bounds(path))


def _extreme_gates(pattern: str) -> Case:
    case = base_case("random", [200, 1, 64])
    low, high = 1e4, -1e4  # g is exactly -5, and exactly 0
    rows = np.zeros(case.raw_g.shape, np.bool_)
    if pattern == "all -5":
        rows[...] = True
    elif pattern == "alternating rows":
        rows[:, ::2] = True
    elif pattern == "alternating channels":
        rows[..., ::2] = True
    elif pattern == "-5 for whole chunks":
        rows[:, 64:128] = True
    case.raw_g[...] = np.where(rows, low, high)
    return case


@all_paths()
@pytest.mark.parametrize(
    "pattern",
    ["all -5", "all 0", "alternating rows", "alternating channels", "-5 for whole chunks"],
)
def test_hazard_06_extreme_gates(path: str, pattern: str) -> None:
    assert_matches_scan(prefill(path), _extreme_gates(pattern), **bounds(path))


@all_paths(NATIVE)
@pytest.mark.parametrize("g", [-5.0, 0.0, -150.0, -np.inf])
def test_hazard_06_and_07_activated(path: str, g: float) -> None:
    # chunked: test_chunked.py.
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 200, 2, n)).astype(DTYPE) for n in (64, 64, 32))
    beta = rng.uniform(0, 1, (1, 200, 2)).astype(np.float32)
    fn = prefill(path)
    for rows in (slice(None), slice(None, None, 2), slice(100, 101), slice(64, 128)):
        gates = np.full(q.shape, -0.01, np.float32)
        gates[:, rows] = g
        options = fn.keywords  # type: ignore[attr-defined]
        got = chunk_kda(q, k, v, gates, beta, use_qk_l2norm=True, **options)
        want = chunk_kda(q, k, v, gates, beta, use_qk_l2norm=True, backend="scan")
        limits = bounds(path) or {"rtol_out": 1e-5, "rtol_state": 1e-5}
        assert relative_error(got.out, want.out) < limits["rtol_out"]
        assert relative_error(got.final_state, want.final_state) < limits["rtol_state"]


@all_paths()
def test_hazard_07_softplus_down_to_minus_150(path: str) -> None:
    case = base_case(
        "saturated", [200, 1, 65], lower_bound=None, checkpoint_offsets=[[64, 100], [], [17]]
    )
    assert np.nanmax(case.raw_g) == 150.0
    fn = prefill(path)
    assert_matches_scan(fn, case, **bounds(path))
    case.raw_g[:, 64:192] = 150.0  # for whole chunks
    assert_matches_scan(fn, case, **bounds(path))
    case.raw_g[:, :] = -9.0
    case.raw_g[:, 100] = 150.0  # once, among small ones
    assert_matches_scan(fn, case, **bounds(path))


# 16-bit operands know a key to 2^-12, hence its 2 % of noise to 1 %. That shows in the state, and
# in out where the queries do not lie near the keys, too, and so read that noise alone.
OUT_ROUNDING = 1.7e-3 if HALF else 0.0
NEAR_EQUAL_KEYS = {"near the keys": (5.0e-3, 1.2e-2), "independent": (1.5e-2, 1.2e-2)}


def _check_near_equal_keys(path: str, case: Case, queries: str) -> None:
    if queries == "near the keys":
        rng = np.random.default_rng(1)
        case.q[...] = case.k + 0.02 * rng.standard_normal(case.q.shape)
    limits = {}
    if "mixed" in path or HALF:
        out, state = NEAR_EQUAL_KEYS[queries]
        limits = {"rtol_out": np.hypot(out, OUT_ROUNDING), "rtol_state": state}
    elif path == "scan" and case.metadata.num_tokens > 10_000:
        # The same gate at each token, next to 1: the rounding of its exponential adds up.
        limits = {"rtol_out": 3e-4, "rtol_state": 3e-4}
    assert_matches_scan(prefill(path), case, **limits)


@all_paths()
@pytest.mark.parametrize("queries", NEAR_EQUAL_KEYS)
@pytest.mark.parametrize("bound", [-5.0, None])
def test_hazard_08_near_equal_keys(path: str, bound: float | None, queries: str) -> None:
    case = base_case("slow", [1088], lower_bound=bound, initial_state=False)
    _check_near_equal_keys(path, case, queries)


@pytest.mark.slow
@all_paths()
@pytest.mark.parametrize("queries", NEAR_EQUAL_KEYS)
def test_hazard_08_near_equal_keys_16384(path: str, queries: str) -> None:
    case = make_case("slow", seq_lens=[16384], K=128, V=128, initial_state=False)
    _check_near_equal_keys(path, case, queries)


def _in_pieces(fn: Any, case: Case, cuts: list[int], layout: str) -> tuple[Any, Any]:
    """The outputs and the last state of a case of one sequence, prefilled piece by piece."""
    outs, state = [], case.initial_state[0]
    for start, stop in zip([0, *cuts], [*cuts, case.metadata.num_tokens], strict=True):
        part = piece(case, start, stop, state)
        if layout == "kv":
            part = dataclasses.replace(part, initial_state=part.initial_state.swapaxes(-1, -2))
        result = call(fn, part, state_layout=layout)
        outs.append(result.out[:, : stop - start])
        state = result.final_state[0]
        state = state.swapaxes(-1, -2) if layout == "kv" else state
    return np.concatenate(outs, axis=1), state


CUTS = [[1], [64], [63, 65], [17, 500, 513], [333, 333, 666], list(range(1, 8))]


@all_paths()
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_hazard_12_in_pieces(path: str, cuts: list[int]) -> None:
    # K != V, and no state is symmetric. A piece may be empty.
    case = base_case("k3", [700])
    for layout in ("vk", "kv") if path in NATIVE else ("vk",):
        out, state = _in_pieces(prefill(path), case, cuts, layout)
        want = scan_in_float64(case)
        limits = bounds(path) or {"rtol_out": 1e-5, "rtol_state": 1e-5}
        assert relative_error(out, want.out[:, :700]) < limits["rtol_out"]
        assert relative_error(state, want.final_state[0]) < limits["rtol_state"]


@pytest.mark.parametrize(
    ("cu", "message"),
    [
        ([1, 5], "cu_seqlens starts at 1"),
        ([0, 5, 3], "cu_seqlens decreases at entry 2: 5 then 3"),
        (np.asarray([0.0, 5.0]), "cu_seqlens has dtype float64"),
        (np.asarray([0, 5], np.uint8), "cu_seqlens has dtype uint8, want int32 or int64"),
        (np.asarray([[0, 5]], np.int32), "cu_seqlens has shape"),
        (jnp.asarray([0, 5]), "cu_seqlens is a JAX array.*build it on the host"),
    ],
    ids=["start", "decreasing", "float", "uint8", "rank", "device"],
)
def test_hazard_14_cu_seqlens(cu: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChunkMetadata.from_cu_seqlens(cu)


@all_paths(["scan", "chunked", "fused", "auto"])
def test_hazard_14_cu_seqlens_past_the_tokens(path: str) -> None:
    case = make_case("random", seq_lens=[10], initial_state=False, **DIMS)
    metadata = ChunkMetadata.from_cu_seqlens([0, 5, 11])
    fn = functools.partial(chunk_kda_prefill, backend=path)
    for step in (fn, jax.jit(fn)):
        with pytest.raises(ValueError, match="metadata covers 11 tokens, but q has 10"):
            step(*case.args, metadata=metadata)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([[0], []], "0 on sequence 0: want 1..500"),
        ([[501], []], "501 on sequence 0: want 1..500"),
        ([512, 0], "512 on sequence 0: want 1..500"),
        ([[7, 9, 7], []], "7 is given twice on sequence 0"),
        ([[-1], []], "-1 on sequence 0"),
        ([[], [1]], "1 on sequence 1: the sequence is empty"),
    ],
    ids=["0", "past", "512 of 500", "twice", "negative", "on empty"],
)
def test_hazard_16_bad_checkpoints(offsets: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChunkMetadata.from_seq_lens([500, 0], checkpoint_offsets=offsets)


@all_paths()
def test_hazard_16_checkpoint_at_the_ends(path: str) -> None:
    offsets = [[1, 500], [64], [1], [65]]
    case = base_case("k3", [500, 64, 1, 65], checkpoint_offsets=offsets)
    fn = prefill(path)
    assert_matches_scan(fn, case, **bounds(path))
    got = call(fn, case)
    assert_same_bits(got.checkpoint_state[1:5], got.final_state[:4])


@all_paths()
@pytest.mark.parametrize(
    ("length", "offsets"),
    [(130, [128]), (1000, [300, 64, 777]), (250, list(range(16, 251, 16))), (1159, [1152])],
    ids=["128 of 130", "three, in any order", "one per 16 tokens", "1152 of 1159"],
)
def test_hazard_17_checkpoints(path: str, length: int, offsets: list[int]) -> None:
    case = base_case("k3", [length, 33], checkpoint_offsets=[offsets, []])
    assert_matches_scan(prefill(path), case, **bounds(path))
    # Not only as a whole, and against a recurrence that stops at the token.
    got = call(prefill(path), case).checkpoint_state
    for row, offset in enumerate(offsets):
        want = scan_in_float64(piece(case, 0, offset, case.initial_state[0])).final_state[0]
        assert relative_error(got[row], want) < bounds(path).get("rtol_state", 1e-5)
    assert not got[len(offsets) : BASE.checkpoints].any()
