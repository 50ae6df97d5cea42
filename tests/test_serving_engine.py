"""The engine's thread on a device that checks every read: overlap, limits, drain, failure."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from model_cases import k3
from symbolic_device import VOCAB, SymbolicDevice, continuation

from kda_jax.models import from_config
from kda_jax.serving import (
    Engine,
    EngineBusyError,
    EngineClosedError,
    EngineConfig,
    Output,
    PoolSizes,
    SamplingParams,
)

MODEL = from_config(k3(), backend="chunked")
CONFIG = EngineConfig(
    max_model_len=256,
    block_size=16,
    budget=96,
    max_requests=4,
    max_prefills=2,
    max_waiting=40,
    cache_bytes=2**20,
    checkpoint_blocks=2,
)
WAIT = 60


class Gate(SymbolicDevice):
    """Lets a test hold steps back: `fetch` waits for a permit; `events` says what happened."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.events: queue.Queue[str] = queue.Queue()
        self.permits = threading.Semaphore(0)
        self.error: Exception | None = None

    def submit(self, plan: Any) -> Any:
        if self.error is not None:
            raise self.error
        handle = super().submit(plan)
        self.events.put("submit")
        return handle

    def fetch(self, handle: Any) -> Any:
        self.events.put("fetch")
        assert self.permits.acquire(timeout=WAIT)
        return super().fetch(handle)

    def open(self) -> None:
        """No step waits any more."""
        self.permits.release(10**6)


def make(config: EngineConfig = CONFIG, device: type[SymbolicDevice] = SymbolicDevice) -> Engine:
    sizes = PoolSizes.of(config, MODEL)
    return Engine(device(sizes, config.block_size), config, sizes, vocab_size=VOCAB, eos=[3])


@pytest.fixture
def gated() -> Iterator[tuple[Engine, Gate]]:
    engine = make(device=Gate)
    engine.start()
    yield engine, engine._device
    engine._device.open()
    engine.close()
    assert engine.join(WAIT)


class Client:
    """Collects what one request gets."""

    def __init__(self, engine: Engine, tokens: Any, **params: Any) -> None:
        self.outputs: queue.Queue[Output] = queue.Queue()
        self.params = SamplingParams(**params)
        self.request = engine.submit(tokens, self.params, self.outputs.put)

    def result(self) -> tuple[list[int], str]:
        tokens = []
        while True:
            token, reason = self.outputs.get(timeout=WAIT)
            if token is not None:
                tokens.append(token)
            if reason is not None:
                return tokens, reason

    def check(self) -> None:
        want = continuation(self.request.prompt, self.params.max_tokens, [3])
        assert self.result()[0] == want


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, VOCAB, length)


def test_the_next_step_is_submitted_before_the_last_one_is_waited_for(
    gated: tuple[Engine, Gate],
) -> None:
    engine, device = gated
    client = Client(engine, prompt(20), max_tokens=4, ignore_eos=True)
    # The first step prefills, and its token is on the device: the second one needs no host.
    assert [device.events.get(timeout=WAIT) for _ in range(3)] == ["submit", "submit", "fetch"]
    assert client.outputs.empty()
    device.permits.release()
    assert client.outputs.get(timeout=WAIT).token is not None
    assert [device.events.get(timeout=WAIT) for _ in range(2)] == ["submit", "fetch"]
    device.open()
    assert len(client.result()[0]) == 3
    # The last one has nothing behind it.
    assert [device.events.get(timeout=WAIT) for _ in range(3)] == ["submit", "fetch", "fetch"]


def test_too_many_requests_are_refused_and_a_place_comes_back(gated: tuple[Engine, Gate]) -> None:
    engine, device = gated
    clients = [Client(engine, prompt(20), max_tokens=4)]
    device.events.get(timeout=WAIT)  # it runs: all others wait
    while len(clients) <= CONFIG.max_waiting:
        clients.append(Client(engine, prompt(20, len(clients)), max_tokens=4))
    with pytest.raises(EngineBusyError, match="40 requests wait already"):
        for _ in range(CONFIG.max_requests):
            clients.append(Client(engine, prompt(20, len(clients)), max_tokens=4))
    device.open()
    for client in clients:
        client.check()
    Client(engine, prompt(20), max_tokens=4).check()


