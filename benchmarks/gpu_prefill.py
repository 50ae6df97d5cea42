"""One row of the GPU's table: a shape, its backends checked against float64 and then timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from kda_jax import KDAResult, chunk_kda_prefill, supports
from kda_jax.testing import TOLERANCES, Case, relative_error, scan_in_float64

from . import device_time, inputs
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
    left out with the reason, and so is one that fails with an error. One whose results are off
    keeps its time in the JSON; `gpu_table` prints no ratio for it.

    Args:
      shape, backends: what to run.
      kinds: of inputs, see `inputs`.
      budget: seconds of timing for each backend and kind.
      calls: in one program; None: by size.
      step: the operator.
    """
    cells: dict[str, dict[str, Any]] = {}
    left_out: dict[str, str] = {}
    references: dict[tuple[str, int], tuple[Picked, KDAResult]] = {}
    sizes: dict[str, Any] = {"H": shape.H, "K": shape.K, "V": shape.V}
    for backend in backends:
        support = supports(backend, dtype=inputs.DTYPE, **sizes)
        if not support:
            left_out[backend] = support.reason
            continue
        many = calls or _calls(shape, backend)
        try:
            cells[backend] = {
                kind: _measure(shape, backend, kind, many, budget, step, references)
                for kind in kinds
            }
        except Exception as error:  # out of memory, a refused launch: the rest of the table stands
            left_out[backend] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
    return {
        "shape": shape.name,
        "tokens": shape.tokens,
        "sequences": len(shape.seq_lens),
        **sizes,
        "traffic": traffic(shape, 2),
        "backends": cells,
        "left_out": left_out,
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


def _measure(
    shape: Shape,
    backend: str,
    kind: str,
    calls: int,
    budget: float,
    step: Callable[..., KDAResult],
    references: dict[tuple[str, int], tuple[Picked, KDAResult]],
) -> dict[str, Any]:
    sets = [inputs.of_shape(shape, kind, seed) for seed in range(calls)]
    metadata = inputs.layout(shape)

    def call(*args: Any) -> KDAResult:
        *arrays, metadata = args
        return step(*arrays, metadata=metadata, backend=backend)

    run = device_time.program(call, (metadata,))
    results = run(sets)
    if (kind, calls) not in references:
        picked = Picked(shape, calls)
        references[kind, calls] = picked, scan_in_float64(picked.case(sets, shape))
    picked, want = references[kind, calls]
    out, state = picked.take(results)
    errors = relative_error(out, want.out), relative_error(state, want.final_state)
    finite = all(bool(jax.numpy.isfinite(r.out).all()) for r in results)
    del results
    cell: dict[str, Any] = {
        "error_out": errors[0],
        "error_state": errors[1],
        "finite": finite,
        "heads_checked": len(picked.pairs),
        # Written so that NaN fails.
        "parity": finite
        and all(e <= limit for e, limit in zip(errors, TOLERANCES[inputs.DTYPE], strict=True)),
    }
    cell |= {"calls_in_program": calls}
    timing = device_time.per_call({backend: (run, sets)}, budget=budget)[backend]
    cell |= timing.to_json() | {"host": device_time.host_time(run, sets)}
    if timing.median >= _QUEUED_FROM and kind == inputs.KINDS[0]:
        cell |= _queued(call, sets, metadata, timing.median, budget)
    return cell


def _queued(
    call: Callable[..., KDAResult], sets: Sequence[Any], metadata: Any, median: float, budget: float
) -> dict[str, Any]:
    """The same calls as programs of their own, queued: a check on the method.

    Independent calls of one program could overlap, and the time per call would then not be what a
    prefill takes; queued programs never do.
    """
    single, turn = jax.jit(call), [0]

    def next_call() -> Any:
        turn[0] = (turn[0] + 1) % len(sets)
        return single(*sets[turn[0]], metadata)

    queued = measure({"queued": next_call}, budget=budget / 2, queued=True)["queued"]
    return {"queued": queued.median, "overlap": not median >= _LEAST_SHARE * queued.median}
