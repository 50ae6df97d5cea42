"""A whole prefill call of the AMD build in the interpreter (cdna_sim), launch by launch.

`prefill` does for one `Case` what ffi/gpu/driver.hip does on a GPU: the same kernels out of the
same code object, with the same grids, in the same order. Results and workspace start as NaN.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import cdna_sim
import jax
import jax.numpy as jnp
import numpy as np
from cdna_sim.code_object import load
from cdna_sim.memory import POISON

from kda_jax import KDAPoolResult, KDAResult
from kda_jax.fused import FusedBackend
from kda_jax.testing import Case
from kda_jax.testing_pool import PoolCase
from kda_jax.types import KDAConfig, KDAInputs
from kda_jax.workspace import workspace

ROOT = Path(__file__).parents[1]
HIPCC = ROOT / "tools" / "amd" / "hipcc.sh"
FLAGS = ("-O3", "-DNDEBUG", "-std=c++17")  # as in ffi/rocm.cmake
ARCHITECTURES = ("gfx942", "gfx950")
TILE, WAVE, WALK_WAVES, FILL_BLOCKS = 16, 64, 4, 64
TOKEN_THREADS, TOKEN_LANES = 128, 32
GROUP_STAGES = ("groups, first walk", "groups, scan", "groups, second walk")
_DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
_GATES = {"bounded": 0, "softplus": 1, "activated": 2}


class Tensor(ctypes.Structure):
    """ffi/kernel/problem.h."""

    _fields_ = (("data", ctypes.c_uint64), ("type", ctypes.c_int32))


_POINTERS = (
    *("A_log", "dt_bias", "initial_state", "has_initial_state", "seqs", "chunks", "checkpoints"),
    *("out", "final_state", "checkpoint_state", "state_rows", "checkpoint_rows", "workspace"),
)


class Problem(ctypes.Structure):
    """ffi/kernel/problem.h; pointers are addresses of the interpreter."""

    _fields_ = (
        *((name, Tensor) for name in ("q", "k", "v", "g", "beta")),
        *((name, ctypes.c_uint64) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in ("workspace_bytes", "T", "N", "NC", "M")),
        *((name, ctypes.c_int32) for name in ("H", "K", "V", "C")),
        *((name, ctypes.c_float) for name in ("scale", "lower_bound")),
        ("gate", ctypes.c_int32),
        *((name, ctypes.c_bool) for name in ("l2norm", "state_kv", "mixed", "in_pool")),
        *((name, ctypes.c_int32) for name in ("groups", "slab_chunks", "pool_rows")),
    )


def why_not() -> str | None:
    """Why this machine cannot compile the kernels, None if it can."""
    if shutil.which("clang++-22") or shutil.which(os.environ.get("HIPCC", "hipcc")):
        return None
    return "no HIP compiler: run tools/amd/install.sh"


@functools.cache
def code_object(arch: str, io: str, K: int) -> bytes:
    """driver.hip for one target, type of q, k, v ("BF16", "F16") and K.

    KDA_AMD_OBJECTS names a folder where tools/amd/compile.sh has just compiled the same sources
    with the same flags: each process of the tests would compile them again otherwise.
    """
    if folder := os.environ.get("KDA_AMD_OBJECTS"):
        return (ROOT / folder / f"driver.{io}_{K}.{arch}.co").read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        what = [f"-DKDA_IO={io}", f"-DKDA_K={K}", str(ROOT / "ffi" / "gpu" / "driver.hip")]
        command = [str(HIPCC), "--arch", arch, "--objects", folder, *FLAGS, *what]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}:\n{done.stderr}")
        return (Path(folder) / f"driver.{arch}.co").read_bytes()


def shared_bytes(K: int, C: int) -> int:
    """sizeof(Prologue::Shared); tools/amd/resources.json holds the same numbers, proven there."""
    channels, rows = K // TILE, C // TILE
    pairs = max(1, rows * (rows - 1) // 2)
    tiles = pairs * channels + pairs + rows
    return 4 * K * (4 * rows + pairs) + -(-4 * C // 64) * 64 + 512 * tiles


@dataclasses.dataclass
class Run:
    """What one call gave: the operator's results, and statistics by stage and launch."""

    result: Any  # KDAResult, or KDAPoolResult of a call in a pool
    stats: dict[str, list[cdna_sim.Stats]]


