"""`python -m benchmarks.neighbours`: the operator's neighbours against the bytes they must move.

The short convolution of q, k and v with silu, which runs before every prefill, and the decode step,
one token for each of many rows with a state, through the operator (sequences of one token), as
plain JAX, and in a pool of states, as a server does it. Each is timed with inputs that exceed any
cache (but for a few rows) and compared with the time in which this device copies as many bytes as
the step must read and write.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax import ChunkMetadata, chunk_kda_prefill, native, supports
from kda_jax.backends import current_platform
from kda_jax.conv import causal_conv1d_parts
from kda_jax.conv_math import convolve
from kda_jax.decode import kda_decode_step
from kda_jax.gate import Activated, l2_normalize, log_decay
from kda_jax.scan import recurrence

from . import device, device_time, floor, inputs, machine, output
from .report import duration, table

D, WIDTH = 128, 4
LIMIT = 1.5  # over the time of the bytes: where a fused kernel is worth writing
_HOST_SHARE = 0.8
Step = Callable[..., Any]


def conv_bytes(tokens: int, H: int) -> int:
    """q, k and v read and written once in bfloat16, with the weights and the final states."""
    return 3 * H * D * 2 * (2 * tokens + WIDTH + (WIDTH - 1))


def conv_steps() -> dict[str, Step]:
    """The public functions, and what XLA makes of plain JAX if that is something else."""

    def public(q: Any, k: Any, v: Any, weights: Any, metadata: Any) -> Any:
        return causal_conv1d_parts((q, k, v), weights, metadata)

    def plain(q: Any, k: Any, v: Any, weights: Any, metadata: Any) -> Any:
        parts = zip((q, k, v), weights, strict=True)
        return [convolve(x, w, metadata, None, None, activation="silu") for x, w in parts]

    kernel = current_platform() in native.status().convolutions
    return {"fused": public, "XLA": plain} if kernel else {"XLA": public}


def conv(tokens: int, H: int, calls: int) -> tuple[list[Any], tuple[Any, ...]]:
    """Sets of arguments, and what all sets share."""
    metadata = jax.device_put(ChunkMetadata.from_seq_lens([tokens]))

    @jax.jit
    def draw(seed: Any) -> Any:
        keys = jax.random.split(jax.random.key(seed, impl="rbg"), 4)
        x = [jax.random.normal(key, (tokens, H * D)).astype(jnp.bfloat16) for key in keys[:3]]
        return *x, list(jax.random.normal(keys[3], (3, H * D, WIDTH)).astype(jnp.bfloat16))

    return [draw(seed) for seed in range(calls)], (metadata,)


def decode_bytes(rows: int, H: int) -> int:
    """States (float32) read and written once, and the tokens' q, k, g, v, beta and out."""
    return rows * H * (2 * 4 * D * D + 2 * (5 * D + 1))


def decode(rows: int, H: int, calls: int) -> tuple[list[Any], tuple[Any, ...]]:
    """Sets of arguments, and the metadata that they share: ``rows`` sequences of one token."""
    metadata = jax.device_put(ChunkMetadata.from_seq_lens([1] * rows))

    @jax.jit
    def draw(seed: Any) -> Any:
        key = jax.random.key(seed, impl="rbg")
        return inputs.arrays(seed, kind="k3", tokens=rows, H=H), jax.random.normal(
            key, (rows, H, D, D)
        )

    return [draw(seed) for seed in range(calls)], (metadata,)


def through_the_operator(args: Any, state: Any, metadata: Any, *, backend: str) -> Any:
    """The public operator, as it stands."""
    result = chunk_kda_prefill(*args, metadata=metadata, initial_state=state, backend=backend)
    return result.out, result.final_state


def plain_decode(args: Any, state: Any, metadata: Any) -> Any:
    """The recurrence for all rows at once, as XLA fuses it; what a decode step is without us."""
    q, k, v, raw_g, raw_beta = (x[0].astype(jnp.float32) for x in args[:5])
    A_log, dt_bias = args[5:]
    token = Activated(
        q=l2_normalize(q) * D**-0.5,
        k=l2_normalize(k),
        v=v,
        g=log_decay(raw_g, A_log, dt_bias, -5.0),
        beta=jax.nn.sigmoid(raw_beta),
    )
    state, out = jax.vmap(recurrence)(state, token)
    return out[None].astype(args[2].dtype), state


