"""The scheduler on a device that checks every state and every MLA row that a step reads."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import k3
from symbolic_device import VOCAB, SymbolicDevice, continuation

from kda_jax.models import from_config
from kda_jax.serving import (
    EngineConfig,
    Output,
    Pools,
    PoolSizes,
    Request,
    SamplingParams,
    Scheduler,
    StepPlan,
)

MODEL = from_config(k3(), backend="chunked")
BLOCK = 16
EOS = 3
SMALL = EngineConfig(
    max_model_len=256,
    block_size=BLOCK,
    budget=96,
    max_requests=4,
    max_prefills=2,
    cache_bytes=2**20,
    checkpoint_blocks=2,
)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, VOCAB, length).astype(np.int32)


class Served:
    """A scheduler, its device and what the requests got; `lag` steps are in flight."""

    def __init__(self, config: EngineConfig = SMALL, lag: int = 1) -> None:
        self.sizes = PoolSizes.of(config, MODEL)
        self.pools = Pools(self.sizes)
        self.scheduler = Scheduler(config, self.pools, [EOS])
        self.device = SymbolicDevice(self.sizes, config.block_size)
        self.lag = lag
        self.flight: deque[tuple[StepPlan, Any]] = deque()
        self.got: dict[Request, list[Output]] = {}

    def add(self, tokens: Any, max_tokens: int = 5, **params: Any) -> Request:
        outputs: list[Output] = []
        params = SamplingParams(max_tokens=max_tokens, **params)
        request = Request(np.asarray(tokens, np.int32), params, outputs.append)
        self.scheduler.check(len(tokens), max_tokens)
        self.scheduler.add(request)
        self.got[request] = outputs
        return request

    def step(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.flight.append((plan, self.device.submit(plan)))
            self.scheduler.submitted(plan)
        if self.flight and (plan is None or len(self.flight) > self.lag):
            done, handle = self.flight.popleft()
            self.scheduler.complete(done, *self.device.fetch(handle))
        return plan

    def run(self) -> None:
        for _ in range(2000):
            if self.scheduler.idle and not self.flight:
                return
            self.step()
        raise AssertionError("requests do not end")

    def tokens(self, request: Request) -> list[int]:
        return [o.token for o in self.got[request] if o.token is not None]

    def check_finished(self, request: Request) -> None:
        params = request.params
        ends = [*params.stop_token_ids, *([] if params.ignore_eos else [EOS])]
        want = continuation(request.prompt, params.max_tokens, ends)
        assert self.tokens(request) == want
        reasons = [output.finish_reason for output in self.got[request]]
        short = len(want) < params.max_tokens or want[-1] in ends
        assert reasons == [None] * (len(want) - 1) + ["stop" if short else "length"]

    def check_nothing_held(self) -> None:
        stats = self.scheduler.stats()
        assert (stats.waiting, stats.running, stats.held_blocks) == (0, 0, 0)
        assert self.pools.cache.stats().leases == 0
        self.pools.cache.clear()
        assert self.pools.free_rows == self.sizes.rows
        assert self.pools.free_blocks == self.sizes.blocks


def test_prompts_share_steps_and_decodes_go_first() -> None:
    served = Served()
    requests = [served.add(prompt(n, n), 6, ignore_eos=True) for n in (90, 40, 7, 130, 20)]
    served.run()
    for request in requests:
        served.check_finished(request)
    for plan in served.device.submitted:
        assert plan.tokens <= SMALL.budget
        assert len(plan.parts) <= SMALL.max_prefills
        unfinished = [part for part in plan.parts if not part.last]
        assert all(part.length % 64 == 0 for part in unfinished)
    mixed = [plan for plan in served.device.submitted if plan.decodes and plan.parts]
    assert mixed
    served.check_nothing_held()


def test_a_warm_prompt_reads_what_the_rule_says() -> None:
    served = Served()
    facts = prompt(150)
    for tail, cached in ((7, 0), (8, 144), (9, 144)):
        request = served.add([*facts, tail])
        served.run()
        served.check_finished(request)
        assert request.cached_tokens == cached
    served.pools.cache.clear()
    request = served.add([*facts, 8])
    served.run()
    assert request.cached_tokens == 0
    served.check_nothing_held()


def test_the_draft_block_is_dropped() -> None:
    served = Served(dataclasses.replace(SMALL, drop_draft_block=True))
    facts = prompt(150)
    requests = []
    for tail in (7, 8):
        requests.append(served.add([*facts, tail]))
        served.run()
    assert [request.cached_tokens for request in requests] == [0, 128]


@pytest.mark.parametrize(
    ("length", "more"),
    [
        (150, 1),  # 96 tokens, then 48 up to the last boundary, then 6
        (90, 1),  # one step becomes two
        (15, 0),  # shorter than a block
        (73, 0),  # the last boundary is where the first step of 64 ends anyway
        (129, 1),
        (140, 0),
    ],
)
def test_without_checkpoints_a_prefill_is_split(length: int, more: int) -> None:
    steps = []
    for checkpoints in (True, False):
        served = Served(dataclasses.replace(SMALL, checkpoints=checkpoints, budget=68))
        facts = prompt(length - 1)
        cold, warm = served.add([*facts, 7]), None
        served.run()
        warm = served.add([*facts, 8])
        served.run()
        served.check_finished(cold)
        served.check_finished(warm)
        assert warm.cached_tokens == (length - 1) // BLOCK * BLOCK
        steps.append(cold.steps)
        assert (served.scheduler.stats().checkpoints > 0) == (checkpoints and length > BLOCK)
        assert served.scheduler.stats().split_steps == (0 if checkpoints else more)
        served.check_nothing_held()
    assert steps[1] == steps[0] + more


def test_the_end_of_text_is_noticed_a_step_late_and_its_token_dropped() -> None:
    served = Served(lag=2)
    start = prompt(30)
    stops = [continuation(start, 9)[2]]
    request = served.add(start, 9, stop_token_ids=tuple(stops))
    served.run()
    served.check_finished(request)
    assert len(served.tokens(request)) == 3
    assert sum(len(plan.decodes) for plan in served.device.submitted) > 2
    served.check_nothing_held()


def test_cancelling_gives_everything_back() -> None:
    served = Served()
    waiting = [served.add(prompt(200, i), 20) for i in range(7)]
    for _ in range(4):
        served.step()
    for request in waiting[::-1]:
        served.scheduler.cancel(request)
        served.scheduler.cancel(request)  # once more is nothing
    assert [served.got[r][-1] for r in waiting] == [Output(None, "cancelled")] * 7
    assert served.scheduler.stats().cancelled == 7
    again = served.add(prompt(200, 1), 20)
    served.run()
    served.check_finished(again)
    served.check_nothing_held()


def test_a_small_cache_evicts_and_never_blocks_a_request() -> None:
    tiny = dataclasses.replace(SMALL, cache_bytes=200_000, checkpoint_blocks=1)
    served = Served(tiny)
    assert served.sizes.checkpoint_rows == 1
    requests = [served.add(prompt(200, i), 20) for i in range(12)]
    served.run()
    for request in requests:
        served.check_finished(request)
    assert served.pools.cache.stats().evictions >= 2
    served.check_nothing_held()


def test_no_cache_at_all() -> None:
    served = Served(dataclasses.replace(SMALL, cache_bytes=0))
    for _ in range(2):
        request = served.add(prompt(100))
        served.run()
        served.check_finished(request)
        assert request.cached_tokens == 0
    stats = served.scheduler.stats()
    assert (stats.checkpoints, stats.split_steps) == (0, 0)
    served.check_nothing_held()


def test_live_tokens_hold_requests_back() -> None:
    served = Served(dataclasses.replace(SMALL, live_tokens=256))
    requests = [served.add(prompt(100, i), 20) for i in range(4)]
    most = 0
    while not (served.scheduler.idle and not served.flight):
        served.step()
        most = max(most, served.scheduler.stats().running)
    assert most == 2
    for request in requests:
        served.check_finished(request)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "step", "step", "step", "cancel", "clear"]),
        st.integers(0, 2**16),
    ),
    max_size=60,
)


@pytest.mark.parametrize("checkpoints", [True, False])
@settings(max_examples=40, deadline=None)
@given(actions=ACTIONS, blocks=st.integers(1, 3), lag=st.integers(0, 2), room=st.booleans())
def test_fuzz(
    checkpoints: bool, actions: list[tuple[str, int]], blocks: int, lag: int, room: bool
) -> None:
    """Any order of arrivals, steps, cancellations and resets: no wrong read, token or leak."""
    config = dataclasses.replace(
        SMALL,
        checkpoints=checkpoints,
        checkpoint_blocks=blocks,
        cache_bytes=2**20 if room else 300_000,
    )
    served = Served(config, lag)
    stems = [prompt(120, seed) for seed in range(3)]
    cancelled = set()
    for action, number in actions:
        if action == "add":
            random = np.random.default_rng(number)
            stem = stems[number % 3][: random.integers(1, 121)]
            tail = random.integers(4, VOCAB, random.integers(1, 80))
            served.add([*stem, *tail], int(random.integers(1, 30)))
        elif action == "step":
            served.step()
        elif action == "clear":
            served.pools.cache.clear()
        elif served.got:
            request = list(served.got)[number % len(served.got)]
            if not request.finished:
                cancelled.add(request)
            served.scheduler.cancel(request)
    served.run()
    for request, outputs in served.got.items():
        if request in cancelled:
            assert outputs[-1] == Output(None, "cancelled")
            want = continuation(request.prompt, request.params.max_tokens, [EOS])
            assert served.tokens(request) == want[: len(outputs) - 1]
        else:
            served.check_finished(request)
    served.check_nothing_held()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"block_size": 0}, "block_size is 0"),
        ({"budget": 67}, "budget is 67, want at least 68"),
        ({"cache_bytes": 1000}, "cache_bytes is 1000, want 0 or at least"),
        ({"live_tokens": 0}, "live_tokens is 0, want an integer of at least 1"),
        ({"live_tokens": 255}, "live_tokens is 255, want at least max_model_len, 256"),
        ({"checkpoint_rows": -1}, "checkpoint_rows is -1"),
        ({"checkpoint_rows": 10**6}, "cache_bytes is 1048576, want 0 or at least"),
    ],
)
def test_config_errors(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolSizes.of(dataclasses.replace(SMALL, **changes), MODEL)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 2.0}, "max_tokens is 2.0"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": "1"}, "temperature is '1'"),
        ({"temperature": 10**400}, "want 0 .* finite in float32"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"stop_token_ids": (-1,)}, r"stop_token_ids\[0\] is -1"),
    ],
)
def test_sampling_errors(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


def test_too_long_a_request_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens is 57 after a prompt of 200 tokens, 257"):
        Served().add(prompt(200), 57)