class _Launcher:
    """One code object, one problem, and the memory they share."""

    def __init__(self, code: bytes, problem: Problem, memory: Any, order: int) -> None:
        self.code, self.problem, self.memory, self.order = code, problem, memory, order
        self.names = [name[:-3] for name in load(code).symbols if name.endswith(".kd")]
        self.stats: dict[str, list[cdna_sim.Stats]] = {}

    def __call__(
        self,
        stage: str,
        kernel: str,
        template: str,
        grid: tuple[int, int],
        threads: int,
        *more: int,
        dynamic_lds: int = 0,
    ) -> None:
        (name,) = (n for n in self.names if kernel in n and template in n)
        stats = cdna_sim.run(
            self.code,
            name,
            grid,
            threads,
            [bytes(self.problem), *map(np.int32, more)],
            dynamic_lds=dynamic_lds,
            memory=self.memory,
            wave_order=self.order,
        )
        self.stats.setdefault(stage, []).append(stats)


def _launch(p: Problem, run: _Launcher) -> None:
    """GpuDriver::run of driver.hip."""
    if p.C == 1:
        rows = TOKEN_THREADS // min(TOKEN_LANES, p.K // 4) * 4  # of V, in a block
        blocks = p.N * p.H * -(-p.V // rows)
        run("tokens", "tokens_kernel", f"Li{p.K}E", (blocks, 1), TOKEN_THREADS)
        return
    sizes = f"Li{p.K}ELi{p.C}E"
    walk, slices, unbounded = WALK_WAVES * WAVE, p.V // TILE, p.gate != 0

    def waves(n: int) -> tuple[int, int]:
        return -(-n // WALK_WAVES), 1

    def prologue(stage: str, policy: str, gate: bool, blocks: int, first: int, last: int) -> None:
        which, lds = f"{policy}{sizes}Lb{gate:d}E", shared_bytes(p.K, p.C)
        threads = p.C // TILE * WAVE
        grid = blocks, 1
        run(stage, "prologue_kernel", which, grid, threads, first, last, dynamic_lds=lds)

    slab = p.NC if p.groups > 1 or p.NC == 0 else p.slab_chunks
    slabs = [(first, min(first + slab, p.NC)) for first in range(0, p.NC, max(slab, 1))]
    for first, last in slabs:
        prologue("prologue", "MixedPolicyE", unbounded, (last - first) * p.H, first, last)
        if p.groups == 1:
            which = f"MixedPolicyE{sizes}"
            run("walk", "walk_kernel", which, waves(p.N * p.H * slices), walk, first, last)
    if p.groups > 1 and p.NC > 0:
        heads, between = p.N * p.H, p.groups - 1
        of = (heads * between * (slices + p.K // TILE), heads * slices, heads * between * slices)
        for number, (stage, n) in enumerate(zip(GROUP_STAGES, of, strict=True), 1):
            run(stage, "group_kernel", f"{sizes}Li{number}E", waves(n), walk)
    for first, last in slabs or [(0, 0)]:
        blocks = max((last - first) * p.H, FILL_BLOCKS)
        prologue("second prologue", "WidePolicyE", True, blocks, first, last)
        if last > first:
            which = f"WidePolicyE{sizes}"
            run("second walk", "walk_kernel", which, waves(p.N * p.H * slices), walk, first, last)


def packed(case: Case, groups: int, layout: str) -> tuple[KDAInputs, KDAConfig]:
    """The arrays and options that reach the custom call; the case's states are [V, K]."""
    arrays = [x[0] for x in case.args[:5]]
    state = case.initial_state
    if state is not None and layout == "kv":
        state = np.ascontiguousarray(state.swapaxes(-1, -2))
    gate = "softplus" if case.lower_bound is None else "bounded"
    scale = case.q.shape[-1] ** -0.5
    config = KDAConfig(scale, gate, case.lower_bound or 0.0, True, layout, groups)
    rest = (case.A_log, case.dt_bias, state, case.has_initial_state)
    return KDAInputs(*arrays, *rest), config


def prefill(
    arch: str,
    given: Case | PoolCase,
    *,
    groups: int = 1,
    layout: str = "vk",
    slab: int = 0,
    order: int = 1,
    missing_bytes: int = 0,
) -> Run:
    """One call of the operator on ``arch``; ``slab`` chunks at a time, 0: as the library does.

    ``missing_bytes``: at the end of the workspace, which the kernels are told to be whole.
    """
    pool = given if isinstance(given, PoolCase) else None
    case = given.case if isinstance(given, PoolCase) else given
    inputs, config = packed(case, groups, layout)
    m, (T, H, K), V = case.metadata, inputs.q.shape, inputs.v.shape[-1]
    N, M, NC = m.capacity.sequences, m.capacity.checkpoints, m.capacity.chunks
    chunks, num_bytes = workspace("rocm", H, K, V, m, groups, pool is not None)
    if slab:
        rows = m.chunk_size // TILE
        elements = 3 * m.chunk_size * K + rows * (rows + 1) * TILE * TILE
        per_chunk = H * (2 * elements + 4 * K + 128)
        chunks, num_bytes = slab, num_bytes - (chunks - slab) * per_chunk
        num_bytes += 8 * H * K * V if pool and slab < NC else 0
    state = (V, K) if layout == "vk" else (K, V)
    poison = functools.partial(np.full, fill_value=POISON, dtype=np.uint32)
    out = np.full((T, H, V), np.nan, inputs.v.dtype)
    final, saved = (poison((n, H, *state)).view(np.float32) for n in (N, M))
    result: Any = KDAResult(out, final, saved)
    if pool:
        result = KDAPoolResult(out, pool.pool.copy())
    memory = cdna_sim.GlobalMemory()

    def address(array: Any, name: str, writable: bool = False) -> int:
        if array is None or array.size == 0:
            return 0
        array = np.ascontiguousarray(array) if not writable else array
        return memory.add(array, name, writable=writable).base

    problem = Problem(
        workspace=address(
            poison(num_bytes // 4).view(np.uint8)[: num_bytes - missing_bytes], "workspace", True
        ),
        workspace_bytes=num_bytes,
        **{"T": T, "N": N, "NC": NC, "M": M, "H": H, "K": K, "V": V, "C": m.chunk_size},
        **{"scale": config.scale, "lower_bound": config.lower_bound, "l2norm": True},
        **{"mixed": True, "state_kv": layout == "kv"},
        **{"gate": _GATES[config.gate], "groups": groups, "slab_chunks": chunks},
    )
    for name in ("q", "k", "v", "g", "beta"):
        array = getattr(inputs, name)
        setattr(problem, name, Tensor(address(array, name), _DTYPES[array.dtype.name]))
    for name in ("A_log", "dt_bias"):
        setattr(problem, name, address(getattr(inputs, name), name))
    for name in ("seqs", "chunks", "checkpoints"):
        setattr(problem, name, address(getattr(m, name), name))
    problem.out = address(out, "out", True)
    if pool:
        rows = pool.rows
        problem.in_pool, problem.pool_rows = True, pool.pool.shape[0]
        problem.final_state = address(result.state_cache, "state_cache", True)
        problem.initial_state = problem.checkpoint_state = problem.final_state
        problem.has_initial_state = address(rows.has_initial_state, "has_initial_state")
        problem.state_rows = address(rows.state_indices, "state_indices")
        problem.checkpoint_rows = address(rows.checkpoint_state_indices, "checkpoint rows")
    else:
        for name in ("initial_state", "has_initial_state"):
            setattr(problem, name, address(getattr(inputs, name), name))
        problem.final_state = address(final, "final_state", True)
        problem.checkpoint_state = address(saved, "checkpoint_state", True)
    io = {"bfloat16": "BF16", "float16": "F16"}[inputs.q.dtype.name]
    launcher = _Launcher(code_object(arch, io, K), problem, memory, order)
    _launch(problem, launcher)
    return Run(result._replace(out=result.out[None]), launcher.stats)


def host_prefill(case: Case, groups: int = 1, layout: str = "vk") -> KDAResult:
    """The same call through the host tile layer, with the same operand types."""
    inputs, config = packed(case, groups, layout)
    call = jax.jit(lambda x, m: FusedBackend(mixed=True).run(x, config, m))
    result = call(jax.tree.map(jnp.asarray, inputs), case.metadata)
    return KDAResult(result.out[None], *map(np.asarray, result[1:]))
