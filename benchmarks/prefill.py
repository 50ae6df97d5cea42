"""One cell of the table: a shape and a dtype, every backend checked first and then timed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kda_jax import KDAResult, chunk_kda_prefill, supports
from kda_jax.testing import TOLERANCES, make_case, relative_error, scan_in_float64

from .floor import Ceilings, floor
from .shapes import Shape
from .timing import measure


def run(
    shape: Shape,
    dtype: str,
    backends: tuple[str, ...],
    ceilings: Ceilings,
    *,
    budget: float = 2.0,
    step: Any = chunk_kda_prefill,
) -> dict[str, Any]:
    """Check and time the backends on one shape; returns a JSON-compatible row.

    A backend that does not run here is left out with the reason; one whose results are off keeps
    its time in the JSON, and the report prints no ratio for it.
    """
    sizes: dict[str, Any] = {"H": shape.H, "K": shape.K, "V": shape.V}
    case = make_case("k3", seq_lens=shape.seq_lens, dtype=dtype, initial_state=False, **sizes)
    reference = scan_in_float64(case)
    arrays = [jnp.asarray(x) for x in case.args]
    functions, rows, left_out = {}, {}, {}
    for name in backends:
        support = supports(name, dtype=dtype, **sizes)
        if not support:
            left_out[name] = support.reason
            continue
        call = _call(name, arrays, case.metadata, step)
        result = call()
        errors = [
            relative_error(result.out, reference.out),
            relative_error(result.final_state, reference.final_state),
        ]
        rows[name] = {
            "error_out": errors[0],
            "error_state": errors[1],
            # Written so that NaN fails.
            "parity": all(e <= limit for e, limit in zip(errors, TOLERANCES[dtype], strict=True)),
        }
        functions[name] = call
    for name, timing in measure(functions, budget=budget).items():
        rows[name].update(timing.to_json())
    return {
        "shape": shape.name,
        "tokens": shape.tokens,
        "sequences": len(shape.seq_lens),
        **sizes,
        "dtype": dtype,
        "floor_s": floor(shape, dtype, ceilings),
        "backends": rows,
        "left_out": left_out,
    }


def _call(backend: str, arrays: list[jax.Array], metadata: Any, step: Any) -> Any:
    @jax.jit
    def prefill(arrays: Any, metadata: Any) -> KDAResult:
        return step(*arrays, metadata=metadata, backend=backend)

    return lambda: prefill(arrays, metadata)
