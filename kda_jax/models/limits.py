"""Tokens that a step cannot take: rows of NaN in the program, errors where the host can see them.

A program cannot raise, and reading a length back to the host would hold up every step. What a step
makes of a token outside the vocabulary or past the end of its MLA cache, and of all tokens after
it, is therefore NaN, never a number that looks right. Only the rows that predict are changed, and
integers beside: another row's result is the same to the bit, with such a token and without.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..metadata import ChunkMetadata
from .batch import Batch
from .cache import LOST, ModelCache
from .mla import MLACache, locate


def room_of(cache: ModelCache) -> int | None:
    """Tokens that each row has room for; None: there is no MLA layer, and so no end."""
    rooms = [layer.rows.shape[1] for layer in cache.layers if isinstance(layer, MLACache)]
    return min(rooms, default=None)


class Lost(NamedTuple):
    """What a step cannot take. decode: bool [D], these rows; None without such rows. first: int32
    [N], of each sequence of the prefill the position from which on; None without a prefill."""

    batch: Batch
    decode: jax.Array | None
    first: jax.Array | None

    def without(self, x: jax.Array, *, every_row: bool) -> jax.Array:
        """x with NaN in lost rows: [D + T, hidden] with every_row, else [D + N, hidden]."""
        parts = [] if self.decode is None else [self.decode]
        if self.first is not None and every_row:
            sequence, position = locate(self.batch, x.shape[0] - self.batch.decodes)
            parts.append(position >= self.first[sequence])
        elif self.first is not None:
            parts.append(self._sequences())
        rows = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        return jnp.where(rows[:, None], jnp.asarray(jnp.nan, x.dtype), x)

    def decode_length(self, length: jax.Array) -> jax.Array:
        """Of the decode rows after the step: `LOST` where they are, whatever comes after."""
        assert self.decode is not None and self.batch.active is not None
        return jnp.where(self.decode, LOST, length + self.batch.active)

    def prefill_length(self, length: jax.Array) -> jax.Array:
        """Of the sequences after the step, likewise."""
        assert self.batch.metadata is not None
        after = length + jnp.maximum(jnp.asarray(self.batch.metadata.seqs)[:, 1], 0)
        return jnp.where(self._sequences(), LOST, after)

    def checkpoint_length(self, sequence: jax.Array, length: jax.Array) -> jax.Array:
        """Of checkpoints, int32 [M], after so many tokens of these sequences, likewise."""
        assert self.first is not None
        return jnp.where(length > self.first[sequence], LOST, length)

    def _sequences(self) -> jax.Array:
        assert self.batch.metadata is not None and self.batch.start is not None
        assert self.first is not None
        length = jnp.asarray(self.batch.metadata.seqs)[:, 1]
        return (length > 0) & (self.batch.start + length > self.first)


def find_lost(
    tokens: jax.Array,
    vocab: int,
    batch: Batch,
    prefill: ModelCache | None,
    decode: ModelCache | None,
) -> Lost:
    """Of tokens int32 [D + T]; prefill, decode: the caches before the step, of the parts it has."""
    outside, D = (tokens < 0) | (tokens >= vocab), batch.decodes
    rows = first = None
    if decode is not None:
        assert batch.active is not None and batch.decode_start is not None
        rows = batch.active & (outside[:D] | (batch.decode_start >= _end(decode)))
    if prefill is not None:
        sequence, position = locate(batch, tokens.shape[0] - D)
        where = jnp.where(outside[D:] & (position >= 0), sequence, prefill.length.shape[0])
        first = jnp.full_like(prefill.length, _end(prefill))
        first = first.at[where].min(position, mode="drop")
    return Lost(batch, rows, first)


def _end(cache: ModelCache) -> int:
    room = room_of(cache)
    return LOST if room is None else room


def check_tokens(tokens: Any, used: Any, first: int, vocab: int) -> None:
    """Refuses a token outside the vocabulary, where all is on the host; a device is not waited for.

    Args:
      tokens: int [R]; anything but a NumPy array is passed over.
      used: bool [R], or a slice: which are tokens. None, or no NumPy array: not known here.
      first: the number of tokens[0] in the message.
      vocab: tokens are 0..vocab - 1.

    Raises:
      ValueError: names the entry, its value and the range.
    """
    if not isinstance(tokens, np.ndarray) or not isinstance(used, np.ndarray | slice):
        return
    chosen = tokens[used]
    if not chosen.size or (chosen.min() >= 0 and chosen.max() < vocab):
        return
    outside = (tokens < 0) | (tokens >= vocab)
    index = int(np.flatnonzero(outside & _mask(used, tokens.size))[0])
    raise ValueError(
        f"tokens[{first + index}] is {tokens[index]}, want a token of the vocabulary, 0 to"
        f" {vocab - 1} (vocab_size is {vocab})"
    )


def _mask(used: Any, size: int) -> np.ndarray:
    mask = np.zeros(size, np.bool_)
    mask[used] = True
    return mask


def check_prefill_room(name: str, metadata: ChunkMetadata, cache: ModelCache) -> None:
    """Refuses a prefill for which the cache is too small, as far as the host can see.

    With lengths on a device that is what does not fit into an empty cache either.

    Raises:
      ValueError: names the sequence, where it ends, and the room.
    """
    room = room_of(cache)
    if room is None or not metadata.on_host:
        return
    length = np.asarray(metadata.seqs)[:, 1]
    end = length + cache.length if isinstance(cache.length, np.ndarray) else length
    lost = (length > 0) & (end > room)
    if lost.any():
        row = int(np.flatnonzero(lost)[0])
        raise _no_room(name, room, row, int(end[row]), f"sequence {row} ends at {end[row]}")


def check_decode_room(name: str, active: Any, cache: ModelCache) -> None:
    """Refuses a decode step of a row that is full, where lengths and flags are on the host.

    Raises:
      ValueError: names the row, its length and the room.
    """
    length = cache.length
    if not isinstance(length, np.ndarray) or not isinstance(active, np.ndarray):
        return
    room = room_of(cache)
    if room is None:
        return
    full = active & (length >= room)
    if full.any():
        row = int(np.flatnonzero(full)[0])
        says = f"row {row} holds {length[row]} already"
        raise _no_room(name, room, row, int(length[row]) + 1, says)


def _no_room(name: str, room: int, row: int, need: int, says: str) -> ValueError:
    if need >= LOST:
        return ValueError(
            f"row {row} of {name} is lost: an earlier step had a token outside the vocabulary or"
            " past the end of the cache; start the request anew, from length 0"
        )
    return ValueError(
        f"{name} has room for {room} tokens in each row, {says}: make it with"
        f" empty_cache(config, sequences, max_length={need}) or more"
    )
