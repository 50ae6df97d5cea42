"""Which prefixes of token ids have a stored state, and what may be dropped for room.

An entry is one checkpoint: the KDA layers' states after a prefix, and the MLA blocks of the tokens
since the entry that its request had resumed from (its parent). So an entry and its ancestors
hold all that a request needs to resume, and both kinds of payload come and go together. Entries
are found by the chained hash of their whole prefix.

A request holds a lease. Its entry and the ancestors are pinned until it is released; of the rest
the least recently used goes first. Touching an entry touches its ancestors after it, so a parent is
always newer than its children: the oldest unpinned entry is a leaf.

Payloads are handles of the caller's (rows of a state pool, block numbers), never arrays.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .arguments import at_least
from .cache_stats import CacheStats
from .hashing import ExtraKey, chain_hashes
from .lease import Entry, Freed, Lease, chain


class PrefixCache:
    """See the module's docstring. All methods may be called from any thread.

    Args:
      unit: tokens that a hash, and an MLA block's handle, covers; positions are multiples of it.
      checkpoint_bytes: of one checkpoint, over all KDA layers.
      block_bytes: of the MLA rows of one unit, over all MLA layers.
      budget_bytes: how much all entries together may take; 0 stores nothing.
      on_free: called with the entries that were dropped, outside of the cache's lock, before the
        method that dropped them returns. Their handles are the caller's again.
    """

    def __init__(
        self,
        *,
        unit: int,
        checkpoint_bytes: int,
        block_bytes: int,
        budget_bytes: int,
        on_free: Callable[[Sequence[Freed]], None] | None = None,
    ) -> None:
        at_least("unit", unit, 1)
        for name, value in (
            ("checkpoint_bytes", checkpoint_bytes),
            ("block_bytes", block_bytes),
            ("budget_bytes", budget_bytes),
        ):
            at_least(name, value, 0)
        self.unit = unit
        self._checkpoint_bytes = checkpoint_bytes
        self._block_bytes = block_bytes
        self._on_free = on_free
        self._lock = threading.Lock()
        self._index: OrderedDict[bytes, Entry] = OrderedDict()  # least recently used first
        self._generation = 0
        self._stats = CacheStats(budget_bytes=budget_bytes)

    def acquire(
        self, tokens: Any, *, extra_keys: Iterable[ExtraKey] = (), max_tokens: int | None = None
    ) -> Lease:
        """Looks for the longest stored prefix of a prompt and pins it.

        Args:
          tokens: the prompt's ids, >= 0, integers on the host.
          extra_keys: as in `chain_hashes`.
          max_tokens: find no more than this (`CheckpointRule.last_position`); the last token is
            never found in any case, for it must run to give logits.

        Raises:
          ValueError: naming the argument, the entry and what is allowed.
        """
        hashes = chain_hashes(tokens, self.unit, extra_keys)
        limit = len(tokens) - 1
        if max_tokens is not None:
            at_least("max_tokens", max_tokens, 0)
            limit = min(limit, max_tokens)
        with self._lock:
            entry = None
            for key in reversed(hashes[: max(0, limit) // self.unit]):
                if entry := self._index.get(key):
                    break
            self._touch(entry)
            for pinned in chain(entry):
                self._stats.pinned_bytes += 0 if pinned.pins else pinned.size
                pinned.pins += 1
            lease = Lease(self, hashes, len(tokens), entry, self._generation)
            self._stats.hits += entry is not None
            self._stats.misses += entry is None
            self._stats.queried_tokens += lease.num_tokens
            self._stats.hit_tokens += lease.cached_tokens
            self._stats.leases += 1
        return lease

    def insert(
        self, lease: Lease, position: int, *, checkpoint: Any, blocks: Sequence[Any]
    ) -> bool:
        """Stores the states of a lease's prompt after `position` tokens.

        Call it when the step that writes them has been submitted: a later request may be given
        the handles at once. If that step fails after all, `clear` the cache.

        Args:
          lease: of the request whose prompt it is.
          position: a multiple of the unit, past ``lease.position``, within the prompt.
          checkpoint: the handle of the KDA states.
          blocks: the handles of the MLA blocks from ``lease.position`` to `position`, one per unit.

        Returns:
          True: the handles are the cache's now, and the lease has moved to `position` and pins
          them. False: they stay the caller's and the lease stays where it was, because the prefix
          is stored already, or nothing more can be evicted, or the cache was cleared since the
          lease began.

        Raises:
          ValueError: the lease is not open here, or the position or the number of blocks is wrong.
        """
        with self._lock:
            self._check_open(lease)
            units = self._check_position(lease, position)
            if len(blocks) != units - lease.position // self.unit:
                raise ValueError(
                    f"blocks has {len(blocks)} handles, want one for each unit of {self.unit} "
                    f"tokens from {lease.position} to {position}"
                )
            key = lease._hashes[units - 1]
            size = self._checkpoint_bytes + self._block_bytes * len(blocks)
            if lease._generation != self._generation:
                self._stats.refused += 1
                return False
            if key in self._index:
                self._touch(self._index[key])
                self._stats.duplicates += 1
                return False
            if self._stats.pinned_bytes + size > self._stats.budget_bytes:
                self._stats.refused += 1
                return False
            freed = self._evict(self._stats.used_bytes + size - self._stats.budget_bytes)
            payload = Freed(checkpoint, tuple(blocks))
            entry = Entry(key, lease._entry, position, payload, size, pins=1)
            self._index[key] = entry
            lease._entry = entry
            self._touch(entry)
            self._stats.stored += 1
            self._stats.used_bytes += size
            self._stats.pinned_bytes += size
        self._give_back(freed)
        return True

    def release(self, lease: Lease) -> None:
        """Ends a lease: the request finished or was cancelled. What it stored may now be evicted.

        Raises:
          ValueError: the lease was released before, or another cache made it.
        """
        freed = []
        with self._lock:
            self._check_open(lease)
            lease._open = False
            self._stats.leases -= 1
            if lease._generation == self._generation:
                self._touch(lease._entry)
            for entry in chain(lease._entry):
                entry.pins -= 1
                if entry.pins:
                    continue
                self._stats.pinned_bytes -= entry.size
                if lease._generation != self._generation:  # it left the index when that ended
                    self._stats.used_bytes -= entry.size
                    freed.append(entry.payload)
            lease._entry = None
        self._give_back(freed)

    def evict(self, nbytes: int) -> int:
        """Drops entries, least recently used first, until that many bytes are given back.

        Returns:
          The bytes given back; fewer than asked for if requests in flight need all the rest.
        """
        at_least("nbytes", nbytes, 0)
        with self._lock:
            before = self._stats.used_bytes
            freed = self._evict(nbytes)
            given = before - self._stats.used_bytes
        self._give_back(freed)
        return given

    def clear(self) -> int:
        """Forgets all prefixes, at once for lookups; returns how many checkpoints it knew.

        What requests in flight hold is given back when they release it, and what they still try
        to store is refused: after a change of weights it would be wrong.
        """
        with self._lock:
            known = len(self._index)
            freed = [entry.payload for entry in self._index.values() if not entry.pins]
            self._stats.used_bytes = self._stats.pinned_bytes
            self._index.clear()
            self._generation += 1
            self._stats.resets += 1
        self._give_back(freed)
        return known

    def stats(self) -> CacheStats:
        """A consistent copy of the counters."""
        with self._lock:
            return dataclasses.replace(self._stats, entries=len(self._index))

    def _touch(self, entry: Entry | None) -> None:
        for used in chain(entry):
            self._index.move_to_end(used.key)

    def _evict(self, nbytes: int) -> list[Freed]:
        victims: list[Entry] = []
        given = 0
        for entry in self._index.values():
            if given >= nbytes:
                break
            if not entry.pins:
                victims.append(entry)
                given += entry.size
        for entry in victims:
            del self._index[entry.key]
        self._stats.used_bytes -= given
        self._stats.evicted_bytes += given
        self._stats.evictions += len(victims)
        return [entry.payload for entry in victims]

    def _give_back(self, freed: list[Freed]) -> None:
        if freed and self._on_free is not None:
            self._on_free(freed)

    def _check_open(self, lease: Lease) -> None:
        if lease._owner is not self:
            raise ValueError("lease is of another PrefixCache; use the one that made it")
        if not lease._open:
            raise ValueError("lease was released already; acquire another one for a new request")

    def _check_position(self, lease: Lease, position: int) -> int:
        at_least("position", position, 1)
        units, rest = divmod(position, self.unit)
        if rest:
            raise ValueError(f"position is {position}, want a multiple of {self.unit}, the unit")
        if not lease.position < position <= lease.num_tokens:
            raise ValueError(
                f"position is {position}, want one past {lease.position}, which the lease holds, "
                f"and at most {lease.num_tokens}, the prompt's length"
            )
        return units
