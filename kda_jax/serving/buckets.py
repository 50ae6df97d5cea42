"""The shapes that steps have: a bounded set, so that a server compiles a handful of programs.

The number of parts of prompts and of checkpoints in a step is always the most there can be (or no
checkpoints); only the packed tokens, and the decode rows of a step without a prefill, make shapes
of their own. Beside a prefill the decode rows are as many as there can be: they cost little there.
"""

from __future__ import annotations

import dataclasses

from ..metadata import Capacity
from .engine_config import CHUNK, EngineConfig, PoolSizes


@dataclasses.dataclass(frozen=True)
class Bucket:
    """One shape: decode rows (0: none), and the capacity of the prefill (None: none)."""

    decodes: int
    capacity: Capacity | None

    def __str__(self) -> str:
        parts = []
        if self.capacity is not None:
            parts.append(f"{self.capacity.tokens} tokens of prompts")
            if self.capacity.checkpoints:
                parts.append("checkpoints")
        if self.decodes:
            parts.append(f"{self.decodes} decodes")
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The shapes of an engine's steps."""

    budget: int
    max_requests: int
    max_prefills: int
    checkpoints: int

    @classmethod
    def of(cls, config: EngineConfig, sizes: PoolSizes) -> Buckets:
        """Of an engine."""
        return cls(
            budget=config.budget,
            max_requests=config.max_requests,
            max_prefills=config.max_prefills,
            checkpoints=sizes.checkpoints_per_step if sizes.rule.enabled else 0,
        )

    def find(self, decodes: int, tokens: int, checkpoints: bool) -> Bucket:
        """The smallest one that holds a step of that many decodes and tokens of prompts."""
        if not tokens:
            return Bucket(_power(decodes, 1), None)
        capacity = self._capacity(_power(tokens, CHUNK), checkpoints)
        return Bucket(_power(self.max_requests, 1) if decodes else 0, capacity)

    def all(self) -> list[Bucket]:
        """Every shape, the most useful first: largest prefills, then decodes, then mixed steps."""
        tokens = _powers(CHUNK, _power(self.budget, CHUNK))[::-1]
        most = _power(self.max_requests, 1)
        exports = [True, False] if self.checkpoints else [False]
        decodes = [Bucket(rows, None) for rows in _powers(1, most)[::-1]]
        prefills = [Bucket(0, self._capacity(t, c)) for t in tokens for c in exports]
        mixed = [dataclasses.replace(bucket, decodes=most) for bucket in prefills]
        return [*prefills, *decodes, *mixed]

    def _capacity(self, tokens: int, checkpoints: bool) -> Capacity:
        exported = self.checkpoints if checkpoints else 0
        chunks = tokens // CHUNK + self.max_prefills + exported
        return Capacity(tokens, self.max_prefills, chunks, exported)


def _power(number: int, least: int) -> int:
    return max(least, 1 << max(0, number - 1).bit_length())


def _powers(first: int, last: int) -> list[int]:
    found = [first]
    while found[-1] < last:
        found.append(2 * found[-1])
    return found
