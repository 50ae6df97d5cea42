"""The short convolutions of a prefill by the GPU kernel: one call for q, k and v.

XLA reads the rows once for each tap and works out positions for each row; the kernel reads and
writes everything once. Its call, `kda_conv_v1`, is in ffi/xla/conv_gpu.cc. On the CPU, and for what
the kernel does not have, it is plain JAX (conv_math.py), whose derivatives it has everywhere. Like
the operator's, the call is split under `jax.jit` by a rule that `jax.export` cannot write down:
inside `jax.shard_map` it is local and needs none.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from . import devices, native
from .conv_math import convolve
from .metadata import ChunkMetadata
from .sharding import run_on_auto_axes, split_by_rule, varying_like

WIDTH, MAX_PARTS = 4, 3
_CHANNELS = 8  # in a thread
_DTYPES = ("bfloat16", "float16")


class ConvInputs(NamedTuple):
    """Of each part x [T, C], weight [C, W] and perhaps a state [N, C, W - 1]; has is bool [N]."""

    xs: tuple[jax.Array, ...]
    weights: tuple[jax.Array, ...]
    states: tuple[jax.Array, ...] | None
    has: jax.Array | None


class ConvOutputs(NamedTuple):
    """Of each part y [T, C], final [N, C, W - 1] and inside [M, C, W - 1]."""

    ys: tuple[jax.Array, ...]
    finals: tuple[jax.Array, ...]
    insides: tuple[jax.Array, ...]


def convolve_parts(
    inputs: ConvInputs, metadata: ChunkMetadata, *, activation: str | None
) -> ConvOutputs:
    """Convolutions that share their sequences, by the kernel where there is one for them."""
    if not able(inputs):
        return _in_plain_jax(activation, inputs, metadata)
    return _by_kernel(activation, inputs, metadata)


def able(inputs: ConvInputs) -> bool:
    """Whether some platform here has a kernel for it, and its call can be split."""
    dtypes = {x.dtype.name for x in inputs.xs}
    sizes = [n for x in inputs.xs for n in x.shape]
    mesh = jax.sharding.get_abstract_mesh()
    return (
        len(dtypes) == 1
        and dtypes <= set(_DTYPES)
        and len(inputs.xs) <= MAX_PARTS
        and all(isinstance(n, int) and n > 0 for n in sizes)
        and all(w.shape[1] == WIDTH for w in inputs.weights)
        and not (mesh.manual_axes and not mesh.are_all_axes_manual)
        and _split_alike(inputs)
        and bool(_platforms())
    )


def _platforms() -> list[str]:
    """Those with a kernel that was compiled for the devices here."""
    status = native.status()
    built = status.architectures
    return [p for p in status.convolutions if devices.uncovered_here(p, built.get(p)) is None]


def _split_alike(inputs: ConvInputs) -> bool:
    """Whether one sharding says how the results of all parts lie, on the explicit axes of a mesh.

    Off these only Shardy can be asked to split the call.
    """
    if not jax.config.jax_use_shardy_partitioner:  # type: ignore[attr-defined]
        return False
    shardings = [jax.typeof(x).sharding for x in (*inputs.xs, *inputs.weights)]
    if not shardings[0].mesh.explicit_axes:
        return True
    parts = len(inputs.xs)
    channels = [x.spec[1] for x in shardings[:parts]] + [w.spec[0] for w in shardings[parts:]]
    return all(c == channels[0] for c in channels)


def _in_plain_jax(
    activation: str | None, inputs: ConvInputs, metadata: ChunkMetadata
) -> ConvOutputs:
    states = inputs.states or (None,) * len(inputs.xs)
    parts = [
        convolve(x, weight, metadata, state, inputs.has, activation=activation)
        for x, weight, state in zip(inputs.xs, inputs.weights, states, strict=True)
    ]
    # Without rows or checkpoints plain JAX makes zeros of nothing that `jax.shard_map` follows.
    return varying_like((inputs, metadata), ConvOutputs(*zip(*parts, strict=True)))


@functools.partial(jax.jit, static_argnums=0)  # so that eager calls compile once
def _by_kernel(activation: str | None, inputs: ConvInputs, metadata: ChunkMetadata) -> ConvOutputs:
    plain = functools.partial(_in_plain_jax, activation)

    def on_auto_axes(inputs: ConvInputs, metadata: ChunkMetadata) -> ConvOutputs:
        parts = len(inputs.xs)
        results = ConvOutputs(*[(0,) * parts] * 3)  # type: ignore[arg-type]
        run = functools.partial(_split, activation)
        return run_on_auto_axes(run, inputs.xs[0], results, inputs, metadata)

    batched = custom_vmap(on_auto_axes)

    @batched.def_vmap
    def rule(size: int, in_batched: Any, *args: Any) -> tuple[ConvOutputs, Any]:
        axes = jax.tree.map(lambda b: 0 if b else None, in_batched)
        result = jax.vmap(plain, axes, axis_size=size)(*args)
        return result, jax.tree.map(lambda _: True, result)

    # Derivatives are those of plain JAX, forward mode included.
    run = jax.custom_jvp(batched)
    run.defjvp(functools.partial(jax.jvp, plain))
    return run(inputs, metadata)


def _split(activation: str | None, inputs: ConvInputs, metadata: ChunkMetadata) -> ConvOutputs:
    """The call, split over channels."""
    platforms = _platforms()
    leaves, tree = jax.tree.flatten((inputs, metadata))

    def call(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        inputs, metadata = jax.tree.unflatten(tree, leaves)
        plain = functools.partial(_in_plain_jax, activation)
        kernel = functools.partial(_custom_call, activation)
        fits = all(x.shape[1] % _CHANNELS == 0 for x in inputs.xs)  # what one device has
        branches = dict.fromkeys(platforms if fits else (), kernel)
        result = lax.platform_dependent(inputs, metadata, **branches, default=plain)
        return tuple(jax.tree.leaves(result))

    flat = split_by_rule(call, leaves, _sharding_rule(inputs), "abc")
    parts = len(inputs.xs)
    return ConvOutputs(flat[:parts], flat[parts : 2 * parts], flat[2 * parts :])


def _sharding_rule(inputs: ConvInputs) -> str:
    """a, b, c: channels of the parts, t: tokens, n: sequences, m: checkpoints; else columns."""
    parts = "abc"[: len(inputs.xs)]
    operands = [f"t {c}" for c in parts] + [f"{c} w" for c in parts]
    if inputs.states is not None:
        operands += [f"n {c} s" for c in parts]
    if inputs.has is not None:
        operands.append("n")
    operands += ["n i", "k j", "m l"]  # seqs, chunks, checkpoints
    results = [f"t {c}" for c in parts] + [f"{x} {c} s" for x in "nm" for c in parts]
    return f"{', '.join(operands)} -> {', '.join(results)}"


def _custom_call(
    activation: str | None, inputs: ConvInputs, metadata: ChunkMetadata
) -> ConvOutputs:
    N, M = metadata.capacity.sequences, metadata.capacity.checkpoints
    dtype = inputs.xs[0].dtype
    states: Sequence[Any] = inputs.states or [jnp.zeros((0,), dtype)] * len(inputs.xs)
    has = jnp.zeros((0,), jnp.bool_) if inputs.has is None else inputs.has
    operands: list[Any] = [metadata.seqs, metadata.checkpoints, has]
    results = []
    for x, weight, state in zip(inputs.xs, inputs.weights, states, strict=True):
        wide = weight if weight.dtype == dtype else weight.astype(jnp.float32)
        operands += [x, wide, state]
        results += [
            jax.ShapeDtypeStruct(x.shape, dtype),
            *(jax.ShapeDtypeStruct((rows, x.shape[1], WIDTH - 1), dtype) for rows in (N, M)),
        ]
    call = jax.ffi.ffi_call(native.CONV_TARGET, results)
    found = call(*operands, silu=activation == "silu")
    result = ConvOutputs(*(tuple(found[i::3]) for i in range(3)))
    return varying_like((inputs, metadata), result)
