"""Every mistake in a call is a `ValueError` that names the argument, eager and under jit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax import ChunkMetadata, chunk_kda, chunk_kda_prefill

T, H, K, V = 10, 3, 16, 8
NAMES = ("q", "k", "v", "raw_g", "raw_beta", "A_log", "dt_bias")


def good() -> dict[str, Any]:
    shapes = ((1, T, H, K), (1, T, H, K), (1, T, H, V), (1, T, H, K), (1, T, H), (H,), (H, K))
    return {n: np.ones(s, np.float32) for n, s in zip(NAMES, shapes, strict=True)}


def eager(**kwargs: Any) -> None:
    chunk_kda_prefill(**kwargs)


def under_jit(**kwargs: Any) -> None:
    arrays = {n: x for n, x in kwargs.items() if isinstance(x, np.ndarray | jax.Array)}
    rest = {n: x for n, x in kwargs.items() if n not in arrays}
    jax.eval_shape(lambda a: chunk_kda_prefill(**a, **rest), arrays)


CASES: list[tuple[dict[str, Any], str]] = [
    ({"q": np.ones((T, H, K), np.float32)}, r"q has shape \(10, 3, 16\), want 4 axes"),
    ({"k": np.ones((1, T, H, K + 1), np.float32)}, r"k has shape \(1, 10, 3, 17\), want \(1, 10"),
    ({"v": np.ones((1, T + 1, H, V), np.float32)}, r"v has shape \(1, 11, 3, 8\), want \[B, T"),
    ({"v": np.ones((1, T, H, 257), np.float32)}, r"V is 257, want 1\.\.256 channels of v"),
    ({"raw_g": np.ones((1, T, H), np.float32)}, r"raw_g has shape \(1, 10, 3\), want"),
    ({"raw_beta": np.ones((1, T, H, 1), np.float32)}, r"raw_beta has shape \(1, 10, 3, 1\), want"),
    ({"A_log": np.ones(128, np.float32)}, r"A_log has shape \(128,\), want \(3,\)"),
    ({"A_log": np.ones((1, 1, H, 1), np.float32)}, r"A_log has shape \(1, 1, 3, 1\), want \(3,\)"),
    ({"dt_bias": np.ones(H * K, np.float32)}, r"dt_bias has shape \(48,\), want \(3, 16\)"),
    ({"q": np.ones((1, T, H, K), np.int32)}, "q has dtype int32"),
    ({"v": np.ones((1, T, H, V), np.bool_)}, "v has dtype bool"),
    ({"raw_g": np.ones((1, T, H, K), np.complex64)}, "raw_g has dtype complex64"),
    ({"A_log": np.ones(H, np.int32)}, "A_log has dtype int32"),
    ({"lower_bound": 0.0}, r"lower_bound is 0\.0, want a number in \[-5, 0\)"),
    ({"lower_bound": -5.5}, r"lower_bound is -5\.5"),
    ({"lower_bound": "-5"}, "lower_bound is '-5'"),
    ({"lower_bound": float("nan")}, "lower_bound is nan"),
    ({"scale": float("inf")}, "scale is inf"),
    ({"scale": True}, "scale is True"),
    ({"state_layout": "kk"}, "state_layout is 'kk', want 'vk' or 'kv'"),
    ({"groups": 0}, "groups is 0"),
    ({"backend": "cuda"}, "backend is 'cuda', want one of"),
    ({"metadata": [3, 7]}, "metadata is a list"),
    (
        {"metadata": dataclasses.replace(ChunkMetadata.from_seq_lens([3, 7]), chunk_size=1)},
        "chunk_size is 1, want one of",
    ),
    ({"metadata": ChunkMetadata.from_seq_lens([6, 7])}, "covers 13 tokens, but q has 10"),
    ({"initial_state": np.ones((2, H, V, K), np.float32)}, r"initial_state .*want \(1, 3, 8, 16\)"),
    ({"initial_state": np.ones((1, H, K, V), np.float32)}, r"initial_state .*want \(1, 3, 8, 16\)"),
    (
        {"initial_state": np.ones((1, H, V, K), np.float32), "state_layout": "kv"},
        r"initial_state .*want \(1, 3, 16, 8\)",
    ),
    ({"initial_state": np.ones((1, H, V, K), np.int32)}, "initial_state has dtype int32"),
    ({"has_initial_state": np.ones(1, np.bool_)}, "without initial_state"),
    (
        {
            "initial_state": np.ones((1, H, V, K), np.float32),
            "has_initial_state": np.ones(1, np.int32),
        },
        "has_initial_state has dtype int32, want bool",
    ),
    (
        {
            "initial_state": np.ones((1, H, V, K), np.float32),
            "has_initial_state": np.ones(2, np.bool_),
        },
        r"has_initial_state has shape \(2,\), want \(1,\)",
    ),
]


@pytest.mark.parametrize("call", [eager, under_jit])
@pytest.mark.parametrize(("change", "message"), CASES)
def test_names_the_mistake(call: Callable[..., None], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**good() | change)


@pytest.mark.parametrize("name", NAMES)
def test_float64_needs_x64(name: str) -> None:
    args = good()
    args[name] = args[name].astype(np.float64)
    with pytest.raises(ValueError, match=f"{name} has dtype float64, which needs jax_enable_x64"):
        eager(**args)


def test_lists_are_not_arrays() -> None:
    with pytest.raises(ValueError, match="q is a list, want a NumPy or JAX array"):
        eager(**good() | {"q": [1.0]})


def test_batch_rows_with_metadata() -> None:
    args = good()
    for name in NAMES[:5]:
        args[name] = np.concatenate([args[name]] * 2)
    with pytest.raises(ValueError, match="q has 2 batch rows, want 1"):
        eager(**args, metadata=ChunkMetadata.from_seq_lens([T]))


def test_traced_options_are_refused() -> None:
    with pytest.raises(ValueError, match="scale is"):
        jax.jit(lambda s: chunk_kda_prefill(**good(), scale=s))(1.0)
    with pytest.raises(ValueError, match="lower_bound is"):
        jax.jit(lambda b: chunk_kda_prefill(**good(), lower_bound=b))(-5.0)


def test_chunk_kda_names_its_own_arguments() -> None:
    args = good()
    g, beta = args["raw_g"], args["raw_beta"]
    q, k, v = args["q"], args["k"], args["v"]
    with pytest.raises(ValueError, match=r"^g has shape"):
        chunk_kda(q, k, v, g[..., :-1], beta)
    with pytest.raises(ValueError, match=r"^beta has dtype int32"):
        chunk_kda(q, k, v, g, beta.astype(np.int32))


def test_inputs_stay_as_they_were() -> None:
    args = good()
    state = np.full((1, H, V, K), 0.5, np.float32)
    before = {n: x.copy() for n, x in args.items()}
    result = chunk_kda_prefill(**args, initial_state=state, backend="chunked")
    assert result.out.shape == (1, T, H, V)
    for name, x in before.items():
        np.testing.assert_array_equal(args[name], x)
    np.testing.assert_array_equal(state, 0.5)


@pytest.mark.parametrize("backend", ["scan", "chunked", "auto"])
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_nothing_to_run_passes_the_states(backend: str, lengths: list[int]) -> None:
    n = len(lengths)
    args = {x: a[:, :0] if a.ndim > 2 else a for x, a in good().items()}
    state = np.random.default_rng(0).standard_normal((n, H, V, K)).astype(np.float32)
    has = np.arange(n) == 0
    state[~has] = np.nan
    result = chunk_kda_prefill(
        **args,
        metadata=ChunkMetadata.from_seq_lens(lengths),
        initial_state=state,
        has_initial_state=has,
        backend=backend,
    )
    assert result.out.shape == (1, 0, H, V) and result.checkpoint_state.shape == (0, H, V, K)
    np.testing.assert_array_equal(result.final_state, np.where(has[:, None, None, None], state, 0))


def test_empty_sequences_over_padding_tokens() -> None:
    args = {x: np.full_like(a, np.nan) if a.ndim > 2 else a for x, a in good().items()}
    state = np.ones((2, H, V, K), np.float32)
    for backend in ("scan", "chunked"):
        result = chunk_kda_prefill(
            **args,
            metadata=ChunkMetadata.from_seq_lens([0, 0]),
            initial_state=state,
            backend=backend,
        )
        np.testing.assert_array_equal(result.final_state, state)
        np.testing.assert_array_equal(result.out, jnp.zeros((1, T, H, V)))
