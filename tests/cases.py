"""What the numerical tests share: the paths under test, and packs that share compiled programs.

Metadata is an ordinary argument, so all packs of one capacity run in one program: the tests put
almost everything into `BASE`, and what is left of it holds NaN.

They run on JAX's default device, in the dtype of ``--kda-dtype`` unless a test names one
(conftest.py).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from kda_jax import (
    Capacity,
    ChunkMetadata,
    KDAResult,
    backends,
    chunk_kda,
    chunk_kda_prefill,
    register_backend,
    supports,
    testing,
)
from kda_jax.fused import FusedBackend
from kda_jax.testing import TOLERANCES, Case

Array = np.ndarray[Any, Any]
Prefill = Callable[..., KDAResult]

DTYPE = os.environ.get("KDA_TEST_DTYPE", "float32")  # set by conftest.py
HALF = DTYPE != "float32"
ON_GPU = backends.current_platform() in ("cuda", "rocm")

BASE = Capacity(tokens=1280, sequences=8, chunks=44, checkpoints=16)
DIMS: dict[str, Any] = {"H": 2, "K": 64, "V": 32}

# name of the path -> backend, groups. "mixed" is the arithmetic of the GPU kernels on the CPU.
PATHS: dict[str, tuple[str, int | None]] = {
    "scan": ("scan", None),
    "chunked": ("chunked", None),
    "fused": ("fused", None),
    "fused in 4 groups": ("fused", 4),
    "mixed": ("mixed", None),
    "mixed in 3 groups": ("mixed", 3),
}
NATIVE = [path for path in PATHS if path not in ("scan", "chunked")]
UNGROUPED = [path for path, (_, groups) in PATHS.items() if groups is None]

# Relative errors (out, state) that rounding the bounded operands to float16 and the others to
# bfloat16 costs, whatever the inputs' dtype. Worst measured over all kinds of cases, K in {64, 128}
# and three seeds at 1230 tokens: 3.5e-3, 1.8e-3; without decay: 1.9e-3 in the state.
MIXED = (3.5e-3, 2.0e-3)


class MixedBackend(FusedBackend):
    """Makes the mixed arithmetic selectable, in tests only."""

    name = "mixed"


_MIXED = MixedBackend(mixed=True)


def all_paths(names: Sequence[str] = tuple(PATHS)) -> pytest.MarkDecorator:
    """Runs the test on each path."""
    return pytest.mark.parametrize("path", names)


def prefill(path: str, once: bool = False) -> Prefill:
    """The operator on a path; skips the test where the native kernel is not built.

    ``once`` is for programs that only one test runs: XLA then compiles the plain JAX backends
    without optimization, in a third of the time.
    """
    backend, groups = PATHS.get(path, (path, None))
    if backend == "mixed" and ON_GPU:
        pytest.skip("the mixed arithmetic on the CPU stands for that of a GPU; this is one")
    if backend == "mixed" and backend not in backends.names():
        register_backend(_MIXED)
    if backend in ("fused", "mixed"):
        support = supports(backend, dtype=DTYPE, K=64, V=32)
        if not support:
            pytest.skip(support.reason)
    fn = functools.partial(chunk_kda_prefill, backend=backend, groups=groups)
    if once and backend in ("scan", "chunked"):
        static = ("lower_bound", "state_layout", "scale")
        options = {"xla_backend_optimization_level": 0}
        return jax.jit(fn, static_argnames=static, compiler_options=options)
    return fn


def bounds(path: str) -> dict[str, float]:
    """The tolerances of a path where they are not those of the dtype, for assert_matches_scan."""
    if HALF:
        return dict(zip(("rtol_out", "rtol_state"), TOLERANCES[DTYPE], strict=True))
    if not path.startswith("mixed"):
        return {}
    return {"rtol_out": MIXED[0], "rtol_state": MIXED[1]}


def make_case(kind: Any, **options: Any) -> Case:
    """`kda_jax.testing.make_case` in the dtype under test."""
    return testing.make_case(kind, **{"dtype": DTYPE} | options)


def between_runs(path: str) -> tuple[float, float]:
    """How far two right results (out, states) of a path may lie apart: both have an error."""
    if path.startswith("mixed") or HALF:
        return tuple(1.42 * x for x in (TOLERANCES[DTYPE] if HALF else MIXED))  # type: ignore
    return 1e-5, 1e-5


def base_case(kind: Any, seq_lens: Sequence[int], **options: Any) -> Case:
    """`make_case` in the shape that most tests share; always with has_initial_state."""
    given = options.pop("initial_state", True)
    if isinstance(given, bool):
        given = [given] * len(seq_lens)
    options = {"capacity": BASE} | DIMS | options
    return make_case(kind, seq_lens=seq_lens, initial_state=given, **options)


def call(fn: Prefill, case: Case, **options: Any) -> KDAResult:
    """The results of one call, as NumPy arrays."""
    return KDAResult(*jax.device_get(tuple(fn(*case.args, **case.kwargs | options))))


def piece(
    case: Case,
    start: int,
    stop: int,
    state: Array | None = None,
    *,
    checkpoint_offsets: Any = None,
    capacity: Capacity | None = BASE,
) -> Case:
    """Tokens [start, stop) of a case of one sequence, resumed from ``state [H, V, K]``."""
    metadata = ChunkMetadata.from_seq_lens(
        [stop - start],
        chunk_size=case.metadata.chunk_size,
        checkpoint_offsets=checkpoint_offsets,
        capacity=capacity,
    )

    def cut(x: Array) -> Array:
        rows = np.full((1, metadata.capacity.tokens, *x.shape[2:]), np.nan, x.dtype)
        rows[:, : stop - start] = x[:, start:stop]
        return rows

    H, K, V = case.q.shape[2], case.q.shape[3], case.v.shape[3]
    states = np.full((metadata.capacity.sequences, H, V, K), np.nan, np.float32)
    has = np.zeros(metadata.capacity.sequences, np.bool_)
    if state is not None:
        states[0], has[0] = state, True
    return dataclasses.replace(
        case,
        name=f"[{start}, {stop}) of {case.name}",
        **{x: cut(getattr(case, x)) for x in ("q", "k", "v", "raw_g", "raw_beta")},
        metadata=metadata,
        initial_state=states,
        has_initial_state=has,
    )


def activated(path: str, use_qk_l2norm: bool) -> Prefill:
    """`chunk_kda` with the signature of `chunk_kda_prefill`: activates in float64 first."""
    prefill(path)  # skips
    backend, groups = PATHS[path]

    def run(q: Any, k: Any, v: Any, raw_g: Any, raw_beta: Any, A_log: Any, dt_bias: Any, **kw: Any):
        bound = kw.pop("lower_bound")
        rate, x = np.exp(A_log.astype(np.float64))[:, None], raw_g.astype(np.float64) + dt_bias
        g = -rate * softplus(x) if bound is None else bound * sigmoid(rate * x)
        beta = sigmoid(raw_beta.astype(np.float64))
        if not use_qk_l2norm:
            q, k = normalize(q), normalize(k)
        g, beta = g.astype(np.float32), beta.astype(np.float32)
        return chunk_kda(
            q, k, v, g, beta, use_qk_l2norm=use_qk_l2norm, backend=backend, groups=groups, **kw
        )

    return run


def softplus(x: Array) -> Array:
    with np.errstate(invalid="ignore"):  # padding holds NaN
        return np.logaddexp(0, x)


def sigmoid(x: Array) -> Array:
    return np.exp(-softplus(-x))


def normalize(x: Array) -> Array:
    wide = x.astype(np.float64)
    return (wide / np.sqrt((wide * wide).sum(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def assert_same_bits(got: Any, want: Any, what: str = "") -> None:
    """Equality of every bit; says how many elements differ and by how much."""
    got, want = np.asarray(got), np.asarray(want)
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    if got.tobytes() != want.tobytes():
        x, y = got.astype(np.float64), want.astype(np.float64)
        differ = (x != y) & ~(np.isnan(x) & np.isnan(y))
        raise AssertionError(
            f"{what}: {differ.sum()} of {differ.size} elements differ, by at most "
            f"{np.max(np.abs(x - y), initial=0, where=differ):.2e}; first at "
            f"{np.argwhere(differ)[:1].tolist()}"
        )
