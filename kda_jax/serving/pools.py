"""Rows and blocks of the device's pools on the host: who holds which, and room made by eviction.

A row holds the KDA layers' states after some tokens: of a running request, where its states are
kept up to date, or of a checkpoint. A block holds the MLA layers' rows of `block_size` tokens.
Numbers move between a request and the prefix cache; what they name never moves.

There is always room for a running request: requests hold at most `live_blocks` together, and all
that the cache holds beside that can be evicted.
"""

from __future__ import annotations

from collections.abc import Sequence

from .engine_config import PoolSizes
from .free_list import FreeList
from .lease import Freed, Lease
from .prefix_cache import PrefixCache


class Pools:
    """See the module's docstring. The engine's thread owns it, and calls the cache through it."""

    def __init__(self, sizes: PoolSizes) -> None:
        self.sizes = sizes
        self.cache = PrefixCache(
            unit=sizes.rule.block_size,
            checkpoint_bytes=sizes.checkpoint_bytes,
            block_bytes=sizes.block_bytes,
            budget_bytes=sizes.cache_bytes,
            on_free=self._on_free,
        )
        self._rows = FreeList(sizes.rows)
        self._blocks = FreeList(sizes.blocks)
        self._checkpoints = 0

    @property
    def caching(self) -> bool:
        """Whether there is a prefix cache."""
        return self.sizes.cache_bytes > 0

    @property
    def free_rows(self) -> int:
        """Rows that nobody holds."""
        return len(self._rows)

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self._blocks)

    def take_live_row(self) -> int:
        """A row for a running request."""
        return self._rows.take()

    def take_checkpoint_row(self) -> int | None:
        """A row for a checkpoint; None if requests in flight depend on all there are."""
        if not self._room_for_checkpoint():
            return None
        self._checkpoints += 1
        return self._rows.take()

    def take_blocks(self, count: int) -> list[int]:
        """That many blocks; the least recently used prefixes make room."""
        if not self.sizes.block_bytes:  # no MLA layer: a block is nothing but its number
            return [0] * count
        while len(self._blocks) < count:
            missing = count - len(self._blocks)
            if not self.cache.evict(missing * self.sizes.block_bytes):
                raise RuntimeError(f"{missing} blocks are missing and nothing can be evicted")
        return [self._blocks.take() for _ in range(count)]

    def give_back_live_row(self, row: int) -> None:
        """Ends a running request's hold."""
        self._rows.give_back([row])

    def give_back_checkpoint_row(self, row: int) -> None:
        """Of a checkpoint that was not stored."""
        self._checkpoints -= 1
        self._rows.give_back([row])

    def give_back_blocks(self, blocks: Sequence[int]) -> None:
        """Of a request that ended, without those that the cache holds."""
        if self.sizes.block_bytes:
            self._blocks.give_back(blocks)

    def store(self, lease: Lease, position: int, row: int, blocks: Sequence[int]) -> bool:
        """`PrefixCache.insert` of a checkpoint row; one that is not stored is given back."""
        if self.cache.insert(lease, position, checkpoint=row, blocks=blocks):
            return True
        self.give_back_checkpoint_row(row)
        return False

    def store_live_row(self, lease: Lease, position: int, row: int, blocks: Sequence[int]) -> bool:
        """The same for the live row: True: it is the cache's now, and the request needs another."""
        if not self._room_for_checkpoint():
            return False
        stored = self.cache.insert(lease, position, checkpoint=row, blocks=blocks)
        self._checkpoints += stored
        return stored

    def _room_for_checkpoint(self) -> bool:
        if self._checkpoints < self.sizes.checkpoint_rows:
            return True
        return self.cache.evict(1) > 0

    def _on_free(self, freed: Sequence[Freed]) -> None:
        for checkpoint, blocks in freed:
            self.give_back_checkpoint_row(checkpoint)
            self.give_back_blocks(blocks)
