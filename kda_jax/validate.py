"""Checks of the operator's arguments: every mistake is a `ValueError` before anything runs.

Only shapes, dtypes and Python values are looked at, so the checks work on tracers.
"""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .grid import check_chunk_size
from .metadata import ChunkMetadata

_SCALE_MIN, _SCALE_MAX = 1e-12, 1e12
MAX_DIM = 256
_FLOATS = ("bfloat16", "float16", "float32", "float64")


def check_floating(name: str, x: Any) -> None:
    """An array of bfloat16, float16 or float32; float64 only with jax_enable_x64."""
    if not isinstance(x, jax.Array | np.ndarray):
        raise ValueError(f"{name} is a {type(x).__name__}, want a NumPy or JAX array")
    check_dtype(f"{name} has dtype", x.dtype.name)
    x64: bool = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    if x.dtype.name == "float64" and not x64:
        raise ValueError(
            f"{name} has dtype float64, which needs jax_enable_x64: turn it on, or cast to float32"
        )


def check_dtype(what: str, dtype: str) -> None:
    if dtype not in _FLOATS:
        raise ValueError(f"{what} {dtype}, want bfloat16, float16 or float32: cast it first")


def check_shape(name: str, x: Any, want: tuple[int, ...], axes: str) -> None:
    if tuple(x.shape) != want:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, want {want}: {axes}")


def check_tensors(
    q: Any, k: Any, v: Any, g: Any, beta: Any, g_name: str, beta_name: str, rows: str = "B, T"
) -> tuple[int, ...]:
    """q, k, g ``[B, T, H, K]``, v ``[B, T, H, V]``, beta ``[B, T, H]``; returns B, T, H, K, V.

    ``rows`` are the names of the axes before H.
    """
    for name, x in (("q", q), ("k", k), ("v", v), (g_name, g), (beta_name, beta)):
        check_floating(name, x)
    rank = len(rows.split(",")) + 2
    if q.ndim != rank:
        raise ValueError(f"q has shape {tuple(q.shape)}, want {rank} axes [{rows}, H, K]")
    *first, H, K = q.shape
    axes = f"[{rows}, H, K] as q"
    check_shape("k", k, (*first, H, K), axes)
    check_shape(g_name, g, (*first, H, K), axes)
    check_shape(beta_name, beta, (*first, H), f"[{rows}, H] as q")
    if v.ndim != rank or v.shape[:-1] != (*first, H):
        want = f"[{rows}, H, V] with {(*first, H)} as q"
        raise ValueError(f"v has shape {tuple(v.shape)}, want {want}")
    V = v.shape[-1]
    check_sizes(H, K, V)
    return *first, H, K, V


def check_sizes(H: int, K: int, V: int) -> None:
    if H < 1:
        raise ValueError(f"H is {H}, want at least 1 head")
    for name, what, size in (("K", "q and k", K), ("V", "v", V)):
        if not 1 <= size <= MAX_DIM:
            raise ValueError(f"{name} is {size}, want 1..{MAX_DIM} channels of {what}")


def check_gate(A_log: Any, dt_bias: Any, lower_bound: Any, H: int, K: int) -> None:
    check_floating("A_log", A_log)
    check_floating("dt_bias", dt_bias)
    check_shape(
        "A_log", A_log, (H,), "[H], one per head (drop the padding of a checkpoint file first)"
    )
    check_shape("dt_bias", dt_bias, (H, K), "[H, K]")
    check_lower_bound(lower_bound)


def check_lower_bound(lower_bound: Any) -> None:
    if lower_bound is None:
        return
    if not _is_number(lower_bound) or not -5.0 <= lower_bound < 0.0:
        raise ValueError(
            f"lower_bound is {lower_bound!r}, want a number in [-5, 0) for the bounded gate, "
            "or None for the softplus gate"
        )


def check_metadata(metadata: Any, B: int, T: int) -> None:
    if not isinstance(metadata, ChunkMetadata):
        raise ValueError(
            f"metadata is a {type(metadata).__name__}, want a ChunkMetadata "
            "(ChunkMetadata.from_seq_lens(...))"
        )
    if B != 1:
        raise ValueError(
            f"q has {B} batch rows, want 1: with metadata the sequences are packed on axis 1"
        )
    check_chunk_size(metadata.chunk_size)
    if metadata.capacity.tokens > T:
        raise ValueError(
            f"metadata covers {metadata.capacity.tokens} tokens, but q has {T}: "
            "pad the inputs with metadata.pad_tokens(x, axis=1)"
        )


def check_state(
    initial_state: Any, has_initial_state: Any, want: tuple[int, ...], layout: str
) -> None:
    if has_initial_state is not None:
        if initial_state is None:
            raise ValueError("has_initial_state is given without initial_state; pass both")
        check_flags("has_initial_state", has_initial_state, want[0], "[N], one per sequence")
    if initial_state is not None:
        check_floating("initial_state", initial_state)
        axes = "[N, H, V, K]" if layout == "vk" else "[N, H, K, V]"
        check_shape("initial_state", initial_state, want, f"{axes} with state_layout={layout!r}")


def check_flags(name: str, flags: Any, size: int, axes: str) -> None:
    """A bool array ``[size]``."""
    if not isinstance(flags, jax.Array | np.ndarray):
        raise ValueError(
            f"{name} is a {type(flags).__name__}, want a bool array of shape {(size,)}"
        )
    if flags.dtype != jnp.bool_:
        raise ValueError(f"{name} has dtype {flags.dtype}, want bool")
    check_shape(name, flags, (size,), axes)


def check_options(scale: Any, state_layout: Any, groups: Any) -> None:
    # Kernels fold the scale into q before the decays, which take their share of float32's range.
    if scale is not None and not (_is_number(scale) and _SCALE_MIN <= abs(scale) <= _SCALE_MAX):
        raise ValueError(
            f"scale is {scale!r}, want a Python number of size {_SCALE_MIN:g} to {_SCALE_MAX:g}, "
            "or None for K**-0.5"
        )
    if state_layout not in ("vk", "kv"):
        raise ValueError(f"state_layout is {state_layout!r}, want 'vk' or 'kv'")
    if groups is not None and (
        isinstance(groups, bool) or not isinstance(groups, numbers.Integral) or groups < 1
    ):
        raise ValueError(f"groups is {groups!r}, want an integer >= 1, or None")


def _is_number(x: Any) -> bool:
    """A Python or NumPy real number: a traced value could not choose the program."""
    return isinstance(x, numbers.Real) and not isinstance(x, bool)
