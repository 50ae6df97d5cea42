"""States that are handed from one call, and one backend, to the next.

The first cases are the acceptance cases of the serving engine that the operator was ported from.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    BASE,
    DIMS,
    UNGROUPED,
    all_paths,
    assert_same_bits,
    base_case,
    between_runs,
    call,
    make_case,
    piece,
    prefill,
)

from kda_jax import ChunkMetadata, KDAResult, backends, chunk_kda_prefill, register_backend
from kda_jax.testing import relative_error

TOLERANCES = {"float32": (1e-5, 1e-5), "bfloat16": (2e-2, 5e-3)}  # out, states


@dataclasses.dataclass(frozen=True)
class NoExport:
    """A third party's backend that cannot export states inside a prompt."""

    name: str = "no export"
    checkpoint_alignment: int | None = None

    def unsupported(self, spec: Any) -> str | None:
        return None

    def run(self, inputs: Any, config: Any, metadata: ChunkMetadata) -> KDAResult:
        assert metadata.capacity.checkpoints == 0
        return backends.get("scan").run(inputs, config, metadata)


@all_paths([*UNGROUPED, "auto", "no export"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_1024_tokens_over_two_backends(path: str, dtype: str, registry: None) -> None:
    register_backend(NoExport())
    first, exporting = prefill(path, once=dtype == "bfloat16"), prefill("fused")
    none = BASE
    if path == "no export":
        # Configured once; only the step that carries a checkpoint goes to fused.
        exporting = first
        none = dataclasses.replace(BASE, checkpoints=0)
    whole = base_case("k3", [1024], dtype=dtype, capacity=none)
    want = call(first, whole)
    want_512 = call(first, piece(whole, 0, 512, whole.initial_state[0], capacity=none))

    a = call(first, piece(whole, 0, 256, whole.initial_state[0], capacity=none))
    middle = piece(whole, 256, 768, a.final_state[0], checkpoint_offsets=[[256]])
    b = call(exporting, middle)
    c = call(first, piece(whole, 768, 1024, b.final_state[0], capacity=none))

    rtol_out, rtol_state = TOLERANCES[dtype]
    if path == "mixed":  # 16-bit operands cost more than float32 allows
        rtol_out, rtol_state = TOLERANCES["bfloat16"]
    out = np.concatenate([a.out[:, :256], b.out[:, :512], c.out[:, :256]], axis=1)
    assert relative_error(out, want.out[:, :1024]) < rtol_out
    assert relative_error(c.final_state[0], want.final_state[0]) < rtol_state
    assert relative_error(b.checkpoint_state[0], want_512.final_state[0]) < rtol_state


# Lengths, and checkpoints in the nested or in the flat form.
ON_CHUNK_ENDS: list[tuple[list[int], Any]] = [
    ([100], [64]),
    ([256], [192]),
    ([128, 300], [64, 256]),
    ([300], [[64, 256]]),
    ([512, 5, 0, 700], [448, 0, 0, 640]),
]


@all_paths(UNGROUPED)
@pytest.mark.parametrize("exact", [False, True], ids=["one program", "exact sizes"])
@pytest.mark.parametrize(("lengths", "offsets"), ON_CHUNK_ENDS, ids=str)
def test_on_chunk_ends_bit_for_bit(path: str, exact: bool, lengths: Any, offsets: Any) -> None:
    if path in ("scan", "chunked") and exact and lengths != [300]:
        pytest.skip("one set of exact sizes is enough: each compiles three programs")
    if path in ("scan", "chunked") and exact and backends.current_platform() != "cpu":
        pytest.skip("plain JAX: for a GPU, XLA compiles three programs to different sums")
    sizes = {"capacity": None if exact else BASE}
    fn = prefill(path)
    case = base_case("k3", lengths, checkpoint_offsets=offsets, **sizes)
    got = call(fn, case)
    without = call(fn, base_case("k3", lengths, **sizes))
    assert_same_bits(got.out, without.out)
    assert_same_bits(got.final_state, without.final_state)
    flat = [o for row in case.metadata.checkpoint_offsets for o in row]
    owners = case.metadata.checkpoints[: len(flat), 0]
    for row, (sequence, offset) in enumerate(zip(owners, flat, strict=True)):
        start = case.metadata.cu_seqlens[sequence]
        stops = piece(case, start, start + offset, case.initial_state[sequence], **sizes)
        want = call(fn, stops)
        assert_same_bits(got.checkpoint_state[row], want.final_state[0], f"checkpoint {row}")
        assert_same_bits(got.out[:, start : start + offset], want.out[:, :offset])


@all_paths(UNGROUPED)
@pytest.mark.parametrize("offset", [1, 17, 63, 65, 100, 299])
def test_at_any_other_token(path: str, offset: int) -> None:
    fn = prefill(path)
    case = base_case("k3", [300], checkpoint_offsets=[[offset]])
    got, without = call(fn, case), call(fn, base_case("k3", [300]))
    stops = call(fn, piece(case, 0, offset, case.initial_state[0]))
    rtol_out, rtol_state = between_runs(path)
    assert relative_error(got.out, without.out) < rtol_out
    assert relative_error(got.final_state, without.final_state) < rtol_state
    assert relative_error(got.checkpoint_state[0], stops.final_state[0]) < rtol_state


@all_paths(UNGROUPED)
def test_resume_from_a_chunk_end_bit_for_bit(path: str) -> None:
    # What a prefix cache relies on: the rest after a cached state is the rest of the whole.
    fn = prefill(path)
    case = base_case("k3", [700], checkpoint_offsets=[[128, 640]])
    got = call(fn, case)
    for row, offset in enumerate((128, 640)):
        rest = call(fn, piece(case, offset, 700, got.checkpoint_state[row]))
        assert_same_bits(rest.out[:, : 700 - offset], got.out[:, offset:700])
        assert_same_bits(rest.final_state[0], got.final_state[0])


@all_paths(["scan", "chunked", "fused", "mixed", "fused in 4 groups"])
def test_projection_views(path: str) -> None:
    # q, k and v sliced out of the one wide array that a fused projection returns.
    case = base_case("random", [130, 33], checkpoint_offsets=[[64], []])
    fn = prefill(path)
    want = call(fn, case)
    H, K, V = DIMS["H"], DIMS["K"], DIMS["V"]
    T = BASE.tokens
    wide = np.concatenate([x.reshape(1, T, -1) for x in case.args[:3]], axis=-1)

    def split(wide: Any) -> list[Any]:
        parts = wide[..., : H * K], wide[..., H * K : 2 * H * K], wide[..., 2 * H * K :]
        return [x.reshape(1, T, H, d) for x, d in zip(parts, (K, K, V), strict=True)]

    sliced = [split(wide), split(jnp.asarray(wide))]
    for q, k, v in sliced:
        got = call(fn, dataclasses.replace(case, q=q, k=k, v=v))
        for x, y in zip(got, want, strict=True):
            assert_same_bits(x, y)
    if path == "chunked":
        return  # the same arithmetic inside one jit; compiling it again takes long

    @jax.jit
    def step(wide: Any, others: Any, kwargs: Any) -> KDAResult:
        return fn(*split(wide), *others, **kwargs, lower_bound=-5.0)

    kwargs = {x: y for x, y in case.kwargs.items() if x != "lower_bound"}
    got = jax.device_get(step(wide, case.args[3:], kwargs))
    for x, y in zip(got, want, strict=True):
        assert relative_error(x, y) < 1e-6 if path == "scan" else np.array_equal(x, y)


@all_paths(["scan", "chunked", "fused", "mixed", "fused in 4 groups"])
def test_precomputed_metadata_equals_self_built(path: str) -> None:
    fn = prefill(path, once=True)
    B, T, chunk_size = 3, 80, 64
    packed = make_case("random", seq_lens=[T] * B, **DIMS)
    rows = [x.reshape(B, T, *x.shape[2:]) for x in packed.args[:5]]
    built = jax.device_get(
        fn(*rows, *packed.args[5:], initial_state=packed.initial_state, lower_bound=-5.0)
    )
    cu = np.arange(B + 1, dtype=np.int32) * T
    count = -(-T // chunk_size)
    indices = [(s, c) for s in range(B) for c in range(count)]
    for metadata in (
        packed.metadata,
        ChunkMetadata.from_cu_seqlens(cu),
        ChunkMetadata.from_chunk_indices(cu, indices, np.arange(B + 1) * count),
        jax.device_put(packed.metadata),
    ):
        got = call(fn, dataclasses.replace(packed, metadata=metadata))
        assert_same_bits(got.out.reshape(built.out.shape), built.out)
        assert_same_bits(got.final_state, built.final_state)


def test_auto_is_fused() -> None:
    prefill("fused")
    case = base_case("k3", [300, 0, 1, 65], checkpoint_offsets=[[64], [], [], [17]])
    want = call(prefill("fused"), case)
    for x, y in zip(call(functools.partial(chunk_kda_prefill), case), want, strict=True):
        assert_same_bits(x, y)
