"""States in a pool: the numbers, on every path, and the rows that must keep their bits."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    BASE,
    DIMS,
    DTYPE,
    activated,
    all_paths,
    assert_same_bits,
    base_case,
    bounds,
    call,
    make_case,
    prefill,
)
from pool_cases import assert_right, call_in_pool

from kda_jax import CallSpec, KDAResult, chunk_kda_prefill, register_backend
from kda_jax.backends import current_platform
from kda_jax.chunked import ChunkedBackend
from kda_jax.testing import TOLERANCES, relative_error
from kda_jax.testing_pool import PoolCase, pool_case
from kda_jax.types import KDAConfig, KDAInputs

LENGTHS = [300, 1, 0, 64, 129, 0]
OFFSETS = [[64, 100, 300], [], [], [64], [5], []]
HAS = [True, False, True, True, True, False]


def tolerances(path: str) -> tuple[float, float]:
    given = bounds(path)
    return tuple(given.values()) if given else TOLERANCES[DTYPE]  # type: ignore[return-value]


def example(**options: Any) -> PoolCase:
    seed = options.pop("seed", 0)
    case = base_case("random", LENGTHS, seed=seed, checkpoint_offsets=OFFSETS, initial_state=HAS)
    return pool_case(case, seed=seed, **options)


@all_paths()
@pytest.mark.parametrize("seed", [0, 1])
def test_against_the_recurrence(path: str, seed: int) -> None:
    p = example(seed=seed)
    assert_right(call_in_pool(prefill(path), p), p, *tolerances(path))


@all_paths()
def test_rows_that_are_not_there(path: str) -> None:
    """A sequence without a row starts from zeros; a checkpoint without one is dropped."""
    p = example(without=[0, 3], dropped=[1, 3])
    assert_right(call_in_pool(prefill(path), p), p, *tolerances(path))
    nowhere = example(without=range(len(LENGTHS)), dropped=range(5))
    got = call_in_pool(prefill(path), nowhere)
    assert_same_bits(got.state_cache, nowhere.pool)
    assert_right(got, nowhere, *tolerances(path))


@all_paths()
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_same_bits_as_states_by_sequence(path: str, seed: int) -> None:
    p = example(seed=seed, without=[seed], dropped=[seed])
    fn = prefill(path)
    want = call(fn, p.case)
    got = call_in_pool(fn, p)
    assert_same_bits(got.out, want.out, "out")
    assert_same_bits(got.state_cache, p.after(want), "state_cache")


@all_paths()
def test_the_other_layout(path: str) -> None:
    p = example(state_layout="kv")
    got = call_in_pool(prefill(path), p, state_layout="kv")
    assert_right(got, p, *tolerances(path), state_layout="kv")


@all_paths(["scan", "chunked", "fused", "mixed"])
def test_activated_gates(path: str) -> None:
    p = example()
    want = call(activated(path, False), p.case)
    got = call_in_pool(activated(path, False), p)
    assert_same_bits(got.out, want.out, "out")
    assert_same_bits(got.state_cache, p.after(want), "state_cache")


@all_paths(["chunked", "fused", "mixed"])
def test_a_checkpoint_equals_a_prefill_that_stops_there(path: str) -> None:
    """Bit for bit, from the same row of the pool."""
    p = example()
    got = call_in_pool(prefill(path), p)
    for row, (name, m) in p.written.items():
        if name != "checkpoint_state":
            continue
        n, offset = p.case.metadata.checkpoints[m].tolist()
        lengths = [offset if i == n else 0 for i in range(len(LENGTHS))]
        first = int(p.case.metadata.seqs[n, 0])
        cut = base_case("random", lengths, initial_state=HAS)
        cut = dataclasses.replace(cut, A_log=p.case.A_log, dt_bias=p.case.dt_bias)
        for x in ("q", "k", "v", "raw_g", "raw_beta"):
            getattr(cut, x)[:, :offset] = getattr(p.case, x)[:, first : first + offset]
        again = PoolCase(cut, p.pool, p.rows, {})
        rows = {"checkpoint_state_indices": np.full(BASE.checkpoints, -1, np.int32)}
        stopped = call_in_pool(prefill(path), again, **rows)
        live = int(p.rows.state_indices[n])
        assert_same_bits(got.state_cache[row], stopped.state_cache[live], f"{n} at {offset}")


@all_paths()
def test_indices_outside_of_the_pool(path: str) -> None:
    """Traced, so nobody can check them: they mean no row, and nothing else is touched."""
    p = example(without=[0, 3], dropped=[1, 3])
    live, saved = p.rows.state_indices.copy(), p.rows.checkpoint_state_indices.copy()
    R = p.pool.shape[0]
    live[[0, 3]], saved[[1, 3]] = [R, 2**31 - 1], [-(2**31), R + 1]
    # Padding has no row, whatever its index says.
    live[p.case.metadata.num_sequences :] = live[1]
    saved[p.case.metadata.num_checkpoints :] = saved[0]
    odd = {"state_indices": jnp.asarray(live), "checkpoint_state_indices": jnp.asarray(saved)}
    fn = prefill(path)
    want, got = call_in_pool(fn, p), call_in_pool(fn, p, **odd)
    assert_same_bits(got.out, want.out, "out")
    assert_same_bits(got.state_cache, want.state_cache, "state_cache")


@all_paths()
@pytest.mark.parametrize("factor", [1e6, 1e30])
def test_states_out_of_fp16(path: str, factor: float) -> None:
    """The second pass of 16-bit operands starts from the row that its result is written to."""
    case = base_case(
        "random", LENGTHS, checkpoint_offsets=OFFSETS, initial_state=[True] * len(LENGTHS)
    )
    state = case.initial_state.copy()
    state[0, 1, 17] *= factor  # one row of V of one head
    state[3] *= factor
    p = pool_case(dataclasses.replace(case, initial_state=state))
    fn = prefill(path)
    want, got = call(fn, p.case), call_in_pool(fn, p)
    assert_same_bits(got.out, want.out, "out")
    assert_same_bits(got.state_cache, p.after(want), "state_cache")
    bf16 = (1.5e-2, 1.5e-2)  # all operands of a second pass, 2^-8 each
    mixed = path.startswith("mixed") or (current_platform() != "cpu" and "fused" in path)
    assert_right(got, p, *(bf16 if mixed else tolerances(path)))


@all_paths()
@pytest.mark.parametrize("token", [0, 70, 299])
def test_values_out_of_fp16(path: str, token: int) -> None:
    case = base_case("random", LENGTHS, checkpoint_offsets=OFFSETS, initial_state=HAS)
    v = case.v.copy()
    v[0, token, 1, 20] = 1e30
    p = pool_case(dataclasses.replace(case, v=v))
    fn = prefill(path)
    want, got = call(fn, p.case), call_in_pool(fn, p)
    assert_same_bits(got.out, want.out, "out")
    assert_same_bits(got.state_cache, p.after(want), "state_cache")
    assert np.isfinite(got.state_cache[list(p.written)]).all()


@pytest.mark.parametrize("path", ["scan", "chunked", "fused"])
def test_nothing_to_run(path: str) -> None:
    """Empty sequences keep their rows, or have zeros written where nothing is read."""
    case = make_case("random", seq_lens=[0, 0, 0], **DIMS, initial_state=[True, False, True])
    p = pool_case(case, without=[2])
    got = call_in_pool(prefill(path), p)
    want = p.pool.copy()
    want[p.rows.state_indices[1]] = 0
    assert_same_bits(got.state_cache, want)


@pytest.mark.parametrize("path", ["scan", "chunked", "fused"])
def test_without_metadata(path: str) -> None:
    """Each row of a batch is a sequence, and has a row of the pool."""
    case = make_case("random", seq_lens=[40, 40, 40], **DIMS, initial_state=True)
    batch = [x.reshape(3, 40, *x.shape[2:]) for x in case.args[:5]]
    pool = np.random.default_rng(0).standard_normal((6, *case.initial_state.shape[1:]))
    pool = pool.astype(np.float32)
    rows = np.array([4, 0, 2], np.int32)
    fn = prefill(path)
    out, after = fn(*batch, *case.args[5:], state_cache=jnp.asarray(pool), state_indices=rows)
    want = fn(*batch, *case.args[5:], initial_state=pool[rows])
    pool[rows] = want.final_state
    assert_same_bits(after, pool)
    assert_same_bits(out, want.out)


class OneRowAtATime:
    """A backend of somebody else's, which knows of no pool and exports no states."""

    name = "somebody's"
    checkpoint_alignment = 1

    def unsupported(self, spec: CallSpec) -> str | None:
        return None

    def run(self, inputs: KDAInputs, config: KDAConfig, metadata: Any) -> KDAResult:
        return ChunkedBackend().run(inputs, config, metadata)


def test_a_registered_backend(registry: None) -> None:
    register_backend(OneRowAtATime())
    p = example(without=[1], dropped=[0])
    fn = functools.partial(chunk_kda_prefill, backend="somebody's")
    assert_right(call_in_pool(fn, p), p, *tolerances("chunked"))


def test_auto() -> None:
    p = example(without=[1], dropped=[0])
    assert_right(call_in_pool(chunk_kda_prefill, p), p, *tolerances("fused"))


def test_float64(x64: None) -> None:
    """A pool in the compute dtype, on the backends that have it."""
    p = example()
    wide = [x.astype(np.float64) for x in p.case.args]
    for backend in ("scan", "chunked"):
        pool = jnp.asarray(p.pool, jnp.float64)
        got = chunk_kda_prefill(*wide, state_cache=pool, **p.options, backend=backend)
        want = call(functools.partial(chunk_kda_prefill, backend="scan"), p.case)
        assert got.state_cache.dtype == np.float64
        for row, (name, i) in p.written.items():
            assert relative_error(got.state_cache[row], getattr(want, name)[i]) < 1e-5
