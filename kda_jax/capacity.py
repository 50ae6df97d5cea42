"""The sizes for which a program is compiled, and arrays padded to them."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from .grid import check_chunk_size


@dataclass(frozen=True)
class Capacity:
    """The sizes for which a program is compiled; unused room is padding.

    Attributes:
      tokens: rows of the packed token axis (an operator's T may be larger).
      sequences: rows of initial_state and final_state.
      chunks: rows of the chunk table.
      checkpoints: rows of checkpoint_state.
    """

    tokens: int
    sequences: int
    chunks: int
    checkpoints: int = 0

    @classmethod
    def bucket(
        cls, tokens: int, sequences: int, checkpoints: int = 0, chunk_size: int = 64
    ) -> Capacity:
        """Rounds sizes up so that a server meets a handful of different capacities.

        Tokens go to the next of 64, 96, 128, 192, 256, ...; sequences and checkpoints to a power
        of two (no checkpoints stay none). The chunks follow from these: no packing of that many
        sequences and checkpoints needs more, so they never make a bucket of their own.

        Raises:
          TypeError: a size is no integer. ValueError: a chunk size that no kernel has.
        """
        check_chunk_size(chunk_size)
        tokens = _integer("tokens", tokens)
        sequences = _integer("sequences", sequences)
        checkpoints = _integer("checkpoints", checkpoints)
        power = max(64, _next_power_of_two(tokens))
        if power > 64 and tokens <= 3 * power // 4:
            power = 3 * power // 4
        sequences = _next_power_of_two(sequences)
        checkpoints = _next_power_of_two(checkpoints) if checkpoints else 0
        return cls(power, sequences, power // chunk_size + sequences + checkpoints, checkpoints)


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, want an integer") from None


def _next_power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def pad(x: Any, axis: int, size: int, what: str) -> Any:
    """x with zeros behind its axis, up to size; what: size counts, for the error."""
    missing = size - x.shape[axis]
    if missing < 0:
        raise ValueError(
            f"axis {axis} of shape {x.shape} is longer than the capacity of {size} {what}"
        )
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return np.pad(x, widths) if isinstance(x, np.ndarray) else jnp.pad(x, widths)
