"""The sizes for which a program is compiled, and arrays padded to them."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import jax
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


def pad(x: Any, axis: int, size: int, what: str, used: int | None = None) -> Any:
    """x with zeros behind its axis, up to size.

    Args:
      x: a NumPy or JAX array.
      axis: which axis.
      size: its length after.
      what: size counts, for the errors.
      used: how many the metadata has; None: not known here.

    Raises:
      TypeError: x is no array. ValueError: it has no such axis, or that is longer than size or
        neither used nor size.
    """
    if not isinstance(x, np.ndarray | jax.Array):
        raise TypeError(f"x is a {type(x).__name__}, want a NumPy or JAX array: np.asarray(x)")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis is {axis}, x has shape {x.shape}: pass the axis of its {what}")
    has = x.shape[axis]
    if has > size:
        raise ValueError(
            f"axis {axis} of shape {x.shape} is longer than the capacity of {size} {what}"
        )
    if used is not None and has not in (used, size):
        raise ValueError(
            f"axis {axis} of shape {x.shape} has {has} {what}, want {used}: what the metadata's"
            f" sequences have (or {size}, padded already)"
        )
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - has)
    return np.pad(x, widths) if isinstance(x, np.ndarray) else jnp.pad(x, widths)
