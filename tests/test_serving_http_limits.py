"""The HTTP server under pressure: overload, clients that go away, the end, an engine that fails."""

from __future__ import annotations

import dataclasses
import http.client as http_client
import json
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from http_server import CONFIG, EOS, make_service, serving
from symbolic_device import VOCAB, SymbolicDevice, continuation

from kda_jax.serving.http import Service

WAIT = 60
GREEDY = {"temperature": 0, "return_token_ids": True}


class Gate(SymbolicDevice):
    """Steps wait until the test opens it; a semaphore says when one was submitted."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.opened, self.started = threading.Event(), threading.Semaphore(0)

    def submit(self, plan: Any) -> Any:
        handle = super().submit(plan)
        self.started.release()
        return handle

    def fetch(self, handle: Any) -> Any:
        assert self.opened.wait(WAIT)
        return super().fetch(handle)


@pytest.fixture
def gated() -> Iterator[tuple[httpx.Client, Service, Gate]]:
    config = dataclasses.replace(CONFIG, max_requests=2, max_waiting=3)
    made = make_service(config, Gate)
    gate = made.engine._device
    with serving(made) as client:
        yield client, made, gate
        gate.opened.set()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, VOCAB, length).tolist()


def test_overload_is_429_and_passes(gated: tuple[httpx.Client, Service, Gate]) -> None:
    http, made, gate = gated
    tokens = [prompt(30, seed) for seed in range(40)]

    def post(body: list[int]) -> httpx.Response:
        return http.post("/v1/completions", json={"prompt": body, "max_tokens": 4, **GREEDY})

    refused: queue.Queue[httpx.Response] = queue.Queue()

    def work(body: list[int]) -> list[int]:
        while (response := post(body)).status_code == 429:
            refused.put(response)
            gate.opened.set()  # once one was refused, the others may run
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["token_ids"]

    with ThreadPoolExecutor(40) as threads:
        got = list(threads.map(work, tokens))
    assert got == [continuation(each, 4, [EOS]) for each in tokens]
    response = refused.get(timeout=WAIT)
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_is_cancelled(
    gated: tuple[httpx.Client, Service, Gate], stream: bool
) -> None:
    http, made, gate = gated
    cancelled = threading.Event()
    cancel = made.engine.cancel

    def noticed(request: Any) -> None:
        cancel(request)
        cancelled.set()

    made.engine.cancel = noticed
    body = {"prompt": prompt(30), "max_tokens": 1000, "ignore_eos": True, "stream": stream}
    other = http_client.HTTPConnection(http.base_url.host, http.base_url.port)
    other.request("POST", "/v1/completions", json.dumps(body))
    assert gate.started.acquire(timeout=WAIT)
    assert not cancelled.is_set()
    other.close()
    assert cancelled.wait(WAIT)
    gate.opened.set()
    made.engine.drain()
    assert made.engine.join(WAIT)
    stats, cache = made.engine.stats()
    assert (stats.cancelled, stats.running, cache.leases) == (1, 0, 0)


def test_draining_answers_503_and_finishes_the_rest(
    gated: tuple[httpx.Client, Service, Gate],
) -> None:
    http, made, gate = gated
    tokens = prompt(30)
    body = {"prompt": tokens, "max_tokens": 6, **GREEDY}
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(http.post, "/v1/completions", json=body)
        assert gate.started.acquire(timeout=WAIT)
        made.engine.drain()
        response = http.post("/v1/completions", json=body)
        assert response.status_code == 503
        assert "retry-after" in response.headers
        assert http.get("/health").status_code == 503
        gate.opened.set()
        made_tokens = running.result(WAIT).json()["choices"][0]["token_ids"]
        assert made_tokens == continuation(tokens, 6, [EOS])
    assert made.engine.join(WAIT)
    assert http.post("/reset_prefix_cache").status_code == 503


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_fails(gated: tuple[httpx.Client, Service, Gate], stream: bool) -> None:
    http, made, gate = gated

    def broken(handle: Any) -> Any:
        raise RuntimeError("the device is gone")

    gate.fetch = broken
    body = {"prompt": prompt(30), "stream": stream}
    response = http.post("/v1/completions", json=body)
    assert "the device is gone" in response.text
    assert response.status_code == (200 if stream else 500)
    assert made.engine.join(WAIT)
    assert http.post("/v1/completions", json=body).status_code == 503
    health = http.get("/health")
    assert health.status_code == 503
    assert health.json() == {"status": "failed", "problem": "RuntimeError: the device is gone"}
