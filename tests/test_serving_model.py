"""The engine on a model: greedy tokens are those of `models.generate`, whatever shares a step."""

from __future__ import annotations

import queue
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import k3, random_model, text
from programs import FUSED, count_compiles, quick_jit

from kda_jax import models
from kda_jax.models import generation
from kda_jax.serving import (
    Engine,
    EngineConfig,
    Output,
    Pools,
    Request,
    SamplingParams,
    Scheduler,
    StepPlan,
    build_engine,
    runner,
    warm,
)
from kda_jax.serving.sampling import Sampling, sample_rows

BLOCK = 64
CONFIG = EngineConfig(
    max_model_len=448,
    block_size=BLOCK,
    budget=128,
    max_requests=4,
    max_prefills=2,
    cache_bytes=2**20,
    checkpoint_blocks=2,
)
# Two logits closer than this could change places with the order of a sum.
MARGIN = 1e-3


@pytest.fixture(scope="module")
def model() -> Any:
    """A KDA layer, MLA, a KDA layer with experts, another KDA layer behind."""
    return random_model(k3(num_experts=4), backend="auto")


@pytest.fixture(scope="module", autouse=True)
def quick() -> Any:
    """Steps compiled without optimization."""
    step = quick_jit(
        runner.run_step.__wrapped__, static_argnames=("backend",), donate_argnames=("state",)
    )
    with mock.patch.object(runner, "run_step", step):
        yield


optimized_step = runner.run_step
_prefill = quick_jit(generation.prefill.__wrapped__, static_argnames=("backend",))
_decode = quick_jit(generation.decode_step.__wrapped__, donate_argnames=("cache",))


def reference(model: Any, prompt: Any, count: int) -> list[int]:
    """`models.generate`, one prompt at a time; no choice of its may be a near tie."""
    margins = []
    sample = generation.sample

    def watched(logits: jax.Array, *args: Any) -> jax.Array:
        best = np.sort(np.asarray(logits[0]))[-2:]
        margins.append(best[1] - best[0])
        return sample(logits, *args)

    with mock.patch.multiple(generation, prefill=_prefill, decode_step=_decode, sample=watched):
        tokens = models.generate(model, [list(map(int, prompt))], count, step_tokens=448)[0]
    assert min(margins) > MARGIN, "a near tie: choose other prompts"
    return tokens


class Client:
    """Collects what one request gets."""

    def __init__(self, engine: Engine, prompt: Any, **params: Any) -> None:
        self.outputs: queue.Queue[Output] = queue.Queue()
        self.request = engine.submit(prompt, SamplingParams(**params), self.outputs.put)

    def result(self) -> list[int]:
        tokens = []
        while True:
            token, reason = self.outputs.get(timeout=300)
            if token is not None:
                tokens.append(token)
            if reason is not None:
                return tokens


FACTS = text(300, seed=3)
PROMPTS = [
    FACTS,
    np.concatenate([FACTS[:280], text(30, seed=9)]),
    np.concatenate([FACTS[:150], text(50, seed=10)]),
    text(70, seed=5),
    text(1, seed=6),
    np.concatenate([FACTS[:290], text(12, seed=11)]),
    text(129, seed=12),
]
COUNTS = [8, 5, 9, 8, 10, 7, 1]


@pytest.fixture(scope="module")
def wanted(model: Any) -> list[list[int]]:
    return [reference(model, p, n) for p, n in zip(PROMPTS, COUNTS, strict=True)]


