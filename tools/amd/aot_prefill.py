"""Compiles the whole jitted prefill, and a layer, for AMD GPUs with XLA's own ROCm backend.

    tools/amd/aot_setup.sh; tools/amd/library.sh          (make amd-aot does both)
    build/amd/aot-venv/bin/python tools/amd/aot_prefill.py

The real library, kda_jax._native_rocm, registers its handler on platform ROCM, as it does on a
machine with a GPU. Each compiled module must hold exactly the custom calls that it should, with the
operands, results and row-major layouts that the kernels take: kda_prefill_v1, of a decode step in a
pool kda_prefill_pool_v1, and of a layer kda_conv_v1 as well. Compiled, not executed.
"""

from __future__ import annotations

import sys
from typing import Any

import aot
import rocm_module

T, N, M, H, K, V, HIDDEN = 8192, 4, 4, 12, 128, 128, 1024
REQUESTS, ROWS = 256, 300


def row_major(dtype: str, *shape: int) -> str:
    layout = ",".join(str(axis) for axis in reversed(range(len(shape))))
    return f"{dtype}[{','.join(map(str, shape))}]{{{layout}}}"


def expected_decode() -> Any:
    """A decode step's call, in a pool."""
    pool = row_major("f32", ROWS, H, V, K)
    operands = [
        *(row_major("bf16", REQUESTS, H, width) for width in (K, K, V, K)),
        row_major("bf16", REQUESTS, H),
        row_major("f32", H),
        row_major("f32", H, K),
        pool,
        row_major("s32", REQUESTS),
        row_major("pred", REQUESTS),
        row_major("s32", 0),
        row_major("s32", REQUESTS, 4),
        row_major("s32", REQUESTS, 4),
        row_major("s32", 0, 2),
    ]
    results = [row_major("bf16", REQUESTS, H, V), pool, row_major("u8", 0)]
    return aot.CustomCall("kda_prefill_pool_v1", tuple(operands), tuple(results))


def expected_conv(channels: int) -> Any:
    """The call for q, k and v of a layer: per part x, weight, state; y, final, checkpoint state."""
    wide = row_major("bf16", T, channels)
    windows, inside = (row_major("bf16", rows, channels, 3) for rows in (N, M))
    operands = [row_major("s32", N, 4), row_major("s32", M, 2), row_major("pred", N)]
    operands += [wide, row_major("f32", channels, 4), windows] * 3
    return aot.CustomCall("kda_conv_v1", tuple(operands), (wide, windows, inside) * 3)


def expected(dtype: str, metadata: Any, num_bytes: int, *, state: bool, heads: int) -> Any:
    """The call: shapes with layouts, minor to major."""
    states = row_major("f32", N, heads, V, K)
    operands = [
        *(row_major(dtype, T, heads, width) for width in (K, K, V, K)),
        row_major(dtype, T, heads),
        row_major("f32", heads),
        row_major("f32", heads, K),
        states if state else row_major("f32", 0),
        row_major("pred", N) if state else row_major("pred", 0),
        row_major("s32", N, 4),
        row_major("s32", metadata.capacity.chunks, 4),
        row_major("s32", M, 2),
    ]
    results = [
        row_major(dtype, T, heads, V),
        states,
        row_major("f32", M, heads, V, K),
        row_major("u8", num_bytes),
    ]
    return aot.CustomCall("kda_prefill_v1", tuple(operands), tuple(results))


