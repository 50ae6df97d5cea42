"""`plan_checkpoints`: an engine's cases one by one, our rule, and what may be reused afterwards."""

from __future__ import annotations

import itertools
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


def test_draft_drop_puts_it_one_unit_earlier() -> None:
    assert flat(engine([200], [200], drop=True)) == ([128], [2])
    assert flat(engine([128], [128], drop=True)) is None  # 64 - 64 is the start
    ours = CheckpointRule(64, drop_draft_block=True)
    assert plan_checkpoints(ours, [200], [0]).position.tolist() == [64, 128]


@pytest.mark.parametrize(
    ("prompt", "cached"), [(3771, 1536), (9371, 7680), (20644, 18432), (45151, 43008)]
)
def test_predicted_cached_tokens(prompt: int, cached: int) -> None:
    for policy in ("every_unit", "last_block"):
        rule = CheckpointRule(1536, drop_draft_block=True, policy=policy)  # type: ignore[arg-type]
        assert rule.last_position(prompt) == cached
        assert plan_checkpoints(rule, [prompt], [0]).position.tolist()[-1] == cached


@pytest.mark.parametrize(("prompt", "last"), [(0, 0), (1, 0), (64, 0), (65, 64), (128, 64)])
def test_one_token_is_always_left_to_run(prompt: int, last: int) -> None:
    assert CheckpointRule(64).last_position(prompt) == last


def test_ours_several_per_request() -> None:
    rule = CheckpointRule(64)
    plan = plan_checkpoints(rule, [200, 400, 64, 168], [0, 250, 0, 128])
    assert plan.checkpoint_offsets == [[64, 128, 192], [6, 70, 134], [], []]
    assert plan.position.tolist() == [64, 128, 192, 256, 320, 384]
    assert plan.column.tolist() == [0, 1, 2, 3, 4, 5]
    two = CheckpointRule(64, max_per_request=2)
    assert plan_checkpoints(two, [200, 400], [0, 250]).checkpoint_offsets == [[128, 192], [70, 134]]


def test_ours_at_the_end_of_a_step_that_is_not_the_last() -> None:
    rule = CheckpointRule(64)
    plan = plan_checkpoints(rule, [128], [0], prompt_lens=[300])
    assert plan.checkpoint_offsets == [[64, 128]]
    # Where the prompt ends, nothing of this length could use it.
    assert plan_checkpoints(rule, [128], [0]).checkpoint_offsets == [[64]]
    # Decoding adds none, wherever it is.
    assert plan_checkpoints(rule, [192], [191], prompt_lens=[100]).checkpoint_offsets is None


def test_ours_keeps_to_the_alignment_of_the_step() -> None:
    plan = plan_checkpoints(CheckpointRule(64, 32, 64), [300, 300], [0, 32])
    assert plan.position.tolist() == [64, 128, 192, 256, 96, 160, 224, 288]


def naive(rule: CheckpointRule, length: int, computed: int, prompt: int) -> list[int]:
    """The positions of one request, from the definition, one token at a time."""
    last = (prompt - 1) // rule.unit * rule.unit - (rule.unit if rule.drop_draft_block else 0)
    wanted = [p for p in range(1, last + 1) if p % rule.unit == 0]
    if rule.max_per_request is not None:
        wanted = wanted[max(0, len(wanted) - rule.max_per_request) :]
    return [p for p in wanted if computed < p <= length and (p - computed) % rule.alignment == 0]


@pytest.mark.parametrize("seed", range(30))
def test_ours_against_its_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    unit = int(rng.choice([1, 3, 16, 64]))
    rule = CheckpointRule(
        unit * int(rng.integers(1, 4)),
        unit,
        int(rng.choice([1, 1, 16, 64])),
        [None, 0, 1, 2, 5][rng.integers(5)],
        bool(rng.integers(2)),
    )
    prompts = rng.integers(0, 400, 12)
    lengths = rng.integers(0, prompts + 1)
    computed = rng.integers(0, lengths + 1)
    plan = plan_checkpoints(rule, lengths, computed, prompt_lens=prompts)
    for r, (length, start, prompt) in enumerate(zip(lengths, computed, prompts, strict=True)):
        assert plan.position[plan.row == r].tolist() == naive(rule, length, start, prompt)
    np.testing.assert_array_equal(plan.offset, plan.position - computed[plan.row])
    plan.metadata()  # the offsets are ones that it takes


