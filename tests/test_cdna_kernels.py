"""The machine code of the AMD build, executed by the interpreter of tests/cdna_sim.

Compared with the float64 scan, and with the host tile layer in the same arithmetic: same inputs,
same operand types, other code for every tile operation. `KDA_AMD=required` turns a skip for want of
the tool chain into a failure (`make amd-test`).
"""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tinygrad", reason="tinygrad decodes AMD machine code (extra: amd)")

import cdna_prefill
import cdna_sim
from cases import assert_same_bits
from cdna_sim.code_object import load

from kda_jax import KDAResult, supports
from kda_jax.testing import Case, make_case, relative_error, scan_in_float64
from kda_jax.testing_pool import pool_case

# Relative errors: against float64 what bfloat16 costs, against the host what the last bits of exp2
# and the order of sums cost (an output may round the other way in bfloat16).
SCAN, HOST_OUT, HOST_STATE = 1e-2, 1e-3, 2e-4
DIMS: dict[str, Any] = {"H": 1, "K": 64, "V": 32, "dtype": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A case and how it is launched."""

    case: Case
    groups: int = 1
    layout: str = "vk"
    slab: int = 0

    @property
    def how(self) -> dict[str, Any]:
        return {"groups": self.groups, "layout": self.layout, "slab": self.slab}


def cell(kind: Any, seq_lens: list[int], how: dict[str, Any] | None = None, **options: Any) -> Cell:
    return Cell(make_case(kind, seq_lens=seq_lens, **DIMS | options), **how or {})


PACK: dict[str, Any] = {
    "initial_state": [True, False, True, True, False],
    "checkpoint_offsets": [[], [16], [], [], [17]],
    "capacity": "bucket",  # padding holds NaN
}
CELLS = {
    "one sequence, a checkpoint": cell("random", [130], checkpoint_offsets=[[70]]),
    "pack": cell("random", [1, 64, 65, 0, 17], **PACK),
    "softplus": cell("random", [130], lower_bound=None),
    "softplus, g to -150": cell("saturated", [80], lower_bound=None),
    "g = -5": cell("saturated", [130]),
    "near-equal keys": cell("slow", [130]),
    "2 groups": cell("random", [160, 65], how={"groups": 2}),
    "4 groups": cell("random", [256], V=16, how={"groups": 4}),
    "K = 128": cell("random", [65], K=128, checkpoint_offsets=[[64]]),
    "K = 128, softplus, 3 groups": cell(
        "k3", [180], K=128, V=16, lower_bound=None, how={"groups": 3}
    ),
    "float16, chunks of 32, slabs, [K, V] states": cell(
        *("random", [70, 1]),
        **{"H": 3, "V": 48, "dtype": "float16", "chunk_size": 32, "capacity": "bucket"},
        how={"slab": 2, "layout": "kv"},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def tool_chain() -> None:
    if reason := cdna_prefill.why_not():
        missing(reason)


def missing(reason: str) -> None:
    if os.environ.get("KDA_AMD") == "required":
        pytest.fail(reason)
    pytest.skip(reason)


def as_vk(result: KDAResult, layout: str) -> KDAResult:
    if layout == "vk":
        return result
    return KDAResult(result[0], *(np.swapaxes(x, -1, -2) for x in result[1:]))


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("arch", cdna_prefill.ARCHITECTURES)
def test_kernels(arch: str, name: str) -> None:
    chosen = CELLS[name]
    got = as_vk(cdna_prefill.prefill(arch, chosen.case, **chosen.how).result, chosen.layout)
    want = scan_in_float64(chosen.case)
    for what, x, ref in zip(KDAResult._fields, got, want, strict=True):
        error = relative_error(x, ref)  # NaN, of which every result is full at first, is not <=
        assert error <= SCAN, f"{what}: {error:.2e} from float64"
    support = supports("fused", K=chosen.case.q.shape[-1], V=chosen.case.v.shape[-1])
    if not support:
        missing(f"compared with float64 only: {support.reason}")
    host = as_vk(
        cdna_prefill.host_prefill(chosen.case, chosen.groups, chosen.layout), chosen.layout
    )
    for what, x, ref in zip(KDAResult._fields, got, host, strict=True):
        error = relative_error(x, ref)
        bound = HOST_OUT if what == "out" else HOST_STATE
        assert error <= bound, f"{what}: {error:.2e} from the host"


@pytest.mark.parametrize("name", ["one sequence, a checkpoint", "4 groups"])
@pytest.mark.parametrize("arch", cdna_prefill.ARCHITECTURES)
def test_order_of_waves_does_not_matter(arch: str, name: str) -> None:
    chosen = CELLS[name]
    forward, backward = (
        cdna_prefill.prefill(arch, chosen.case, **chosen.how, order=order).result
        for order in (1, -1)
    )
    for what, x, ref in zip(KDAResult._fields, backward, forward, strict=True):
        assert_same_bits(x, ref, what)


def test_every_stage_multiplies_on_the_matrix_unit() -> None:
    chosen = CELLS["4 groups"]
    stats = cdna_prefill.prefill("gfx942", chosen.case, **chosen.how).stats
    first = ["prologue", *cdna_prefill.GROUP_STAGES]
    assert list(stats) == [*first, "second prologue", "second walk"]
    assert all(launch.classes["mfma"] for name in first for launch in stats[name])
    # Nothing was too large for fp16 here, so the second pass did nothing.
    assert not any(launch.classes["mfma"] for name in list(stats)[-2:] for launch in stats[name])


@pytest.mark.parametrize("arch", cdna_prefill.ARCHITECTURES)
def test_values_beyond_float16_make_a_second_pass(arch: str) -> None:
    chosen = CELLS["one sequence, a checkpoint"]
    large = copy.deepcopy(chosen)
    large.case.v[:, 100:] *= 2.0**20
    before = cdna_prefill.prefill(arch, chosen.case).result
    run = cdna_prefill.prefill(arch, large.case)
    assert_same_bits(run.result.out[:, :100], before.out[:, :100], "before the large values")
    assert_same_bits(run.result.checkpoint_state, before.checkpoint_state, "checkpoint before them")
    for what, x, ref in zip(
        KDAResult._fields, run.result, scan_in_float64(large.case), strict=True
    ):
        assert relative_error(x, ref) <= SCAN, what
    assert all(run.stats[name][0].classes["mfma"] for name in ("second prologue", "second walk"))


POOLS: dict[str, tuple[list[int], dict[str, Any], float]] = {
    "rows": ([1, 64, 65, 0, 17], {}, 1.0),
    "slabs": ([130, 70], {"slab": 2}, 1.0),
    "groups": ([130, 70], {"groups": 3}, 1.0),
    "beyond fp16": ([1, 64, 65, 0, 17], {}, 1e6),
    "beyond fp16, slabs": ([130, 70], {"slab": 2}, 1e6),
    "beyond fp16, groups": ([130, 70], {"groups": 3}, 1e6),
}


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("arch", cdna_prefill.ARCHITECTURES)
def test_states_in_a_pool(arch: str, name: str) -> None:
    """The bits of states by sequence, also where a second pass starts from the row it replaces."""
    lengths, how, factor = POOLS[name]
    case = make_case(
        "random",
        seq_lens=lengths,
        **DIMS,
        initial_state=[n != 1 for n in range(len(lengths))],
        checkpoint_offsets=[[1], [33], *[[] for _ in lengths[2:]]],
        capacity="bucket",
    )
    state = case.initial_state.copy()
    state[:, :, 17] *= factor  # of one slice alone
    case = dataclasses.replace(case, initial_state=state)
    none = [2, 3] if name == "rows" else []  # have no row in the pool
    p = pool_case(case, without=none, dropped=[1] if none else [])
    want = cdna_prefill.prefill(arch, p.case, **how)
    got = cdna_prefill.prefill(arch, p, **how)
    assert_same_bits(got.result.out, want.result.out, "out")
    assert_same_bits(got.result.state_cache, p.after(want.result), "state_cache")
    assert any(x.classes["mfma"] for x in got.stats["second walk"]) == (factor > 1)


def test_a_workspace_that_is_too_small_faults() -> None:
    """The workspace is exactly as large as kda_jax/workspace.py says, and all of it is needed."""
    with pytest.raises(cdna_sim.MemoryFault, match="workspace"):
        cdna_prefill.prefill("gfx950", CELLS["near-equal keys"].case, missing_bytes=4)


def test_dynamic_lds_is_all_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = cdna_prefill.shared_bytes
    monkeypatch.setattr(cdna_prefill, "shared_bytes", lambda K, C: real(K, C) - 8)
    with pytest.raises(cdna_sim.MemoryFault, match="LDS"):
        cdna_prefill.prefill("gfx950", CELLS["near-equal keys"].case)


@pytest.mark.parametrize("arch", cdna_prefill.ARCHITECTURES)
def test_the_library_holds_the_code_that_runs_here(arch: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(cdna_prefill.HIPCC.parent)])
    import code_objects
    import rocm_module

    if not rocm_module.library().exists():
        missing(f"{rocm_module.library()} is not built: make amd-library with this Python")
    mine = load(cdna_prefill.code_object(arch, "BF16", 64))
    kernels = {name for name in mine.symbols if name.endswith(".kd")}
    shipped = [
        load(objects[arch]) for objects in code_objects.bundles(rocm_module.library().read_bytes())
    ]
    (theirs,) = (one for one in shipped if kernels <= one.symbols.keys())
    for name in sorted(kernels):
        assert mine.kernel(name[:-3]) == theirs.kernel(name[:-3])
    first = min(mine.kernel(name[:-3]).entry for name in kernels)
    end = mine.symbols["_DYNAMIC"]  # it has the length of names, one of which differs in each build
    np.testing.assert_array_equal(mine.image[first:end], theirs.image[first:end])
