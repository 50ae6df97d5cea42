"""The short convolutions of several arrays in one call, against the loop over tokens.

On a GPU with the kernel that is the kernel, which the compiled program must call; elsewhere plain
JAX. What lies around the call (derivatives, batches, shardings) runs on the CPU as well, with a
stand-in for it; shardings in test_conv_sharding.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ON_GPU
from test_conv import loop

from kda_jax import Capacity, ChunkMetadata, conv_kernel, export_checks, native
from kda_jax.backends import current_platform
from kda_jax.conv import causal_conv1d, causal_conv1d_parts, causal_conv1d_parts_in_pool

DTYPES = ["bfloat16", "float16"] if ON_GPU else ["bfloat16"]
ROUNDING = {"bfloat16": 3e-3, "float16": 4e-4}  # of the outputs
CHANNELS = (16, 40, 8)
LENS = [33, 0, 1, 2, 3, 64, 17, 16]
OFFSETS = [[1, 2, 16, 33], [], [1], [], [3], [5, 64], [], [15]]


def draw(*shape: int, seed: int, dtype: Any = "float32") -> jax.Array:
    x = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(x, jnp.dtype(dtype))


def relative(x: jax.Array, want: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(np.asarray(x, np.float64) - want) / np.linalg.norm(want))


def pack(dtype: str) -> dict[str, Any]:
    """A pack whose padding is NaN, and one sequence of which must not read its state."""
    capacity = Capacity(tokens=150, sequences=10, chunks=12, checkpoints=10)
    metadata = ChunkMetadata.from_seq_lens(LENS, checkpoint_offsets=OFFSETS, capacity=capacity)
    has = np.array([True, True, False, True, True, False, True, True, False, False])
    xs, weights, states = [], [], []
    for i, C in enumerate(CHANNELS):
        xs.append(draw(150, C, seed=i, dtype=dtype).at[sum(LENS) :].set(jnp.nan))
        weights.append(draw(C, 4, seed=10 + i, dtype=dtype))
        state = draw(10, C, 3, seed=20 + i, dtype=dtype)
        states.append(jnp.where(has[:, None, None], state, jnp.nan))
    return {"xs": xs, "weights": weights, "metadata": metadata, "states": states, "has": has}


def check(p: dict[str, Any], dtype: str, with_state: bool, found: Any, silu: bool = True) -> None:
    M, first = sum(map(len, OFFSETS)), 0
    for x, weight, state, y in zip(p["xs"], p["weights"], p["states"], found[0], strict=True):
        wide = [np.asarray(a, np.float64) for a in (x, weight, state)]
        wide[2] = np.where(p["has"][:, None, None] & with_state, wide[2], 0)
        want = loop(wide[0], wide[1], LENS, wide[2], OFFSETS, silu=silu)
        part = slice(first, first + x.shape[1])
        assert relative(y[: sum(LENS)], want[0]) <= ROUNDING[dtype]
        assert not np.any(np.asarray(y[sum(LENS) :], np.float32))
        np.testing.assert_array_equal(found[1][: len(LENS), part], want[1])  # raw rows
        np.testing.assert_array_equal(found[2][:M, part], want[2])
        first += x.shape[1]
    assert not np.any(np.asarray(found[1][len(LENS) :], np.float32))
    assert not np.any(np.asarray(found[2][M:], np.float32))


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts(dtype: str, with_state: bool, activation: str | None) -> None:
    p = pack(dtype)
    options: dict[str, Any] = {}
    if with_state:
        options = {
            "initial_state": jnp.concatenate(p["states"], 1),
            "has_initial_state": jnp.asarray(p["has"]),
        }
    run = jax.jit(
        lambda xs, weights, metadata, **options: causal_conv1d_parts(
            xs, weights, metadata, activation=activation, **options
        )
    )
    compiled = run.lower(p["xs"], p["weights"], p["metadata"], **options).compile()
    assert ("kda_conv" in compiled.as_text()) == (
        current_platform() in native.status().convolutions
    )
    found = compiled(p["xs"], p["weights"], p["metadata"], **options)
    check(p, dtype, with_state, jax.device_get(found), silu=activation == "silu")


@pytest.mark.parametrize("lens", [[1000], [0], [1, 1, 1], [16, 16], [700, 0, 0, 324]])
def test_lengths(lens: list[int]) -> None:
    """Weights in float32 beside bfloat16, a width of channels that is not a power of two."""
    x, weight = draw(max(sum(lens), 1), 24, seed=1, dtype="bfloat16"), draw(24, 4, seed=2)
    metadata = ChunkMetadata.from_seq_lens(lens)
    got = jax.jit(causal_conv1d)(x, weight, metadata)
    zeros = np.zeros((len(lens), 24, 3))
    want = loop(np.asarray(x, np.float64), np.asarray(weight), lens, zeros, [[]] * len(lens))
    if sum(lens):
        assert relative(got.y, want[0]) <= ROUNDING["bfloat16"]
    np.testing.assert_array_equal(np.asarray(got.final_state, np.float64), want[1])


def test_in_a_pool() -> None:
    p = pack("bfloat16")
    rows = np.array([7, -1, 3, 0, 11, 2, 9, 4, -1, -1], np.int32)
    pool = draw(12, 70, 4, seed=5, dtype="bfloat16")
    saved = np.full(10, -1, np.int32)
    saved[:3] = 1, 5, 6
    got = jax.jit(causal_conv1d_parts_in_pool, static_argnames="first_channel")(
        p["xs"],
        p["weights"],
        p["metadata"],
        state_cache=pool,
        state_indices=rows,
        has_initial_state=jnp.asarray(p["has"]),
        checkpoint_state_indices=saved,
        first_channel=2,
    )
    state = jnp.where((rows >= 0)[:, None, None], pool[rows, 2:66, :3], 0)
    want = causal_conv1d_parts(
        p["xs"],
        p["weights"],
        p["metadata"],
        initial_state=state,
        has_initial_state=jnp.asarray(p["has"] & (rows >= 0)),
    )
    jax.tree.map(np.testing.assert_array_equal, got.ys, want.ys)
    after = np.array(pool)
    after[rows[rows >= 0], 2:66, :3] = want.final_state[rows >= 0]
    after[saved[:3], 2:66, :3] = want.checkpoint_state[:3]
    np.testing.assert_array_equal(np.asarray(got.state_cache), after)


ERRORS = [
    ({"xs": []}, "xs has 0 arrays, weights 3"),
    ({"xs": [0, 1]}, "xs has 2 arrays, weights 3"),
    ({"xs[1]": lambda x: x[:5]}, "xs[1] is bfloat16 with 5 rows, want bfloat16 with 150"),
    ({"xs[2]": lambda x: x.astype("float32")}, "xs[2] is float32 with 150 rows"),
    ({"weights[1]": lambda w: w[:, 1:]}, "weights[1] has width 3, want 4"),
    ({"weights[2]": lambda w: w[1:]}, "weights[2] has shape (7, 4), want (8, W)"),
    ({"xs[0]": lambda x: x[0]}, "xs[0] has shape (16,), want [T, C]"),
]


@pytest.mark.parametrize(("change", "message"), ERRORS, ids=[x[1] for x in ERRORS])
def test_errors(change: dict[str, Any], message: str) -> None:
    p = pack("bfloat16")
    ((what, value),) = change.items()
    if what == "xs":
        p["xs"] = [p["xs"][i] for i in value]
    else:
        name, i = what[:-3], int(what[-2])
        p[name][i] = value(p[name][i])
    with pytest.raises(ValueError) as error:
        causal_conv1d_parts(p["xs"], p["weights"], p["metadata"])
    assert message in str(error.value)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What a stand-in for the custom call has got; on a GPU, as on the CPU, it is plain JAX."""
    found: list[Any] = []
    status = dataclasses.replace(native.status(), convolutions=(current_platform(),))

    def stand_in(activation: Any, inputs: Any, metadata: Any) -> Any:
        found.append(inputs)
        return conv_kernel._in_plain_jax(activation, inputs, metadata)

    monkeypatch.setattr(conv_kernel, "_custom_call", stand_in)
    monkeypatch.setattr(conv_kernel.devices, "uncovered_here", lambda platform, built: None)
    monkeypatch.setattr(native, "status", lambda: status)
    jax.clear_caches()
    yield found
    jax.clear_caches()


