"""The server as a process: signals, a hard end in the middle, a clean start after it."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from http_server import EOS
from server_process import HERE, WAIT, process
from symbolic_device import VOCAB, continuation


def symbolic(*options: str) -> Any:
    return process(str(HERE / "http_server.py"), *options)


def prompt(seed: int, length: int = 60) -> list[int]:
    return np.random.default_rng(seed).integers(4, VOCAB, length).tolist()


def body(tokens: list[int], count: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt": tokens,
        "max_tokens": count,
        "temperature": 0,
        "return_token_ids": True,
        **more,
    }


def ask(url: str, tokens: list[int], count: int, **more: Any) -> list[int]:
    wanted = body(tokens, count, **more)
    response = httpx.post(f"{url}/v1/completions", json=wanted, timeout=WAIT)
    response.raise_for_status()
    return response.json()["choices"][0]["token_ids"]


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(which: signal.Signals) -> None:
    """Running requests end as ever, new ones get 503, the exit code is 0."""
    tokens = prompt(1)
    with symbolic("--delay", "0.02") as (server, url), httpx.Client(base_url=url) as http:
        wanted = body(tokens, 40, stream=True, ignore_eos=True)
        with http.stream("POST", "/v1/completions", json=wanted, timeout=WAIT) as stream:
            lines = stream.iter_lines()
            got = [json.loads(next(lines).removeprefix("data: "))]
            server.send_signal(which)
            with httpx.Client(base_url=url) as other:
                while other.get("/health").status_code == 200:
                    pass  # until the signal has arrived
                refused = other.post("/v1/completions", json=body(tokens, 1))
            assert refused.status_code == 503
            events = [line.removeprefix("data: ") for line in lines if line]
            assert events.pop() == "[DONE]"
            got += map(json.loads, events)
        received = [token for event in got for token in event["choices"][0]["token_ids"]]
        assert received == continuation(tokens, 40)
        assert server.wait(WAIT) == 0


def test_a_client_that_neither_sends_nor_reads_does_not_keep_it_alive() -> None:
    """A body of which the rest never comes, and a stream that nobody reads."""
    with symbolic("--grace", "1") as (server, url):
        place = urlsplit(url)
        with contextlib.ExitStack() as stack:

            def send(content: bytes, size: int) -> socket.socket:
                client = stack.enter_context(socket.socket())
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
                client.connect((place.hostname, place.port))
                head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
                client.sendall(head.encode() + content)
                return client

            send(b'{"prompt":', 100)
            whole = json.dumps(body(prompt(1), 1900, stream=True, ignore_eos=True)).encode()
            send(whole, len(whole)).recv(1)
            server.send_signal(signal.SIGTERM)
            assert server.wait(WAIT) == 0


def test_a_second_signal_ends_it_at_once() -> None:
    with symbolic("--delay", "0.05") as (server, url), httpx.Client(base_url=url) as http:
        wanted = body(prompt(1), 1900, stream=True, ignore_eos=True)
        with http.stream("POST", "/v1/completions", json=wanted, timeout=WAIT) as stream:
            next(stream.iter_lines())
            server.send_signal(signal.SIGTERM)
            while httpx.get(f"{url}/health").status_code == 200:
                pass
            server.send_signal(signal.SIGTERM)
            assert server.wait(WAIT) != 0


def test_a_hard_end_and_a_clean_start() -> None:
    """Every client notices that the server is gone; the next one starts empty, on the same port."""
    tokens = [prompt(seed) for seed in range(8)]
    with symbolic("--delay", "0.02") as (server, url):
        with ThreadPoolExecutor(8) as threads:
            running = [threads.submit(ask, url, each, 1000, ignore_eos=True) for each in tokens]
            with httpx.Client(base_url=url) as http:
                while "kda_engine_running 8" not in http.get("/metrics").text:
                    assert server.poll() is None
            server.send_signal(signal.SIGKILL)
            for each in running:
                with pytest.raises(httpx.HTTPError):
                    each.result(WAIT)
        assert server.wait(WAIT) == -signal.SIGKILL
    port = url.rpartition(":")[2]
    with symbolic("--port", port) as (_, again):
        assert again == url
        metrics = httpx.get(f"{url}/metrics").text
        for name in ("kda_engine_running", "kda_engine_waiting", "kda_prefix_cache_entries"):
            assert f"{name} 0\n" in metrics
        for each in tokens:
            assert ask(url, each, 10) == continuation(each, 10, [EOS])
