"""vmap, grad, remat, scan over layers and donation."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import FUSED, assert_trees_equal, needs_fused, quick_jit

from kda_jax import ChunkMetadata, KDAResult, chunk_kda, chunk_kda_prefill
from kda_jax.testing import make_case, relative_error

H, K, V = 2, 64, 16
NAMES = ("q", "k", "v", "raw_g", "raw_beta", "A_log", "dt_bias")
ARGUMENTS = (*NAMES, "initial_state", "has_initial_state", "metadata")
LENGTHS = ([33, 0, 1, 20], [10, 30, 0, 13], [64], [1, 2, 3, 40])
OFFSETS = ([[16], [], [], [5]], [[10], [7], [], []], [[64, 3]], [[1], [], [], []])
HAS = ([True, True, False, True], [False, True, True, True], [True], [True, False, False, True])
Values = dict[str, Any]


@functools.cache
def examples() -> tuple[Values, ...]:
    """Calls of one capacity on different lengths; NaN in padding and in rows that do not count."""
    found = []
    for seed, (lengths, offsets, has) in enumerate(zip(LENGTHS, OFFSETS, HAS, strict=True)):
        case = make_case(
            "random",
            seq_lens=lengths,
            H=H,
            K=K,
            V=V,
            seed=seed,
            chunk_size=16,
            checkpoint_offsets=offsets,
            initial_state=has,
            capacity=ChunkMetadata.from_seq_lens(
                LENGTHS[0], chunk_size=16, checkpoint_offsets=OFFSETS[0], capacity="bucket"
            ).capacity,
        )
        found.append({name: getattr(case, name) for name in ARGUMENTS})
    return tuple(found)


def finite(values: Values) -> Values:
    """Without NaN, so that any argument goes with any layout."""
    return jax.tree.map(lambda x: np.nan_to_num(x, nan=0.5) if x.dtype == np.float32 else x, values)


def call(values: Values, backend: str, **options: Any) -> KDAResult:
    args = [values[name] for name in NAMES]
    rest = {name: x for name, x in values.items() if name not in NAMES}
    return chunk_kda_prefill(*args, **rest, backend=backend, **options)


def assert_close(got: Any, want: Any, rtol: float) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    paths = jax.tree_util.tree_leaves_with_path(want)
    for (path, ref), x in zip(paths, jax.tree.leaves(got), strict=True):
        assert relative_error(x, ref) < rtol, jax.tree_util.keystr(path)


def _stack(trees: Any) -> Any:
    return jax.tree.map(lambda *x: np.stack(x), *trees)


# ---------- vmap ----------


one_call = quick_jit(call, static_argnames="backend")


def mix(batch: list[Values], batched: Collection[str]) -> tuple[list[Values], Values, Values]:
    """A loop's arguments, where those not in ``batched`` are the first's; vmap's; and in_axes."""
    first = batch[0]
    loop = [{n: x[n] if n in batched else first[n] for n in ARGUMENTS} for x in batch]
    stacked = {n: _stack([x[n] for x in batch]) if n in batched else first[n] for n in ARGUMENTS}
    return loop, stacked, {n: 0 if n in batched else None for n in ARGUMENTS}


def _check_vmap(batched: tuple[str, ...], backend: str, rtol: float) -> None:
    """One call on the batched arguments against a Python loop over them."""
    loop, stacked, in_axes = mix([finite(x) for x in examples()[:3]], batched)
    want = _stack([one_call(x, backend) for x in loop])
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
    assert_trees_equal(many(_stack(batch)), _stack([one(x) for x in batch]))
    # Folded into the heads.
    loop, stacked, in_axes = mix([finite(x) for x in batch], ARGUMENTS[:-1])
    run = functools.partial(call, backend="fused", **options)
    got = jax.jit(jax.vmap(run, in_axes=(in_axes,)))(stacked)
    assert_trees_equal(got, _stack([one(x) for x in loop]))


@needs_fused
def test_vmap_of_vmap_on_other_axes() -> None:
    metadata = examples()[0]["metadata"]
    batch = [{n: finite(x)[n] for n in (*NAMES, "initial_state")} for x in examples()]
    grid = _stack([_stack(batch[:2]), _stack(batch[2:])])
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
    want = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), _stack(want))
    assert_trees_equal(got, want)


@needs_fused
def test_vmap_of_activated_gates() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((3, 2, 20, H, n)).astype(np.float32) / 8 for n in (K, K, V))
    g = -rng.random((3, 2, 20, H, K)).astype(np.float32)
    beta = rng.random((3, 2, 20, H)).astype(np.float32)
    run = functools.partial(chunk_kda, backend="fused", use_qk_l2norm=True)
    got = jax.jit(jax.vmap(run))(q, k, v, g, beta)
    assert_trees_equal(got, _stack([run(*x) for x in zip(q, k, v, g, beta, strict=True)]))


# ---------- grad ----------

WEIGHTS = np.random.default_rng(5).standard_normal(1 << 14).astype(np.float32)
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
    want = _stack([gradients(*_split(x), -5.0, "fused") for x in loop])
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
