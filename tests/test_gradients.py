"""grad, against that of the recurrence; of vmap and of itself."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import needs_fused, quick_jit
from transform_cases import (
    ARGUMENTS,
    NAMES,
    WEIGHTS,
    K,
    V,
    Values,
    assert_close,
    call,
    examples,
    finite,
    mix,
    stack,
)

from kda_jax import ChunkMetadata, chunk_kda_prefill
from kda_jax.testing import make_case, relative_error

FLOATS = (*NAMES, "initial_state")


def _loss(floats: Values, others: Values, gate: float | None, backend: str) -> jax.Array:
    """All results count, each element with a weight of its own."""
    result = call(floats | others, backend, lower_bound=gate)
    return sum(jnp.vdot(WEIGHTS[: x.size], x) for x in result)


@functools.partial(quick_jit, static_argnames=("gate", "backend"))
def gradients(floats: Values, others: Values, gate: float | None, backend: str) -> Values:
    return jax.grad(_loss)(floats, others, gate, backend)


def _split(values: Values) -> tuple[Values, Values]:
    return ({n: values[n] for n in FLOATS}, {n: values[n] for n in ARGUMENTS if n not in FLOATS})


def _graded() -> tuple[Values, Values]:
    """With NaN in padding, and rows of q and k that are zeros (a padded vocabulary, say)."""
    floats, others = _split(examples()[0])
    floats = {n: x.copy() for n, x in floats.items()}
    floats["q"][:, 4:8] = 0
    floats["k"][:, 6:10] = 0
    floats["v"][:, 12] = 0
    return floats, others


@needs_fused
@pytest.mark.parametrize("gate", [-5.0, None])
def test_gradients_match_the_recurrence(gate: float | None) -> None:
    floats, others = _graded()
    got, want = (gradients(floats, others, gate, b) for b in ("fused", "scan"))
    for name, x in got.items():
        assert x.shape == floats[name].shape and x.dtype == floats[name].dtype
        assert np.isfinite(x).all(), name
        assert relative_error(x, want[name]) < 1e-5, name
        assert np.asarray(x).any(), name
    tokens, rows = others["metadata"].num_tokens, others["has_initial_state"]
    for name in NAMES[:5]:
        assert not np.asarray(got[name][:, tokens:]).any(), f"{name}: padding has a gradient"
    assert not np.asarray(got["initial_state"])[~rows].any()
    assert np.asarray(got["q"][:, 4:8]).any(), "zero rows have a gradient, which is finite"


@needs_fused
def test_gradients_of_integer_leaves_are_float0() -> None:
    values = finite(examples()[0])

    def loss(has: Any, metadata: ChunkMetadata) -> jax.Array:
        result = call(values | {"has_initial_state": has, "metadata": metadata}, "fused")
        return jnp.sum(result.out)

    tangents = jax.grad(loss, argnums=(0, 1), allow_int=True)(
        values["has_initial_state"], values["metadata"]
    )
    leaves = jax.tree.leaves(tangents)
    assert len(leaves) == 4 and all(x.dtype == jax.dtypes.float0 for x in leaves)
    assert jax.tree.structure(tangents[1]) == jax.tree.structure(values["metadata"])


@needs_fused
def test_vmap_of_grad() -> None:
    """Gradients of each example, on layouts of their own, with shared A_log and dt_bias."""
    batched = set(ARGUMENTS) - {"A_log", "dt_bias"}
    loop, stacked, in_axes = mix([finite(x) for x in examples()[:2]], batched)
    want = stack([gradients(*_split(x), -5.0, "fused") for x in loop])
    fn = functools.partial(jax.grad(_loss), gate=-5.0, backend="fused")
    got = quick_jit(jax.vmap(fn, in_axes=_split(in_axes)))(*_split(stacked))
    assert_close(got, want, 1e-5)


@needs_fused
@pytest.mark.slow
def test_grad_of_grad() -> None:
    """A gradient penalty: the gradient of a function of a gradient."""
    values = {"q": (1, 20, 1, K), "k": (1, 20, 1, K), "v": (1, 20, 1, V), "raw_g": (1, 20, 1, K)}
    rng = np.random.default_rng(0)
    floats = {n: rng.standard_normal(s).astype(np.float32) for n, s in values.items()}
    metadata = ChunkMetadata.from_seq_lens([17, 3], chunk_size=16)

    def penalty(floats: Values, backend: str) -> jax.Array:
        def loss(floats: Values) -> jax.Array:
            beta, A_log, bias = jnp.zeros((1, 20, 1)), jnp.zeros(1), jnp.zeros((1, K))
            args = [floats[n] for n in NAMES[:4]]
            result = chunk_kda_prefill(*args, beta, A_log, bias, metadata=metadata, backend=backend)
            return sum(jnp.vdot(WEIGHTS[: x.size], x) for x in result)

        return sum(jnp.sum(g * g) for g in jax.tree.leaves(jax.grad(loss)(floats)))

    got, want = (
        quick_jit(jax.grad(penalty), static_argnums=1)(floats, b) for b in ("fused", "scan")
    )
    assert_close(got, want, 1e-4)


@needs_fused
def test_forward_mode_names_the_backends_that_have_it() -> None:
    def tangent(dtype: str, backend: str) -> jax.Array:
        case = make_case("random", seq_lens=[20, 5], K=64, V=16, H=1, dtype=dtype)

        def out(q: jax.Array) -> jax.Array:
            return chunk_kda_prefill(q, *case.args[1:], **case.kwargs, backend=backend).out

        q = jnp.asarray(case.q)
        return jax.jvp(out, (q,), (q,))[1]

    for backend in ("auto", "fused"):
        with pytest.raises(TypeError, match=r"'fused' has no forward-mode .*'chunked' or 'scan'"):
            tangent("bfloat16", backend)  # which fused takes on every platform
    tangents = [tangent("float32", backend) for backend in ("chunked", "scan")]
    np.testing.assert_allclose(*tangents, rtol=1e-3, atol=1e-5)
