"""A device for the serving tests that keeps prefixes instead of states, and checks every read.

A row of the pool holds the tokens whose state it would be, a block the tokens of its rows with
all that came before them. A step that reads a row or a block which does not hold exactly its
request's prefix fails here; what it samples depends on the whole prefix.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from kda_jax.serving import PoolSizes, StepPlan

VOCAB = 96


def next_token(tokens: Sequence[int]) -> int:
    """What the device samples after these tokens."""
    return 3 + zlib.crc32(np.asarray(tokens, "<i4").tobytes()) % (VOCAB - 3)


def names(tokens: Sequence[int]) -> list[int]:
    """Of each token, with all that came before it."""
    found = [0]
    for token in np.asarray(tokens, "<i4"):
        found.append(zlib.crc32(token.tobytes(), found[-1]))
    return found[1:]


def continuation(prompt: Sequence[int], count: int, stops: Sequence[int] = ()) -> list[int]:
    """What a request should get, one token at a time."""
    tokens = [int(token) for token in prompt]
    for _ in range(count):
        tokens.append(next_token(tokens))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


class SymbolicDevice:
    """Runs `StepPlan`s in the order in which they are submitted."""

    def __init__(self, sizes: PoolSizes, block_size: int) -> None:
        self._block = block_size
        self.rows: list[tuple[int, ...] | None] = [None] * sizes.rows
        self.blocks: list[dict[int, int]] = [{} for _ in range(sizes.blocks)]
        self.slots: dict[int, int] = {}
        self.texts: dict[Any, list[int]] = {}
        self.submitted: list[StepPlan] = []
        self.fetched = 0

    def submit(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that the step samples."""
        self.submitted.append(plan)
        for part in plan.parts:  # all reads come before all writes
            prefix = tuple(part.running.request.prompt[: part.start].tolist())
            if part.start:
                assert self.rows[part.source] == prefix, "a state of another prefix"
            self._check_blocks(part.running.table, prefix)
        texts = []
        for decode in plan.decodes:
            running = decode.running
            text = self.texts.setdefault(running.request, running.request.prompt.tolist())
            text.append(self.slots[running.slot])
            assert len(text) == decode.start + 1
            assert self.rows[decode.row] == tuple(text[:-1]), "a state of another prefix"
            self._check_blocks(running.table, text[:-1])
            texts.append(text)
        decoded = []
        for decode, text in zip(plan.decodes, texts, strict=True):
            running = decode.running
            self._write(running.table, text, decode.start)
            self.rows[decode.row] = tuple(text)
            decoded.append(next_token(text))
            self.slots[running.slot] = decoded[-1]
        prefilled = []
        for part in plan.parts:
            text = part.running.request.prompt[: part.stop].tolist()
            self._write(part.running.table, text, part.start)
            self.rows[part.row] = tuple(text)
            prefilled.append(next_token(text))
            if part.last:
                self.slots[part.running.slot] = prefilled[-1]
        checkpoints = plan.checkpoints
        for row, position, where in zip(
            checkpoints.row, checkpoints.position, checkpoints.destination, strict=True
        ):
            if where >= 0:
                prompt = plan.parts[row].running.request.prompt
                self.rows[where] = tuple(prompt[:position].tolist())
        return np.array(decoded, np.int32), np.array(prefilled, np.int32)

    def fetch(self, handle: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Waits for a step."""
        self.fetched += 1
        return handle

    def _check_blocks(self, table: np.ndarray, tokens: Sequence[int]) -> None:
        for position, name in enumerate(names(tokens)):
            block = self.blocks[table[position // self._block]]
            assert block.get(position % self._block) == name, "an MLA row of another prefix"

    def _write(self, table: np.ndarray, tokens: Sequence[int], first: int) -> None:
        for position, name in enumerate(names(tokens)[first:], first):
            block = self.blocks[table[position // self._block]]
            block[position % self._block] = name
