"""A decode step in a pool through the kernel's call: what lies around the call, on the CPU.

The CPU's kernel has no chunks of one token, so a stand-in in plain JAX takes the call's place; the
kernel itself is executed in test_cdna_tokens.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import needs_fused

from kda_jax import decode_kernel, fused
from kda_jax.decode import kda_decode_step

pytestmark = needs_fused
R, P, H, K, V = 4, 6, 2, 64, 16
ROWS = np.array([5, -1, 0, 2], np.int32)


def arguments(seed: int = 0) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = [(R, H, K), (R, H, K), (R, H, V), (R, H, K), (R, H), (H,), (H, K), (P, H, V, K)]
    return [jnp.asarray(rng.standard_normal(shape).astype("f")) for shape in shapes]


def step(*args: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
    *tensors, pool = args
    return kda_decode_step(*tensors, state_cache=pool, state_indices=ROWS, **options)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The layouts of the calls that a stand-in for the custom call has got."""
    found: list[Any] = []
    forget()

    def stand_in(inputs: Any, pool: Any, metadata: Any, *, config: Any, **_: Any) -> Any:
        found.append(metadata)
        return fused._chunked(inputs, pool, metadata, config)

    monkeypatch.setattr(fused, "custom_call", stand_in)
    monkeypatch.setattr(fused, "takes_tokens", lambda platform: platform == "cpu")
    yield found
    forget()


def forget() -> None:
    """JAX remembers what it has traced of a function."""
    fused._differentiable.cache_clear()
    decode_kernel._step.clear_cache()


def without_the_kernel(function: Any, *args: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "takes_tokens", lambda platform: False)
        return function(*args)


def assert_same(got: Any, want: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"active": np.array([True, True, False, True])},
        {"has_initial_state": np.array([True, True, True, False]), "lower_bound": None},
    ],
    ids=["all", "one idle", "one fresh, softplus"],
)
def test_it_is_the_step_in_plain_jax(calls: list[Any], options: dict[str, Any]) -> None:
    args = arguments()
    idle = [i for i, on in enumerate(options.get("active", np.ones(R))) if not on]
    unread = jnp.array(idle, jnp.int32)
    args[:5] = [x.at[unread].set(jnp.nan) for x in args[:5]]
    got = jax.jit(lambda *a: step(*a, **options))(*args)
    assert len(calls) == 1 and calls[0].chunk_size == 1
    want = without_the_kernel(jax.jit(lambda *a: step(*a, **options)), *args)
    assert len(calls) == 1
    assert_same(got, want)
    others = sorted(set(range(P)) - {int(ROWS[i]) for i in range(R) if i not in idle})
    np.testing.assert_array_equal(got[1][np.array(others)], args[-1][np.array(others)])


def test_derivatives(calls: list[Any]) -> None:
    """Both modes; what an idle row holds is in none of them."""
    active = np.array([True, True, False, True])

    def loss(*args: Any) -> jax.Array:
        found = step(*args, active=active)
        return sum(jnp.vdot(jnp.arange(1.0, 1 + x.size), x.ravel()) / x.size for x in found)

    args = arguments()
    args[:5] = [x.at[2].set(jnp.nan) for x in args[:5]]
    every = tuple(range(8))

    def both(*args: Any) -> Any:
        ones = tuple(map(jnp.ones_like, args))
        return jax.grad(loss, every)(*args), jax.jvp(loss, args, ones)

    got = both(*args)
    assert calls and all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(got))
    assert_same(got, without_the_kernel(both, *args))


def test_eager_steps_compile_once(calls: list[Any]) -> None:
    for seed in range(3):
        step(*arguments(seed))
    assert len(calls) == 1


def test_requests_of_an_unknown_number(calls: list[Any]) -> None:
    """Plain JAX exports them; the call's tables have a row for each request."""
    (r,) = jax.export.symbolic_shape("r")
    shapes = [(r, H, K), (r, H, K), (r, H, V), (r, H, K), (r, H), (H,), (H, K), (P, H, V, K)]
    specs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    rows = jax.ShapeDtypeStruct((r,), jnp.int32)
    exported = jax.export.export(
        jax.jit(lambda *a: kda_decode_step(*a[:7], state_cache=a[7], state_indices=a[8]))
    )(*specs, rows)
    assert not calls and exported.in_avals[0].shape[1:] == (H, K)


def test_vmap(calls: list[Any]) -> None:
    both = jax.tree.map(lambda *x: jnp.stack(x), arguments(0), arguments(1))
    got = jax.vmap(step)(*both)
    assert calls and all(metadata.chunk_size == 1 for metadata in calls)
    assert_same(got, without_the_kernel(jax.vmap(step), *both))


def test_other_platforms_have_it_not() -> None:
    args = arguments()
    spec = fused.CallSpec.of("cpu", args[:5], decode_kernel.token_each(R), "bounded", None)
    assert "no chunks of one token" in (fused.FUSED.unsupported(spec) or "")
