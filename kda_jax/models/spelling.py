"""Misspelt fields of a config.

Published configs hold many fields that shape no model here (rope_theta, use_cache, what a newer
release adds), so an unknown field is no mistake. One that is almost called as a known one is: its
value would be passed over, and the default taken in its place.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from .fields import shown

# One or two letters off in a name of ten. head_dim and v_head_dim have 0.89. Published fields that
# are closer are told apart by their words.
_ALIKE = 0.9
_SHORT = 3  # letters of a word that is another one with any of them changed: eos and eoi, q and o


def check_spelling(fields: Mapping[Any, Any], known: Collection[str], where: str = "") -> None:
    """Refuses a field whose name is almost a known one.

    Args:
      fields: of a config; null is as good as absent.
      known: names that have a meaning.
      where: what to put before the names in the message.

    Raises:
      ValueError: names the field, its value, and the name that was meant.
    """
    for name, value in fields.items():
        if value is None or name in known or not isinstance(name, str):
            continue
        for meant in difflib.get_close_matches(name, known, len(known), _ALIKE):
            if not _other_words(name, meant):
                raise ValueError(
                    f"{where}{name} is {shown(value)}, but there is no such field: rename it to"
                    f" {meant}, or remove it"
                )


def _other_words(name: str, known: str) -> bool:
    """Whether name is known with a word before, or between, or with another short word."""
    words, theirs = name.split("_"), known.split("_")
    if len(words) > len(theirs):
        rest = iter(words)
        return all(word in rest for word in theirs)
    pairs = [pair for pair in zip(words, theirs, strict=False) if pair[0] != pair[1]]
    short = all(max(map(len, pair)) <= _SHORT for pair in pairs)
    return len(words) == len(theirs) and short and all(set(a) != set(b) for a, b in pairs)