@pytest.mark.parametrize("checkpoints", [True, False])
def test_tokens_are_those_of_generate(
    model: Any, wanted: list[list[int]], checkpoints: bool
) -> None:
    """All at once, beside one that is cancelled; then warm, one by one; then after a reset."""
    config = CONFIG if checkpoints else NO_CHECKPOINTS
    engine, _ = build_engine(model, config)
    with engine:
        extra = Client(engine, text(200, seed=20), max_tokens=40)
        clients = [Client(engine, p, max_tokens=n) for p, n in zip(PROMPTS, COUNTS, strict=True)]
        engine.cancel(extra.request)
        assert [client.result() for client in clients] == wanted
        extra.result()
        for prompt, count, want in zip(PROMPTS, COUNTS, wanted, strict=True):
            client = Client(engine, prompt, max_tokens=count)
            assert client.result() == want
            assert client.request.cached_tokens == (len(prompt) - 1) // BLOCK * BLOCK
        assert engine.reset_prefix_cache().result(60) > 0
        client = Client(engine, FACTS, max_tokens=8)
        assert client.result() == wanted[0]
        assert client.request.cached_tokens == 0
        # 128, 128, 44 with checkpoints; the last boundary, 256, is where a step ends anyway.
        assert client.request.steps == 3
        short = Client(engine, PROMPTS[3], max_tokens=8)
        assert short.result() == wanted[3]
    stats, cache = engine.stats()
    assert (stats.checkpoints > 0) == checkpoints
    assert cache.hits >= 6


NO_CHECKPOINTS = EngineConfig(**{**CONFIG.__dict__, "checkpoints": False})


def test_a_split_prefill_takes_one_more_step(model: Any, wanted: list[list[int]]) -> None:
    steps = []
    for config in (CONFIG, NO_CHECKPOINTS):
        engine, _ = build_engine(model, config)
        with engine:
            client = Client(engine, PROMPTS[3], max_tokens=8)  # 70 tokens
            assert client.result() == wanted[3]
            steps.append(client.request.steps)
    assert steps == [1, 2]


@pytest.mark.parametrize("committed", [False, True])
def test_warm_up_leaves_nothing_to_compile(committed: bool) -> None:
    """Weights made here, and weights that were put on a device, as those of a folder are."""
    model = random_model(k3(2, num_experts=0, moe_intermediate_size=0))
    if committed:
        model = jax.device_put(model, jax.devices()[0])
    config = EngineConfig(
        max_model_len=128,
        block_size=BLOCK,
        budget=66,
        max_requests=2,
        max_prefills=1,
        cache_bytes=2**20,
    )
    engine, steps = build_engine(model, config)
    report = warm(steps, progress=False)
    assert len(report.programs) == len(steps.buckets.all()) + 1 == report.reachable
    before = [np.asarray(x) for x in jax.tree.leaves(steps._state)]
    assert not any(x.any() for x in before[:-1]), "warm-up wrote a state"
    with count_compiles() as compiles, engine:
        # The first fills the largest shape, which the warm-up began with.
        clients = [Client(engine, text(66, seed=2), max_tokens=5)]
        clients += [Client(engine, text(90, seed=s % 2), max_tokens=5) for s in range(4)]
        for client in clients:
            client.result()
    assert not compiles
    assert engine.stats()[1].hits > 0
    with pytest.raises(ValueError, match="limit is 0"):
        warm(steps, limit=0)


