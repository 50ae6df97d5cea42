"""No sync, no retrace: what a serving step costs besides its own work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from programs import BACKENDS, FUSED, assert_trees_equal, count_compiles, needs_fused, quick_jit

from kda_jax import ChunkMetadata, KDAResult, chunk_kda_prefill
from kda_jax.call import _run
from kda_jax.testing import Case, make_case, relative_error

TOKENS, H, K, V = 256, 2, 64, 32
FEW = 8  # results of the 50 that are compared with another program's


@functools.cache
def mixes() -> tuple[ChunkMetadata, ...]:
    """50 batches of one bucket: 5..8 sequences, 193..256 tokens, 3 or 4 checkpoints."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(50):
        total, count = int(rng.integers(193, 257)), int(rng.integers(5, 9))
        cuts = np.sort(rng.integers(0, total, count - 1))
        lengths = np.diff(np.concatenate([[0], cuts, [total]]))
        offsets: list[list[int]] = [[] for _ in lengths]
        longest = int(np.argmax(lengths))
        some = rng.choice(lengths[longest], size=rng.integers(3, 5), replace=False) + 1
        offsets[longest] = some.tolist()
        found.append(
            ChunkMetadata.from_seq_lens(
                lengths, chunk_size=16, checkpoint_offsets=offsets, capacity="bucket"
            )
        )
    return tuple(found)


@functools.cache
def arrays() -> dict[str, Any]:
    """The arguments of a step besides the metadata, on the device."""
    case = make_case("random", seq_lens=[TOKENS], H=H, K=K, V=V, initial_state=False)
    states = np.random.default_rng(1).standard_normal((8, H, V, K)).astype(np.float32)
    has = np.arange(8) % 3 != 0
    return jax.device_put({"args": case.args, "initial_state": states, "has_initial_state": has})


def make_step(backend: str) -> tuple[Callable[..., KDAResult], list[None]]:
    """A step function, and a list that grows by one at each trace of it."""
    traces: list[None] = []

    def step(metadata: ChunkMetadata, args: Any, **options: Any) -> KDAResult:
        traces.append(None)
        return chunk_kda_prefill(*args, metadata=metadata, backend=backend, **options)

    return step, traces


@functools.cache
def scan_results() -> list[KDAResult]:
    step = quick_jit(make_step("scan")[0])
    return [step(metadata, **arrays()) for metadata in mixes()[:FEW]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_trace_and_one_compile_for_50_length_mixes(backend: str) -> None:
    assert len({m.capacity for m in mixes()}) == 1
    assert len({m.seq_lens.tobytes() for m in mixes()}) == 50
    step, traces = make_step(backend)
    compiled = quick_jit(step)
    given = arrays()
    results = []
    with jax.transfer_guard("disallow"), count_compiles() as compiles:
        for metadata in mixes():
            results.append(compiled(jax.device_put(metadata), **given))
        jax.block_until_ready(results)
    assert len(traces) == 1
    assert len(compiles) == 1
    assert compiled._cache_size() == 1
    for got, want in zip(results[:FEW], scan_results(), strict=True):
        for x, ref in zip(got, want, strict=True):
            assert relative_error(x, ref) < 1e-5


@needs_fused
def test_another_bucket_is_another_trace() -> None:
    """The counters count, and nothing but the capacity matters."""
    step, traces = make_step("fused")
    compiled = jax.jit(step)
    case = make_case("random", seq_lens=[TOKENS], H=H, K=K, V=V, initial_state=False)
    with count_compiles() as compiles:
        for lengths in ([100, 20], [90, 38], [100, 29], [190]):  # buckets 128, 128, 192, 192
            metadata = ChunkMetadata.from_seq_lens(lengths, capacity="bucket")
            jax.block_until_ready(compiled(metadata, case.args))
    assert len(traces) == len(compiles) == 3  # one sequence or two is a difference, too


@pytest.mark.parametrize("backend", [FUSED, "scan"])
def test_eager_calls_compile_once(backend: str) -> None:
    case = make_case("random", seq_lens=[TOKENS], H=1, K=K, V=48, initial_state=False)

    def call(metadata: ChunkMetadata) -> None:
        jax.block_until_ready(chunk_kda_prefill(*case.args, metadata=metadata, backend=backend))

    before = _run._cache_size()
    with count_compiles() as compiles:
        for metadata in mixes()[:5]:
            call(metadata)
    assert len(compiles) == 1 and _run._cache_size() == before + 1


@pytest.mark.parametrize("backend", [FUSED, "scan"])
def test_metadata_as_static_argument(backend: str) -> None:
    step, traces = make_step(backend)
    dynamic = quick_jit(step)
    static = quick_jit(step, static_argnames="metadata")
    given = arrays()
    first, second = mixes()[:2]
    # The same content again, as another object.
    copy = ChunkMetadata.from_seq_lens(
        first.seq_lens.tolist(),
        chunk_size=16,
        checkpoint_offsets=first.checkpoint_offsets,
        capacity="bucket",
    )
    assert copy is not first
    want = [dynamic(jax.device_put(m), **given) for m in (first, copy, second, first)]
    assert len(traces) == 1
    with jax.transfer_guard("disallow"), count_compiles() as compiles:
        got = [static(m, **given) for m in (first, copy, second, first)]
        jax.block_until_ready(got)
    assert len(traces) == 3  # for first and for second
    assert len(compiles) == 2
    for x, ref in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if backend == "fused":
            np.testing.assert_array_equal(x, ref)
        assert relative_error(x, ref) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_device_value_is_read_while_tracing(backend: str) -> None:
    """Shapes are enough to trace: there are no values to read here at all."""
    step, _ = make_step(backend)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (mixes()[0], arrays()))
    result = jax.eval_shape(lambda metadata, given: step(metadata, **given), *shapes)
    assert [x.shape for x in result] == [(1, TOKENS, H, V), (8, H, V, K), (4, H, V, K)]


