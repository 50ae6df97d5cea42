"""What must hold bit for bit, and what one call must not do to another.

Each function takes a `Path` and raises AssertionError. All share one program.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ..testing import Case, relative_error
from ..types import KDAResult
from . import in_pool
from .path import Path, piece, same_bits

TOKENS = ("q", "k", "v", "raw_g", "raw_beta")


def _same(got: KDAResult, want: KDAResult, what: str = "") -> None:
    for name, x, y in zip(KDAResult._fields, got, want, strict=True):
        same_bits(x, y, f"{name} {what}".strip())


def _edited(case: Case, tokens: slice, value: Callable[[str, Any], Any]) -> Case:
    """A copy with other contents in these tokens."""
    case = copy.deepcopy(case)
    for name in TOKENS:
        x = getattr(case, name)
        x[:, tokens] = value(name, x[:, tokens])
    return case


def _is_nan(got: KDAResult, tokens: slice) -> None:
    if not np.isnan(got.out[:, tokens].astype(np.float32)).all():
        raise AssertionError("a NaN in the inputs does not show in the outputs of its sequence")


def again(path: Path) -> None:
    """The same call twice, and again after a call that leaves NaN in all memory."""
    case = path.pack()
    want = path.call(case)
    _same(path.call(case), want, "of a second call")
    poisoned = _edited(case, slice(0, 196), lambda name, x: np.nan)
    assert poisoned.initial_state is not None
    poisoned.initial_state[...] = np.nan
    for _ in range(2):
        _is_nan(path.call(poisoned), slice(0, 196))
        _same(path.call(case), want, "after a call on NaN")


def two_threads(path: Path) -> None:
    """Two threads that call at once, each with its own inputs."""
    cases = [path.pack(), path.case("k3", [300, 33], checkpoint_offsets=[[128], []])]
    want = [path.call(case) for case in cases]

    def work(which: int) -> None:
        for _ in range(8):
            _same(path.call(cases[which]), want[which], f"in thread {which} of 2")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


def on_chunk_ends(path: Path) -> None:
    """Checkpoints on chunk ends: equal to a prefill that stops there; nothing else changes."""
    case = path.case("k3", [300], checkpoint_offsets=[[64, 256, 300]])
    got, without = path.call(case), path.call(path.case("k3", [300]))
    same_bits(got.out, without.out, "out with and without checkpoints")
    same_bits(got.final_state, without.final_state, "final_state with and without checkpoints")
    same_bits(got.checkpoint_state[2], got.final_state[0], "the checkpoint at the end")
    assert case.initial_state is not None
    for row, offset in enumerate((64, 256)):
        stops = path.call(piece(case, 0, offset, case.initial_state[0]))
        same_bits(got.checkpoint_state[row], stops.final_state[0], f"the state at {offset}")
        same_bits(got.out[:, :offset], stops.out[:, :offset], f"out before {offset}")
        rest = path.call(piece(case, offset, 300, got.checkpoint_state[row]))
        same_bits(rest.out[:, : 300 - offset], got.out[:, offset:300], f"out resumed at {offset}")
        same_bits(rest.final_state[0], got.final_state[0], f"final_state resumed at {offset}")


def elsewhere(path: Path) -> None:
    """Checkpoints at other tokens: near a prefill that stops there, near the one without."""
    offsets = [1, 17, 63, 65, 299]
    case = path.case("k3", [300], checkpoint_offsets=[offsets])
    got, without = path.call(case), path.call(path.case("k3", [300]))
    exact = path.dtype == "float32"
    rtol_out, rtol_state = (1e-5, 1e-5) if exact else (7.2e-3, 5.9e-3)  # both have an error
    errors = {
        "out": relative_error(got.out, without.out),
        "final_state": relative_error(got.final_state[:1], without.final_state[:1]),
    }
    assert case.initial_state is not None
    for row, offset in enumerate(offsets):
        stops = path.call(piece(case, 0, offset, case.initial_state[0]))
        errors[f"the state at {offset}"] = relative_error(
            got.checkpoint_state[row], stops.final_state[0]
        )
    for what, error in errors.items():
        limit = rtol_out if what == "out" else rtol_state
        if not error <= limit:
            raise AssertionError(f"{what}: differs by {error:.2e}, bound {limit:.1e}")


def empty_sequences(path: Path) -> None:
    """Their final state is their initial state, or zeros; the others are as without them."""
    case = path.case("random", [0, 5, 0, 70, 0], initial_state=[True, True, False, False, True])
    got = path.call(case)
    assert case.initial_state is not None and case.has_initial_state is not None
    start = np.where(case.has_initial_state[:, None, None, None], case.initial_state, 0)
    for row in (0, 2, 4):
        same_bits(got.final_state[row], start[row], f"final_state of empty sequence {row}")
    dense = path.case("random", [5, 70], initial_state=[True, False])
    assert dense.initial_state is not None
    dense.initial_state[0] = case.initial_state[1]
    want = path.call(dense)
    same_bits(got.out, want.out, "out beside empty sequences")
    same_bits(got.final_state[[1, 3]], want.final_state[:2], "final_state beside empty sequences")


def fresh_rows(path: Path) -> None:
    """NaN in rows of initial_state that do not count has no effect."""
    case = path.case("random", [70, 33, 1], initial_state=[False, True, False])
    assert case.initial_state is not None and case.has_initial_state is not None
    assert np.isnan(case.initial_state[0]).all()
    got = path.call(case)
    clean = copy.deepcopy(case)
    assert clean.initial_state is not None
    clean.initial_state[~case.has_initial_state] = 0  # those of padding, too
    _same(got, path.call(clean), "with NaN in fresh rows")


def nan_isolation(path: Path) -> None:
    """NaN in the inputs or the state of one sequence reaches no other."""
    lengths = [130, 1, 64, 100]
    case = path.case("random", lengths)
    want = path.call(case)
    for sequence, first in enumerate(case.metadata.cu_seqlens[:-1].tolist()):
        mine = slice(first, first + lengths[sequence])
        states = copy.deepcopy(case)
        assert states.initial_state is not None
        states.initial_state[sequence] = np.nan
        for bad in (_edited(case, mine, lambda name, x: np.nan), states):
            got = path.call(bad)
            _is_nan(got, mine)
            what = f"beside NaN in sequence {sequence}"
            same_bits(np.delete(got.out, mine, 1), np.delete(want.out, mine, 1), f"out {what}")
            finals = [np.delete(x.final_state, sequence, 0) for x in (got, want)]
            same_bits(finals[0], finals[1], f"final_state {what}")


def the_future(path: Path) -> None:
    """Later inputs, gates above all, change nothing that came before."""
    offsets = [1, 16, 17, 64, 100, 128]
    case = path.case("random", [200, 100], checkpoint_offsets=[offsets, []])
    want, rng = path.call(case), np.random.default_rng(1)
    for P in (1, 16, 17, 63, 64, 65, 199):

        def disturb(name: str, x: Any) -> Any:
            size = {"v": 100.0, "raw_g": 30.0, "raw_beta": 10.0}.get(name, 1.0)
            return size * rng.standard_normal(x.shape)

        got = path.call(_edited(case, slice(P, 300), disturb))
        same_bits(got.out[:, :P], want.out[:, :P], f"out before a change at token {P}")
        for row, offset in enumerate(offsets):
            if offset <= P:
                states = got.checkpoint_state[row], want.checkpoint_state[row]
                same_bits(*states, f"the state at {offset} before a change at token {P}")


def padding(path: Path) -> None:
    """Padding has no effect, and its rows of the results are zeros."""
    case = path.pack()
    got = path.call(case)  # NaN
    clean = _edited(case, slice(196, None), lambda name, x: 0)
    assert clean.initial_state is not None
    clean.initial_state[4:] = 0
    _same(got, path.call(clean), "with NaN in padding")
    for name, x, used in zip(KDAResult._fields, (got.out[0], *got[1:]), (196, 4, 4), strict=True):
        if np.asarray(x[used:], np.float32).any():
            raise AssertionError(f"{name}: rows of padding are not zeros")


def extreme_gates(path: Path) -> None:
    """g exactly 0 and exactly the bound, in turns and for whole chunks: finite everywhere."""
    case = path.case("random", [200, 1, 64])
    rows = np.zeros(case.raw_g.shape, np.bool_)
    for low in (slice(None), slice(None, None, 2), slice(64, 128), slice(0, 0)):
        rows[...] = False
        rows[:, low] = True
        gates = np.where(rows, 1e4, -1e4).astype(case.raw_g.dtype)
        got = path.call(dataclasses.replace(case, raw_g=gates))
        if not all(np.isfinite(x.astype(np.float32)).all() for x in got):
            raise AssertionError("a result is not finite")


CHECKS: dict[str, dict[str, Callable[[Path], None]]] = {
    "determinism": {"again, bit for bit": again, "two threads": two_threads},
    "checkpoints": {"on chunk ends": on_chunk_ends, "elsewhere": elsewhere},
    "pool": {"by row": in_pool.results, "beyond fp16": in_pool.second_pass},
    "hazards": {
        "empty sequences": empty_sequences,
        "NaN in fresh rows": fresh_rows,
        "NaN isolation": nan_isolation,
        "later inputs": the_future,
        "padding": padding,
        "extreme gates": extreme_gates,
    },
}
