"""Parity tests for an implementation of the operator: your kernel, your layer, or ours.

    from kda_jax.testing import assert_matches_scan
    assert_matches_scan(my_prefill)                                     # the default cases
    assert_matches_scan(my_prefill, make_case("slow", seq_lens=[300, 1, 65], dtype="bfloat16"))

`assert_matches_scan` needs chex: ``pip install 'kda-jax[test]'``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .grid import Offsets
from .metadata import Capacity, ChunkMetadata
from .ops import chunk_kda_prefill
from .types import KDAResult

Kind = Literal["random", "saturated", "slow", "k3"]
KINDS: tuple[Kind, ...] = ("random", "saturated", "slow", "k3")
Array = np.ndarray[Any, Any]

# Relative errors (out, states) against float64. In half precision they are the best that a public
# kernel reaches with slow decay (fla-core 0.6.0, bfloat16); rounding out alone costs 1.7e-3.
TOLERANCES = {
    "float64": (1e-12, 1e-12),
    "float32": (1e-5, 1e-5),
    "float16": (5.1e-3, 4.2e-3),
    "bfloat16": (5.1e-3, 4.2e-3),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """The arguments of one call of `chunk_kda_prefill`, as NumPy arrays.

    Whatever must have no effect holds NaN: rows of padding, and rows of initial_state that do not
    count.
    """

    name: str
    q: Array
    k: Array
    v: Array
    raw_g: Array
    raw_beta: Array
    A_log: Array
    dt_bias: Array
    metadata: ChunkMetadata
    lower_bound: float | None = -5.0
    initial_state: Array | None = None
    has_initial_state: Array | None = None

    @property
    def args(self) -> tuple[Array, ...]:
        """The positional arguments."""
        return (self.q, self.k, self.v, self.raw_g, self.raw_beta, self.A_log, self.dt_bias)

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments."""
        return {
            "metadata": self.metadata,
            "lower_bound": self.lower_bound,
            "initial_state": self.initial_state,
            "has_initial_state": self.has_initial_state,
        }


def make_case(
    kind: Kind,
    *,
    seq_lens: Sequence[int],
    H: int = 2,
    K: int = 128,
    V: int = 128,
    dtype: str = "float32",
    seed: int = 0,
    lower_bound: float | None = -5.0,
    initial_state: bool | Sequence[bool] = True,
    checkpoint_offsets: Offsets | None = None,
    capacity: Capacity | Literal["bucket"] | None = None,
    chunk_size: int = 64,
) -> Case:
    """Makes a packed case.

    Args:
      kind: "random": normal everything.
        "saturated": every gate near the bound; with the softplus gate, -150 among small ones.
        "slow": slow decay with near-equal keys (one key and 0.02 of noise, beta near 1): where
        an inverse by powers of a matrix, or in half precision, breaks down.
        "k3": gates as in Kimi-K3: dt_bias in [-7.8, -1.4], beta saturating near 0.95.
      seq_lens, checkpoint_offsets, capacity, chunk_size: as in `ChunkMetadata.from_seq_lens`.
      H, K, V: heads, key channels, value channels.
      dtype: of q, k, v, raw_g and raw_beta.
      seed: of the random numbers.
      lower_bound: as in the operator.
      initial_state: whether sequences have one; a list makes has_initial_state of it.

    Returns:
      `Case`: q, k, raw_g ``[1, T, H, K]``, v ``[1, T, H, V]`` and raw_beta ``[1, T, H]``, with T
      the metadata's token capacity; A_log ``[H]``, dt_bias ``[H, K]`` and initial_state
      ``[N, H, V, K]`` in float32.

    Raises:
      ValueError: there is no such kind, or `ChunkMetadata.from_seq_lens` refuses its arguments.
    """
    metadata = ChunkMetadata.from_seq_lens(
        seq_lens, chunk_size=chunk_size, checkpoint_offsets=checkpoint_offsets, capacity=capacity
    )
    T, N = metadata.num_tokens, metadata.num_sequences
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return np.asarray(rng.standard_normal(shape))

    q, k, v = normal(1, T, H, K), normal(1, T, H, K), normal(1, T, H, V)
    raw_g, raw_beta = normal(1, T, H, K), normal(1, T, H)
    A_log, dt_bias = np.multiply(0.3, normal(H)), normal(H, K)
    if kind == "saturated":
        raw_g = np.full_like(raw_g, 20.0)
        if lower_bound is None:
            A_log, dt_bias = np.zeros_like(A_log), np.zeros_like(dt_bias)
            raw_g[...] = np.where(rng.random(raw_g.shape) < 0.3, 150.0, -9.0)
    elif kind in ("slow", "k3"):
        dt_bias = rng.uniform(-7.8, -1.4, (H, K))
        if kind == "slow":
            k = normal(1, 1, H, K) + 0.02 * k
            raw_g = np.full_like(raw_g, -12.0)
            raw_beta[...] = rng.uniform(3.0, 8.0, raw_beta.shape)
        else:
            raw_beta = np.clip(1.5 + 1.5 * raw_beta, None, 2.94)
    elif kind != "random":
        raise ValueError(f"kind is {kind!r}, want one of {KINDS}")

    def packed(x: Array) -> Array:
        missing = metadata.capacity.tokens - T
        padding = np.full((1, missing, *x.shape[2:]), np.nan)
        return np.concatenate([x, padding], axis=1).astype(jnp.dtype(dtype))

    state = has = None
    if initial_state is not False:
        rows = metadata.capacity.sequences
        state = normal(rows, H, V, K).astype(np.float32)
        state[N:] = np.nan
        if initial_state is not True:
            has = np.zeros(rows, np.bool_)
            has[:N] = initial_state
            state[~has] = np.nan
    gate = "softplus" if lower_bound is None else f"bound {lower_bound}"
    return Case(
        name=f"{kind}, {gate}, {list(seq_lens)}, H={H} K={K} V={V}, {dtype}",
        q=packed(q),
        k=packed(k),
        v=packed(v),
        raw_g=packed(raw_g),
        raw_beta=packed(raw_beta),
        A_log=A_log.astype(np.float32),
        dt_bias=dt_bias.astype(np.float32),
        metadata=metadata,
        lower_bound=lower_bound,
        initial_state=state,
        has_initial_state=has,
    )


