"""One row of the GPU's table: a shape, its backends checked against float64 and then timed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax import KDAResult, chunk_kda_prefill, supports
from kda_jax.testing import TOLERANCES, Case, relative_error, scan_in_float64

from . import device_time, inputs, output
from .device import memory_limit
from .floor import traffic
from .shapes import Shape
from .timing import measure

# The reference takes about 40 us for a token of a head: all heads of short shapes only.
_REFERENCE_ROWS = 16384
# Plain XLA programs are long: two calls of them, whose data exceed any cache on their own.
_CALLS_OF_OTHERS = 2
# Above this, queuing a single call takes the host less than the device needs for it.
_QUEUED_FROM = 150e-6
_LEAST_SHARE = 0.8


def run(
    shape: Shape,
    backends: Sequence[str],
    *,
    kinds: Sequence[str] = inputs.KINDS,
    budget: float = 0.3,
    calls: int | None = None,
    step: Callable[..., KDAResult] = chunk_kda_prefill,
) -> dict[str, Any]:
    """Check and time the backends on one shape, bfloat16; returns a JSON-compatible row.

    What is checked is the result of the program that is timed. A backend that does not run here is
    left out with the reason, and so is one that fails with an error, which "failed" lists, too. One
    whose results are off keeps its time in the JSON; `gpu_table` prints no ratio for it.

    Args:
      shape, backends: what to run.
      kinds: of inputs, see `inputs`.
      budget: seconds of timing for each backend and kind.
      calls: in one program; None: by size.
      step: the operator.
    """
    cells: dict[str, dict[str, Any]] = {}
    left_out: dict[str, str] = {}
    failed: list[str] = []
    references: References = {}
    sizes: dict[str, Any] = {"H": shape.H, "K": shape.K, "V": shape.V}
    for backend in backends:
        support = supports(backend, dtype=inputs.DTYPE, **sizes)
        if not support:
            left_out[backend] = support.reason
            continue
        sets = calls or _calls(shape, backend)
        try:
            program = Program(shape, functools.partial(step, backend=backend), sets, budget)
            cells[backend] = {kind: program.measure(kind, references) for kind in kinds}
        except Exception as error:  # out of memory, a refused launch: the rest of the table stands
            left_out[backend] = output.last_error(f"{type(error).__name__}: {error}")
            failed.append(backend)
    return {
        "shape": shape.name,
        "tokens": shape.tokens,
        "sequences": len(shape.seq_lens),
        **sizes,
        "traffic": traffic(shape, 2),
        "backends": cells,
        "left_out": left_out,
        "failed": failed,
    }


def _calls(shape: Shape, backend: str) -> int:
    if backend != "fused":
        return _CALLS_OF_OTHERS
    return device_time.calls_for(traffic(shape, 2), memory_limit())


class Picked:
    """Which heads of which sets are compared with the reference: (set, head), in order."""

    def __init__(self, shape: Shape, sets: int) -> None:
        many = max(2, _REFERENCE_ROWS // shape.tokens)
        if many >= shape.H:
            self.pairs = [(sets - 1, head) for head in range(shape.H)]
            return
        heads = np.random.default_rng(shape.tokens).permutation(shape.H)[:many].tolist()
        self.pairs = [((sets - 1) * (i % 2), head) for i, head in enumerate(heads)]

    def case(self, sets: Sequence[inputs.Arrays], shape: Shape) -> Case:
        return inputs.host_case([(sets[s], head) for s, head in self.pairs], shape)

    def take(self, results: Sequence[KDAResult]) -> tuple[Any, Any]:
        """out [1, T, heads, V] and final states [N, heads, V, K]."""

        def heads(name: str, axis: int) -> Any:
            parts = [inputs.head_of(getattr(results[s], name), h, axis) for s, h in self.pairs]
            return np.concatenate([np.asarray(part) for part in parts], axis)

        return heads("out", 2), heads("final_state", 1)


# What the results of a kind of inputs, in so many sets, are compared with.
References = dict[tuple[str, int], tuple[Picked, KDAResult]]


class Program:
    """A backend's calls on one shape as one program, checked and timed on kinds of inputs."""

    def __init__(
        self, shape: Shape, step: Callable[..., KDAResult], calls: int, budget: float
    ) -> None:
        self.shape, self.calls, self.budget = shape, calls, budget
        self.metadata = inputs.layout(shape)

        def call(*args: Any) -> KDAResult:
            *arrays, metadata = args
            return step(*arrays, metadata=metadata)

        self.run = device_time.program(call, (self.metadata,))
        self.single = jax.jit(call)

    def measure(self, kind: str, references: References) -> dict[str, Any]:
        sets = [inputs.of_shape(self.shape, kind, seed) for seed in range(self.calls)]
        cell = self._check(sets, kind, references) | {"calls_in_program": self.calls}
        programs = {kind: (self.run, sets)}
        timing = device_time.per_call(programs, budget=self.budget)[kind]
        cell |= timing.to_json() | {"host": device_time.host_time(self.run, sets)}
        if timing.median >= _QUEUED_FROM and kind == inputs.KINDS[0]:
            cell |= self._queued(sets, timing.median)
        return cell

    def _check(
        self, sets: Sequence[inputs.Arrays], kind: str, references: References
    ) -> dict[str, Any]:
        results = self.run(sets)
        if (kind, self.calls) not in references:
            picked = Picked(self.shape, self.calls)
            want = scan_in_float64(picked.case(sets, self.shape))
            references[kind, self.calls] = picked, want
        picked, want = references[kind, self.calls]
        out, state = picked.take(results)
        errors = relative_error(out, want.out), relative_error(state, want.final_state)
        finite = all(bool(jnp.isfinite(result.out).all()) for result in results)
        limits = TOLERANCES[inputs.DTYPE]
        return {
            "error_out": errors[0],
            "error_state": errors[1],
            "finite": finite,
            "heads_checked": len(picked.pairs),
            # Written so that NaN fails.
            "parity": finite and all(e <= x for e, x in zip(errors, limits, strict=True)),
        }

    def _queued(self, sets: Sequence[Any], median: float) -> dict[str, Any]:
        """The same calls as programs of their own, queued: a check on the method.

        Independent calls of one program could overlap, and the time per call would then not be what
        a prefill takes; queued programs never do.
        """
        turn = [0]

        def next_call() -> Any:
            turn[0] = (turn[0] + 1) % len(sets)
            return self.single(*sets[turn[0]], self.metadata)

        timings = measure({"queued": next_call}, budget=self.budget / 2, queued=True)
        queued = timings["queued"].median
        return {"queued": queued, "overlap": not median >= _LEAST_SHARE * queued}