def programs() -> Any:
    """(name, function, arguments, the calls that its module must hold)."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from kda_jax import ChunkMetadata, chunk_kda_prefill
    from kda_jax.decode import kda_decode_step
    from kda_jax.layer import KDACache, KDALayerConfig, KDAState, KimiDeltaAttention
    from kda_jax.workspace import workspace

    lengths = [3000, 1, 700, 2000]
    metadata = ChunkMetadata.from_seq_lens(
        lengths, checkpoint_offsets=[[64, 2048], [1], [], []], capacity="bucket"
    )
    assert (metadata.capacity.tokens, metadata.capacity.sequences) == (6144, N)
    struct = jax.ShapeDtypeStruct
    f32, states = jnp.float32, struct((N, H, V, K), jnp.float32)

    def prefill(dtype: str, backend: str, state: bool, **options: Any) -> Any:
        def run(arrays: Any, metadata: Any, state: Any, has: Any) -> Any:
            return chunk_kda_prefill(
                *arrays,
                metadata=metadata,
                initial_state=state,
                has_initial_state=has,
                backend=backend,
                **options,
            )

        wide, gate = struct((1, T, H, K), dtype), struct((H, K), f32)
        arrays = (wide, wide, struct((1, T, H, V), dtype), wide, struct((1, T, H), dtype))
        given = (states, struct((N,), jnp.bool_)) if state else (None, None)
        return run, (((*arrays, struct((H,), f32), gate), metadata, *given))

    names = {"bfloat16": "bf16", "float16": "f16"}
    for dtype, backend, state, options in (
        ("bfloat16", "auto", True, {}),
        ("bfloat16", "fused", False, {"groups": 6}),
        ("float16", "auto", True, {"lower_bound": None}),
    ):
        bytes_ = workspace("rocm", H, K, V, metadata, options.get("groups", 1)).num_bytes
        call = expected(names[dtype], metadata, bytes_, state=state, heads=H)
        name = f"prefill, {dtype}, backend {backend}, {options}"
        yield name, *prefill(dtype, backend, state, **options), [call]

    def decode(arrays: Any, pool: Any, rows: Any) -> Any:
        return kda_decode_step(*arrays, state_cache=pool, state_indices=rows)

    token = struct((REQUESTS, H, K), jnp.bfloat16)
    arrays = (
        *[token] * 4,
        struct((REQUESTS, H), jnp.bfloat16),
        struct((H,), f32),
        struct((H, K), f32),
    )
    pool = struct((ROWS, H, V, K), f32)
    arguments = (arrays, pool, struct((REQUESTS,), jnp.int32))
    yield "decode step in a pool, bfloat16", decode, arguments, [expected_decode()]

    config = KDALayerConfig(hidden=HIDDEN, heads=H, head_dim=K)
    layer = nnx.eval_shape(lambda: KimiDeltaAttention(config, rngs=nnx.Rngs(0)))
    graph, weights = nnx.split(layer)
    conv = struct((N, 3 * config.channels, config.conv_width - 1), jnp.bfloat16)
    cache = KDACache(KDAState(states, conv), struct((N,), jnp.bool_))

    def step(weights: Any, x: Any, metadata: Any, cache: Any) -> Any:
        return nnx.merge(graph, weights)(x, metadata, cache)

    bytes_ = workspace("rocm", H, K, V, metadata).num_bytes
    call = expected("bf16", metadata, bytes_, state=True, heads=H)
    x = struct((T, HIDDEN), jnp.bfloat16)
    both = [expected_conv(config.channels), call]
    yield "layer, bfloat16, backend auto", step, (weights, x, metadata, cache), both


def main() -> None:
    if not rocm_module.library().exists():
        raise SystemExit(f"aot_prefill.py: {rocm_module.library()} is not built (library.sh)")
    rocm_module.provide()
    from kda_jax import call as calls
    from kda_jax import native

    calls.current_platform = lambda: "rocm"  # "auto" chooses as on a machine with an AMD GPU
    status = native.status()
    assert "rocm" in status.available_platforms, status
    print(f"registered on ROCM: {status.libraries['rocm']}, {status.architectures['rocm']}")
    for device, arch in aot.DEVICES.items():
        for name, fn, arguments, calls_ in programs():
            text = aot.compile_for(device, fn, *arguments).as_text()
            ours = [c for c in aot.custom_calls(text) if c.target.startswith("kda_")]
            ours.sort(key=lambda call: call.target)
            assert ours == calls_, f"{device}, {name}:\n{ours}\nexpected\n{calls_}"
            targets = ", ".join(f"one {call.target}" for call in calls_)
            print(f"{device} ({arch}): {name}: {targets}, operands and layouts as expected")
    print("ok: compiled, not executed")


if __name__ == "__main__":
    aot.with_stub_libraries()
    sys.exit(main())