class Unread:
    """Stands for an array of the device; looking into it is an error."""

    def copy_to_host_async(self) -> None:
        """Starts a copy and does not wait."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the host reads the device: {name}")


def test_submitting_reads_nothing(model: Any) -> None:
    """A prefill, a mixed step, decodes, a prefill from a checkpoint: no step needs the last one."""
    _, steps = build_engine(model, CONFIG)
    scheduler = Scheduler(CONFIG, Pools(steps._sizes))
    shapes = []

    def run(plan: StepPlan | None) -> None:
        assert plan is not None
        steps.submit(plan)
        scheduler.submitted(plan)
        shapes.append((len(plan.decodes), len(plan.parts)))

    def add(prompt: Any) -> None:
        scheduler.add(Request(np.asarray(prompt), SamplingParams(max_tokens=3), lambda _: None))

    def unread(*_: Any, **__: Any) -> Any:
        return Unread(), Unread()

    with (
        mock.patch.object(runner, "run_step", unread),
        mock.patch.object(runner, "copy_rows", return_value=Unread()) as copies,
    ):
        add(PROMPTS[3])
        run(scheduler.plan())
        add(PROMPTS[4])
        for _ in range(3):
            run(scheduler.plan())
        assert scheduler.plan() is None
        add(np.concatenate([PROMPTS[3], PROMPTS[4]]))
        run(scheduler.plan())
    assert shapes == [(0, 1), (1, 1), (2, 0), (1, 0), (0, 1)]
    copies.assert_called_once()


def test_seeds_temperature_and_top_p() -> None:
    logits = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05]))[None].repeat(4000, 0)

    def draw(temperature: float, top_p: float, seed: int = 0) -> np.ndarray:
        how = Sampling.greedy(4000)
        how.temperature[:], how.top_p[:], how.seed[:] = temperature, top_p, seed
        how.position[:] = np.arange(4000)
        return np.asarray(sample_rows(logits, how))

    def shares(tokens: np.ndarray) -> np.ndarray:
        return np.bincount(tokens, minlength=4) / tokens.size

    np.testing.assert_array_equal(draw(0, 1), 0)
    np.testing.assert_allclose(shares(draw(1, 1)), [0.5, 0.3, 0.15, 0.05], atol=0.03)
    np.testing.assert_allclose(shares(draw(1, 0.8)), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(draw(1, 0.81)), [0.526, 0.316, 0.158, 0], atol=0.03)
    np.testing.assert_array_equal(draw(1, 0.1), 0)
    np.testing.assert_array_equal(draw(1, 1e-50), 0)  # which is 0 in float32
    squares = np.array([0.25, 0.09, 0.0225, 0.0025])
    np.testing.assert_allclose(shares(draw(0.5, 1)), squares / squares.sum(), atol=0.03)
    np.testing.assert_array_equal(draw(1, 1), draw(1, 1))
    assert (draw(1, 1, seed=1) != draw(1, 1)).mean() > 0.4
    # A greedy row beside one that is drawn.
    how = Sampling.greedy(4000)
    how.temperature[1::2] = 1
    how.position[:] = np.arange(4000)
    mixed = np.asarray(sample_rows(logits, how))
    np.testing.assert_array_equal(mixed[::2], 0)
    np.testing.assert_array_equal(mixed[1::2], draw(1, 1)[1::2])


def test_a_seed_draws_the_same_whatever_else_runs(model: Any) -> None:
    engine, _ = build_engine(model, CONFIG)
    with engine:
        params = {"max_tokens": 8, "temperature": 1.0, "seed": 7}
        alone = Client(engine, PROMPTS[3], **params).result()
        together = [Client(engine, p, max_tokens=6, temperature=0.7) for p in PROMPTS[:3]]
        assert Client(engine, PROMPTS[3], **params).result() == alone
        for client in together:
            client.result()
        assert Client(engine, PROMPTS[3], **params | {"seed": 8}).result() != alone


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12),
    reason="XLA of jaxlib 0.10 drops optimization barriers on the CPU before it fuses, and copies",
)
@pytest.mark.parametrize("backend", ["chunked", FUSED])
@pytest.mark.parametrize(
    ("tokens", "block_size"),
    [(0, 64), (60, 64), (0, 1024), pytest.param(60, 1024, marks=pytest.mark.slow)],
)
def test_no_step_copies_a_pool(backend: str, tokens: int, block_size: int) -> None:
    """Decodes alone and a mixed step: what XLA needs beside its arguments is far below a pool."""
    model = random_model(k3(2, num_experts=0, moe_intermediate_size=0), backend=backend)
    config = EngineConfig(
        max_model_len=max(512, 2 * block_size),
        block_size=block_size,
        budget=66,
        max_requests=2,
        max_prefills=1,
        cache_bytes=2**28,
    )
    _, steps = build_engine(model, config)
    step, needed = optimized_step, []

    def watched(*args: Any, **options: Any) -> Any:
        needed.append(step.lower(*args, **options).compile().memory_analysis())
        return step(*args, **options)

    pools = jax.tree.leaves(steps._state)[:-1]
    places, least = [pool.unsafe_buffer_pointer() for pool in pools], min(p.nbytes for p in pools)
    with mock.patch.object(runner, "run_step", watched):
        steps.warm(steps.buckets.find(1, tokens, tokens > 0))
    assert needed[0].temp_size_in_bytes < least / 4
    after = jax.tree.leaves(steps._state)[:-1]
    assert [pool.unsafe_buffer_pointer() for pool in after] == places
