"""Clients that load a server: streams, cancellations, clients that go away and come back."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import numpy as np

Prompt = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Load:
    """What clients send.

    Attributes:
      prompts: of which any may be sent at any time.
      wanted: the tokens of each, from a server that did nothing else.
      cancel, leave, restart: how often a client closes a stream in the middle, closes its
        connection before an answer, and starts anew, of all requests.
    """

    prompts: Sequence[Prompt]
    wanted: Sequence[list[int]]
    cancel: float = 0.15
    leave: float = 0.05
    restart: float = 0.1


@dataclasses.dataclass
class Tally:
    """What all clients saw."""

    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    wrong: list[str] = dataclasses.field(default_factory=list)
    lost: list[str] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)


def random_prompts(
    count: int, vocab: int, longest: int, block: int, random: np.random.Generator
) -> list[Prompt]:
    """Prompts that share prefixes of some stems, of any length; token 0 to vocab - 1."""
    stems = [random.integers(0, vocab, longest) for _ in range(max(2, count // 16))]
    made = []
    for _ in range(count):
        stem = stems[random.integers(len(stems))]
        shared = int(random.integers(0, longest - block // 2))
        tail = int(random.integers(1, max(2, min(block, longest - shared))))
        made.append(tuple(int(t) for t in [*stem[:shared], *random.integers(0, vocab, tail)]))
    return made


def body(prompt: Prompt, max_tokens: int, *, stream: bool) -> dict[str, Any]:
    """A greedy request for tokens."""
    return {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }


def references(
    http: httpx.Client, prompts: Sequence[Prompt], max_tokens: int, done: Callable[[], None]
) -> list[list[int]]:
    """The tokens of each prompt on an empty cache, one at a time."""
    wanted = []
    for prompt in prompts:
        http.post("/reset_prefix_cache").raise_for_status()
        response = http.post("/v1/completions", json=body(prompt, max_tokens, stream=False))
        wanted.append(response.raise_for_status().json()["choices"][0]["token_ids"])
        done()
    return wanted


async def run_clients(
    url: str,
    load: Load,
    clients: int,
    seconds: float,
    max_tokens: int,
    seed: int,
    outage: Callable[[], bool],
) -> Tally:
    """Loads the server for that long; then all clients finish what they began.

    outage: whether the server is down on purpose, or was within the last seconds: a request that
    breaks then is sent again. Any other one that breaks is lost.
    """
    tally, end = Tally(), time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            client = _Client(url, load, max_tokens, (seed, number), tally, outage)
            group.create_task(client.run(end))
    return tally


class _Client:
    def __init__(
        self,
        url: str,
        load: Load,
        max_tokens: int,
        seed: tuple[int, int],
        tally: Tally,
        outage: Callable[[], bool],
    ) -> None:
        self._url, self._load, self._max_tokens = url, load, max_tokens
        self._random = np.random.default_rng(seed)
        self._tally, self._outage = tally, outage

    async def run(self, end: float) -> None:
        while time.monotonic() < end:
            # One connection and its cookies, so to say; a restart leaves the loop.
            async with httpx.AsyncClient(base_url=self._url, timeout=300) as http:
                while time.monotonic() < end:
                    await self._request(http)
                    if self._random.random() < self._load.restart:
                        self._tally.counts["restarts"] += 1
                        break

    async def _request(self, http: httpx.AsyncClient) -> None:
        number = int(self._random.integers(len(self._load.prompts)))
        draw = self._random.random()
        kind = "whole"
        if draw < self._load.leave:
            kind = "left"
        elif draw < self._load.leave + self._load.cancel:
            kind = "cancelled"
        elif draw < 0.6:
            kind = "streamed"
        while True:
            begin = time.monotonic()
            try:
                got = await self._send(http, number, kind)
            except httpx.HTTPStatusError as error:
                status = error.response.status_code
                if status != 429 and not (status == 503 and self._outage()):
                    self._tally.lost.append(f"prompt {number}: {status} {error.response.text}")
                    return
                self._tally.counts["retries"] += 1
                await asyncio.sleep(float(self._random.uniform(0.05, 0.5)))  # as told: back off
                continue
            except httpx.HTTPError as error:
                if not self._outage():
                    self._tally.lost.append(f"prompt {number}: {type(error).__name__} {error}")
                    return
                self._tally.counts["interrupted"] += 1
                await asyncio.sleep(0.2)
                continue
            break
        self._tally.counts[kind] += 1
        wanted = self._load.wanted[number]
        if kind in ("whole", "streamed"):
            self._tally.seconds.append(time.monotonic() - begin)
            right = got == wanted
        else:
            right = got == wanted[: len(got)]
        self._tally.counts["tokens"] += len(got)
        if not right:
            self._tally.wrong.append(f"prompt {number}, {kind}: {got}, want {wanted}")

    async def _send(self, http: httpx.AsyncClient, number: int, kind: str) -> list[int]:
        wanted = body(self._load.prompts[number], self._max_tokens, stream=kind != "whole")
        if kind == "whole":
            response = await http.post("/v1/completions", json=wanted)
            return response.raise_for_status().json()["choices"][0]["token_ids"]
        if kind == "left":
            wanted["stream"] = False
            task = asyncio.create_task(http.post("/v1/completions", json=wanted))
            await asyncio.wait([task], timeout=float(self._random.uniform(0, 0.2)))
            task.cancel()
            await asyncio.wait([task])
            return []
        stop = int(self._random.integers(1, self._max_tokens + 1)) if kind == "cancelled" else None
        got: list[int] = []
        ended = False
        async with http.stream("POST", "/v1/completions", json=wanted) as response:
            if response.is_error:
                await response.aread()
                response.raise_for_status()
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    ended = True
                elif data:
                    event = json.loads(data)
                    if "error" in event:
                        raise httpx.RemoteProtocolError(str(event["error"]))
                    got += event["choices"][0]["token_ids"]
                if stop is not None and len(got) >= stop:
                    return got
        if not ended:
            raise httpx.RemoteProtocolError("the stream ended early")
        return got