METADATA = ChunkMetadata.from_seq_lens([5, 0, 9], checkpoint_offsets=[[2], [], [9]])


def small(seed: int = 0) -> tuple[Any, ...]:
    xs = [draw(14, C, seed=seed + C, dtype="bfloat16") for C in (16, 8)]
    weights = [draw(C, 4, seed=seed + C + 1) for C in (16, 8)]
    return xs, weights, draw(3, 24, 3, seed=seed, dtype="bfloat16")


def apply(xs: Any, weights: Any, state: Any) -> Any:
    return causal_conv1d_parts(xs, weights, METADATA, initial_state=state)


def plain(xs: Any, weights: Any, state: Any) -> Any:
    inputs = conv_kernel.ConvInputs(
        tuple(xs), tuple(weights), tuple(jnp.split(state, [16], axis=1)), None
    )
    ys, finals, insides = conv_kernel._in_plain_jax("silu", inputs, METADATA)
    return ys, jnp.concatenate(finals, 1), jnp.concatenate(insides, 1)


def assert_same(got: Any, want: Any) -> None:
    def same(x: Any, y: Any) -> None:
        x, y = (np.asarray(a, np.float32) for a in (x, y))
        np.testing.assert_allclose(x, y, rtol=2e-2, atol=2e-2)

    jax.tree.map(same, jax.tree.leaves(got), jax.tree.leaves(want))


