"""vmap, of any arguments and of itself."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from programs import assert_trees_equal, needs_fused, quick_jit
from transform_cases import (
    ARGUMENTS,
    NAMES,
    H,
    K,
    V,
    Values,
    assert_close,
    call,
    examples,
    finite,
    mix,
    one_call,
    stack,
)

from kda_jax import KDAResult, chunk_kda


def _check_vmap(batched: tuple[str, ...], backend: str, rtol: float) -> None:
    """One call on the batched arguments against a Python loop over them."""
    loop, stacked, in_axes = mix([finite(x) for x in examples()[:3]], batched)
    want = stack([one_call(x, backend) for x in loop])
    run = functools.partial(call, backend=backend)
    got = quick_jit(jax.vmap(run, in_axes=(in_axes,)))(stacked)
    if rtol == 0:
        assert_trees_equal(got, want)
    else:
        assert_close(got, want, rtol)


SUBSETS: list[tuple[str, ...]] = [
    *((name,) for name in ARGUMENTS),
    ARGUMENTS,
    ARGUMENTS[:-1],
    ("initial_state", "has_initial_state"),
    ("has_initial_state", "metadata"),
    ("initial_state", "metadata"),
    ("q", "k", "v", "raw_g", "raw_beta"),
    ("q", "k", "v", "raw_g", "raw_beta", "metadata"),
    ("A_log", "dt_bias", "has_initial_state"),
    *itertools.islice(itertools.combinations(NAMES, 2), 0, None, 5),
]


@needs_fused
@pytest.mark.parametrize("batched", SUBSETS, ids="+".join)
def test_vmap_of_any_arguments(batched: tuple[str, ...]) -> None:
    _check_vmap(batched, "fused", rtol=0)


@pytest.mark.parametrize("backend", ["chunked", "scan"])
def test_vmap_of_backends_in_plain_jax(backend: str) -> None:
    _check_vmap((*NAMES[:5], "has_initial_state", "metadata"), backend, rtol=3e-6)


@needs_fused
@pytest.mark.parametrize("options", [{"state_layout": "kv"}, {"groups": 2}, {"lower_bound": None}])
def test_vmap_with_options(options: dict[str, Any]) -> None:
    if options.get("state_layout") == "kv":
        batch = [x | {"initial_state": x["initial_state"].swapaxes(2, 3)} for x in examples()]
    else:
        batch = list(examples())
    one = jax.jit(functools.partial(call, backend="fused", **options))
    many = jax.jit(jax.vmap(functools.partial(call, backend="fused", **options)))
    # With the NaN of rows that do not count, each in another place.
    assert_trees_equal(many(stack(batch)), stack([one(x) for x in batch]))
    # Folded into the heads.
    loop, stacked, in_axes = mix([finite(x) for x in batch], ARGUMENTS[:-1])
    run = functools.partial(call, backend="fused", **options)
    got = jax.jit(jax.vmap(run, in_axes=(in_axes,)))(stacked)
    assert_trees_equal(got, stack([one(x) for x in loop]))


@needs_fused
def test_vmap_of_vmap_on_other_axes() -> None:
    metadata = examples()[0]["metadata"]
    batch = [{n: finite(x)[n] for n in (*NAMES, "initial_state")} for x in examples()]
    grid = stack([stack(batch[:2]), stack(batch[2:])])
    grid["q"] = np.moveaxis(grid["q"], (0, 1), (5, 2))
    grid["A_log"] = grid["A_log"][0, 0]  # shared by all
    grid["dt_bias"] = grid["dt_bias"][0]  # shared by the outer batch

    def run(values: Values) -> KDAResult:
        return call(values | {"metadata": metadata}, "fused")

    names = (*NAMES, "initial_state")
    inner = dict.fromkeys(names, 0) | {"q": 2, "A_log": None}
    outer = dict.fromkeys(names, 0) | {"q": 5, "A_log": None, "dt_bias": None}
    many = jax.vmap(jax.vmap(run, in_axes=(inner,)), in_axes=(outer,), out_axes=1)
    got = jax.jit(many)(grid)
    shared = {"A_log": batch[0]["A_log"]}
    want = [
        run(batch[2 * i + j] | shared | {"dt_bias": batch[j]["dt_bias"]})
        for j in range(2)
        for i in range(2)
    ]
    want = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), stack(want))
    assert_trees_equal(got, want)


@needs_fused
def test_vmap_of_activated_gates() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((3, 2, 20, H, n)).astype(np.float32) / 8 for n in (K, K, V))
    g = -rng.random((3, 2, 20, H, K)).astype(np.float32)
    beta = rng.random((3, 2, 20, H)).astype(np.float32)
    run = functools.partial(chunk_kda, backend="fused", use_qk_l2norm=True)
    got = jax.jit(jax.vmap(run))(q, k, v, g, beta)
    assert_trees_equal(got, stack([run(*x) for x in zip(q, k, v, g, beta, strict=True)]))
