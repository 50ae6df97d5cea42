"""Backend "fused": one XLA FFI custom call, whose kernel is in ffi/.

Four layers, from the inside out: the custom call for each platform (fused_call.py); the rule that
shards it over heads (sharding.py); `custom_vmap`, which folds a batch into the heads; `custom_vjp`,
whose backward pass is that of the chunked backend. Each takes the states by sequence (pool is None)
or in a pool.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from . import devices, native
from .chunked import ChunkedBackend
from .fused_call import custom_call
from .gate import activate, starting_states
from .metadata import ChunkMetadata
from .pool import gather_run_scatter
from .scan import recurrence
from .sharding import split_over_heads
from .types import CallSpec, KDAConfig, KDAInputs, KDAPoolResult, KDAResult, StatePool

_TILE = 16
_MAX_GROUPS = 64
# Whose kernel gets chunks of one token, for decode steps.
_TOKEN_PLATFORMS = ("rocm", "cuda")

Result = KDAResult | KDAPoolResult
Kernel = Callable[[KDAInputs, StatePool | None, ChunkMetadata], Result]


class FusedBackend:
    """The native kernel.

    Args:
      portable: for "auto". Lowers to the custom call on the platforms whose kernel is built and to
        the chunked form on every other, so that one exported program runs anywhere. An explicit
        "fused" (False) is the custom call on every platform that it is lowered for.
      mixed: 16-bit operands with float32 accumulation, the GPU kernels' arithmetic; on the CPU a
        reference for them, and slower than the float32 operands it uses otherwise.
    """

    name = "fused"
    checkpoint_alignment = 1

    def __init__(self, portable: bool = False, mixed: bool = False) -> None:
        self.portable = portable
        self.mixed = mixed

    def unsupported(self, spec: CallSpec) -> str | None:
        status = native.status()
        if spec.platform not in status.available_platforms:
            return status.reasons.get(
                spec.platform, f"there is no kernel for platform {spec.platform!r}; use 'chunked'"
            )
        built = status.architectures.get(spec.platform)
        if why := devices.uncovered_here(spec.platform, built) or _wrong_dtypes(spec):
            return why
        if spec.K not in (64, 128):
            return f"its kernel has K = 64 and 128, not {spec.K}; use 'chunked'"
        if spec.V % _TILE or not _TILE <= spec.V <= 256:
            return f"its kernel takes V in multiples of 16 up to 256, not {spec.V}; use 'chunked'"
        if spec.chunk_size == 1 and not takes_tokens(spec.platform):
            return f"its kernel for {spec.platform} has no chunks of one token"
        if spec.chunk_size == 16 and spec.platform != "cpu":
            return "on a GPU its kernel has chunks of 32 and 64 tokens, not 16; use 'chunked'"
        if spec.groups is not None and spec.groups > _MAX_GROUPS:
            return f"it splits a sequence into at most {_MAX_GROUPS} groups, not {spec.groups}"
        return None

    def run(self, inputs: KDAInputs, config: KDAConfig, metadata: ChunkMetadata) -> KDAResult:
        result = _differentiable(self.portable, self.mixed, config)(inputs, None, metadata)
        assert isinstance(result, KDAResult)
        return result

    def run_in_pool(
        self, inputs: KDAInputs, pool: StatePool, config: KDAConfig, metadata: ChunkMetadata
    ) -> KDAPoolResult:
        result = _differentiable(self.portable, self.mixed, config)(inputs, pool, metadata)
        assert isinstance(result, KDAPoolResult)
        return result


def takes_tokens(platform: str) -> bool:
    """Whether a platform's kernel gets chunks of one token."""
    return platform in _TOKEN_PLATFORMS and platform in native.status().token_chunks


def _wrong_dtypes(spec: CallSpec) -> str | None:
    for name in spec.dtypes:
        if name not in ("bfloat16", "float16", "float32"):
            return f"its kernel has no {name}; cast the inputs or use 'chunked'"
    if spec.platform == "cpu":
        return None
    # A GPU's matrix units would halve float32's precision, so the kernel does not claim it.
    io = spec.q_dtype
    if io == "float32" or (spec.k_dtype, spec.v_dtype) != (io, io):
        return (
            "on a GPU its kernel takes q, k and v in bfloat16 or all in float16, not "
            f"{spec.q_dtype}, {spec.k_dtype} and {spec.v_dtype}; cast them or use 'chunked'"
        )
    if {spec.g_dtype, spec.beta_dtype} - {io, "float32"}:
        return f"on a GPU its kernel takes the gates in {io} or float32; cast them"
    return None


FUSED = FusedBackend()
FUSED_AUTO = FusedBackend(portable=True)
_CHUNKED = ChunkedBackend()


@functools.cache
def _differentiable(portable: bool, mixed: bool, config: KDAConfig) -> Kernel:
    forward = _batched(portable, mixed, config)

    @jax.custom_vjp
    def prefill(inputs: KDAInputs, pool: StatePool | None, metadata: ChunkMetadata) -> Result:
        return forward(inputs, pool, metadata)

    def prefill_fwd(
        inputs: KDAInputs, pool: StatePool | None, metadata: ChunkMetadata
    ) -> tuple[Result, tuple[KDAInputs, StatePool | None, ChunkMetadata]]:
        # Not `forward`, which has no derivative of its own: for the gradient of a gradient.
        return prefill(inputs, pool, metadata), (inputs, pool, metadata)

    def prefill_bwd(
        residuals: tuple[KDAInputs, StatePool | None, ChunkMetadata], cotangents: Result
    ) -> tuple[KDAInputs, StatePool | None, None]:
        inputs, pool, metadata = residuals
        _, pull_back = jax.vjp(lambda x, y: _chunked(x, y, metadata, config), inputs, pool)
        return *pull_back(cotangents), None

    prefill.defvjp(prefill_fwd, prefill_bwd)
    return prefill


