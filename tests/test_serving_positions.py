"""`plan_checkpoints`: our rule, what may be reused after a step, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from kda_jax.layer_types import KDALayerConfig
from kda_jax.serving import CheckpointRule, KDACacheSpec, plan_checkpoints


def test_draft_drop_puts_it_one_unit_earlier() -> None:
    theirs = CheckpointRule(64, None, 64, 1, True, "last_block")
    plan = plan_checkpoints(theirs, [200, 128], [0, 0])
    assert plan.checkpoint_offsets == [[128], []]  # 64 - 64 is the start
    assert plan.column.tolist() == [2]
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
    no_blocks = np.zeros((2, 0), np.int32)
    assert plan_checkpoints(rule, [0, 0], [0, 0], block_tables=no_blocks).num_checkpoints == 0


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
        ({"lengths": [3], "computed": [0], "block_tables": [[1], [2]]}, "block_tables has 2 rows"),
    ],
)
def test_step_refusals(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_checkpoints(CheckpointRule(64, policy="last_block"), **arguments)


def test_block_tables_are_for_last_block() -> None:
    with pytest.raises(ValueError, match="block_tables is given, but policy 'every_unit'"):
        plan_checkpoints(CheckpointRule(64), [3], [0], block_tables=[[1]])


def test_the_rule_of_a_spec() -> None:
    config = KDALayerConfig(backend="chunked")
    spec = KDACacheSpec.from_config(config, block_size=1536, checkpoint_blocks=4)
    rule = CheckpointRule.from_spec(spec, hash_unit=512, drop_draft_block=True)
    assert rule == CheckpointRule(1536, 512, 1, 4, True)
    off = KDACacheSpec.from_config(config, block_size=64, use_prefill_checkpoint=False)
    assert not CheckpointRule.from_spec(off).enabled
    assert plan_checkpoints(CheckpointRule.from_spec(off), [200], [0]).num_checkpoints == 0
