"""`jax.export`, and lowering for GPUs on a host that has none."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from programs import FUSED, assert_trees_equal, needs_fused, quick_jit

from kda_jax import ChunkMetadata, KDAResult, chunk_kda_prefill, export_checks, supports
from kda_jax.native import TARGET
from kda_jax.testing import Case, make_case, relative_error

pytest.importorskip("flatbuffers", reason="jax.export serializes with it")

H, K, V = 2, 64, 32
PLATFORMS = ["cpu", "cuda", "rocm"]


def example(
    seed: int = 0,
    lengths: Any = (40, 0, 1, 70),
    dtype: str = "float32",
    chunk_size: int = 16,
) -> Case:
    return make_case(
        "random",
        seq_lens=lengths,
        H=H,
        K=K,
        V=V,
        seed=seed,
        dtype=dtype,
        chunk_size=chunk_size,
        initial_state=[True, True, False, True],
        checkpoint_offsets=[[7], [], [], [64]],
        capacity="bucket",
    )


def arguments(case: Case) -> tuple[Any, ...]:
    return case.args, case.metadata, case.initial_state, case.has_initial_state


def step(backend: str) -> Callable[..., KDAResult]:
    def run(args: Any, metadata: ChunkMetadata, state: Any, has: Any) -> KDAResult:
        options = {"metadata": metadata, "initial_state": state, "has_initial_state": has}
        return chunk_kda_prefill(*args, **options, backend=backend)

    return run


def custom_calls(text: str) -> list[str]:
    """The lines of a StableHLO module that call the kernel."""
    return [line for line in text.splitlines() if f"@{TARGET}(" in line]


@functools.cache
def exported(backend: str) -> bytes:
    fn = jax.jit(step(backend))
    checks = export_checks()
    program = jax.export.export(fn, platforms=PLATFORMS, disabled_checks=checks)
    return bytes(program(*arguments(example())).serialize())


@pytest.mark.parametrize("backend", [FUSED, "auto", "chunked"])
def test_round_trip_on_the_cpu(backend: str) -> None:
    """One artifact for three platforms, metadata as an argument: any batch of its bucket."""
    program = jax.export.deserialize(bytearray(exported(backend)))
    assert program.platforms == tuple(PLATFORMS)
    assert isinstance(program.in_tree.unflatten(list(program.in_avals))[0][1], ChunkMetadata)
    calls = len(custom_calls(program.mlir_module()))
    assert (calls > 0) == (backend == "fused" or (backend == "auto" and _fused_works()))
    direct = quick_jit(step("auto"))
    for case in (example(), example(seed=1, lengths=(30, 1, 0, 97))):
        got, want = (f(*arguments(case)) for f in (quick_jit(program.call), direct))
        assert isinstance(got, KDAResult)
        if backend == "chunked":  # compiled another way
            for x, ref in zip(got, want, strict=True):
                assert relative_error(x, ref) < 1e-6
        else:
            assert_trees_equal(got, want)


def test_another_bucket_is_refused() -> None:
    program = jax.export.deserialize(bytearray(exported("chunked")))
    with pytest.raises(ValueError):
        program.call(*arguments(example(lengths=(200, 1, 0, 70))))


@needs_fused
def test_a_process_that_only_loads_it(tmp_path: Path) -> None:
    """`import kda_jax` registers the types and the handler; nothing else of it has run."""
    case = example()
    (tmp_path / "program").write_bytes(exported("fused"))
    np.savez(tmp_path / "arrays", *jax.tree.leaves(arguments(case)))
    script = """
import sys, jax, numpy as np, kda_jax
folder = sys.argv[1]
program = jax.export.deserialize(bytearray(open(folder + "/program", "rb").read()))
arrays = list(np.load(folder + "/arrays.npz").values())
(args, metadata, state, has), _ = jax.tree.unflatten(program.in_tree, arrays)
np.savez(folder + "/result", *program.call(args, metadata, state, has))
"""
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    got = list(np.load(tmp_path / "result.npz").values())
    want = step("fused")(*arguments(case))
    assert_trees_equal(got, [np.asarray(x) for x in want])


@needs_fused
def test_the_check_that_export_needs_off() -> None:
    with pytest.raises(ValueError, match="no compatibility guarantees"):
        jax.export.export(jax.jit(step("fused")))(*arguments(example()))


@needs_fused
def test_static_metadata_in_an_exported_program() -> None:
    """A fixed layout: the tables are constants of the program."""
    case = example()
    fn = jax.jit(lambda *args: chunk_kda_prefill(*args, metadata=case.metadata, backend="fused"))
    export = jax.export.export(fn, platforms=PLATFORMS, disabled_checks=export_checks())
    loaded = jax.export.deserialize(export(*case.args).serialize())
    assert_trees_equal(loaded.call(*case.args), fn(*case.args))


@needs_fused
@pytest.mark.parametrize("platform", PLATFORMS)
def test_fused_lowers_to_one_call(platform: str) -> None:
    case = example(dtype="bfloat16", chunk_size=64)
    traced = jax.jit(step("fused")).trace(*arguments(case))
    (line,) = custom_calls(traced.lower(lowering_platforms=(platform,)).as_text())
    operands, results = (
        re.findall(r"tensor<([^>]*)>", side) for side in line.rsplit(" : ", 1)[1].split("->")
    )
    T, N, NC, M = case.metadata.capacity.tokens, 4, case.metadata.capacity.chunks, 2
    row, state = f"{T}x{H}x", f"x{H}x{V}x{K}xf32"
    assert operands == [
        f"{row}{K}xbf16",
        f"{row}{K}xbf16",
        f"{row}{V}xbf16",
        f"{row}{K}xbf16",
        f"{T}x{H}xbf16",
        f"{H}xf32",
        f"{H}x{K}xf32",
        f"{N}{state}",
        f"{N}xi1",
        f"{N}x4xi32",
        f"{NC}x4xi32",
        f"{M}x2xi32",
    ]
    assert results[:3] == [f"{row}{V}xbf16", f"{N}{state}", f"{M}{state}"]
    assert re.fullmatch(r"\d+xui8", results[3])
    for attribute in ("gate = 0 : i32", "chunk_size = 64 : i32", "lower_bound = -5.0", "l2norm"):
        assert attribute in line


@needs_fused
def test_absent_operands_are_empty() -> None:
    case = example()
    fn = jax.jit(lambda *args: chunk_kda_prefill(*args, backend="fused", lower_bound=None))
    (line,) = custom_calls(fn.lower(*case.args).as_text())
    operands = re.findall(r"tensor<([^>]*)>", line.rsplit(" : ", 1)[1].split("->")[0])
    assert operands[7:9] == ["0xf32", "0xi1"] and operands[11] == "0x2xi32"
    assert "gate = 1 : i32" in line


def test_auto_lowers_to_plain_jax_where_there_is_no_kernel() -> None:
    """For a platform that no kernel is built for here, whatever this host has."""
    traced = jax.jit(step("auto")).trace(*arguments(example()))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert not custom_calls(text) and "stablehlo.while" in text
    if _fused_works():
        assert len(custom_calls(traced.lower(lowering_platforms=("cpu",)).as_text())) == 1


def _fused_works() -> bool:
    return bool(supports("fused"))