def _chunked(
    inputs: KDAInputs, pool: StatePool | None, metadata: ChunkMetadata, config: KDAConfig
) -> Result:
    config = dataclasses.replace(config, groups=None)
    run = _token_of_each if metadata.chunk_size == 1 else _CHUNKED.run
    if pool is None:
        return run(inputs, config, metadata)
    return gather_run_scatter(lambda x: run(x, config, metadata), inputs, pool, metadata)


def _token_of_each(inputs: KDAInputs, config: KDAConfig, metadata: ChunkMetadata) -> KDAResult:
    states = starting_states(inputs, config, jnp.asarray(metadata.seqs))
    token = activate(inputs, config, valid=jnp.ones(inputs.q.shape[0], jnp.bool_))
    states, out = jax.vmap(recurrence)(states, token)
    return KDAResult(
        out.astype(inputs.v.dtype), states, jnp.zeros_like(states, shape=(0, *states.shape[1:]))
    )


def able(inputs: KDAInputs, metadata: ChunkMetadata, config: KDAConfig) -> list[str]:
    """The platforms whose kernel runs this call; a GPU's refuses what the CPU's takes."""
    specs = [
        CallSpec.of(platform, inputs[:5], metadata, config.gate, config.groups)
        for platform in native.status().available_platforms
    ]
    return [spec.platform for spec in specs if FUSED.unsupported(spec) is None]


def _batched(portable: bool, mixed: bool, config: KDAConfig) -> Kernel:
    def prefill(inputs: KDAInputs, pool: StatePool | None, metadata: ChunkMetadata) -> Result:
        built = able(inputs, metadata, config) if portable else native.PLATFORMS
        branches = {
            p: functools.partial(custom_call, platform=p, config=config, mixed=mixed) for p in built
        }
        default = functools.partial(_chunked, config=config) if portable else None

        def kernel(inputs: KDAInputs, pool: StatePool | None, metadata: ChunkMetadata) -> Result:
            return lax.platform_dependent(inputs, pool, metadata, **branches, default=default)

        return split_over_heads(kernel, inputs, pool, metadata, config)

    batched = custom_vmap(prefill)

    @batched.def_vmap
    def rule(
        size: int,
        in_batched: Any,
        inputs: KDAInputs,
        pool: StatePool | None,
        metadata: ChunkMetadata,
    ) -> tuple[Result, Any]:
        inputs_batched, _, metadata_batched = in_batched
        result: Result
        if pool is not None:  # a pool for each call: the rows of all come to one call by heads
            axes = jax.tree.map(lambda b: 0 if b else None, in_batched)
            result = jax.vmap(_gathered, axes, axis_size=size)(inputs, pool, metadata)
        elif any(jax.tree.leaves(metadata_batched)):  # another layout in each: nothing to fold
            inputs, metadata = jax.tree.map(
                lambda x, b: x if b else jnp.broadcast_to(x, (size, *x.shape)),
                (inputs, metadata),
                (inputs_batched, metadata_batched),
            )
            result = lax.map(lambda x: batched(x[0], None, x[1]), (inputs, metadata))
        else:
            folded = batched(_fold(size, inputs, inputs_batched), None, metadata)
            result = _unfold(folded, size)
        return result, jax.tree.map(lambda _: True, result)

    def _gathered(inputs: KDAInputs, pool: StatePool, metadata: ChunkMetadata) -> KDAPoolResult:
        return gather_run_scatter(lambda x: batched(x, None, metadata), inputs, pool, metadata)

    return batched


# The head axis of each array, without the batch axis.
_HEAD_AXIS = (1, 1, 1, 1, 1, 0, 0, 1, None)


def _fold(size: int, inputs: KDAInputs, batched: Any) -> KDAInputs:
    """Turns a batch of ``size`` calls on one layout into one call on ``size`` times the heads."""
    has = inputs.has_initial_state
    if has is not None and batched.has_initial_state:
        # Which rows count differs from call to call, and a row holds all calls' heads: select now.
        assert inputs.initial_state is not None
        keep = has[..., None, None, None]
        state = jnp.where(keep, inputs.initial_state, 0)
        inputs = inputs._replace(initial_state=state, has_initial_state=None)
        batched = batched._replace(initial_state=True, has_initial_state=None)

    def fold(x: Any, is_batched: bool, axis: int | None) -> Any:
        if x is None or axis is None:
            return x
        if not is_batched:
            x = jnp.broadcast_to(x, (size, *x.shape))
        # Heads before the batch: what is sharded over heads stays so.
        x = jnp.moveaxis(x, 0, axis + 1)
        return x.reshape(*x.shape[:axis], x.shape[axis] * size, *x.shape[axis + 2 :])

    return KDAInputs(*map(fold, inputs, batched, _HEAD_AXIS))


def _unfold(result: KDAResult, size: int) -> KDAResult:
    def unfold(x: jax.Array) -> jax.Array:
        rows, heads = x.shape[:2]
        return jnp.moveaxis(x.reshape(rows, heads // size, size, *x.shape[2:]), 2, 0)

    return KDAResult(*map(unfold, result))
