"""Spec, positions and prefix cache together: a cold prompt, a warm one, one after a reset."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kda_jax.layer_types import KDALayerConfig
from kda_jax.serving import CheckpointRule, KDACacheSpec, PrefixCache, plan_checkpoints

BLOCK = 1536


def serve(
    cache: PrefixCache, rule: CheckpointRule, tokens: np.ndarray, budget: int
) -> tuple[int, list[int]]:
    """Plans a prompt's prefill as an engine would; returns (cached tokens, positions stored)."""
    handles = itertools.count(1000)
    lease = cache.acquire(tokens, max_tokens=rule.last_position(tokens.size))
    computed, stored = lease.cached_tokens, []
    while computed < tokens.size:
        length = min(tokens.size, computed + budget)
        plan = plan_checkpoints(rule, [length], [computed], prompt_lens=[tokens.size])
        plan = plan.with_rows([next(handles) for _ in range(plan.num_checkpoints)], in_use=[0])
        assert plan.metadata(capacity="bucket").num_checkpoints == plan.num_checkpoints
        for position, row in plan.offered(0):
            blocks = range(lease.position // rule.unit, position // rule.unit)
            assert cache.insert(lease, position, checkpoint=row, blocks=blocks)
            stored.append(position)
        computed = length
    cache.release(lease)
    return lease.cached_tokens, stored


@pytest.mark.parametrize("budget", [1000, 8192, 16384])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize(
    ("length", "cached"), [(3771, 1536), (9371, 7680), (20644, 18432), (45151, 43008)]
)
def test_warm_prompts_read_what_the_rule_predicts(
    length: int, cached: int, blocks: int, budget: int
) -> None:
    config = KDALayerConfig(backend="chunked")
    spec = KDACacheSpec.from_config(config, block_size=BLOCK, checkpoint_blocks=blocks)
    rule = CheckpointRule.from_spec(spec, drop_draft_block=True)
    cache = PrefixCache(
        unit=BLOCK, checkpoint_bytes=spec.row_bytes, block_bytes=0, budget_bytes=64 * spec.row_bytes
    )
    facts = np.random.default_rng(length).integers(0, 1000, length - 32)
    one = np.concatenate([facts, np.full(32, 7)])
    other = np.concatenate([facts, np.full(32, 8)])
    deepest = list(range(BLOCK, cached + 1, BLOCK))[-blocks:]
    assert serve(cache, rule, one, budget) == (0, deepest)
    assert serve(cache, rule, other, budget) == (cached, [])
    cache.clear()
    assert serve(cache, rule, other, budget) == (0, deepest)
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.hit_tokens) == (1, 2, cached)


def test_opted_out_stores_nothing() -> None:
    config = KDALayerConfig(backend="chunked")
    spec = KDACacheSpec.from_config(config, block_size=64, use_prefill_checkpoint=False)
    cache = PrefixCache(unit=64, checkpoint_bytes=1, block_bytes=1, budget_bytes=100)
    rule = CheckpointRule.from_spec(spec)
    for _ in range(2):
        assert serve(cache, rule, np.arange(1000), 300) == (0, [])
