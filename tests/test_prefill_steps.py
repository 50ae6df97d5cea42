"""The predicted number of steps is what the engine takes, and has the rows that do not change."""

from __future__ import annotations

import queue

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import k3
from symbolic_device import VOCAB, SymbolicDevice, continuation

from benchmarks.prefill_steps import predict, step_ends
from kda_jax.models import from_config
from kda_jax.serving import CheckpointRule, EngineConfig, PoolSizes, SamplingParams
from kda_jax.serving.engine import Engine

MODEL = from_config(k3(2, (2,)), dtype="float32", backend="chunked")
BLOCK = 1536


def rule(**changes) -> CheckpointRule:
    return CheckpointRule(**({"block_size": BLOCK, "max_per_request": 1} | changes))


@pytest.mark.parametrize(
    ("length", "budget", "steps", "split", "why"),
    [
        (1024, 16384, 1, 1, "no whole block"),
        (1024, 8192, 1, 1, "no whole block"),
        (4096, 16384, 1, 2, ""),
        (8192, 8192, 1, 2, ""),
        (8704, 8192, 2, 2, "not the last"),  # 7680 lies in the first of two steps
        (8704, 16384, 1, 2, ""),
        (16384, 16384, 1, 2, ""),
        (25600, 8192, 4, 4, "step boundary"),  # 24576 = 3 * 8192 = 16 * 1536
        (25600, 16384, 2, 3, ""),
        (32768, 16384, 2, 3, ""),
        (65536, 8192, 8, 9, ""),
    ],
)
def test_what_a_checkpoint_saves(length, budget, steps, split, why):
    got = predict(rule(), length, budget)
    assert (got.steps, got.split_steps) == (steps, split)
    assert (why in got.unchanged) if why else not got.unchanged


def test_a_published_table_with_steps_of_whole_blocks_and_a_dropped_block():
    """At 1536 tokens a block, times change but at 1024, 32768 (16384) and 16384 (8192)."""
    table = {  # budget: the lengths of the table
        16384: (1024, 4096, 8192, 16384, 32768, 65536),
        8192: (4096, 8192, 16384, 65536),
    }
    unchanged = []
    for budget, lengths in table.items():
        for length in lengths:
            position = rule(drop_draft_block=True).last_position(length)
            steps = step_ends(length, budget, unit=BLOCK)
            if len(steps) == len(step_ends(length, budget, position, unit=BLOCK)):
                unchanged.append((length, budget, position in steps))
    assert unchanged == [(1024, 16384, False), (32768, 16384, True), (16384, 8192, False)]


@given(
    st.integers(1, 700),
    st.integers(65, 400),
    st.sampled_from([1, 16, 24, 64, 100, 128, 300]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_the_engine_takes_the_predicted_steps(length, budget, block, drop):
    """With and without checkpoints, on an empty cache and on a warm one, on a symbolic device."""
    random = np.random.default_rng((length, budget, block))
    first = random.integers(0, VOCAB, length)
    second = np.append(first[:-1], (first[-1] + 1) % VOCAB)
    want = predict(rule(block_size=block, drop_draft_block=drop), length, budget)
    for checkpoints, cold in ((True, want.steps), (False, want.split_steps)):
        config = EngineConfig(
            max_model_len=704,
            block_size=block,
            budget=budget,
            max_requests=1,
            max_prefills=1,
            checkpoints=checkpoints,
            drop_draft_block=drop,
        )
        sizes = PoolSizes.of(config, MODEL)
        device = SymbolicDevice(sizes, block)
        with Engine(device, config, sizes, vocab_size=VOCAB) as engine:
            for prompt, steps, cached in (
                (first, cold, 0),
                (second, want.warm_steps, want.position),
            ):
                outputs = queue.Queue()
                request = engine.submit(prompt, SamplingParams(max_tokens=1), outputs.put)
                token, reason = outputs.get(timeout=30)
                assert (reason, [token]) == ("length", continuation(prompt, 1))
                assert (request.steps, request.cached_tokens) == (steps, cached)
