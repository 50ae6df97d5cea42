"""Names of prefixes: one chained SHA-256 per unit of token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from .arguments import at_least, lengths_of

ExtraKey = str | bytes | int


def chain_hashes(tokens: Any, unit: int, extra_keys: Iterable[ExtraKey] = ()) -> list[bytes]:
    """One hash per whole unit; the i-th names the first ``(i + 1) * unit`` tokens, not the unit.

    Each hash covers the one before it and the tokens of its unit, and the first also covers the
    unit's size and the extra keys. So equal hashes mean equal prefixes under equal keys.

    Args:
      tokens: ids >= 0, integers on the host. Tokens after the last whole unit have no hash.
      unit: tokens of a unit, at least 1.
      extra_keys: what changes the states beside the tokens, in a fixed order: an adapter's name
        and revision, a tenant's salt.

    Raises:
      ValueError: naming the argument, the entry and what is allowed.
    """
    at_least("unit", unit, 1)
    ids = lengths_of("tokens", tokens).astype("<i8")
    name = _root(unit, extra_keys)
    hashes = []
    for start in range(0, ids.size - unit + 1, unit):
        name = hashlib.sha256(name + ids[start : start + unit].tobytes()).digest()
        hashes.append(name)
    return hashes


def _root(unit: int, extra_keys: Iterable[ExtraKey]) -> bytes:
    if isinstance(extra_keys, (str, bytes)):
        raise ValueError(f"extra_keys is {extra_keys!r}, want a tuple of keys: ({extra_keys!r},)")
    digest = hashlib.sha256(b"kda prefix %d" % unit)
    for i, key in enumerate(extra_keys):
        if isinstance(key, bytes):
            kind, value = b"b", key
        elif isinstance(key, str):
            kind, value = b"s", key.encode("utf-8", "surrogatepass")
        elif isinstance(key, int) and not isinstance(key, bool):
            kind, value = b"i", b"%d" % key
        else:
            raise ValueError(f"extra_keys[{i}] is {key!r}, want a str, bytes or int")
        digest.update(
            b"|%s%d:" % (kind, len(value)) + value
        )  # with its length: no two run together
    return digest.digest()