@pytest.mark.parametrize("backend", [FUSED, "scan"])
def test_ahead_of_time(backend: str) -> None:
    step, traces = make_step(backend)
    compiled = quick_jit(step).lower(mixes()[0], **arrays()).compile()
    for metadata, want in zip(mixes()[:3], scan_results(), strict=False):
        got = compiled(metadata, **arrays())
        for x, ref in zip(got, want, strict=True):
            assert relative_error(x, ref) < 1e-5
    assert len(traces) == 1
    other = ChunkMetadata.from_seq_lens([TOKENS], capacity="bucket")
    with pytest.raises(TypeError):
        compiled(other, **arrays())


@needs_fused
def test_jit_of_jit_and_leaks() -> None:
    case = _small_case()
    want = chunk_kda_prefill(*case.args, **case.kwargs, backend="fused")

    @jax.jit
    def inner(args: Any, metadata: ChunkMetadata, state: Any) -> KDAResult:
        options = {"metadata": metadata, "initial_state": state, "backend": "fused"}
        return chunk_kda_prefill(*args, **options)

    @jax.jit
    def outer(args: Any, metadata: ChunkMetadata, state: Any) -> KDAResult:
        once = inner(args, metadata, state)
        again = inner(args, metadata, state)
        return jax.tree.map(lambda x, y: (x + y) / 2, once, again)

    with jax.checking_leaks():
        got = outer(case.args, case.metadata, case.initial_state)
    assert_trees_equal(got, want)


@needs_fused
def test_disable_jit() -> None:
    """As one debugs: every step runs by itself."""
    case = _small_case()
    want = chunk_kda_prefill(*case.args, **case.kwargs, backend="fused")
    with jax.disable_jit():
        got = chunk_kda_prefill(*case.args, **case.kwargs, backend="fused")
    assert_trees_equal(got, want)


@pytest.mark.parametrize("backend", [FUSED, "scan"])
def test_debug_nans_finds_none(backend: str) -> None:
    """NaN in padding and in states that do not count reaches no result."""
    case = make_case(
        "random",
        seq_lens=[20, 0, 3],
        H=1,
        K=64,
        V=16,
        initial_state=[True, True, False],
        checkpoint_offsets=[[7], [], []],
        capacity="bucket",
    )
    with jax.debug_nans(True):
        result = chunk_kda_prefill(*case.args, **case.kwargs, backend=backend)
    assert all(np.isfinite(x).all() for x in result)


def _small_case() -> Case:
    return make_case(
        "random", seq_lens=[9, 0, 4], H=1, K=64, V=16, checkpoint_offsets=[[5], [], []]
    )
