"""Derivatives, `jax.vmap` and `jax.export` of calls in a pool."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DIMS, all_paths, assert_same_bits, make_case, prefill
from programs import needs_fused, quick_jit

from kda_jax import KDAPoolResult, chunk_kda_prefill, export_checks
from kda_jax.native import POOL_TARGET
from kda_jax.testing import relative_error
from kda_jax.testing_pool import PoolCase, pool_case

PATHS = ["scan", "chunked", "fused"]


def example(seed: int = 0, lengths: Any = (40, 0, 1, 70)) -> PoolCase:
    case = make_case(
        "random",
        seq_lens=lengths,
        **DIMS,
        seed=seed,
        chunk_size=32,
        initial_state=[True, False, True, True],
        checkpoint_offsets=[[7], [], [], [64]],
        capacity="bucket",
    )
    return pool_case(case, without=[2], seed=seed)


def step(fn: Callable[..., KDAPoolResult], args: Any, pool: Any, metadata: Any, rows: Any) -> Any:
    return fn(*args, metadata=metadata, state_cache=pool, **rows._asdict())


@all_paths(PATHS)
def test_gradients(path: str) -> None:
    """Of the inputs and of the pool: through a row that is read and one that passes by."""
    p = example()
    pool = np.nan_to_num(p.pool, nan=0.5)
    weight = np.random.default_rng(1).standard_normal(pool.shape).astype(np.float32)

    def loss(fn: Any, args: Any, pool: Any) -> Any:
        got = step(fn, args, pool, p.case.metadata, p.rows)
        used = got.out[:, : p.case.metadata.num_tokens]
        return jnp.sum(jnp.sin(used)) + jnp.sum(weight * jnp.sin(got.state_cache))

    args = tuple(np.nan_to_num(x) for x in p.case.args)
    got, want = (
        quick_jit(jax.grad(functools.partial(loss, prefill(name)), argnums=(0, 1)))(args, pool)
        for name in (path, "scan")
    )
    for x, ref in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(x, ref) < 1e-5
    # A row that the call does not touch: the derivative of the sum itself.
    idle = p.others[0]
    np.testing.assert_allclose(got[1][idle], (weight * np.cos(pool))[idle], rtol=1e-5)
    # One that is only written: what it held before has no effect.
    fresh = p.rows.state_indices[1]
    assert not got[1][fresh].any()


@all_paths(PATHS)
def test_vmap_with_a_pool_for_each_call(path: str) -> None:
    cases = [example(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *[(p.case.args, p.pool) for p in cases])
    rows = jax.tree.map(lambda *x: np.stack(x), *[p.rows for p in cases])
    call = functools.partial(step, prefill(path))
    metadata = cases[0].case.metadata
    each = [call(p.case.args, jnp.asarray(p.pool), metadata, p.rows) for p in cases]
    got = jax.vmap(call, (0, 0, None, 0))(*stacked, metadata, rows)
    # One set of rows for all.
    shared = jax.vmap(call, (0, 0, None, None))(*stacked, metadata, cases[0].rows)
    for i, p in enumerate(cases):
        again = call(p.case.args, jnp.asarray(p.pool), metadata, cases[0].rows)
        for result, want in ((got, each[i]), (shared, again)):
            used = slice(0, metadata.num_tokens)
            np.testing.assert_allclose(result.out[i, :, used], want.out[:, used], atol=1e-5)
            np.testing.assert_allclose(result.state_cache[i], want.state_cache, atol=1e-5)


@all_paths(PATHS)
def test_vmap_over_the_rows_of_one_pool(path: str) -> None:
    """Each call has the pool that it makes of the same one."""
    p, q = example(0), example(1)
    pool = jnp.asarray(np.nan_to_num(p.pool, nan=0.5))
    call = functools.partial(step, prefill(path))
    rows = jax.tree.map(lambda *x: np.stack(x), p.rows, q.rows)
    got = jax.vmap(call, (None, None, None, 0))(p.case.args, pool, p.case.metadata, rows)
    assert got.state_cache.shape == (2, *pool.shape)
    for i, each in enumerate((p.rows, q.rows)):
        want = call(p.case.args, pool, p.case.metadata, each)
        np.testing.assert_allclose(got.state_cache[i], want.state_cache, atol=1e-5)


@needs_fused
@pytest.mark.parametrize("backend", ["fused", "auto"])
def test_export(backend: str) -> None:
    """One artifact for three platforms; the alias is part of it, and other rows go in later."""
    pytest.importorskip("flatbuffers", reason="jax.export serializes with it")
    fn = jax.jit(
        functools.partial(step, functools.partial(chunk_kda_prefill, backend=backend)),
        donate_argnums=1,
    )
    p = example()
    arguments = (p.case.args, jnp.asarray(p.pool), p.case.metadata, p.rows)
    program = jax.export.export(
        fn, platforms=["cpu", "cuda", "rocm"], disabled_checks=export_checks()
    )(*arguments)
    loaded = jax.export.deserialize(program.serialize())
    calls = [x for x in loaded.mlir_module().splitlines() if f"@{POOL_TARGET}(" in x]
    assert calls and all("output_operand_aliases" in x for x in calls)
    for each in (p, example(seed=1, lengths=(30, 0, 1, 90))):
        rest = each.case.metadata, each.rows
        got = quick_jit(loaded.call)(each.case.args, jnp.asarray(each.pool), *rest)
        want = fn(each.case.args, jnp.asarray(each.pool), *rest)
        assert isinstance(got, KDAPoolResult)
        assert_same_bits(got.out, want.out)
        assert_same_bits(got.state_cache, want.state_cache)


@needs_fused
@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm"])
def test_fused_lowers_to_one_call_with_the_alias(platform: str) -> None:
    """On a host without a GPU, too; the pool is the eighth operand and the second result."""
    case = make_case("random", seq_lens=[70], **DIMS, dtype="bfloat16", initial_state=[True])
    p = pool_case(case)
    fn = jax.jit(functools.partial(step, functools.partial(chunk_kda_prefill, backend="fused")))
    traced = fn.trace(p.case.args, jnp.asarray(p.pool), p.case.metadata, p.rows)
    lines = traced.lower(lowering_platforms=(platform,)).as_text().splitlines()
    (line,) = [x for x in lines if f"@{POOL_TARGET}(" in x]
    alias = r"output_tuple_indices = \[1\],\s*operand_index = 7,\s*operand_tuple_indices = \[\]"
    assert re.search(alias, line), line
    sides = line.rsplit(" : ", 1)[1].split("->")
    operands, results = (re.findall(r"tensor<([^>]*)>", side) for side in sides)
    pool = "x".join(map(str, p.pool.shape)) + "xf32"
    assert operands[7] == results[1] == pool
    assert operands[8:11] == ["1xi32", "1xi1", "0xi32"]