def test_draining_finishes_what_runs_and_what_waits(gated: tuple[Engine, Gate]) -> None:
    engine, device = gated
    clients = [Client(engine, prompt(30, i), max_tokens=9) for i in range(8)]
    device.events.get(timeout=WAIT)
    engine.drain()
    with pytest.raises(EngineClosedError, match="takes no more requests"):
        Client(engine, prompt(30))
    assert engine.state == "draining"
    device.open()
    for client in clients:
        client.check()
    assert engine.join(WAIT)
    assert engine.state == "closed"
    with pytest.raises(EngineClosedError, match="the engine is closed"):
        engine.reset_prefix_cache()


def test_a_step_that_fails_ends_every_request(gated: tuple[Engine, Gate]) -> None:
    engine, device = gated
    clients = [Client(engine, prompt(30, i), max_tokens=9) for i in range(8)]
    device.events.get(timeout=WAIT)
    device.error = RuntimeError("the device is gone")
    device.open()
    assert {client.result()[1] for client in clients} == {"error"}
    assert engine.join(WAIT)
    assert engine.state == "failed"
    with pytest.raises(EngineClosedError, match="failed: RuntimeError: the device is gone"):
        Client(engine, prompt(30))
    stats, _ = engine.stats()
    assert (stats.failed, stats.running, stats.waiting) == (8, 0, 0)


def test_cancelling_what_runs_what_waits_and_what_has_ended(gated: tuple[Engine, Gate]) -> None:
    engine, device = gated
    clients = [Client(engine, prompt(60, i), max_tokens=9) for i in range(8)]
    device.events.get(timeout=WAIT)
    for client in clients[::2]:
        engine.cancel(client.request)
    device.open()
    for client in clients[1::2]:
        client.check()
    assert {client.result()[1] for client in clients[::2]} == {"cancelled"}
    engine.cancel(clients[1].request)
    Client(engine, prompt(60, 1), max_tokens=3).check()
    assert clients[1].outputs.empty()


def test_closing_cancels_all(gated: tuple[Engine, Gate]) -> None:
    engine, device = gated
    clients = [Client(engine, prompt(60, i), max_tokens=9) for i in range(8)]
    device.events.get(timeout=WAIT)
    engine.close()
    device.open()
    assert {client.result()[1] for client in clients} == {"cancelled"}
    assert engine.join(WAIT)


def test_a_callback_that_raises_harms_nobody_else() -> None:
    def broken(output: Output) -> None:
        raise KeyError("client")

    with make() as engine:
        engine.submit(prompt(20), SamplingParams(), broken)
        Client(engine, prompt(21), max_tokens=5).check()
    assert engine.state == "closed"


def test_many_threads() -> None:
    """Shared prefixes, cancellations and resets from 8 threads: every token is right."""
    stems = [prompt(120, seed) for seed in range(3)]
    config = dataclasses.replace(CONFIG, cache_bytes=800_000, checkpoint_blocks=8)

    def work(seed: int) -> int:
        random = np.random.default_rng(seed)
        done = 0
        for _ in range(30):
            stem = stems[random.integers(3)][: random.integers(1, 121)]
            tokens = [*stem, *random.integers(4, VOCAB, random.integers(1, 60))]
            client = Client(engine, tokens, max_tokens=int(random.integers(1, 20)))
            if random.random() < 0.3:
                engine.cancel(client.request)
                got, reason = client.result()
                want = continuation(tokens, client.params.max_tokens, [3])
                assert got == want[: len(got)]
                assert reason in ("cancelled", "stop", "length")
            else:
                client.check()
                done += 1
            if random.random() < 0.03:
                engine.reset_prefix_cache().result(WAIT)
        return done

    with make(config) as engine, ThreadPoolExecutor(8) as threads:
        done = sum(threads.map(work, range(8)))
    stats, cache = engine.stats()
    assert stats.finished >= done > 100
    assert stats.finished + stats.cancelled == 240
    assert cache.hits > 20
    assert (stats.running, stats.waiting, stats.held_blocks, cache.leases) == (0, 0, 0, 0)
    pools = engine._pools
    pools.cache.clear()
    assert pools.free_rows == engine.sizes.rows
    assert pools.free_blocks == engine.sizes.blocks


def test_refused_prompts() -> None:
    engine = make()
    with pytest.raises(EngineClosedError, match="the engine is new"):
        Client(engine, [4])
    with engine:
        for tokens, message in (
            ([], "prompt is empty"),
            ([1, VOCAB], r"prompt\[1\] is 96, want a token in 0..95"),
            ([-1], r"prompt\[0\] is -1"),
            ([0.5], "prompt has dtype float64"),
            (prompt(250), "max_tokens is 16 after a prompt of 250 tokens"),
        ):
            with pytest.raises(ValueError, match=message):
                Client(engine, tokens)
        with pytest.raises(RuntimeError, match="start it once"):
            engine.start()
