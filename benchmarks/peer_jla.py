"""jax-linear-attention's KDA (JAX, Pallas kernels for Hopper), in a process of its own.

    python -m benchmarks.peer_jla --shapes A B

Prints a JSON line for each shape: time of queued jit calls that rotate through several inputs, with
the gates' activation in the same jit. It has one sequence per batch row and one final state per
row, so packed shapes are left out. Started by `peers`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import device_time, inputs
from .device import memory_limit, share_memory
from .floor import traffic
from .shapes import SHAPES, Shape
from .timing import measure


def call() -> Any:
    """The jitted operator from raw gates, as ours takes them."""
    from jla import ops

    @jax.jit
    def run(q: Any, k: Any, v: Any, raw_g: Any, raw_beta: Any, A_log: Any, dt_bias: Any) -> Any:
        rate = jnp.exp(A_log)[:, None]
        g = -5.0 * jax.nn.sigmoid(rate * (raw_g.astype(jnp.float32) + dt_bias))
        return ops.linear_attention(
            "kda",
            q,
            k,
            v,
            impl="mosaic_gpu",
            g=g,
            beta=jax.nn.sigmoid(raw_beta.astype(jnp.float32)),
            output_final_state=True,
            use_qk_l2norm=True,
        )

    return run


def time_shape(run: Any, shape: Shape, budget: float) -> dict[str, Any]:
    if len(shape.seq_lens) > 1:
        raise ValueError("it has no packed sequences with a final state each")
    many = device_time.calls_for(traffic(shape, 2), memory_limit(), least=2, most=8)
    sets = [inputs.of_shape(shape, "random", seed) for seed in range(many)]
    turn = [0]

    def next_call() -> Any:
        turn[0] = (turn[0] + 1) % many
        return run(*sets[turn[0]])

    return measure({"jla": next_call}, budget=budget, queued=True)["jla"].to_json()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_jla", description=__doc__)
    parser.add_argument("--shapes", nargs="+", required=True, choices=sorted(SHAPES))
    parser.add_argument("--budget", type=float, default=0.3)
    args = parser.parse_args(argv)
    share_memory()
    run = call()
    for name in args.shapes:
        row: dict[str, Any] = {"peer": "jla", "shape": name}
        try:
            row |= time_shape(run, SHAPES[name], args.budget)
        except Exception as error:  # the other shapes may run
            row["failed"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
