"""A short convolution of the AMD build in the interpreter (cdna_sim): ffi/gpu/conv.hip on one GPU.

Results start as NaN.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import cdna_sim
import numpy as np
from cdna_prefill import FLAGS, HIPCC, ROOT, Tensor
from cdna_sim.code_object import load

from kda_jax import ChunkMetadata

THREADS, RUN, CHANNELS, PARTS = 128, 16, 8, 3
_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}


class Part(ctypes.Structure):
    """ffi/gpu/conv_problem.h; pointers are addresses of the interpreter."""

    _fields_ = (
        ("x", ctypes.c_uint64),
        ("weight", Tensor),
        *((name, ctypes.c_uint64) for name in ("initial", "y", "final", "saved")),
        *((name, ctypes.c_int32) for name in ("C", "first_block")),
    )


class Problem(ctypes.Structure):
    """ffi/gpu/conv_problem.h."""

    _fields_ = (
        ("parts", Part * PARTS),
        *((name, ctypes.c_uint64) for name in ("seqs", "checkpoints", "has_initial")),
        *((name, ctypes.c_int64) for name in ("T", "N", "M")),
        *((name, ctypes.c_int32) for name in ("num_parts", "type")),
        ("silu", ctypes.c_bool),
    )


@functools.cache
def code_object(arch: str, io: str) -> bytes:
    """conv.hip for one target and type; KDA_AMD_OBJECTS as in cdna_prefill.py."""
    if folder := os.environ.get("KDA_AMD_OBJECTS"):
        return (ROOT / folder / f"conv.{io}.{arch}.co").read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        source = str(ROOT / "ffi" / "gpu" / "conv.hip")
        options = ["--arch", arch, "--objects", folder, *FLAGS, f"-DKDA_IO={io}", source]
        subprocess.run([str(HIPCC), *options], check=True, capture_output=True)
        return (Path(folder) / f"conv.{arch}.co").read_bytes()


def convolve(
    arch: str,
    xs: list[Any],
    weights: list[Any],
    states: list[Any] | None,
    has: Any,
    metadata: ChunkMetadata,
    *,
    silu: bool = True,
) -> tuple[list[Any], list[Any], list[Any], cdna_sim.Stats]:
    """y, final and checkpoint states of each part, and the launch's statistics."""
    memory = cdna_sim.GlobalMemory()
    dtype, T = xs[0].dtype, xs[0].shape[0]
    N, M = metadata.capacity.sequences, metadata.capacity.checkpoints

    def address(array: Any, name: str, writable: bool = False) -> int:
        if array is None or array.size == 0:
            return 0
        return memory.add(array, name, writable=writable).base

    ys, finals, insides = (
        [np.full((rows, x.shape[1], *rest), np.nan, dtype) for x in xs]
        for rows, rest in ((T, ()), (N, (3,)), (M, (3,)))
    )
    problem = Problem(num_parts=len(xs), type=_TYPES[dtype.name], silu=silu, T=T, N=N, M=M)
    problem.seqs = address(np.array(metadata.seqs), "seqs")
    problem.checkpoints = address(np.array(metadata.checkpoints), "checkpoints")
    problem.has_initial = address(has, "has_initial")
    blocks = 0
    for i, (x, weight) in enumerate(zip(xs, weights, strict=True)):
        part = problem.parts[i]
        part.x, part.C, part.first_block = address(x, f"x{i}"), x.shape[1], blocks
        part.weight = Tensor(address(weight, f"weight{i}"), _TYPES[weight.dtype.name])
        part.initial = address(states[i] if states else None, f"initial{i}")
        part.y = address(ys[i], f"y{i}", True)
        part.final = address(finals[i], f"final{i}", True)
        part.saved = address(insides[i], f"saved{i}", True)
        rows = -(-T // RUN) + N + M
        blocks += -(-rows * (x.shape[1] // CHANNELS) // THREADS)
    code = code_object(arch, {"bfloat16": "BF16", "float16": "F16"}[dtype.name])
    (name,) = (n[:-3] for n in load(code).symbols if n.endswith(".kd"))
    stats = cdna_sim.run(code, name, (blocks, 1), THREADS, [bytes(problem)], memory=memory)
    return ys, finals, insides, stats