class InPool:
    """`kda_decode_step` in a pool that is donated, so that each step works on the last one's.

    Called with sets of arguments as `decode` makes them, whose states are not looked at.
    """

    def __init__(self, rows: int, H: int) -> None:
        spare = 1 + rows // 8
        self.pool = jnp.ones((rows + spare, H, D, D))
        self.rows = jnp.asarray(np.random.default_rng(0).permutation(rows + spare)[:rows])
        self._run = jax.jit(self._steps, donate_argnums=1)

    @staticmethod
    def _steps(sets: Any, pool: jax.Array, rows: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        outs = []
        for (q, k, v, raw_g, raw_beta, A_log, dt_bias), _ in sets:
            token = (q[0], k[0], v[0], raw_g[0], raw_beta[0])
            out, pool = kda_decode_step(
                *token, A_log, dt_bias, state_cache=pool, state_indices=rows
            )
            outs.append(out)
        return outs, pool

    def __call__(self, sets: Any) -> list[jax.Array]:
        outs, self.pool = self._run(sets, self.pool, self.rows)
        return outs


def decode_steps() -> tuple[dict[str, Step], dict[str, str]]:
    """What can run the decode step here, and why the rest cannot."""
    steps: dict[str, Step] = {"plain JAX": plain_decode}
    left_out = {}
    if support := supports("fused", dtype=inputs.DTYPE):
        steps["operator, fused"] = functools.partial(through_the_operator, backend="fused")
    else:
        left_out["operator, fused"] = support.reason
    return steps, left_out


def run(
    tokens: Sequence[int],
    rows: Sequence[int],
    heads: Sequence[int],
    *,
    budget: float,
    bandwidth: float,
    most: int = 32,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Rows of what, time, bytes and the ratio to the bytes' time; and what is left out, and why."""
    found: list[dict[str, Any]] = []
    steps, left_out = decode_steps()

    def add(what: str, shape: str, size: int, program: Any) -> None:
        try:
            found.append(_row(what, shape, size, program, budget, bandwidth))
        except Exception as error:  # out of memory, say: the other rows stand
            left_out[f"{what}, {shape}"] = output.last_error(f"{type(error).__name__}: {error}")

    for H in heads:
        for T in tokens:
            size = conv_bytes(T, H)
            sets, shared = conv(T, H, _calls(size, most))
            for name, step in conv_steps().items():
                program = device_time.program(step, shared), sets
                add(f"convolution, {name}", f"T = {T}, H = {H}", size, program)
        for N in rows:
            size = decode_bytes(N, H)
            sets, shared = decode(N, H, _calls(size, most))
            for name, step in steps.items():
                program = device_time.program(step, shared), sets
                add(f"decode, {name}", f"{N} rows, H = {H}", size, program)
            add("decode, in a pool", f"{N} rows, H = {H}", size, (InPool(N, H), sets))
    return found, left_out


def _calls(size: int, most: int) -> int:
    return device_time.calls_for(size, device.memory_limit(), least=min(8, most), most=most)


def _row(
    what: str, shape: str, size: int, program: Any, budget: float, bandwidth: float
) -> dict[str, Any]:
    timing = device_time.per_call({what: program}, budget=budget)[what]
    return {
        "what": what,
        "shape": shape,
        "bytes": size,
        "floor_s": size / bandwidth,
        "over_floor": timing.median * bandwidth / size,
        "host": device_time.host_time(*program),
        **timing.to_json(),
    }


def markdown(results: dict[str, Any]) -> str:
    m, where = results["machine"], results["device"]
    rows = [
        [
            r["what"],
            r["shape"],
            duration(r["median"]) + (" host" if r["host"] > _HOST_SHARE * r["median"] else ""),
            f"{duration(r['low'])} - {duration(r['high'])}",
            f"{r['bytes'] / 1e6:.1f}",
            duration(r["floor_s"]),
            f"{r['over_floor']:.2f}" + (f", over {LIMIT:g}" if r["over_floor"] > LIMIT else ""),
        ]
        for r in results["rows"]
    ]
    header = ["step", "shape", "time", "quartiles", "MB", "time of the bytes", "ratio"]
    left_out = "".join(f"\n- left out, {n}: {why}" for n, why in results["left_out"].items())
    return f"""# The operator's neighbours on {where["kind"]}

Generated by `{m["command"]}` on {m["date"]}; do not edit.

Device: {device.line(where)}. bfloat16, K = V = 128. Time of one step on the device; bytes that it
must read and write; the time of these bytes at the copy bandwidth measured in this run,
{results["copy_bandwidth"] / 1e9:.0f} GB/s. Convolution: width {WIDTH} with silu, of q, k and v.
Decode: one token for each row, states float32, read and written; in a pool: `kda_decode_step` with
`state_cache`, each step on the pool that the last one left. "Host": the host took as long to
queue the steps as they ran, so the device's time may be less. "Over {LIMIT:g}": where a kernel of
our own is worth writing.

{table(header, rows)}
{left_out}
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = output.parser("neighbours", __doc__, budget=0.5)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--heads", type=int, nargs="+", default=[12, 96])
    parser.add_argument("--calls", type=int, default=32, help="calls in one program at most")
    args = parser.parse_args(argv)
    with output.progress(output.console()) as bar:
        bar.add_task("convolution and decode", total=None)
        bandwidth = floor.device_copy_bandwidth(budget=args.budget)
        rows, left_out = run(
            args.tokens,
            args.rows,
            args.heads,
            budget=args.budget,
            bandwidth=bandwidth,
            most=args.calls,
        )
    results: dict[str, Any] = {
        "machine": machine.describe(),
        "device": device.describe(),
        "copy_bandwidth": bandwidth,
        "rows": rows,
        "left_out": left_out,
    }
    output.publish(args, "neighbours", results, markdown(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
