"""scan over layers, remat and donation. vmap and grad: test_vmap.py, test_gradients.py."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import FUSED, assert_trees_equal, needs_fused, quick_jit
from transform_cases import (
    WEIGHTS,
    K,
    Values,
    assert_close,
    call,
    examples,
    finite,
    one_call,
)

from kda_jax import ChunkMetadata, KDAResult, chunk_kda

# ---------- remat, layers ----------


def _layer(x: jax.Array, weights: Values, metadata: ChunkMetadata, backend: str) -> jax.Array:
    """A residual layer with gates of its own: x ``[1, T, H, V]``, V = K."""
    q, k, v, g = (jnp.einsum("bthc,hcd->bthd", x, weights[n]) for n in ("q", "k", "v", "g"))
    g = -jax.nn.softplus(g + weights["bias"])
    beta = jax.nn.sigmoid(jnp.einsum("bthc,hc->bth", x, weights["beta"]))
    options = {"metadata": metadata, "use_qk_l2norm": True, "backend": backend}
    return x + chunk_kda(q, k, v, g, beta, **options).out


def _layers(depth: int) -> tuple[jax.Array, Values, ChunkMetadata]:
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    weights = {n: normal(depth, 1, K, K) / 8 for n in ("q", "k", "v", "g")}
    weights |= {"beta": normal(depth, 1, K) / 8, "bias": normal(depth, 1, K)}
    metadata = ChunkMetadata.from_seq_lens([18, 5], chunk_size=16, capacity="bucket")
    return normal(1, metadata.capacity.tokens, 1, K), weights, metadata


@needs_fused
@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_layers(remat: bool) -> None:
    """Values, and gradients with rematerialization, against a Python loop over the reference.

    On activated gates, so that their gradient is looked at, too.
    """
    depth = 2
    x, weights, metadata = _layers(depth)

    def stacked(x: jax.Array, weights: Values, metadata: ChunkMetadata) -> jax.Array:
        def body(x: jax.Array, w: Values) -> tuple[jax.Array, None]:
            return _layer(x, w, metadata, "fused"), None

        return jax.lax.scan(jax.checkpoint(body) if remat else body, x, weights)[0]

    def loop(x: jax.Array, weights: Values, metadata: ChunkMetadata) -> jax.Array:
        for i in range(depth):
            x = _layer(x, jax.tree.map(lambda w, i=i: w[i], weights), metadata, "scan")
        return x

    if not remat:
        got, want = (quick_jit(f)(x, weights, metadata) for f in (stacked, loop))
    else:
        loss = [lambda *a, f=f: jnp.vdot(WEIGHTS[: x.size], f(*a)) for f in (stacked, loop)]
        got, want = (quick_jit(jax.grad(f, argnums=(0, 1)))(x, weights, metadata) for f in loss)
    assert_close(got, want, 1e-5)


# ---------- donation ----------


@pytest.mark.parametrize(
    ("backend", "state_layout"),
    [(b, "vk") for b in ("auto", "chunked", "scan")]
    + [pytest.param("fused", layout, marks=needs_fused) for layout in ("vk", "kv")],
)
def test_donated_state_becomes_the_final_state(backend: str, state_layout: Any) -> None:
    values = dict(finite(examples()[0]))
    want = one_call(values, backend)
    if state_layout == "kv":
        values["initial_state"] = values["initial_state"].swapaxes(2, 3)
        want = want._replace(
            final_state=want.final_state.swapaxes(2, 3),
            checkpoint_state=want.checkpoint_state.swapaxes(2, 3),
        )

    def step(state: jax.Array, rest: Values) -> KDAResult:
        return call(rest | {"initial_state": state}, backend, state_layout=state_layout)

    # A computed array: device_put may borrow an aligned NumPy buffer, which cannot be donated.
    state = jnp.copy(jax.device_put(values.pop("initial_state")))
    address = state.unsafe_buffer_pointer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "Some donated buffers were not usable"
        got = quick_jit(step, donate_argnums=0)(state, values)
    assert state.is_deleted()
    assert got.final_state.unsafe_buffer_pointer() == address
    assert_trees_equal(got, want)


@pytest.mark.parametrize("backend", [FUSED, "auto"])
def test_donating_what_the_kernel_still_reads(backend: str) -> None:
    """``out`` takes the memory of v and final_state that of the state, in a chain of steps."""
    values = jax.device_put(finite(examples()[0]))
    run = jax.jit(functools.partial(call, backend=backend))
    first = run(values)
    want = run(values | {"v": first.out, "initial_state": first.final_state})

    def step(v: jax.Array, state: jax.Array, rest: Values) -> KDAResult:
        return call(rest | {"v": v, "initial_state": state}, backend)

    donating = jax.jit(step, donate_argnums=(0, 1))
    v, state = (jnp.array(values.pop(n)) for n in ("v", "initial_state"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = donating(v, state, values)
        got = donating(got.out, got.final_state, values)
    assert v.is_deleted() and state.is_deleted()
    assert_trees_equal(got, want)
