"""`python -m benchmarks.layer`: one KDA layer in JAX, end to end, and the operator's share of it.

Kimi-K3's layer as one of eight tensor-parallel devices has it: hidden 7168, 12 heads of 128
channels, bfloat16; projections, convolutions, operator, gated norm and output projection in one
jit. Then ten such layers in one jit, once with the operator and once with a stand-in that reads
and writes the same arrays and does nothing else: what the operator adds to a layer, beside what it
takes alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from kda_jax import ChunkMetadata, KDAResult, chunk_kda_prefill, register_backend, supports
from kda_jax.layer import KDALayerConfig, KimiDeltaAttention
from kda_jax.types import CallSpec, KDAConfig, KDAInputs

from . import device, device_time, machine, output
from .floor import traffic
from .report import duration, table
from .shapes import Shape
from .timing import measure

BACKENDS = ("fused", "chunked", "scan")
LAYERS = 10
STAND_IN = "stand-in"


class StandIn:
    """Reads the operator's inputs once and writes its results, elementwise."""

    name = STAND_IN
    checkpoint_alignment = 1

    def unsupported(self, spec: CallSpec) -> str | None:
        return None

    def run(self, inputs: KDAInputs, config: KDAConfig, metadata: ChunkMetadata) -> KDAResult:
        # Never multiplied away: 0 times a float is not 0 for all floats.
        zero = jnp.zeros((), inputs.v.dtype)
        others = inputs.q + inputs.k + inputs.g.astype(zero.dtype) + inputs.beta[..., None]
        out = inputs.v + zero * others.astype(zero.dtype)
        H, V, K = inputs.q.shape[1], inputs.v.shape[2], inputs.q.shape[2]
        rows = metadata.capacity
        state = jnp.zeros((rows.sequences, H, V, K), jnp.float32)
        return KDAResult(out, state, jnp.zeros((rows.checkpoints, H, V, K), jnp.float32))


class Layers:
    """Layers of one form, each with weights of its own, as functions of plain arrays.

    (An nnx module as an argument of a jit costs the host more than the device needs for a layer.)
    """

    def __init__(self, config: KDALayerConfig, count: int) -> None:
        self.config = config
        self.weights: list[list[jax.Array]] = []
        for seed in range(count):
            layer = KimiDeltaAttention(config, rngs=nnx.Rngs(seed))
            self._graph, state = nnx.split(layer)
            leaves, self._tree = jax.tree.flatten(state)
            self.weights.append(leaves)

    def module(self, weights: list[jax.Array]) -> KimiDeltaAttention:
        layer: KimiDeltaAttention = nnx.merge(self._graph, jax.tree.unflatten(self._tree, weights))
        return layer

    def stack(self, count: int, backend: str) -> Any:
        """A jitted x -> y, with the states, of ``count`` residual layers."""

        @jax.jit
        def run(weights: Any, x: jax.Array, metadata: ChunkMetadata) -> Any:
            states: list[Any] = []
            for each in weights:
                y, state = self.module(each)(x, metadata, backend=backend)
                x, states = x + y, [*states, state.final]
            return x, states

        return lambda x, metadata: run(self.weights[:count], x, metadata)

    def op_sets(self, tokens: int, metadata: ChunkMetadata, calls: int) -> list[Any]:
        """What the operator gets in the first layer, for several inputs of it."""

        @jax.jit
        def draw(weights: Any, x: jax.Array, metadata: ChunkMetadata) -> Any:
            layer = self.module(weights)
            bias = layer.dt_bias[...].reshape(self.config.heads, self.config.head_dim)
            return *layer.op_inputs(x, metadata), layer.A_log[...], bias

        return [draw(self.weights[0], self.x(tokens, seed), metadata) for seed in range(calls)]

    def x(self, tokens: int, seed: int) -> jax.Array:
        x = jax.random.normal(jax.random.key(seed), (tokens, self.config.hidden))
        return x.astype(self.config.dtype)


