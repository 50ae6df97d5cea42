"""The CPU handler for states in a pool, called past the library: what it writes and refuses."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_same_bits
from handler_call import CHUNK, LENGTHS, Call, H, K, V, make_call
from programs import needs_fused

from kda_jax.native import POOL_TARGET
from kda_jax.testing import make_case
from kda_jax.workspace import workspace

pytestmark = [needs_fused, pytest.mark.usefixtures("on_cpu")]

Arrays = dict[str, Any]
ROWS, LIVE, SAVED = 9, [6, 2, 0, -1], [3, -1, 8, 99]
POOL_AT = 7  # of the operands


def pool_call(groups: int = 1, state_kv: bool = False) -> tuple[Call, Call]:
    """A call in a pool, and the same one with states by sequence."""
    plain = make_call(groups=groups, state_kv=state_kv)
    state, has = plain.operands["initial_state"], plain.operands["has_initial_state"]
    pool = np.full((ROWS, *state.shape[1:]), np.nan, np.float32)
    for n, row in enumerate(LIVE):
        if has[n] and row >= 0:
            pool[row] = state[n]
    plain.operands["has_initial_state"] = has & (np.array(LIVE) >= 0)
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    operands = {name: plain.operands[name] for name in names}
    operands |= {
        "state_cache": pool,
        "state_indices": np.array(LIVE, np.int32),
        "has_initial_state": has,
        "checkpoint_state_indices": np.array(SAVED, np.int32),
    }
    operands |= {name: plain.operands[name] for name in ("seqs", "chunks", "checkpoints")}
    metadata = make_case(
        "random",
        seq_lens=LENGTHS,
        H=H,
        K=K,
        V=V,
        chunk_size=CHUNK,
        checkpoint_offsets=[[7, 32], [], [], [16]],
        capacity="bucket",
    ).metadata
    slab, num_bytes = workspace("cpu", H, K, V, metadata, groups, in_pool=True)
    shape = jax.ShapeDtypeStruct
    results = {
        "out": plain.results["out"],
        "state_cache": shape(pool.shape, pool.dtype),
        "workspace": shape((num_bytes,), jnp.uint8),
    }
    call = Call(operands, results, plain.attributes | {"slab_chunks": np.int32(slab)})
    return call, plain


def run(call: Call, alias: bool = True) -> Arrays:
    aliases = {POOL_AT: 1} if alias else {}

    def fn(*operands: Any) -> Any:
        results = tuple(call.results.values())
        ffi = jax.ffi.ffi_call(POOL_TARGET, results, input_output_aliases=aliases)
        return dict(zip(call.results, ffi(*operands, **call.attributes), strict=True))

    return jax.device_get(jax.jit(fn)(*call.operands.values()))


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("state_kv", [False, True])
@pytest.mark.parametrize("slab", [1, 2, 1000])
def test_the_call_itself(groups: int, state_kv: bool, slab: int) -> None:
    """In slabs too, between which a state waits in the workspace."""
    call, plain = pool_call(groups, state_kv)
    chunks = call.operands["chunks"].shape[0]
    if groups == 1 and slab < chunks:
        workspace_of = call.results["workspace"].shape[0]
        call.attributes["slab_chunks"] = plain.attributes["slab_chunks"] = np.int32(slab)
        waiting = 2 * 4 * H * K * V
        call.results["workspace"] = jax.ShapeDtypeStruct((workspace_of + waiting,), jnp.uint8)
    got, want = run(call), plain.run()
    pool = call.operands["state_cache"].copy()
    for row, state in zip(LIVE, want["final_state"], strict=True):
        if row >= 0:
            pool[row] = state
    for row, state in zip(SAVED[:3], want["checkpoint_state"], strict=False):
        if row >= 0:
            pool[row] = state
    assert_same_bits(got["state_cache"], pool)
    assert_same_bits(got["out"], want["out"])


def assert_refused(call: Call, *words: str, alias: bool = True) -> None:
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as caught:
        run(call, alias)
    for word in (POOL_TARGET, *words):
        assert word in str(caught.value)


def test_a_pool_that_is_not_aliased() -> None:
    """Its rows would be written, and all others left as XLA's memory was."""
    call, _ = pool_call()
    assert_refused(call, "state_cache must be aliased to its result", alias=False)


@pytest.mark.parametrize("name", ["state_indices", "has_initial_state", "checkpoint_state_indices"])
def test_wrong_rows(name: str) -> None:
    call, _ = pool_call()
    good = call.operands[name]
    call.operands[name] = good[:-1]
    assert_refused(call, f"{name} has shape [3], want [4]")
    call.operands[name] = good.astype(np.float32)
    assert_refused(call, f"{name} has another element type")


def test_wrong_pool() -> None:
    for change, words in (
        (lambda x: x[..., :32], "has shape [9, 2, 32, 32], want [9, 2, 32, 64]"),
        (lambda x: x[:, :1], "has shape [9, 1, 32, 64], want [9, 2, 32, 64]"),
        (lambda x: x.astype(np.float16), "has another element type"),
    ):
        call, _ = pool_call()
        pool = change(call.operands["state_cache"])
        call.operands["state_cache"] = pool
        call.results["state_cache"] = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
        assert_refused(call, "state_cache " + words)


def test_too_little_workspace() -> None:
    call, _ = pool_call()
    size = call.results["workspace"].shape[0]
    call.results["workspace"] = jax.ShapeDtypeStruct((size - 1,), jnp.uint8)
    assert_refused(call, f"workspace has {size - 1} bytes, want {size}")


def test_an_empty_pool() -> None:
    """All indices are outside: every sequence starts from zeros."""
    call, plain = pool_call()
    shape = (0, *call.operands["state_cache"].shape[1:])
    call.operands["state_cache"] = np.zeros(shape, np.float32)
    call.results["state_cache"] = jax.ShapeDtypeStruct(shape, np.float32)
    plain.operands["has_initial_state"] = np.zeros(4, np.bool_)
    assert_same_bits(run(call)["out"], plain.run()["out"])


def test_nothing_else_is_written() -> None:
    """Out and workspace lie in memory full of NaN; each of their results is the same again."""
    call, _ = pool_call()
    want = run(call)
    full = {
        name: jnp.full(x.shape, jnp.nan if x.dtype != jnp.uint8 else 255, x.dtype)
        for name, x in call.results.items()
        if name != "state_cache"
    }

    def into(_: Any, *operands: Any) -> Any:
        ffi = jax.ffi.ffi_call(
            POOL_TARGET, tuple(call.results.values()), input_output_aliases={POOL_AT: 1}
        )
        return dict(zip(call.results, ffi(*operands, **call.attributes), strict=True))

    fn = functools.partial(jax.jit, donate_argnums=(0, 1 + POOL_AT), keep_unused=True)(into)
    operands = [jnp.array(x) for x in call.operands.values()]
    got = fn(full, *operands)
    assert operands[POOL_AT].is_deleted()
    assert_same_bits(got["out"], want["out"])
    assert_same_bits(got["state_cache"], want["state_cache"])
