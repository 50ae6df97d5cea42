"""Results against the recurrence in float64, over everything that a call can be asked for."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from ..metadata import Capacity
from ..ops import chunk_kda
from ..testing import (
    TOLERANCES,
    Case,
    Kind,
    make_case,
    reference_device,
    relative_error,
    scan_in_float64,
)
from ..types import Gate, KDAResult
from .path import CHECKPOINTS, H, K, Path, V, room

Array = np.ndarray[Any, Any]

# Half precision knows a key to 2^-9 or 2^-12, hence 2 % of noise on it not much better: the error
# of a result that reads that noise (out, states).
NEAR_EQUAL_KEYS = (1.5e-2, 9e-3)

RAGGED = (65, 0, 1, 130, 16)
MIXED = (1, 2, 63, 64, 65, 100)
ONES = (1,) * 8
LONG = (300, 0, 33)


@dataclasses.dataclass(frozen=True)
class Parity:
    """One case. ``dtype`` "" is the one of the path; ``gates`` that of raw_g and raw_beta."""

    kind: Kind = "random"
    seq_lens: tuple[int, ...] = RAGGED
    lower_bound: float | None = -5.0
    dtype: str = ""
    gates: str = ""
    state_layout: str = "vk"
    chunk_size: int = 64
    dims: tuple[int, int, int] = (H, K, V)
    groups: int | None = None
    states: bool = True
    activated: bool = False
    l2norm: bool = True

    @property
    def name(self) -> str:
        """Names what is not the default."""
        H, K, V = self.dims
        bound = self.lower_bound
        parts = [
            self.kind,
            "activated" if self.activated else "softplus" if bound is None else f"bound {bound:g}",
            self.dtype + (f" with {self.gates} gates" if self.gates else ""),
            f"lengths {' '.join(map(str, self.seq_lens))}",
            f"H={H} K={K} V={V}",
            f"chunks of {self.chunk_size}" if self.chunk_size != 64 else "",
            f"layout {self.state_layout}" if self.state_layout != "vk" else "",
            f"{self.groups} groups" if self.groups else "",
            "" if self.states else "no states",
            "" if self.l2norm else "no l2norm",
        ]
        return ", ".join(part for part in parts if part)


def cases(backend: str, dtypes: tuple[str, ...]) -> list[Parity]:
    """What a backend is asked; the plain JAX ones less, since each program compiles for seconds."""
    base, half = dtypes[0], dtypes[-1]
    short = [
        Parity("k3"),
        Parity("random", LONG),
        Parity("saturated", MIXED),
        Parity("slow", LONG),
        Parity("k3", ONES),
    ]
    if backend != "fused":
        plain: dict[str, Any] = {"lower_bound": None, "state_layout": "kv", "states": False}
        short.append(Parity("k3", dtype=half, chunk_size=16, **plain))
        return [dataclasses.replace(each, dtype=each.dtype or base) for each in short]
    more = [
        Parity("random", lower_bound=None, state_layout="kv", states=False),
        Parity("k3", dtype=half, chunk_size=16),
        Parity("random", chunk_size=16),
        Parity("k3", LONG, chunk_size=32),
        Parity("saturated", LONG, None, chunk_size=32),
        Parity("random", lower_bound=-0.7, state_layout="kv"),
        Parity("k3", groups=2),
        Parity("random", LONG, groups=4),
        Parity("saturated", LONG, None, groups=3),
        Parity("random", dims=(3, 128, 128)),
        Parity("random", dims=(3, 64, 16)),
        Parity("k3", LONG, None, dims=(1, 64, 256)),
        Parity("random", dims=(1, 128, 48), chunk_size=32),
        Parity("random", activated=True),
        Parity("random", LONG, None, activated=True, l2norm=False, state_layout="kv"),
        Parity("k3", gates="float32"),
    ]
    kinds: tuple[Kind, ...] = ("random", "saturated", "k3", "slow")
    every = [
        Parity(kind, lengths, bound, dtype)
        for dtype in dtypes
        for kind, lengths in zip(kinds, (RAGGED, LONG, MIXED, LONG), strict=True)
        for bound in (-5.0, None)
    ]
    found = [dataclasses.replace(each, dtype=each.dtype or base) for each in short + more] + every
    return list(dict.fromkeys(found))


def build(parity: Parity) -> Case:
    """The arguments of a case; states and checkpoints in some sequences only."""
    H, K, V = parity.dims
    lengths = parity.seq_lens
    offsets = [sorted({1, (n + 1) // 2, n}) if n and i < 2 else [] for i, n in enumerate(lengths)]
    case = make_case(
        parity.kind,
        seq_lens=lengths,
        H=H,
        K=K,
        V=V,
        dtype=parity.dtype,
        lower_bound=parity.lower_bound,
        initial_state=[i % 3 != 1 for i in range(len(lengths))] if parity.states else False,
        checkpoint_offsets=offsets if parity.states else None,
        capacity=_capacity(parity),
        chunk_size=parity.chunk_size,
    )
    if parity.activated:
        case = _activate(case, parity.l2norm)
    if parity.gates:
        gates: dict[str, Any] = {
            x: getattr(case, x).astype(parity.gates) for x in ("raw_g", "raw_beta")
        }
        case = dataclasses.replace(case, **gates)
    return case


def _capacity(parity: Parity) -> Capacity:
    return room(parity.chunk_size, CHECKPOINTS if parity.states else 0)


def _activate(case: Case, l2norm: bool) -> Case:
    """Activated float32 gates in the place of the raw ones; unit keys if nothing normalizes."""
    rate = np.exp(case.A_log.astype(np.float64))[:, None]
    x = case.raw_g.astype(np.float64) + case.dt_bias
    with np.errstate(invalid="ignore"):  # padding holds NaN
        g = -rate * np.logaddexp(0, x)
        if case.lower_bound is not None:
            g = case.lower_bound * np.exp(-np.logaddexp(0, -rate * x))
        beta = np.exp(-np.logaddexp(0, -case.raw_beta.astype(np.float64)))
    tokens: dict[str, Any] = {"raw_g": g.astype(np.float32), "raw_beta": beta.astype(np.float32)}
    if not l2norm:
        for name in ("q", "k"):
            wide = getattr(case, name).astype(np.float64)
            unit = wide / np.sqrt((wide * wide).sum(-1, keepdims=True) + 1e-6)
            tokens[name] = unit.astype(getattr(case, name).dtype)
    return dataclasses.replace(case, **tokens)


@functools.cache
def _reference(parity: Parity) -> KDAResult:
    """In float64; of a case in its plainest form, which others share."""
    case = build(parity)
    if not parity.activated:
        return scan_in_float64(case)
    with jax.enable_x64(True), reference_device():
        kwargs = {name: x for name, x in case.kwargs.items() if name != "lower_bound"}
        wide = [x.astype(np.float64) for x in case.args[:5]]
        got = chunk_kda(*wide, **kwargs, use_qk_l2norm=parity.l2norm, backend="scan")
        return KDAResult(*jax.device_get(tuple(got)))


def bounds(parity: Parity, dtypes: set[str]) -> tuple[float, float]:
    """The largest relative errors allowed of (out, states)."""
    coarsest = max(dtypes, key=lambda dtype: TOLERANCES[dtype][0])
    if parity.kind == "slow" and coarsest in ("bfloat16", "float16"):
        return NEAR_EQUAL_KEYS
    return TOLERANCES[coarsest]


def check(path: Path, parity: Parity) -> dict[str, Any]:
    """Errors and their bounds; or ``{"unsupported": reason}`` where the backend says so.

    Raises:
      AssertionError: a result is off; or the call ran although the backend does not claim it.
    """
    case = build(parity)
    options: dict[str, Any] = {"state_layout": parity.state_layout, "groups": parity.groups}
    if parity.activated:
        options["use_qk_l2norm"] = parity.l2norm
    run = path.call_activated if parity.activated else path.call
    gate: Gate | None = "activated" if parity.activated else None
    if why := path.unsupported(case, gate=gate, groups=parity.groups):
        _refuses(run, case, options)
        return {"unsupported": why}
    given = case
    if parity.state_layout == "kv" and case.initial_state is not None:
        state = np.ascontiguousarray(case.initial_state.swapaxes(-1, -2))
        given = dataclasses.replace(case, initial_state=state)
    got = run(given, **options)
    if parity.state_layout == "kv":
        got = KDAResult(got.out, *(x.swapaxes(-1, -2) for x in got[1:]))
    plain = dataclasses.replace(parity, state_layout="vk", groups=None, chunk_size=64)
    want = _reference(plain)
    limit_out, limit_state = bounds(parity, {str(x.dtype) for x in case.args[:5]})
    errors: dict[str, float] = {}
    for name, x, ref in zip(KDAResult._fields, got, want, strict=True):
        limit = limit_out if name == "out" else limit_state
        if x.shape != ref.shape or str(x.dtype) != (case.v.dtype if name == "out" else "float32"):
            raise AssertionError(f"{name} is {x.dtype} {x.shape}, want {ref.shape}")
        errors[name] = relative_error(x, ref)
        if not errors[name] <= limit:
            raise AssertionError(f"{name}: relative error {errors[name]:.2e}, bound {limit:.1e}")
    return {"errors": errors, "bounds": {"out": limit_out, "states": limit_state}}


def _refuses(run: Any, case: Case, options: dict[str, Any]) -> None:
    try:
        run(case, **options)
    except NotImplementedError:
        return
    raise AssertionError("the backend does not claim this call, and ran it nevertheless")