def default_cases(dtype: str = "float32") -> list[Case]:
    """All kinds and both gates, over ragged packs, checkpoints, fresh rows and padding."""
    bounds: tuple[float | None, ...] = (-5.0, None)
    cases = []
    for seed, kind in enumerate(KINDS):
        for bound in bounds:
            cases.append(
                make_case(
                    kind,
                    seq_lens=[65, 0, 1, 130, 16],
                    dtype=dtype,
                    seed=seed,
                    lower_bound=bound,
                    initial_state=[True, True, False, False, True],
                    checkpoint_offsets=[[64, 65], [], [1], [17, 128], []],
                    capacity="bucket",
                )
            )
    return cases


def relative_error(x: Any, ref: Any) -> float:
    """``||x - ref|| / ||ref||`` in float64; ``||x||`` where ref is zero. NaN stays NaN."""
    got, want = np.asarray(x, np.float64), np.asarray(ref, np.float64)
    norm = float(np.linalg.norm(want))
    return float(np.linalg.norm(got - want)) / (norm or 1.0)


def reference_device() -> contextlib.AbstractContextManager[Any]:
    """A context for references: on the CPU, where JAX has it and uses another device."""
    if jax.default_backend() != "cpu":
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may leave it out
            return jax.default_device(jax.local_devices(backend="cpu")[0])
    return contextlib.nullcontext()


def scan_in_float64(case: Case, **kwargs: Any) -> KDAResult:
    """The result of the "scan" backend in float64, computed on the CPU, as NumPy arrays."""
    with jax.enable_x64(True), reference_device():
        options = case.kwargs | kwargs | {"backend": "scan"}
        wide = [np.asarray(x).astype(np.float64) for x in case.args]
        return KDAResult(*jax.device_get(chunk_kda_prefill(*wide, **options)))


def assert_matches_scan(
    fn: Callable[..., Any],
    case_or_cases: Case | Iterable[Case] | None = None,
    *,
    rtol_out: float | None = None,
    rtol_state: float | None = None,
    **kwargs: Any,
) -> None:
    """Asserts that ``fn`` computes what the "scan" backend computes in float64.

    Args:
      fn: has the signature of `chunk_kda_prefill` and returns (out, final_state,
        checkpoint_state); for instance ``functools.partial(chunk_kda_prefill, backend="fused")``.
      case_or_cases: from `make_case`; None: `default_cases`.
      rtol_out, rtol_state: bounds on the relative error; None: `TOLERANCES` of the dtype.
      **kwargs: more arguments of the operator. Those that change the result go to both sides, so
        pass ``state_layout`` or ``scale`` here, not in a partial.

    Raises:
      AssertionError: names the case, the result, the error and the bound.
      ImportError: chex is not installed, or does not load.
    """
    try:
        import chex  # what else is here works without it
    except ImportError as why:
        raise ImportError(
            f"assert_matches_scan needs the package chex ({why}): pip install 'kda-jax[test]'",
            name="chex",
        ) from why
    if case_or_cases is None:
        case_or_cases = default_cases()
    cases = [case_or_cases] if isinstance(case_or_cases, Case) else list(case_or_cases)
    shared = {name: x for name, x in kwargs.items() if name not in ("backend", "groups")}
    for case in cases:
        if case.initial_state is not None and kwargs.get("state_layout") == "kv":
            state = np.ascontiguousarray(case.initial_state.swapaxes(-1, -2))
            case = dataclasses.replace(case, initial_state=state)
        want = scan_in_float64(case, **shared)
        got = KDAResult(*jax.device_get(tuple(fn(*case.args, **case.kwargs | kwargs))))
        dtype = str(case.v.dtype)
        state_dtype = np.float64 if dtype == "float64" else np.float32
        bounds = TOLERANCES[max((str(x.dtype) for x in case.args[:5]), key=_coarseness)]
        for name, x, ref in zip(KDAResult._fields, got, want, strict=True):
            label = f"{name} of [{case.name}]"
            is_out = name == "out"
            chex.assert_shape(x, ref.shape, custom_message=label)
            chex.assert_type(x, jnp.dtype(dtype) if is_out else state_dtype)
            chex.assert_tree_all_finite(np.asarray(x, np.float64))
            rtol = rtol_out if is_out else rtol_state
            rtol = bounds[0 if is_out else 1] if rtol is None else rtol
            error = relative_error(x, ref)
            if not error <= rtol:
                raise AssertionError(f"{label}: relative error {error:.2e}, bound {rtol:.1e}")


def _coarseness(dtype: str) -> float:
    return TOLERANCES[dtype][0]
