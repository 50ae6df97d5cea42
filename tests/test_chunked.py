"""Backend "chunked" where it could go wrong by itself: decays, windows, slabs, gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax import ChunkMetadata, chunk_kda, chunk_kda_prefill, chunked
from kda_jax.pairwise import join_rows
from kda_jax.testing import Case, assert_matches_scan, default_cases, make_case, relative_error

prefill = functools.partial(chunk_kda_prefill, backend="chunked")
SMALL: dict[str, Any] = {"H": 2, "K": 24, "V": 40}


def test_default_cases() -> None:
    assert_matches_scan(prefill, [c for c in default_cases() if "slow" not in c.name])


@pytest.mark.parametrize("bound", [-5.0, None])
def test_near_equal_keys(bound: float | None) -> None:
    # Tighter than the tolerance: the joined inverse must not lose digits.
    case = make_case("slow", seq_lens=[1088], lower_bound=bound, V=64, initial_state=False)
    assert_matches_scan(prefill, case, rtol_out=6e-6, rtol_state=6e-6)


@pytest.mark.parametrize("chunk_size", [16, 32])
def test_chunk_sizes(chunk_size: int) -> None:
    case = make_case(
        "k3",
        seq_lens=[100, 1, 33],
        chunk_size=chunk_size,
        checkpoint_offsets=[[16, 99], [], [32]],
        **SMALL,
    )
    assert_matches_scan(prefill, case)


def test_widest_channels_and_layout() -> None:
    case = make_case("random", seq_lens=[70], H=1, K=256, V=192)
    assert_matches_scan(prefill, case, state_layout="kv", scale=0.3)


@pytest.mark.parametrize("slab", [1, 3])
def test_any_slab_size(slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "MAX_SLAB", slab)
    # Lengths that no other test has: the slab size is not in the key of the jit cache.
    case = make_case(
        "random", seq_lens=[200, 0, 70 + slab], checkpoint_offsets=[[9], [], []], **SMALL
    )
    assert_matches_scan(prefill, case)


@pytest.mark.parametrize("rare", [1.0, 0.02, 0.002])
def test_one_gate_of_minus_150_among_small_ones(rare: float) -> None:
    # Where sums are subtracted, the rows after such a gate lose the digits of their own decay.
    case = make_case("random", seq_lens=[130], lower_bound=None, **SMALL)
    rng = np.random.default_rng(1)
    case.raw_g[...] = np.where(rng.random(case.raw_g.shape) < rare, 150.0, -9.0)
    case.A_log[...], case.dt_bias[...] = 0.0, 0.0
    assert_matches_scan(prefill, case, rtol_out=2e-6, rtol_state=2e-6)


@pytest.mark.parametrize("g", [0.0, -5.0, "alternating", -np.inf])
def test_activated_extremes(g: float | str) -> None:
    rng = np.random.default_rng(0)
    T, H, K, V = 130, 2, 16, 8
    q, k, v, gate = (rng.standard_normal((1, T, H, n)).astype(np.float32) / 4 for n in (K, K, V, K))
    gate[...] = g if not isinstance(g, str) else 0.0
    if isinstance(g, str):
        gate[:, ::2] = -5.0
    if g == -np.inf:  # a reset in one place
        gate[...] = -0.1
        gate[:, 40] = -np.inf
    beta = rng.uniform(0, 1, (1, T, H)).astype(np.float32)
    got, want = (
        chunk_kda(q, k, v, gate, beta, use_qk_l2norm=isinstance(g, str), backend=b)
        for b in ("chunked", "scan")
    )
    for x, y in zip(got[:2], want[:2], strict=True):
        assert relative_error(x, y) < 2e-6


def test_join_rows_against_its_definition(x64: None) -> None:
    rng = np.random.default_rng(0)
    C, K = 32, 8
    q, k = rng.standard_normal((2, C, K)) / 3
    g = -np.where(rng.random((C, K)) < 0.1, 150.0, rng.random((C, K)))
    beta = rng.uniform(0, 1, C)
    chunk = join_rows(*map(jnp.asarray, (q, k, g, beta)))
    G = np.cumsum(g, axis=0)
    decay = np.exp(np.where(np.tri(C, dtype=bool)[..., None], G[:, None] - G[None], -np.inf))
    Aqk = np.einsum("ik,jk,ijk->ij", q, k, decay)
    Akk = np.tril(beta[:, None] * np.einsum("ik,jk,ijk->ij", k, k, decay), -1)
    for got, want in (
        (chunk.Aqk, Aqk),
        (chunk.inverse, np.linalg.inv(np.eye(C) + Akk)),
        (chunk.q_start, q * np.exp(G)),
        (chunk.k_start, beta[:, None] * k * np.exp(G)),
        (chunk.k_end, k * decay[-1]),
        (chunk.decay, np.exp(G[-1])),
    ):
        np.testing.assert_allclose(got, want, atol=1e-12)


def _weighted(result: Any) -> jax.Array:
    return sum(jnp.sum(x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)) for x in result)


@functools.partial(jax.jit, static_argnames="backend")
def _gradients_of(args: Any, kwargs: Any, backend: str) -> Any:
    def loss(args: Any, state: Any) -> jax.Array:
        options = kwargs | {"initial_state": state, "backend": backend}
        return _weighted(chunk_kda_prefill(*args, **options))

    return jax.grad(loss, argnums=(0, 1))(args, kwargs["initial_state"])


def _gradients(case: Case, backend: str) -> Any:
    kwargs = {n: x for n, x in case.kwargs.items() if n != "lower_bound"}
    return _gradients_of(case.args, kwargs, backend)


@pytest.fixture
def graded() -> Case:
    return make_case(
        "random",
        seq_lens=[70, 0, 1, 40],
        checkpoint_offsets=[[64], [], [], [17]],
        initial_state=[True, True, False, True],
        capacity="bucket",
        chunk_size=16,
        **SMALL,
    )


def test_gradients_match_the_recurrence(graded: Case) -> None:
    # Rows of padding hold NaN: their gradients must be zeros.
    got, want = (_gradients(graded, b) for b in ("chunked", "scan"))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(x, y) < 5e-6


def test_gradients_of_zero_and_saturated_rows_are_finite(graded: Case) -> None:
    for x in graded.args[:5]:
        x[:, 10:20] = 0
    graded.raw_g[:, 20:40] = 1e4
    graded.raw_beta[:, 20:30] = 1e4
    for x in jax.tree.leaves(_gradients(graded, "chunked")):
        assert np.isfinite(x).all()


def test_one_program_for_all_lengths_and_none_for_padding() -> None:
    traces = []

    @jax.jit
    def step(args: Any, metadata: ChunkMetadata) -> Any:
        traces.append(None)
        return prefill(*args, metadata=metadata)

    for lengths in ([60, 30], [1, 90], [10, 80]):
        case = make_case(
            "random",
            seq_lens=lengths,
            initial_state=False,
            capacity="bucket",
            chunk_size=16,
            **SMALL,
        )
        args, metadata = jax.device_put((case.args, case.metadata))
        with jax.transfer_guard("disallow"):
            result = jax.block_until_ready(step(args, metadata))
        assert relative_error(result.out, prefill(*case.args, **case.kwargs).out) == 0
    assert len(traces) == 1


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm"])
def test_lowers_for_every_platform_from_here(platform: str) -> None:
    case = make_case("random", seq_lens=[40], chunk_size=16, **SMALL)
    step = jax.jit(lambda *args: prefill(*args, **case.kwargs))
    exported = jax.export.export(step, platforms=[platform])(*case.args)
    assert "custom_call" not in exported.mlir_module()