def run(
    layers: Layers, tokens: int, backends: Sequence[str], budget: float, calls: int | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Seconds of a layer and of the operator alone for each backend, and of the stacks."""
    config = layers.config
    D = config.head_dim
    shape = Shape(f"T{tokens}_H{config.heads}", (tokens,), config.heads, D, D)
    metadata = jax.device_put(ChunkMetadata.from_seq_lens([tokens]))
    x, left_out, here = layers.x(tokens, 0), {}, []
    for name in backends:
        sizes: dict[str, Any] = {"H": shape.H, "K": shape.K, "V": shape.V}
        if support := supports(name, dtype=config.dtype, **sizes):
            here.append(name)
        else:
            left_out[name] = support.reason
    layer, op = {}, {}
    for name in list(here):
        one = functools.partial(layers.stack(1, name), x, metadata)
        many = calls or device_time.calls_for(traffic(shape, 2), device.memory_limit())
        sets = layers.op_sets(tokens, metadata, many if name == "fused" else 2)
        program = device_time.program(_step(name), (metadata,)), sets
        try:
            layer[name] = measure({name: one}, budget=budget, queued=True)[name]
            op[name] = device_time.per_call({name: program}, budget=budget)[name]
        except Exception as error:  # out of memory, say: the other backends stand
            left_out[name] = output.last_error(f"{type(error).__name__}: {error}")
            here.remove(name)
            layer.pop(name, None)
    count = len(layers.weights)
    stacked = [name for name in here if name == "fused"] + [STAND_IN]
    stacks = {name: layers.stack(count, name) for name in stacked}
    functions = {name: lambda run=run: run(x, metadata) for name, run in stacks.items()}
    times = measure(functions, budget=2 * budget, queued=True)
    return {
        "tokens": tokens,
        "layer": {name: timing.to_json() for name, timing in layer.items()},
        "op": {name: timing.to_json() for name, timing in op.items()},
        "layers": count,
        "stack": {name: timing.to_json() for name, timing in times.items()},
    }, left_out


def _step(backend: str) -> Any:
    def step(*args: Any) -> Any:
        *arrays, metadata = args
        return chunk_kda_prefill(*arrays, metadata=metadata, backend=backend)

    return step


def in_place(row: dict[str, Any]) -> float | None:
    """What the operator adds to a layer of the stack, over the stand-in; None if it did not run."""
    if "fused" not in row["stack"]:
        return None
    fused, other = (row["stack"][name]["median"] for name in ("fused", STAND_IN))
    return float((fused - other) / row["layers"])


def markdown(results: dict[str, Any]) -> str:
    m, where, rows = results["machine"], results["device"], results["rows"]
    one = [
        [
            f"T = {row['tokens']}, {name}",
            duration(cell["median"]),
            f"{duration(cell['low'])} - {duration(cell['high'])}",
            duration(row["op"][name]["median"]),
            f"{row['op'][name]['median'] / cell['median'] * 100:.0f} %",
        ]
        for row in rows
        for name, cell in row["layer"].items()
    ]
    many = [
        [
            f"T = {row['tokens']}",
            duration(row["stack"]["fused"]["median"] / row["layers"]),
            duration(row["stack"][STAND_IN]["median"] / row["layers"]),
            duration(added),
            duration(row["op"]["fused"]["median"]),
            duration(added - row["op"]["fused"]["median"]),
        ]
        for row in rows
        if (added := in_place(row)) is not None
    ]
    stack_header = ["", "layer, fused", "layer, stand-in", "added", "operator alone", "difference"]
    left_out = "".join(f"\n- left out, {n}: {why}" for n, why in results["left_out"].items())
    return f"""# A KDA layer on {where["kind"]}

Generated by `{m["command"]}` on {m["date"]}; do not edit.

Device: {device.line(where)}. Layer: {results["config"]}. One sequence. Time of a jitted layer,
calls queued; time of the operator alone on that layer's values, in programs of several calls.

{table(["one layer", "time", "quartiles", "operator alone", "share"], one)}
{left_out}

## Ten layers in one jit

Time for each layer with the fused operator, and with a stand-in that reads and writes the same
arrays elementwise, which XLA may fuse with its surroundings. What the operator adds, less what it
takes alone, is what embedding it costs; at 64 tokens the arrays are small, and what is added is
close to the cost of launching it.

{table(stack_header, many) if many else "The fused operator does not run here."}
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = output.parser("layer", __doc__, budget=1.0)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 1024, 8192])
    parser.add_argument("--backends", nargs="+", default=BACKENDS, metavar="NAME")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--calls", type=int, help="calls in one program (default: by size)")
    args = parser.parse_args(argv)
    register_backend(StandIn(), replace=True)
    config = KDALayerConfig(hidden=args.hidden, heads=args.heads)
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    with output.progress(output.console()) as bar:
        layers = Layers(config, args.layers)
        for tokens in bar.track(args.tokens, description="layers"):
            row, why = run(layers, tokens, args.backends, args.budget, args.calls)
            rows.append(row)
            left_out |= why
    results: dict[str, Any] = {
        "machine": machine.describe(),
        "device": device.describe(),
        "config": f"hidden {config.hidden}, {config.heads} heads of {config.head_dim}, "
        f"{config.dtype}",
        "rows": rows,
        "left_out": left_out,
    }
    output.publish(args, "layer", results, markdown(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
