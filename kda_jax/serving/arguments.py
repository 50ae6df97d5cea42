"""Reads the host integers that the serving functions take; every refusal names the argument."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..grid import Array, host_integers


def at_least(name: str, value: Any, least: int) -> None:
    """Refuses what is not an integer of at least that much."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} is {value!r}, want an integer of at least {least}")


def lengths_of(name: str, values: Any, *, least: int | None = 0) -> Array:
    """Reads a list of integers, int64 ``[N]``; none may be below `least`."""
    array = host_integers(values, name).astype(np.int64)
    if least is not None and (array < least).any():
        i = int(np.argmax(array < least))
        raise ValueError(f"{name}[{i}] is {array[i]}, want at least {least}")
    return array


def same_size(name: str, array: Array, like: str, other: Array) -> None:
    """Refuses lists of different sizes."""
    if array.size != other.size:
        raise ValueError(f"{name} has {array.size} entries, want {other.size}, as {like} has")


def table_of(name: str, values: Any, lengths: Array, block_size: int) -> Array:
    """Reads block tables, int64 ``[N, W]``, wide enough for the lengths."""
    table = host_integers(values, name, ndim=2).astype(np.int64)
    if table.shape[0] != lengths.size:
        raise ValueError(f"{name} has {table.shape[0]} rows, want {lengths.size}, as lengths has")
    need = -(-lengths // block_size)
    if need.size and need.max() > table.shape[1]:
        i = int(np.argmax(need))
        raise ValueError(
            f"{name} has {table.shape[1]} columns, but request {i} has {lengths[i]} tokens and "
            f"needs {need[i]} blocks of {block_size}"
        )
    return table
