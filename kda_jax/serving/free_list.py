"""Which rows or blocks of a pool are free."""

from __future__ import annotations

from collections.abc import Iterable


class FreeList:
    """The numbers 0..size-1, each free or taken. Not thread-safe: the engine's thread owns it."""

    def __init__(self, size: int) -> None:
        self._free = list(range(size - 1, -1, -1))  # low numbers first
        self._taken = [False] * size

    def __len__(self) -> int:
        """How many are free."""
        return len(self._free)

    def take(self) -> int:
        """One that was free.

        Raises:
          RuntimeError: none is.
        """
        if not self._free:
            raise RuntimeError(f"all {len(self._taken)} are taken: ask len() first")
        number = self._free.pop()
        self._taken[number] = True
        return number

    def give_back(self, numbers: Iterable[int]) -> None:
        """Frees them.

        Raises:
          RuntimeError: one is free already: two owners would write to it.
        """
        for number in numbers:
            if not self._taken[number]:
                raise RuntimeError(f"{number} is free already")
            self._taken[number] = False
            self._free.append(number)
