"""What a request holds of the prefix cache: an entry, its ancestors, and their handles."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple


class Freed(NamedTuple):
    """The handles of a dropped entry: nothing in the cache refers to them any more."""

    checkpoint: Any
    blocks: tuple[Any, ...]


@dataclasses.dataclass(eq=False, slots=True)
class Entry:
    """One checkpoint of the index.

    key: the chained hash of the prefix. position: its tokens. size: bytes of the payload. pins:
    leases on this entry and on all entries below it.
    """

    key: bytes
    parent: Entry | None
    position: int
    payload: Freed
    size: int
    pins: int = 0


class Lease:
    """A request's hold on the cache. Made by `PrefixCache.acquire`; release it exactly once.

    A released lease holds nothing: its handles may belong to another prefix by then.

    Attributes:
      num_tokens: of the request's prompt.
      cached_tokens: what the lookup found, for the response's usage; stays as it was.
    """

    def __init__(
        self,
        owner: object,
        hashes: list[bytes],
        num_tokens: int,
        entry: Entry | None,
        generation: int,
    ) -> None:
        self.num_tokens = num_tokens
        self.cached_tokens = entry.position if entry else 0
        self._owner = owner
        self._hashes = hashes
        self._entry = entry
        self._generation = generation
        self._open = True

    @property
    def position(self) -> int:
        """Tokens of the prefix that the lease holds: found, or stored since. 0: none."""
        return self._entry.position if self._entry else 0

    @property
    def checkpoint(self) -> Any:
        """The handle of the KDA states after `position` tokens; None at 0."""
        return self._entry.payload.checkpoint if self._entry else None

    @property
    def blocks(self) -> list[Any]:
        """The handles of the MLA blocks of the first `position` tokens, one per unit, in order."""
        parts = [entry.payload.blocks for entry in chain(self._entry)]
        return [block for part in reversed(parts) for block in part]


def chain(entry: Entry | None) -> Iterator[Entry]:
    """An entry and its ancestors, deepest first."""
    while entry is not None:
        yield entry
        entry = entry.parent
