"""`plan_checkpoints` with policy "last_block": an engine's metadata cases, one by one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kda_jax import ChunkMetadata
from kda_jax.serving import CheckpointPlan, CheckpointRule, plan_checkpoints

WIDTH = 16


def table(rows: int, width: int = WIDTH) -> np.ndarray:
    """Row r, column c names block r * width + c; block 0 is the null block."""
    return np.arange(rows * width).reshape(rows, width)


def engine(
    lengths: list[int],
    new: list[int],
    *,
    block: int = 64,
    unit: int | None = None,
    alignment: int | None = 64,
    blocks: int = 1,
    drop: bool = False,
    **options: Any,
) -> CheckpointPlan:
    rule = CheckpointRule(block, unit, alignment, blocks, drop, "last_block")
    computed = np.subtract(lengths, new)
    options.setdefault("block_tables", table(len(lengths)))
    return plan_checkpoints(rule, lengths, computed, **options)


def flat(plan: CheckpointPlan) -> tuple[list[int], list[int]] | None:
    """Offset (0: none) and destination (-1: none) of each row."""
    if plan.checkpoint_offsets is None:
        return None
    offsets, destinations = [0] * plan.seq_lens.size, [-1] * plan.seq_lens.size
    for row, offset, destination in zip(plan.row, plan.offset, plan.destination, strict=True):
        offsets[row], destinations[row] = int(offset), int(destination)
    return offsets, destinations


def test_a_two_prompts() -> None:
    plan = engine([200, 128], [200, 128], block_tables=table(2, 4))
    assert flat(plan) == ([192, 64], [2, 4])
    assert plan.column.tolist() == [2, 0]


def test_b_a_prompt_that_goes_on() -> None:
    assert flat(engine([400, 64], [144, 64])) == ([128, 0], [5, -1])


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(("block", "unit"), [(64, 64), (64, 16), (192, 96), (256, 64)])
def test_c_never_the_live_row(block: int, unit: int, drop: bool) -> None:
    lengths = np.arange(1, 1300)
    seen = []
    for prompts in (None, lengths + 9, lengths + 70):
        rule = CheckpointRule(block, unit, 1, 1, drop, "last_block")
        plan = plan_checkpoints(rule, lengths, 0 * lengths, prompt_lens=prompts)
        live = (lengths - 1) // block
        seen.append(plan.num_checkpoints)
        assert (plan.column != live[plan.row]).all() and (plan.column >= 0).all()
    assert seen[0] and seen[1]


def test_d_the_step_starts_at_the_position() -> None:
    assert flat(engine([168], [40])) is None


def test_e_null_block_as_destination() -> None:
    blocks = table(2)
    blocks[0, 2] = 0
    plan = engine([200, 128], [200, 128], block_tables=blocks)
    assert flat(plan) == ([0, 64], [-1, WIDTH])
    assert plan.offered(0) == []


@pytest.mark.parametrize("options", [{"blocks": 0}, {"alignment": None}])
def test_f_no_blocks_reserved(options: dict[str, Any]) -> None:
    plan = engine([200, 128], [200, 128], **options)
    assert flat(plan) is None
    assert plan.offered(0) == [] and plan.offered(1) == [(128, WIDTH + 1)]  # a step end is a state


def test_g_rows_are_picked_by_index() -> None:
    # Two drafts: requests 0 and 2 verify them with three tokens each.
    plan = engine([300, 200, 400, 512, 128], [3, 200, 3, 1, 128], rows=[1, 3, 4])
    assert flat(plan) == ([192, 0, 64], [WIDTH + 2, -1, 4 * WIDTH])
    assert plan.seq_lens.tolist() == [200, 1, 128]


def test_h_caching_off() -> None:
    plan = engine([200, 128], [200, 128], caching=False)
    assert flat(plan) is None
    assert plan.offered(0) == plan.offered(1) == []


def test_i_a_decode_row_first() -> None:
    assert flat(engine([64, 200], [1, 200], rows=[1])) == ([192], [WIDTH + 2])
    assert flat(engine([64, 200], [1, 200])) == ([0, 192], [-1, WIDTH + 2])


def test_j_hash_unit_below_the_block() -> None:
    plan = engine([700], [700], block=256, unit=128)
    assert flat(plan) == ([640], [1])
    assert plan.position.tolist() == [640] and plan.column.tolist() == [1]


def test_k_off_the_alignment() -> None:
    assert flat(engine([700], [700], block=192, unit=96)) is None
    assert flat(engine([700], [700], block=192, unit=96, alignment=32)) == ([672], [2])


def test_cases_become_metadata() -> None:
    plan = engine([200, 128, 168], [200, 128, 40])
    metadata = plan.metadata()
    assert metadata == ChunkMetadata.from_seq_lens([200, 128, 40], checkpoint_offsets=[192, 64, 0])
    assert metadata.checkpoints.tolist() == [[0, 192], [1, 64]]  # the order of plan.destination
    assert engine([168], [40]).metadata() == ChunkMetadata.from_seq_lens([40])
    padded = plan.metadata(chunk_size=32, capacity="bucket")
    assert (padded.chunk_size, padded.capacity.checkpoints) == (32, 2)


def definition(rule: CheckpointRule, start: int, end: int, prompt: int) -> tuple[int, int] | None:
    """(position, column) of one request, word by word."""
    unit, block = rule.unit, rule.block_size
    position = (prompt - 1) // unit * unit
    if rule.drop_draft_block:
        position -= unit
    column = math.ceil(prompt / block) - 2
    live, read = (end - 1) // block, (start - 1) // block
    if start % unit or not start < position < end or start + unit > position:
        return None
    if math.ceil(end / block) - 2 <= read or (position - start) % rule.alignment:
        return None
    # Beyond the engine's rule, which has no prompt longer or shorter than the step's end.
    return (position, column) if read < column != live else None


@pytest.mark.parametrize("seed", range(20))
def test_against_its_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    unit = int(rng.choice([1, 16, 48, 64]))
    rule = CheckpointRule(
        unit * int(rng.integers(1, 5)),
        unit,
        int(rng.choice([1, 1, 16, 64])),
        1,
        bool(rng.integers(2)),
        "last_block",
    )
    ends = rng.integers(0, 700, 200)
    starts = rng.integers(0, ends + 1)
    starts = np.where(rng.integers(2, size=200), starts // unit * unit, starts)
    prompts = ends + rng.integers(-2, 3, 200) * rng.integers(0, unit + 1, 200) * rng.integers(2)
    prompts = np.maximum(prompts, 0)
    plan = plan_checkpoints(rule, ends, starts, prompt_lens=prompts)
    got = dict(zip(plan.row, zip(plan.position, plan.column, strict=True), strict=True))
    for r in range(200):
        assert got.get(r) == definition(rule, starts[r], ends[r], prompts[r])