@pytest.mark.parametrize("limit", [None, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_ours_does_not_depend_on_the_cuts(seed: int, limit: int | None) -> None:
    rng = np.random.default_rng(seed)
    prompt = int(rng.integers(1, 2000))
    rule = CheckpointRule(128, 32, 1, limit, bool(rng.integers(2)))
    cuts = np.unique(np.concatenate([[0, prompt], rng.integers(0, prompt + 1, 6)]))
    pieces = [
        plan_checkpoints(rule, [end], [start], prompt_lens=[prompt]).position.tolist()
        for start, end in itertools.pairwise(cuts)
    ]
    assert list(itertools.chain(*pieces)) == plan_checkpoints(rule, [prompt], [0]).position.tolist()


@pytest.mark.parametrize("seed", range(40))
def test_what_is_offered_was_written_and_stays(seed: int) -> None:
    """A request under "last_block", step by step, against a pool that notes what it holds."""
    rng = np.random.default_rng(seed)
    unit = int(rng.choice([16, 32, 64]))
    block = unit * int(rng.integers(1, 4))
    rule = CheckpointRule(
        block, unit, int(rng.choice([1, 16, 64])), 1, bool(rng.integers(2)), "last_block"
    )
    total = int(rng.integers(1, 1500))
    prompt = int(rng.integers(1, total + 1))
    blocks = rng.permutation(np.arange(1, -(-total // block) + 1))
    blocks[rng.random(blocks.size) < 0.1] = 0
    pool: dict[int, int] = {}  # block -> the position whose state it holds
    offered: dict[int, int] = {}
    computed = 0
    while computed < total:
        step = int(rng.choice([unit, block, 3 * block, 1, int(rng.integers(1, 400))]))
        length = min(total, computed + step)
        known = [prompt] if rng.integers(2) else None
        plan = plan_checkpoints(
            rule, [length], [computed], prompt_lens=known, block_tables=blocks[None]
        )
        read = blocks[(computed - 1) // block] if computed else -1
        live = blocks[(length - 1) // block]
        for position, row in zip(plan.position.tolist(), plan.destination.tolist(), strict=True):
            assert row not in (0, read, live) and computed < position < length
            pool[row] = position
        pool[int(live)] = length
        offered.update((row, position) for position, row in plan.offered(0))
        computed = length
        for row, position in offered.items():
            assert row and pool[row] == position
    # A block that the request holds and that was never written to is in no offer.
    assert set(offered) <= set(pool) - {0}


def test_rows_of_our_own() -> None:
    plan = plan_checkpoints(CheckpointRule(64), [200, 130], [0, 0])
    assert plan.destination.tolist() == [-1] * 5
    assert plan.offered(0) == plan.offered(1) == []
    placed = plan.with_rows([9, 4, -1, 7, 5], in_use=[0, 1])
    assert placed.offered(0) == [(64, 9), (128, 4)]  # 192 is skipped, so it is not offered
    assert placed.offered(1) == [(64, 7), (128, 5)]
    assert placed.checkpoint_offsets == plan.checkpoint_offsets
    with pytest.raises(ValueError, match="rows has 2 entries for 5 checkpoints"):
        plan.with_rows([1, 2])
    with pytest.raises(ValueError, match="rows holds 4 twice"):
        plan.with_rows([4, -1, -1, 4, 3])
    with pytest.raises(ValueError, match="rows holds 3, which is in use in this step"):
        plan.with_rows([4, 5, 6, 7, 3], in_use=[3, 0])


def test_empty_step() -> None:
    for policy in ("every_unit", "last_block"):
        rule = CheckpointRule(64, policy=policy)  # type: ignore[arg-type]
        plan = plan_checkpoints(rule, [], [])
        assert plan.num_checkpoints == 0 and plan.metadata().num_sequences == 0
    assert flat(engine([0, 0], [0, 0], block_tables=np.zeros((2, 0), np.int32))) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, "block_size is 0, want an integer of at least 1"),
        ({"block_size": 64, "hash_unit": 48}, "hash_unit is 48, want a divisor of block_size, 64"),
        ({"block_size": 64, "hash_unit": 0}, "hash_unit is 0"),
        ({"block_size": 64, "alignment": 0}, "alignment is 0"),
        ({"block_size": 64, "max_per_request": -1}, "max_per_request is -1"),
        ({"block_size": 64, "policy": "best"}, "policy is 'best', want 'every_unit' or"),
    ],
)
def test_rule_refusals(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CheckpointRule(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [-1], "computed": [0]}, r"lengths\[0\] is -1, want at least 0"),
        ({"lengths": [1.5], "computed": [0]}, "lengths has dtype float64, want integers"),
        ({"lengths": [3], "computed": [0, 0]}, "computed has 2 entries, want 1, as lengths has"),
        ({"lengths": [3], "computed": [4]}, r"computed\[0\] is 4, want at most lengths\[0\], 3"),
        ({"lengths": [3], "computed": [0], "prompt_lens": []}, "prompt_lens has 0 entries"),
        ({"lengths": [3], "computed": [0], "rows": [1]}, "rows holds 1, want indices below 1"),
        ({"lengths": [3], "computed": [0], "rows": [-1]}, r"rows\[0\] is -1, want at least 0"),
        (
            {"lengths": [130], "computed": [0], "block_tables": [[1, 2]]},
            "block_tables has 2 columns, but request 0 has 130 tokens and needs 3 blocks of 64",
        ),
        ({"lengths": [3], "computed": [0], "block_tables": table(2)}, "block_tables has 2 rows"),
    ],
)
def test_step_refusals(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_checkpoints(CheckpointRule(64, policy="last_block"), **arguments)


def test_block_tables_are_for_last_block() -> None:
    with pytest.raises(ValueError, match="block_tables is given, but policy 'every_unit'"):
        plan_checkpoints(CheckpointRule(64), [3], [0], block_tables=table(1))
