"""`kda_jax.warmup`: which capacities it meets, and that serving then compiles nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from programs import count_compiles, needs_fused, quick_jit

from kda_jax import Capacity, ChunkMetadata, chunk_kda_prefill, warmup
from kda_jax.testing import make_case
from kda_jax.warming import buckets, metadata_for


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_the_buckets_are_those_that_a_server_meets(chunk_size: int) -> None:
    maxima = (700, 9, 5)
    found = buckets(*maxima, chunk_size)
    assert len(set(found)) == len(found)
    met = {
        Capacity.bucket(t, n, m, chunk_size)
        for t in range(1, maxima[0] + 1)
        for n in range(1, min(t, maxima[1]) + 1)
        for m in range(min(t, maxima[2]) + 1)
    }
    # A step of few tokens rounds up to 64 of them, more than its sequences need: none is missing.
    assert met == set(found)
    assert found[0] == Capacity.bucket(*maxima[:2], 0, chunk_size)
    # The first are all lengths with the most sequences.
    lengths = [c.tokens for c in found[:8]]
    assert lengths == sorted(lengths, reverse=True) == [768, 512, 384, 256, 192, 128, 96, 64]
    assert {(c.sequences, c.checkpoints) for c in found[:8]} == {(16, 0)}


@pytest.mark.parametrize("capacity", [*buckets(300, 64, 8, 16), Capacity.bucket(8192, 64, 32, 16)])
def test_metadata_of_a_capacity(capacity: Capacity) -> None:
    metadata = metadata_for(capacity, 16)
    assert metadata.capacity == capacity and metadata.num_tokens == capacity.tokens
    assert metadata.num_checkpoints == capacity.checkpoints


@needs_fused
def test_a_warm_operator_compiles_nothing() -> None:
    options: dict[str, Any] = {"heads": 3, "K": 64, "V": 32, "dtype": "float32"}
    report = warmup(max_tokens=100, max_sequences=2, max_checkpoints=1, **options)
    assert report.count("compiled") == len(report.programs) == report.reachable == 12
    assert "12 of 12 capacities in" in str(report) and "12 compiled" in str(report)
    assert all(program.seconds > 0 for program in report.programs)
    for lengths, offsets in (([70], None), ([50, 11], [[13], []]), ([1, 99], None)):
        case = make_case(
            "random",
            seq_lens=lengths,
            H=3,
            K=64,
            V=32,
            initial_state=[True] * len(lengths),
            checkpoint_offsets=offsets,
            capacity="bucket",
        )
        with count_compiles() as compiles:
            jax.block_until_ready(chunk_kda_prefill(*case.args, **case.kwargs))
        assert not compiles
    again = warmup(max_tokens=100, max_sequences=2, max_checkpoints=1, **options)
    assert again.count("memory") == 12


def test_a_step_of_ones_own() -> None:
    met: list[ChunkMetadata] = []
    program = quick_jit(lambda metadata, x: x.sum() + metadata.seqs.sum())

    def step(metadata: ChunkMetadata) -> jax.Array:
        met.append(metadata)
        return program(metadata, np.zeros((metadata.capacity.tokens, 4), np.float32))

    report = warmup(step, max_tokens=1000, max_sequences=4, limit=5, chunk_size=32, progress=False)
    assert [p.capacity.tokens for p in report.programs] == [1024, 768, 512, 384, 256]
    assert report.reachable > 5 and report.count("compiled") == 5
    assert {m.chunk_size for m in met} == {32}
    with count_compiles() as compiles:
        step(ChunkMetadata.from_seq_lens([200, 1, 30], chunk_size=32, capacity="bucket"))
    assert not compiles


def test_wrong_arguments() -> None:
    for wrong, message in (
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 1, "max_sequences": 0}, "max_sequences is 0"),
        ({"max_tokens": 1, "max_checkpoints": -1}, "max_checkpoints is -1"),
        ({"max_tokens": 1, "limit": 0}, "limit is 0"),
        ({"max_tokens": 1, "chunk_size": 48}, "48"),
        ({"max_tokens": 1, "backend": "best"}, "best"),
    ):
        with pytest.raises(ValueError, match=message):
            warmup(**wrong)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="K = 64 and 128"):
        warmup(max_tokens=1, K=32, V=32, backend="fused")


SERVER = """
import sys, jax, kda_jax
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
report = kda_jax.warmup(max_tokens=96, heads=2, K=64, V=32, dtype="float32")
print(*(program.source for program in report.programs), sep=", ")
"""


@needs_fused
def test_the_second_process_finds_the_programs_of_the_first(tmp_path: Any) -> None:
    def serve() -> str:
        done = subprocess.run(
            [sys.executable, "-c", SERVER, str(tmp_path)],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert serve() == "compiled, compiled"
    assert serve() == "persistent cache, persistent cache"
