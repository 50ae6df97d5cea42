"""`PrefixCache` against a model of itself that is too simple to be wrong (hypothesis, stateful).

The model keeps a plain list of entries with a time of last use, and knows prefixes as tuples of
tokens, not as hashes. A pool of handles stands in for the device: each handle notes the prefix
whose state was last written to it, forgets it when the cache frees it, and is used again as soon
as possible. So a state served for any other prefix than its own is seen at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kda_jax.serving import Freed, Lease, PrefixCache

UNIT, CHECKPOINT, BLOCK, BUDGET = 2, 5, 1, 45
Prefix = tuple[Any, ...]  # extra key, then tokens


@dataclasses.dataclass(eq=False)
class Stored:
    """The model's entry: `ends` are the prefixes of its blocks."""

    prefix: Prefix
    parent: Stored | None
    ends: list[Prefix]
    used: int
    gone: bool = False  # cleared: no lookup finds it

    @property
    def size(self) -> int:
        return CHECKPOINT + BLOCK * len(self.ends)

    def line(self) -> list[Stored]:
        return [*(self.parent.line() if self.parent else []), self]


@dataclasses.dataclass(eq=False)
class Held:
    """The model's lease."""

    lease: Lease
    key: Any
    tokens: list[int]
    entry: Stored | None
    stale: bool = False

    def prefix(self, length: int) -> Prefix:
        return (self.key, *self.tokens[:length])


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(
            unit=UNIT,
            checkpoint_bytes=CHECKPOINT,
            block_bytes=BLOCK,
            budget_bytes=BUDGET,
            on_free=self.on_free,
        )
        self.entries: list[Stored] = []
        self.held: list[Held] = []
        self.now = 0
        self.free: list[int] = []
        self.made = 0
        self.content: dict[int, tuple[str, Prefix]] = {}

    # The pool.

    def write(self, kind: str, prefix: Prefix) -> int:
        if not self.free:
            self.free.append(self.made)
            self.made += 1
        handle = self.free.pop()
        self.content[handle] = (kind, prefix)
        return handle

    def on_free(self, freed: Sequence[Freed]) -> None:
        for entry in freed:
            for handle in (entry.checkpoint, *entry.blocks):
                del self.content[handle]  # a KeyError if it was free already
                self.free.append(handle)

    # The model.

    def pinned(self) -> list[Stored]:
        lines = [held.entry.line() for held in self.held if held.entry]
        return [entry for entry in self.entries if any(entry in line for line in lines)]

    def touch(self, entry: Stored | None) -> None:
        if entry is not None and not entry.gone:
            for used in reversed(entry.line()):
                self.now += 1
                used.used = self.now

    def size(self, entries: list[Stored]) -> int:
        return sum(entry.size for entry in entries)

    def make_room(self, excess: int) -> int:
        """Drops the oldest leaf that nobody holds, one at a time."""
        given = 0
        while given < excess:
            parents = [entry.parent for entry in self.entries]
            pinned = self.pinned()
            leaves = [e for e in self.entries if e not in parents and e not in pinned]
            if not leaves:
                break
            oldest = min(leaves, key=lambda entry: entry.used)
            self.entries.remove(oldest)
            given += oldest.size
        return given

    # What a server does.

    @rule(
        tokens=st.lists(st.integers(0, 1), max_size=11),
        key=st.sampled_from([None, "lora"]),
        limit=st.none() | st.integers(0, 11),
    )
    def acquire(self, tokens: list[int], key: str | None, limit: int | None) -> None:
        keys = () if key is None else (key,)
        lease = self.cache.acquire(tokens, extra_keys=keys, max_tokens=limit)
        held = Held(lease, key, tokens, None)
        usable = min(len(tokens) - 1, len(tokens) if limit is None else limit)
        known = {entry.prefix: entry for entry in self.entries if not entry.gone}
        for length in range(max(usable, 0), 0, -1):
            if entry := known.get(held.prefix(length)):
                held.entry = entry
                break
        self.touch(held.entry)
        assert lease.cached_tokens == (len(held.entry.prefix) - 1 if held.entry else 0)
        self.held.append(held)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        lease = held.lease
        positions = range(lease.position + UNIT, len(held.tokens) + 1, UNIT)
        if not positions:
            return
        position = data.draw(st.sampled_from(positions))
        ends = [held.prefix(end) for end in positions if end <= position]
        checkpoint = self.write("checkpoint", held.prefix(position))
        blocks = [self.write("block", end) for end in ends]
        new = Stored(held.prefix(position), held.entry, ends, 0)
        twin = [e for e in self.entries if e.prefix == new.prefix and not e.gone]
        if held.stale:
            want = False
        elif twin:
            self.touch(twin[0])
            want = False
        elif self.size(self.pinned()) + new.size > BUDGET:
            want = False
        else:
            self.make_room(self.size(self.entries) + new.size - BUDGET)
            self.entries.append(new)
            held.entry = new
            self.touch(new)
            want = True
        assert self.cache.insert(lease, position, checkpoint=checkpoint, blocks=blocks) == want
        if not want:
            self.on_free([Freed(checkpoint, tuple(blocks))])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        self.cache.release(held.lease)
        self.held.remove(held)
        self.touch(held.entry)
        pinned = self.pinned()
        self.entries = [e for e in self.entries if not e.gone or e in pinned]

    @rule(nbytes=st.integers(0, 20))
    def evict(self, nbytes: int) -> None:
        # What is gone from the index and still here is held, so that make_room spares it.
        assert self.make_room(nbytes) == self.cache.evict(nbytes)

    @rule()
    def clear(self) -> None:
        assert self.cache.clear() == sum(not entry.gone for entry in self.entries)
        self.entries = self.pinned()
        for entry in self.entries:
            entry.gone = True
        for held in self.held:
            held.stale = True

    # What must hold after each of them.

    @invariant()
    def every_state_is_of_its_prefix(self) -> None:
        for held in self.held:
            lease = held.lease
            if not lease.position:
                assert lease.checkpoint is None and lease.blocks == []
                continue
            want = ("checkpoint", held.prefix(lease.position))
            assert self.content[lease.checkpoint] == want
            ends = range(UNIT, lease.position + 1, UNIT)
            assert [self.content[block] for block in lease.blocks] == [
                ("block", held.prefix(end)) for end in ends
            ]

    @invariant()
    def nothing_is_lost(self) -> None:
        stats = self.cache.stats()
        assert stats.used_bytes == self.size(self.entries) <= BUDGET
        assert stats.pinned_bytes == self.size(self.pinned())
        assert stats.entries == sum(not entry.gone for entry in self.entries)
        assert stats.leases == len(self.held)
        assert len(self.content) == sum(1 + len(entry.ends) for entry in self.entries)
        assert stats.used_bytes == sum(
            CHECKPOINT if kind == "checkpoint" else BLOCK for kind, _ in self.content.values()
        )


TestPrefixCache = Machine.TestCase
TestPrefixCache.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
