"""Rows of HAZARDS.md that are bit for bit: what a result must not depend on.

Later tokens, other sequences, padding, the memory that results are written to, how often and with
which views of the inputs the operator is called.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    BASE,
    DIMS,
    NATIVE,
    Array,
    all_paths,
    assert_same_bits,
    base_case,
    between_runs,
    call,
    make_case,
    prefill,
)

from kda_jax import Capacity, ChunkMetadata, KDAResult, chunk_kda_prefill
from kda_jax.testing import Case, assert_matches_scan

BIG = Capacity(tokens=8192, sequences=64, chunks=192, checkpoints=0)
TOKENS = ("q", "k", "v", "raw_g", "raw_beta")


def _with_tokens(case: Case, change: Any) -> Case:
    """A copy of the case; ``change(name, x)`` edits each array ``[1, T, ..]`` in place."""
    case = copy.deepcopy(case)
    for name in TOKENS:
        change(name, getattr(case, name))
    return case


def _assert_same_results(got: KDAResult, want: KDAResult) -> None:
    for name, x, y in zip(KDAResult._fields, got, want, strict=True):
        assert_same_bits(x, y, name)


@all_paths()
@pytest.mark.parametrize("bound", [-5.0, None])
def test_hazard_09_the_future(path: str, bound: float | None) -> None:
    case = base_case(
        "random",
        [200, 100],
        lower_bound=bound,
        initial_state=[True, False],
        checkpoint_offsets=[[1, 16, 17, 64, 100, 128], []],
    )
    fn = prefill(path)
    want = call(fn, case)
    rng = np.random.default_rng(1)
    for P in (1, 15, 16, 17, 40, 63, 64, 65, 130, 199):

        def disturb(name: str, x: Array, P: int = P) -> None:
            later = x[:, P:300]
            size = {"v": 100.0, "raw_g": 30.0, "raw_beta": 10.0}.get(name, 1.0)
            later[...] = size * rng.standard_normal(later.shape)

        got = call(fn, _with_tokens(case, disturb))
        assert_same_bits(got.out[:, :P], want.out[:, :P], f"out before token {P}")
        offsets = np.asarray(case.metadata.checkpoints[:, 1])
        past = (offsets > 0) & (offsets <= P)
        assert_same_bits(got.checkpoint_state[past], want.checkpoint_state[past], "checkpoints")
        assert not np.array_equal(got.out[:, P:], want.out[:, P:])


@all_paths()
def test_hazard_09_large_values_later(path: str) -> None:
    case = base_case("random", [200, 100], dtype="bfloat16")
    fn = prefill(path, once=True)
    want = call(fn, case)
    case.v[:, 100:150] *= 2.0**20
    got = call(fn, case)
    assert_same_bits(got.out[:, :100], want.out[:, :100])
    assert_same_bits(got.out[:, 200:], want.out[:, 200:])
    assert_matches_scan(fn, case)


@all_paths()
def test_hazard_10_nan_stays_in_its_sequence(path: str) -> None:
    lengths = [2048, 1, 512, 300]
    case = base_case("random", lengths, capacity=BIG)
    fn = prefill(path)
    want = call(fn, case)
    for poisoned, start in enumerate(case.metadata.cu_seqlens[:-1]):
        tokens = slice(start, start + lengths[poisoned])

        def poison(name: str, x: Array, tokens: slice = tokens) -> None:
            x[:, tokens] = np.nan

        inputs = _with_tokens(case, poison)
        states = copy.deepcopy(case)
        states.initial_state[poisoned] = np.nan
        for bad in (inputs, states):
            got = call(fn, bad)
            assert np.isnan(got.out[:, tokens]).all()
            for x, y, mine in ((got.out, want.out, tokens), (got[1], want[1], poisoned)):
                axis = 1 if x.ndim == 4 and mine is tokens else 0
                assert_same_bits(np.delete(x, mine, axis), np.delete(y, mine, axis))


@all_paths()
def test_hazard_11_again(path: str) -> None:
    case = base_case("random", [700, 0, 65, 1], checkpoint_offsets=[[100], [], [64], []])
    fn = prefill(path)
    want = call(fn, case)
    _assert_same_results(call(fn, case), want)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: call(fn, case), range(8)):
            _assert_same_results(got, want)


@all_paths()
@pytest.mark.parametrize("extra", [0, 30])
def test_hazard_15_padding(path: str, extra: int) -> None:
    # Rows beyond the tokens in use, both in the capacity and (extra) beyond it.
    capacity = dataclasses.replace(BASE, tokens=BASE.tokens - extra)
    case = base_case("random", [130, 0, 33], checkpoint_offsets=[[64], [], [7]], capacity=capacity)
    fill = np.nan

    def widen(case: Case) -> Case:
        def wide(x: Array) -> Array:
            rows = np.full((1, BASE.tokens, *x.shape[2:]), fill, x.dtype)
            rows[:, :163] = x[:, :163]
            return rows

        return dataclasses.replace(case, **{x: wide(getattr(case, x)) for x in TOKENS})

    fn = prefill(path, once=extra > 0)
    got = call(fn, widen(case))
    fill = 0.0
    case.initial_state[3:] = 0
    _assert_same_results(got, call(fn, widen(case)))
    assert_same_bits(got.out[:, 163:], np.zeros_like(got.out[:, 163:]))
    assert_same_bits(got.final_state[3:], np.zeros_like(got.final_state[3:]))
    assert_same_bits(got.checkpoint_state[2:], np.zeros_like(got.checkpoint_state[2:]))
    assert all(np.isfinite(x).all() for x in got)


@all_paths(NATIVE)
@pytest.mark.parametrize("lengths", [[130, 0, 33], [0, 0], [1]], ids=str)
def test_results_are_written_over_whatever_was_there(path: str, lengths: list[int]) -> None:
    # A custom call's results are not zeroed. Donated NaN becomes the memory of the results here.
    case = base_case("random", lengths, initial_state=[i % 2 == 0 for i in range(len(lengths))])
    fn = prefill(path)
    want = call(fn, case)

    @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
    def step(memory: KDAResult, args: Any, kwargs: Any) -> KDAResult:
        return fn(*args, **kwargs, lower_bound=case.lower_bound)

    kwargs = {x: y for x, y in case.kwargs.items() if x != "lower_bound"}
    args, kwargs = jax.device_put((case.args, kwargs))
    memory = KDAResult(*(jnp.full(x.shape, jnp.nan, x.dtype) for x in want))
    before = [x.unsafe_buffer_pointer() for x in memory]
    got = step(memory, args, kwargs)
    assert [x.unsafe_buffer_pointer() for x in got] == before
    _assert_same_results(jax.device_get(got), want)


@all_paths()
def test_results_do_not_depend_on_an_earlier_call(path: str) -> None:
    # Its buffers, the workspace among them, are full of NaN when they are handed out again.
    case = base_case("random", [300, 0, 33, 1], checkpoint_offsets=[[64], [], [7], []])
    fn = prefill(path)
    want = call(fn, case)
    nan = _with_tokens(case, lambda name, x: x.fill(np.nan))
    nan.initial_state[...] = np.nan
    for _ in range(3):
        assert np.isnan(call(fn, nan).out[:, :334]).all()
        _assert_same_results(call(fn, case), want)


@all_paths()
@pytest.mark.parametrize("where", ["on chunk ends", "elsewhere"])
def test_hazard_18_checkpoints_on_and_off(path: str, where: str) -> None:
    lengths, fn = [300, 0, 130, 64], prefill(path)
    want = call(fn, base_case("k3", lengths))
    if where == "on chunk ends":
        offsets = [[64, 256], [], [130, 128], [64]]
        got = call(fn, base_case("k3", lengths, checkpoint_offsets=offsets))
        assert_same_bits(got.out, want.out)
        assert_same_bits(got.final_state, want.final_state)
    else:
        offsets = [[1, 63, 65, 299], [], [100], [16]]
        got = call(fn, base_case("k3", lengths, checkpoint_offsets=offsets))
        for x, y, rtol in zip(got[:2], want[:2], between_runs(path), strict=True):
            assert np.linalg.norm(x - y) <= rtol * np.linalg.norm(y)


@all_paths()
def test_hazard_21_views(path: str) -> None:
    case = base_case("random", [130, 33])

    def view(x: Array, how: int) -> Array:
        """x again, but strided, reversed, or with its axes in another order in memory."""
        if how == 0:
            return np.repeat(x, 2, axis=-1)[..., ::2]
        if how == 1:
            return np.ascontiguousarray(x[:, ::-1])[:, ::-1]
        return np.asfortranarray(x)

    fn = prefill(path)
    want = call(fn, case)
    for how in range(3):
        viewed = {name: view(getattr(case, name), how) for name in TOKENS}
        viewed["initial_state"] = view(case.initial_state, how)
        assert not viewed["q"].flags.c_contiguous
        _assert_same_results(call(fn, dataclasses.replace(case, **viewed)), want)


@all_paths()
def test_hazard_21_inputs_stay_as_they_were(path: str) -> None:
    case = base_case("random", [130, 33], checkpoint_offsets=[[64], []])
    arrays = {x: getattr(case, x) for x in (*TOKENS, "A_log", "dt_bias", "initial_state")}
    on_device = {name: jax.device_put(x) for name, x in arrays.items()}
    before = {name: x.copy() for name, x in arrays.items()}
    for x in arrays.values():
        x.flags.writeable = False
    fn = prefill(path)
    call(fn, case)
    call(fn, dataclasses.replace(case, **on_device))
    for name, x in before.items():
        assert_same_bits(arrays[name], x, name)
        assert_same_bits(on_device[name], x, name)


@pytest.mark.parametrize("backend", ["scan", "chunked", "auto"])
def test_hazard_21_float64(backend: str, x64: None) -> None:
    case = make_case("random", seq_lens=[40, 1], dtype="float64", chunk_size=16, H=1, K=64, V=16)
    fn = functools.partial(chunk_kda_prefill, backend=backend)
    assert_matches_scan(fn, case, rtol_out=1e-13, rtol_state=1e-13)


@all_paths(NATIVE)
def test_hazard_21_float64_is_refused(path: str, x64: None) -> None:
    case = make_case("random", seq_lens=[40], dtype="float64", **DIMS)
    with pytest.raises(NotImplementedError, match=r"float64.*cast the inputs or use 'chunked'"):
        prefill(path)(*case.args, **case.kwargs)


@all_paths()
@pytest.mark.parametrize("name", [*TOKENS, "A_log", "dt_bias", "initial_state"])
def test_hazard_21_integers_are_refused(path: str, name: str) -> None:
    case = make_case("random", seq_lens=[10], **DIMS)
    bad = dataclasses.replace(case, **{name: np.ones(getattr(case, name).shape, np.int32)})
    with pytest.raises(ValueError, match=f"{name} has dtype int32"):
        prefill(path)(*bad.args, **bad.kwargs)


@all_paths(NATIVE)
def test_hazard_22_vmap_is_a_loop(path: str) -> None:
    # The backends in plain JAX: test_vmap.py. The other transformations: test_gradients.py and
    # test_transforms.py.
    fn = prefill(path)
    capacity = Capacity(160, 4, 12, 4)
    offsets = [[64], [], [1], [80]]
    cases = [
        base_case(
            "random",
            [65, 0, 1, 80],
            seed=seed,
            initial_state=[seed == 0, True, False, True],
            checkpoint_offsets=offsets,
            capacity=capacity,
        )
        for seed in range(3)
    ]
    metadata: ChunkMetadata = cases[0].metadata

    def one(args: Any, state: Array, has: Array) -> KDAResult:
        return fn(*args, metadata=metadata, initial_state=state, has_initial_state=has)

    each = [(case.args, case.initial_state, case.has_initial_state) for case in cases]
    batch = jax.tree.map(lambda *x: np.stack(x), *each)
    got = jax.device_get(jax.vmap(one)(*batch))
    for i, case in enumerate(cases):
        want = call(fn, case)
        for x, y in zip(got, want, strict=True):
            assert_same_bits(x[i], y)
