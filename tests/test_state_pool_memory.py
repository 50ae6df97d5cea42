"""A donated pool is updated where it lies, another one is left alone, and indices cost no trace."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DIMS, all_paths, assert_same_bits, make_case, prefill
from pool_cases import call_in_pool
from programs import BACKENDS, count_compiles

from kda_jax import ChunkMetadata, KDAPoolResult, chunk_kda_prefill
from kda_jax.serving import StepRows, step_rows
from kda_jax.testing_pool import PoolCase, pool_case

R = 2048  # rows, so that the pool is larger than all else


def example(seed: int = 0, lengths: Any = (70, 1, 0, 64)) -> PoolCase:
    case = make_case(
        "random",
        seq_lens=lengths,
        **DIMS,
        seed=seed,
        initial_state=[True, False, True, True],
        checkpoint_offsets=[[64], [], [], [7]],
        capacity="bucket",
    )
    return pool_case(case, seed=seed, spare_rows=R - 6)


def step(fn: Callable[..., KDAPoolResult]) -> Callable[..., KDAPoolResult]:
    def run(
        state_cache: jax.Array, args: Any, metadata: ChunkMetadata, rows: StepRows
    ) -> KDAPoolResult:
        return fn(*args, metadata=metadata, state_cache=state_cache, **rows._asdict())

    return run


def arguments(p: PoolCase) -> tuple[Any, ...]:
    return p.case.args, p.case.metadata, p.rows


@all_paths()
def test_a_donated_pool_stays_where_it_is(path: str) -> None:
    p = example()
    fn = prefill(path)
    pool = jnp.array(p.pool)
    program = jax.jit(step(fn), donate_argnums=0).lower(pool, *arguments(p)).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes / 4
    address = pool.unsafe_buffer_pointer()
    got = program(pool, *arguments(p))
    assert pool.is_deleted()
    assert got.state_cache.unsafe_buffer_pointer() == address
    assert_same_bits(got.state_cache, call_in_pool(fn, p).state_cache)


@pytest.mark.parametrize("backend", ["fused", "auto"])
def test_the_custom_call_is_all_that_touches_it(backend: str) -> None:
    """No gather, no scatter and no copy: the pool goes from the argument through the call."""
    fn = prefill("fused") if backend == "fused" else chunk_kda_prefill
    p = example()
    pool = jax.ShapeDtypeStruct(p.pool.shape, p.pool.dtype)
    text = jax.jit(step(fn), donate_argnums=0).lower(pool, *arguments(p)).compile().as_text()
    if "kda_prefill_pool_v1" not in text:
        pytest.skip("auto does not take fused here")
    shape = re.escape("f32[" + ",".join(map(str, p.pool.shape)) + "]")
    made = re.findall(rf" = [^=\n]*{shape}\S* *(\w[\w-]*)\(", text)
    assert set(made) <= {"get-tuple-element", "parameter", "tuple"}, made
    assert "output_to_operand_aliasing={{1}: (7, {})}" in text


@all_paths(["scan", "chunked", "fused"])
def test_a_pool_that_is_not_donated_stays_as_it_was(path: str) -> None:
    p = example()
    pool = jnp.array(p.pool)
    got = jax.jit(step(prefill(path)))(pool, *arguments(p))
    assert_same_bits(pool, p.pool)
    assert got.state_cache.unsafe_buffer_pointer() != pool.unsafe_buffer_pointer()
    assert_same_bits(got.state_cache, call_in_pool(prefill(path), p).state_cache)


@all_paths(["scan", "chunked", "fused"])
def test_two_steps_in_one_program(path: str) -> None:
    """As the layers of a model, or the steps of a loop: in place from one call to the next."""
    p, q = example(), example(seed=1, lengths=(64, 1, 0, 90))
    fn = prefill(path)

    def both(pool: jax.Array, first: Any, second: Any) -> Any:
        out, pool = step(fn)(pool, *first)
        again, pool = step(fn)(pool, *second)
        return out, again, pool

    start = np.nan_to_num(p.pool, nan=0.25)
    pool = jnp.array(start)
    address = pool.unsafe_buffer_pointer()
    out, again, after = jax.jit(both, donate_argnums=0)(pool, arguments(p), arguments(q))
    assert after.unsafe_buffer_pointer() == address
    eager = step(fn)
    one = eager(jnp.array(start), *arguments(p))
    two = eager(one.state_cache, *arguments(q))
    for got, want in ((out, one.out), (again, two.out), (after, two.state_cache)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_and_lengths_do_not_retrace(backend: str) -> None:
    traces = []

    def run(pool: jax.Array, *args: Any) -> KDAPoolResult:
        traces.append(None)
        return step(lambda *a, **k: chunk_kda_prefill(*a, **k, backend=backend))(pool, *args)

    fn = jax.jit(run, donate_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
    pool = jnp.array(np.nan_to_num(example().pool))
    steps = [arguments(example(seed, lengths)) for seed, lengths in enumerate(MIXES)]
    with count_compiles() as compiles:
        for each in steps:
            pool = fn(pool, *each).state_cache
    assert len(traces) == 1 and len(compiles) == 1
    assert np.isfinite(pool).all()


MIXES = [(70, 1, 0, 64), (64, 60, 1, 30), (100, 10, 9, 60), (64, 60, 5, 7)]


def test_no_sync_with_the_device() -> None:
    """NumPy rows go in, and nothing comes back, while transfers to the host are forbidden."""
    p = example()
    pool = jnp.array(p.pool)
    jax.block_until_ready(call_in_pool(chunk_kda_prefill, p))
    with jax.transfer_guard_device_to_host("disallow"):
        got = chunk_kda_prefill(*p.case.args, state_cache=pool, **p.options)
    assert_same_bits(got.state_cache, call_in_pool(chunk_kda_prefill, p).state_cache)


def test_rows_of_a_step_are_checked_on_the_host_alone() -> None:
    p = example()
    with jax.transfer_guard("disallow"):
        rows = step_rows(p.case.metadata, R, [3, 9, -1, 2], checkpoint_state_indices=[7, 8])
    assert [x.dtype.name for x in rows] == ["int32", "bool", "int32"]
