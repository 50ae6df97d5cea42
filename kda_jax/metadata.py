"""Where sequences, chunks and checkpoints lie on the packed token axis.

Built on the host in NumPy, once per step, and shared by all layers. As an ordinary jit argument
(a pytree of int32 arrays) it costs one trace per `Capacity`, whatever the lengths; as a static
argument (hashable by content) it fixes the layout in the compiled program.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from .capacity import Capacity as Capacity
from .capacity import pad
from .grid import (
    Array,
    Offsets,
    as_nested,
    check_chunk_arrays,
    check_chunk_size,
    cut_chunks,
    parse_checkpoints,
    parse_cu_seqlens,
    parse_seq_lens,
    table,
)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["seqs", "chunks", "checkpoints"],
    meta_fields=["chunk_size", "capacity"],
)
@dataclass(frozen=True, eq=False)
class ChunkMetadata:
    """The layout of one packed batch. Make it with one of the ``from_`` methods.

    Attributes:
      seqs: int32 ``[N, 4]``: first token, length, first chunk, number of chunks. Rows of padding:
        length -1, no chunks.
      chunks: int32 ``[NC, 4]``: sequence, first token, valid rows (1..chunk_size), row of the
        checkpoint at its end or -1. The chunks tile the tokens in use, in order. Rows of padding:
        sequence -1, no rows.
      checkpoints: int32 ``[M, 2]``: sequence, offset (1..length), in the order given, which is the
        row order of ``checkpoint_state``. Rows of padding: (-1, 0).
      chunk_size: 16, 32 or 64 (static).
      capacity: the sizes N, NC, M and the token rows (static).
    """

    seqs: Array
    chunks: Array
    checkpoints: Array
    chunk_size: int
    capacity: Capacity

    @classmethod
    def from_seq_lens(
        cls,
        seq_lens: Any,
        *,
        chunk_size: int = 64,
        checkpoint_offsets: Offsets | None = None,
        capacity: Capacity | Literal["bucket"] | None = None,
    ) -> ChunkMetadata:
        """Builds the metadata of sequences that lie one after the other.

        Args:
          seq_lens: the length of each sequence, integers >= 0, on the host.
          chunk_size: rows of a chunk: 16, 32 or 64.
          checkpoint_offsets: after how many tokens to return the state, each in 1..length and at
            most once: either one list per sequence, ``[[64, 128], []]``, or one number per
            sequence where 0 means none, ``[64, 0]``.
          capacity: None for the exact sizes, "bucket" for `Capacity.bucket` of them, or a
            `Capacity` to fit into.

        Raises:
          ValueError: naming the argument, the entry and what is allowed.
        """
        return _build(parse_seq_lens(seq_lens), chunk_size, checkpoint_offsets, capacity)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Any,
        *,
        chunk_size: int = 64,
        checkpoint_offsets: Offsets | None = None,
        capacity: Capacity | Literal["bucket"] | None = None,
    ) -> ChunkMetadata:
        """`from_seq_lens` for boundaries: int32 or int64 ``[N + 1]``, from 0, not decreasing.

        Other arguments and errors as there.
        """
        return _build(parse_cu_seqlens(cu_seqlens), chunk_size, checkpoint_offsets, capacity)

    @classmethod
    def from_chunk_indices(
        cls,
        cu_seqlens: Any,
        chunk_indices: Any,
        chunk_offsets: Any,
        *,
        chunk_size: int = 64,
        checkpoint_offsets: Offsets | None = None,
        capacity: Capacity | Literal["bucket"] | None = None,
    ) -> ChunkMetadata:
        """`from_cu_seqlens` for an engine that has the chunk grid already, in vLLM's form.

        chunk_indices ``[NC, 2]`` holds (sequence, chunk in sequence) and chunk_offsets ``[N + 1]``
        the exclusive sum of ``ceil(length / chunk_size)``. Both are verified: a kernel that
        trusted a wrong grid would read out of bounds. Other arguments and errors as in
        `from_seq_lens`.
        """
        cu = parse_cu_seqlens(cu_seqlens)
        check_chunk_size(chunk_size)
        check_chunk_arrays(cu, chunk_size, chunk_indices, chunk_offsets)
        return _build(cu, chunk_size, checkpoint_offsets, capacity)

    @property
    def on_host(self) -> bool:
        """Whether the arrays are NumPy, as they were built; False for device arrays and tracers."""
        return isinstance(self.seqs, np.ndarray)

    @functools.cached_property
    def _content(self) -> tuple[Any, ...]:
        if not self.on_host:
            raise TypeError(
                "this ChunkMetadata holds device arrays or tracers and has no hash; pass it as an "
                "ordinary argument, or use the one that was built on the host as static argument"
            )
        arrays = (self.seqs, self.chunks, self.checkpoints)
        return (self.chunk_size, self.capacity, *(array.tobytes() for array in arrays))

    def __hash__(self) -> int:
        return hash(self._content)

    def __reduce__(self) -> tuple[Any, ...]:
        # So that a copy is read-only as well, and does not inherit a cached content.
        arrays = (np.asarray(self.seqs), np.asarray(self.chunks), np.asarray(self.checkpoints))
        return _restore, (*arrays, self.chunk_size, self.capacity)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, ChunkMetadata) or not (self.on_host and other.on_host):
            return NotImplemented
        return self._content == other._content

    @functools.cached_property
    def num_sequences(self) -> int:
        """Sequences in use."""
        self._require_host()
        return int(np.count_nonzero(self.seqs[:, 1] >= 0))

    @property
    def num_tokens(self) -> int:
        """Tokens in use."""
        return int(self.seq_lens.sum())

    @property
    def num_chunks(self) -> int:
        """Chunks in use."""
        return int(self._chunk_counts.sum())

    @functools.cached_property
    def num_checkpoints(self) -> int:
        """Checkpoints in use."""
        self._require_host()
        return int(np.count_nonzero(self.checkpoints[:, 0] >= 0))

    @property
    def seq_lens(self) -> Array:
        """int32 ``[N]``."""
        return self.seqs[: self.num_sequences, 1]

    @property
    def _chunk_counts(self) -> Array:
        return self.seqs[: self.num_sequences, 3]

    @property
    def cu_seqlens(self) -> Array:
        """int32 ``[N + 1]``: where the sequences begin, and where the last ends."""
        return np.concatenate([[0], np.cumsum(self.seq_lens)]).astype(np.int32)

    @property
    def chunk_offsets(self) -> Array:
        """int32 ``[N + 1]``: exclusive sum of the chunks of each sequence."""
        return np.concatenate([[0], np.cumsum(self._chunk_counts)]).astype(np.int32)

    @property
    def chunk_indices(self) -> Array:
        """int32 ``[NC, 2]``: sequence, chunk in sequence."""
        sequence = self.chunks[: self.num_chunks, 0]
        within = np.arange(sequence.size, dtype=np.int32) - self.chunk_offsets[sequence]
        return np.stack([sequence, within], axis=1)

    @property
    def checkpoint_offsets(self) -> list[list[int]]:
        """The offsets of each sequence, in the order given."""
        rows = self.checkpoints[: self.num_checkpoints]
        return as_nested(rows[:, 0], rows[:, 1], self.num_sequences)

    def _require_host(self) -> None:
        if not self.on_host:
            raise ValueError(
                "this property needs the ChunkMetadata that was built on the host; this one "
                "holds device arrays or tracers"
            )

    def pad_tokens(self, x: Any, axis: int = 1) -> Any:
        """Zero-pads the token axis of a NumPy or JAX array to ``capacity.tokens``.

        Args:
          x: of the sequences' tokens, one after the other, or padded already.
          axis: 1 for ``[1, T, ...]``, as the operator takes it; 0 for ``[T]`` and ``[T, C]``.

        Raises:
          ValueError: the axis has more or fewer than the sequences' tokens and is not padded
            already (where the metadata is on the host; elsewhere: more than the capacity).
          TypeError: x is no array.
        """
        used = self.num_tokens if self.on_host else None
        return pad(x, axis, self.capacity.tokens, "tokens", used)

    def pad_states(self, x: Any) -> Any:
        """Zero-pads axis 0 of a NumPy or JAX array to ``capacity.sequences``.

        Raises:
          ValueError, TypeError: as `pad_tokens`, of the sequences in use.
        """
        used = self.num_sequences if self.on_host else None
        return pad(x, 0, self.capacity.sequences, "sequences", used)


def _build(
    cu: Array,
    chunk_size: int,
    checkpoint_offsets: Offsets | None,
    capacity: Capacity | Literal["bucket"] | None,
) -> ChunkMetadata:
    check_chunk_size(chunk_size)
    lengths = np.diff(cu)
    sequence, offset = parse_checkpoints(checkpoint_offsets, lengths)
    grid = cut_chunks(cu, sequence, offset, chunk_size)
    tokens = int(cu[-1])
    need = Capacity(tokens, lengths.size, grid.rows.size, offset.size)
    if capacity is None:
        capacity = need
    elif isinstance(capacity, Capacity):
        for name in ("tokens", "sequences", "chunks", "checkpoints"):
            has, wants = getattr(capacity, name), getattr(need, name)
            if has < wants:
                raise ValueError(
                    f"capacity.{name} is {has}, {wants - has} too few: this batch has {wants}"
                )
    elif capacity == "bucket":
        capacity = Capacity.bucket(tokens, need.sequences, need.checkpoints, chunk_size)
    else:
        raise ValueError(f"capacity is {capacity!r}, want None, 'bucket' or a Capacity")

    first_chunk = np.cumsum(grid.counts) - grid.counts
    seqs = table((cu[:-1], lengths, first_chunk, grid.counts), capacity.sequences)
    seqs[need.sequences :] = (tokens, -1, need.chunks, 0)
    columns = (grid.sequence, grid.first, grid.rows, grid.checkpoint)
    chunks = table(columns, capacity.chunks)
    chunks[need.chunks :] = (-1, tokens, 0, -1)
    checkpoints = table((sequence, offset), capacity.checkpoints)
    checkpoints[need.checkpoints :] = (-1, 0)
    return _restore(seqs, chunks, checkpoints, chunk_size, capacity)


def _restore(
    seqs: Any, chunks: Any, checkpoints: Any, chunk_size: int, capacity: Capacity
) -> ChunkMetadata:
    for rows in (seqs, chunks, checkpoints):
        rows.flags.writeable = False
    return ChunkMetadata(seqs, chunks, checkpoints, chunk_size, capacity)
