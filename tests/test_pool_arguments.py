"""The arguments of a call in a pool: what the operator, the convolution and the steps refuse."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax import Capacity, ChunkMetadata, chunk_kda, chunk_kda_prefill
from kda_jax.conv import causal_conv1d, causal_conv1d_step
from kda_jax.decode import kda_decode_step

H, K, V, R = 2, 8, 4, 10
METADATA = ChunkMetadata.from_seq_lens(
    [20, 0, 5], checkpoint_offsets=[[4, 16], [], [5]], capacity=Capacity(32, 4, 9, 4)
)
N, M, T = 4, 4, 32
LIVE, SAVED = np.array([3, 0, 9, -1], np.int32), np.array([1, -5, 2, -1], np.int32)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


Q, VALUE, BETA = normal(1, T, H, K), normal(1, T, H, V), normal(1, T, H)
POOL, WINDOWS = jnp.zeros((R, H, V, K)), jnp.zeros((R, 6, 3))


def operator(**changed: Any) -> Any:
    options = {
        "metadata": METADATA,
        "state_cache": POOL,
        "state_indices": LIVE,
        "checkpoint_state_indices": SAVED,
    }
    return chunk_kda_prefill(
        *(Q, Q, VALUE, Q, BETA, normal(H), normal(H, K)), **options | changed, backend="chunked"
    )


def activated(**changed: Any) -> Any:
    options = {
        "metadata": METADATA,
        "state_cache": POOL,
        "state_indices": LIVE,
        "checkpoint_state_indices": SAVED,
    }
    return chunk_kda(Q, Q, VALUE, -abs(Q), abs(BETA), **options | changed, backend="chunked")


def convolution(**changed: Any) -> Any:
    options = {
        "state_cache": WINDOWS,
        "state_indices": LIVE,
        "checkpoint_state_indices": SAVED,
    }
    return causal_conv1d(normal(T, 6), normal(6, 4), METADATA, **options | changed)


def decode(**changed: Any) -> Any:
    options = {"state_cache": POOL, "state_indices": LIVE}
    q = Q[0, :N]
    return kda_decode_step(
        *(q, q, VALUE[0, :N], q, BETA[0, :N], normal(H), normal(H, K)), **options | changed
    )


def convolution_step(**changed: Any) -> Any:
    options = {"state_cache": WINDOWS, "state_indices": LIVE}
    return causal_conv1d_step(normal(N, 6), normal(6, 4), **options | changed)


PREFILLS = {"prefill": operator, "chunk_kda": activated, "conv": convolution}
STEPS = {"decode": decode, "conv_step": convolution_step}
BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "no indices": ({"state_indices": None}, "state_cache is given without state_indices; pass b"),
    "no pool": ({"state_cache": None}, "state_indices is given without state_cache; pass both"),
    "a NumPy pool": (
        {"state_cache": np.zeros((R, H, V, K), np.float32)},
        "state_cache is a ndarray, want a jax.Array: a pool lies on the device, contiguous",
    ),
    "a strided pool": (
        {"state_cache": np.zeros((2 * R, H, V, K), np.float32)[::2]},
        "state_cache is a ndarray, want a jax.Array: a pool lies on the device, contiguous",
    ),
    "a list": ({"state_indices": [0, 1, 2, 3]}, r"state_indices is a list, want an int32 array"),
    "too few": ({"state_indices": LIVE[:3]}, r"state_indices has shape \(3,\), want \(4,\)"),
    "floats": ({"state_indices": LIVE.astype("f")}, "state_indices has dtype float32, want int32"),
    "wide device indices": (
        {"state_indices": jnp.asarray(LIVE).astype(jnp.int16)},
        "state_indices has dtype int16, want int32",
    ),
    "past the end": (
        {"state_indices": np.array([3, 10, 9, -1])},
        r"state_indices\[1\] is 10, want a row of the pool",
    ),
    "past int32": (
        {"state_indices": np.array([3, 2**40, 9, -1])},
        r"state_indices\[1\] is 1099511627776, want a row of the pool",
    ),
    "twice": ({"state_indices": np.array([3, 9, 9, -1])}, "state_indices holds 9 twice"),
    "flags": ({"has_initial_state": np.ones(3, bool)}, r"has_initial_state has shape \(3,\)"),
    "flags of another dtype": (
        {"has_initial_state": np.ones(4, np.int32)},
        "has_initial_state has dtype int32, want bool",
    ),
}
BAD_CHECKPOINTS: dict[str, tuple[dict[str, Any], str]] = {
    "no rows for checkpoints": (
        {"checkpoint_state_indices": None},
        "checkpoint_state_indices is not given, but the metadata has room for 4 checkpoints",
    ),
    "checkpoints without a pool": (
        {"state_cache": None, "state_indices": None},
        "checkpoint_state_indices is given without state_cache; pass both",
    ),
    "too few checkpoints": (
        {"checkpoint_state_indices": SAVED[:2]},
        r"checkpoint_state_indices has shape \(2,\), want \(4,\)",
    ),
    "read and written": (
        {"checkpoint_state_indices": np.array([0, -1, 2, -1])},
        "checkpoint_state_indices holds 0, which is in state_indices too",
    ),
    "checkpoints twice": (
        {"checkpoint_state_indices": np.array([2, -1, 2, -1])},
        "checkpoint_state_indices holds 2 twice",
    ),
}
BAD_STATES: dict[str, tuple[dict[str, Any], str]] = {
    "another shape": (
        {"state_cache": jnp.zeros((R, H, K, V))},
        r"state_cache has shape \(10, 2, 8, 4\), want \(R, 2, 4, 8\)",
    ),
    "rows with padding": (
        {"state_cache": jnp.zeros((R, H, V, K + 8))},
        r"want \(R, 2, 4, 8\): .* a pool with padding, or one that shares its rows .* be split fir",
    ),
    "rows of bytes": ({"state_cache": jnp.zeros((R, 4096), jnp.uint8)}, "want .R, 2, 4, 8.: "),
    "another dtype": (
        {"state_cache": POOL.astype(jnp.bfloat16)},
        "state_cache has dtype bfloat16, want float32: states are updated where they lie",
    ),
}
BAD_WINDOWS: dict[str, tuple[dict[str, Any], str]] = {
    "too few channels": (
        {"state_cache": WINDOWS[:, :5]},
        r"state_cache has shape \(10, 5, 3\), want at least \(R, 6, 3\)",
    ),
    "channels past the end": ({"first_channel": 1}, r"want at least \(R, 7, 3\)"),
    "a negative channel": ({"first_channel": -1}, "first_channel is -1, want an integer of at lea"),
    "too few columns": ({"state_cache": WINDOWS[..., :2]}, r"want at least \(R, 6, 3\)"),
    "another dtype": (
        {"state_cache": WINDOWS.astype(jnp.bfloat16)},
        "state_cache is bfloat16, x is float32",
    ),
}


def refused(fn: Any, what: tuple[dict[str, Any], str]) -> None:
    changed, message = what
    with pytest.raises(ValueError, match=message):
        fn(**changed)


@pytest.mark.parametrize("name", PREFILLS | STEPS)
@pytest.mark.parametrize("what", BAD_ARGUMENTS)
def test_wrong_argument(name: str, what: str) -> None:
    drop = {"checkpoint_state_indices": None} if what == "no pool" and name in PREFILLS else {}
    changed, message = BAD_ARGUMENTS[what]
    refused((PREFILLS | STEPS)[name], (changed | drop, message))


@pytest.mark.parametrize("name", PREFILLS)
@pytest.mark.parametrize("what", BAD_CHECKPOINTS)
def test_wrong_checkpoints(name: str, what: str) -> None:
    refused(PREFILLS[name], BAD_CHECKPOINTS[what])


@pytest.mark.parametrize("name", ["prefill", "chunk_kda", "decode"])
@pytest.mark.parametrize("what", BAD_STATES)
def test_wrong_pool_of_states(name: str, what: str) -> None:
    refused((PREFILLS | STEPS)[name], BAD_STATES[what])


@pytest.mark.parametrize("name", ["conv", "conv_step"])
@pytest.mark.parametrize("what", BAD_WINDOWS)
def test_wrong_pool_of_windows(name: str, what: str) -> None:
    refused((PREFILLS | STEPS)[name], BAD_WINDOWS[what])


@pytest.mark.parametrize("name", PREFILLS)
def test_two_kinds_of_states(name: str) -> None:
    shape = (N, 6, 3) if name == "conv" else (N, H, V, K)
    state = {"initial_state": np.zeros(shape, np.float32)}
    message = "initial_state and state_cache are both given: want one of them"
    refused(PREFILLS[name], (state, message))


def test_two_kinds_of_states_in_a_step() -> None:
    message = "state and state_cache are both given: want one of them"
    refused(decode, ({"state": np.zeros((N, H, V, K), np.float32)}, message))
    refused(convolution_step, ({"state": np.zeros((N, 6, 3), np.float32)}, message))
    for fn in (decode, convolution_step):
        nothing = {"state_cache": None, "state_indices": None}
        refused(fn, (nothing, "state is None[,:] want"))
        flags = {"has_initial_state": np.ones(N, bool)}
        refused(fn, (nothing | flags, "has_initial_state is given without state_cache; pass both"))


def test_idle_rows_may_share_a_row() -> None:
    """Only what is written must be distinct: rows of padding and idle requests are not."""
    same = np.array([3, 0, 3, 3])
    idle = np.array([True, True, False, False])
    decode(state_indices=same, active=idle)
    convolution_step(state_indices=same, active=idle)
    operator(state_indices=np.array([3, 0, 9, 9]))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int64"])
def test_indices_of_any_integer_type(dtype: str) -> None:
    rows = np.array([3, 0, 9, 5], dtype)
    decode(state_indices=rows, active=np.array([True, True, False, True]))
    convolution_step(state_indices=rows)
    operator(state_indices=rows)


def test_the_checks_do_not_wait_for_a_device() -> None:
    """A traced index is not looked at, whatever it holds."""
    bad = np.array([3, 3, 99, -1], np.int32)
    jax.jit(lambda rows: operator(state_indices=rows)).trace(bad)
    jax.jit(lambda rows: decode(state_indices=rows)).trace(bad)
