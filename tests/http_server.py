"""The HTTP server on the symbolic device: in a thread of a test, or as a process of its own.

python tests/http_server.py [--delay SECONDS] [--grace SECONDS] [--wrong-when-warm]: prints its URL
"""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
from model_cases import k3
from symbolic_device import VOCAB, SymbolicDevice

from kda_jax.models import from_config
from kda_jax.serving import Engine, EngineConfig, PoolSizes
from kda_jax.serving.http import Server, Service

EOS = 3
CONFIG = EngineConfig(
    max_model_len=2048,
    block_size=16,
    budget=512,
    max_requests=8,
    max_prefills=4,
    max_waiting=64,
    cache_bytes=4 * 2**20,
    checkpoint_blocks=4,
)


class Characters:
    """Token t is the t-th printable ASCII character; the last one is not ASCII."""

    def encode(self, text: str) -> list[int]:
        return [(ord(c) - 32) % VOCAB for c in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(32 + token) if token < VOCAB - 1 else "é" for token in tokens)


CHARACTERS = Characters()


class SlowDevice(SymbolicDevice):
    """Every step takes a while, so that a signal finds requests that run."""

    delay = 0.0

    def fetch(self, handle: Any) -> Any:
        time.sleep(self.delay)
        return super().fetch(handle)


class WrongWhenWarm(SlowDevice):
    """A prompt that resumes from a checkpoint goes on wrongly."""

    def submit(self, plan: Any) -> Any:
        decoded, prefilled = super().submit(plan)
        for i, part in enumerate(plan.parts):
            if part.running.request.cached_tokens:
                prefilled[i] = 4 + (prefilled[i] - 3) % (VOCAB - 4)
                self.slots[part.running.slot] = prefilled[i]
        return decoded, prefilled


def make_service(
    config: EngineConfig = CONFIG,
    device: type[SymbolicDevice] = SymbolicDevice,
    tokenizer: Any = CHARACTERS,
) -> Service:
    sizes = PoolSizes.of(config, from_config(k3(), backend="chunked"))
    engine = Engine(device(sizes, config.block_size), config, sizes, vocab_size=VOCAB, eos=[EOS])
    return Service(engine, "symbolic", tokenizer, max_body=100_000)


@contextlib.contextmanager
def serving(service: Service) -> Iterator[httpx.Client]:
    """A client of a server in a thread."""
    server = Server(service, "127.0.0.1", 0)
    service.engine.start()
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:  # uvicorn has no event for it
        time.sleep(0.001)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client
    finally:
        service.engine.close()
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
        assert service.engine.join(60)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--grace", type=int, default=30)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--wrong-when-warm", action="store_true")
    args = parser.parse_args()
    SlowDevice.delay = args.delay
    shared = make_service(device=WrongWhenWarm if args.wrong_when_warm else SlowDevice)
    with shared.engine:
        Server(shared, "127.0.0.1", args.port, grace=args.grace).run()