def test_derivatives(calls: list[Any]) -> None:
    def loss(f: Any) -> Any:
        def of(*args: Any) -> jax.Array:
            return sum(jnp.sum(x.astype("float32") ** 2) for x in jax.tree.leaves(f(*args)))

        return of

    args = small()
    ones = jax.tree.map(jnp.ones_like, args)
    got = jax.grad(loss(apply), (0, 1, 2))(*args), jax.jvp(loss(apply), args, ones)
    assert calls
    assert_same(got, (jax.grad(loss(plain), (0, 1, 2))(*args), jax.jvp(loss(plain), args, ones)))


def test_batches(calls: list[Any]) -> None:
    both = jax.tree.map(lambda *x: jnp.stack(x), small(0), small(50))
    assert_same(jax.vmap(apply)(*both), jax.vmap(plain)(*both))
    axes = (0, None, None)
    assert_same(
        jax.vmap(apply, axes)(both[0], *small()[1:]), jax.vmap(plain, axes)(both[0], *small()[1:])
    )


def test_a_device_that_the_library_does_not_cover(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = small()
    monkeypatch.setattr(
        conv_kernel.devices, "uncovered_here", lambda platform, built: "not for 8.0"
    )
    assert_same(apply(*args), plain(*args))
    assert not calls


def test_without_shardy(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else asks the rule how the call is split."""
    inputs = conv_kernel.ConvInputs(*map(tuple, small()[:2]), None, None)
    assert conv_kernel.able(inputs)
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        assert not conv_kernel.able(inputs)
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


def test_a_pool_without_rows() -> None:
    xs, weights, _ = small()
    got = causal_conv1d_parts_in_pool(
        xs,
        weights,
        METADATA,
        state_cache=jnp.zeros((0, 24, 3), "bfloat16"),
        state_indices=np.full(3, -1, np.int32),
        checkpoint_state_indices=np.full(2, -1, np.int32),
    )
    assert_same(got.ys, causal_conv1d_parts(xs, weights, METADATA).ys)
    assert got.state_cache.shape == (0, 24, 3)


def test_results_are_serializable() -> None:
    xs, weights, state = small()
    run = jax.jit(lambda *args: causal_conv1d_parts(*args, METADATA, initial_state=state))
    exported = jax.export.export(run, disabled_checks=export_checks())(xs, weights)
    got = jax.export.deserialize(exported.serialize()).call(xs, weights)
    assert_same(got.ys, run(xs, weights).ys)


def test_a_channel_without_a_pool() -> None:
    with pytest.raises(ValueError, match="first_channel is 8 without state_cache"):
        causal_conv1d(small()[0][0], small()[1][0], METADATA, first_channel=8)
