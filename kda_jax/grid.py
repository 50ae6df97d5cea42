"""Host arithmetic under `ChunkMetadata`: reads lengths and checkpoints, cuts the chunks.

NumPy only and vectorized: a serving step pays for it on the critical path, before the launch.
Every mistake is a `ValueError` that names the argument and the entry.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
CHUNK_SIZES = (16, 32, 64)
_MAX_TOKENS = 2**31 - 1


class Grid(NamedTuple):
    """The chunks of a pack: all arrays are int64.

    counts [N] chunks of each sequence; sequence [NC], first [NC] (packed token), rows [NC], and
    checkpoint [NC] (row of the checkpoint at the end of the chunk, or -1).
    """

    counts: Array
    sequence: Array
    first: Array
    rows: Array
    checkpoint: Array


def check_chunk_size(chunk_size: int) -> None:
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size is {chunk_size!r}, want one of {CHUNK_SIZES}")


def host_integers(values: Any, name: str, ndim: int = 1) -> Array:
    """``values`` as a NumPy integer array; never reads a device."""
    if isinstance(values, jax.Array):
        raise ValueError(
            f"{name} is a JAX array: reading it would wait for the device (or fail under jit); "
            "build it on the host from a NumPy array"
        )
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError, jax.errors.TracerArrayConversionError) as error:
        raise ValueError(f"{name} is not an array of integers: {error}") from None
    if array.size == 0 and not isinstance(values, np.ndarray):
        return np.zeros((0,) * ndim, np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} has dtype {array.dtype}, want integers")
    if array.ndim != ndim:
        raise ValueError(f"{name} has shape {array.shape}, want {ndim} dimension(s)")
    return array


def parse_seq_lens(seq_lens: Any) -> Array:
    """Reads sequence lengths; returns cu_seqlens, int64 ``[N + 1]``."""
    lengths = host_integers(seq_lens, "seq_lens")
    if lengths.size and lengths.min() < 0:
        i = int(np.argmax(lengths < 0))
        raise ValueError(f"seq_lens[{i}] is {lengths[i]}, want a length >= 0")
    if lengths.size and lengths.max() > _MAX_TOKENS:  # before sums that could wrap around
        i = int(np.argmax(lengths > _MAX_TOKENS))
        raise ValueError(f"seq_lens[{i}] is {lengths[i]}, at most {_MAX_TOKENS} fit in int32")
    cu = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=cu[1:])
    if cu[-1] > _MAX_TOKENS:
        raise ValueError(f"seq_lens sum to {cu[-1]} tokens, at most {_MAX_TOKENS} fit in int32")
    return cu


def parse_cu_seqlens(cu_seqlens: Any) -> Array:
    """Reads the packed boundaries; returns them as int64 ``[N + 1]``."""
    cu = host_integers(cu_seqlens, "cu_seqlens")
    if cu.dtype not in (np.int32, np.int64):
        raise ValueError(f"cu_seqlens has dtype {cu.dtype}, want int32 or int64")
    if cu.size == 0 or cu[0] != 0:
        raise ValueError(f"cu_seqlens starts at {cu[0] if cu.size else 'nothing'}, want 0")
    cu = cu.astype(np.int64)
    steps = np.diff(cu)
    if steps.size and steps.min() < 0:
        i = int(np.argmax(steps < 0))
        raise ValueError(f"cu_seqlens decreases at entry {i + 1}: {cu[i]} then {cu[i + 1]}")
    if cu[-1] > _MAX_TOKENS:
        raise ValueError(f"cu_seqlens ends at {cu[-1]}, at most {_MAX_TOKENS} tokens fit in int32")
    return cu


def parse_checkpoints(offsets: Any, lengths: Array) -> tuple[Array, Array]:
    """Reads checkpoint offsets, nested or flat; returns (sequence ``[M]``, offset ``[M]``)."""
    if offsets is None:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if isinstance(offsets, jax.Array):
        host_integers(offsets, "checkpoint_offsets")
    if isinstance(offsets, np.ndarray) and offsets.ndim == 1 and offsets.dtype != object:
        nested, items = False, offsets.tolist()
    else:
        items = list(offsets)
        sized = {hasattr(kind, "__len__") for kind in set(map(type, items))}
        nested = True in sized
        if len(sized) > 1:
            raise ValueError(
                "checkpoint_offsets mixes numbers and lists: pass one list per sequence, such as "
                "[[64, 128], []], or one number per sequence (0: none), such as [64, 0]"
            )
    n = lengths.size
    if len(items) != n:
        example = [[64, 128]] + [[]] * (min(n, 3) - 1) if n else []
        raise ValueError(
            f"checkpoint_offsets has {len(items)} entries for {n} sequences: pass one list per "
            f"sequence, such as {example}, or one number per sequence (0: none)"
        )
    if nested:
        sequence = np.repeat(np.arange(n), list(map(len, items)))
        offset = host_integers(list(itertools.chain.from_iterable(items)), "checkpoint_offsets")
    else:
        flat = host_integers(items, "checkpoint_offsets")
        sequence = np.flatnonzero(flat)  # 0 means none here
        offset = flat[sequence]
    offset = offset.astype(np.int64)
    outside = (offset < 1) | (offset > lengths[sequence])
    if outside.any():
        i = int(np.argmax(outside))
        length = lengths[sequence[i]]
        allowed = f"want 1..{length}" if length else "the sequence is empty, so it can have none"
        raise ValueError(f"checkpoint_offsets: {offset[i]} on sequence {sequence[i]}: {allowed}")
    return sequence, offset


def cut_chunks(cu: Array, sequence: Array, offset: Array, chunk_size: int) -> Grid:
    """Cuts each sequence at the multiples of ``chunk_size`` from its start and at its checkpoints.

    So a kernel stores states at ends of chunks only, and a checkpoint on a chunk end leaves the
    grid as it was. The chunks tile the tokens in use: each begins where the one before it ends.
    """
    starts, stops = cu[:-1], cu[1:]
    counts = -(-(stops - starts) // chunk_size)
    owner = np.repeat(np.arange(counts.size), counts)
    first_chunk = np.cumsum(counts) - counts
    index = np.arange(owner.size) - first_chunk[owner]
    ends = np.minimum(starts[owner] + (index + 1) * chunk_size, stops[owner])
    checkpoint = None
    if offset.size:
        # Every non-empty sequence owns (start, stop] of the ends, so packed ends identify it.
        marks = starts[sequence] + offset
        _refuse_duplicates(marks, sequence, offset)
        ends = np.concatenate([ends, marks])
        ends.sort(kind="stable")
        ends = ends[np.concatenate([ends[:1] > 0, ends[1:] > ends[:-1]])]
        counts = np.diff(np.searchsorted(ends, cu, side="right"))
        owner = np.repeat(np.arange(counts.size), counts)
        checkpoint = np.full(ends.size, -1)
        checkpoint[np.searchsorted(ends, marks)] = np.arange(offset.size)
    first = np.zeros(ends.size, np.int64)
    first[1:] = ends[:-1]
    if checkpoint is None:
        checkpoint = np.full(ends.size, -1)
    return Grid(counts, owner, first, ends - first, checkpoint)


def _refuse_duplicates(marks: Array, sequence: Array, offset: Array) -> None:
    if (np.diff(marks) > 0).all():
        return
    order = np.argsort(marks, kind="stable")
    same = np.flatnonzero(np.diff(marks[order]) == 0)
    if same.size:
        i = order[same[0]]
        raise ValueError(
            f"checkpoint_offsets: {offset[i]} is given twice on sequence {sequence[i]}; "
            "each offset may be given once"
        )


def check_chunk_arrays(cu: Array, chunk_size: int, indices: Any, offsets: Any) -> None:
    """Verifies ready-made chunk_indices and chunk_offsets against the boundaries."""
    none = np.zeros(0, np.int64)
    grid = cut_chunks(cu, none, none, chunk_size)
    want_offsets = np.concatenate([[0], np.cumsum(grid.counts)])
    within = np.arange(grid.sequence.size) - want_offsets[grid.sequence]
    _same("chunk_offsets", host_integers(offsets, "chunk_offsets"), want_offsets, chunk_size)
    got = host_integers(indices, "chunk_indices", ndim=2)
    want = np.stack([grid.sequence, within], axis=1)
    _same("chunk_indices", got.reshape(0, 2) if got.size == 0 else got, want, chunk_size)


def _same(name: str, got: Array, want: Array, chunk_size: int) -> None:
    where = f"from cu_seqlens with chunk_size={chunk_size}"
    if got.shape != want.shape:
        raise ValueError(f"{name} has shape {got.shape}, want {want.shape} {where}")
    wrong = got != want
    if wrong.any():
        i = int(np.argwhere(wrong)[0][0])
        raise ValueError(f"{name}[{i}] is {got[i].tolist()}, want {want[i].tolist()} {where}")


def as_nested(sequence: Array, offset: Array, num_sequences: int) -> list[list[int]]:
    """The inverse of `parse_checkpoints`: one list of offsets per sequence."""
    nested: list[list[int]] = [[] for _ in range(num_sequences)]
    for s, o in zip(sequence.tolist(), offset.tolist(), strict=True):
        nested[s].append(o)
    return nested


def table(columns: tuple[Array, ...], rows: int) -> Array:
    """The columns side by side, int32, with uninitialized rows after them."""
    out = np.empty((rows, len(columns)), np.int32)
    for i, column in enumerate(columns):
        out[: column.size, i] = column
    return out


Offsets = Sequence[Sequence[int]] | Sequence[int] | Array
