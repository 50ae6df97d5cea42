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

# One or two letters off in a name of ten. Published pairs of different fields are further apart:
# head_dim and v_head_dim have 0.89.
_ALIKE = 0.9


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
        for meant in difflib.get_close_matches(name, known, 1, _ALIKE):
            raise ValueError(
                f"{where}{name} is {shown(value)}, but there is no such field: rename it to"
                f" {meant}, or remove it"
            )
