"""Lazy views of tensors in files: a shape, a dtype, and a way to read a part.

A device's shard of a parameter is then read from the files and nothing else is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

Index = tuple[slice, ...]
# The values of a 4-bit float with 2 exponent bits and 1 mantissa bit (OCP MX, version 1.0).
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4 = np.concatenate([_E2M1, -_E2M1])
MX_BLOCK = 32


@dataclasses.dataclass(frozen=True)
class View:
    """read(index) returns the part that a tuple of slices (step 1, one per axis) names."""

    shape: tuple[int, ...]
    read: Callable[[Index], np.ndarray]

    def all(self) -> np.ndarray:
        """The whole tensor."""
        return self.read(tuple(slice(0, n) for n in self.shape))


def bounded(index: Index, shape: tuple[int, ...]) -> Index:
    """The same slices with start and stop as numbers."""
    return tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))


def transposed(view: View) -> View:
    """Of a matrix."""
    return View(view.shape[::-1], lambda index: view.read(index[::-1]).T)


def without_axis(view: View, axis: int) -> View:
    """Drops an axis of size 1."""
    shape = (*view.shape[:axis], *view.shape[axis + 1 :])

    def read(index: Index) -> np.ndarray:
        return view.read((*index[:axis], slice(0, 1), *index[axis:])).squeeze(axis)

    return View(shape, read)


def stacked(views: Sequence[View], axis: int) -> View:
    """Views of one shape along a new axis; of it, only the parts asked for are read."""
    shape = (*views[0].shape[:axis], len(views), *views[0].shape[axis:])

    def read(index: Index) -> np.ndarray:
        rest = (*index[:axis], *index[axis + 1 :])
        return np.stack([v.read(rest) for v in views[index[axis]]], axis)

    return View(shape, read)


def part(view: View, axis: int, start: int, stop: int) -> View:
    """Entries start..stop-1 of an axis."""
    shape = (*view.shape[:axis], stop - start, *view.shape[axis + 1 :])

    def read(index: Index) -> np.ndarray:
        here = slice(index[axis].start + start, index[axis].stop + start)
        return view.read((*index[:axis], here, *index[axis + 1 :]))

    return View(shape, read)


def mxfp4(packed: View, scale: View) -> View:
    """A matrix [out, in] of 4-bit floats: packed uint8 [out, in / 2], scale uint8 [out, in / 32].

    The low half of a byte is the even column; a scale s stands for 2^(s - 127) (OCP MX, E8M0).
    """
    rows, half = packed.shape

    def read(index: Index) -> np.ndarray:
        columns = index[1]
        first = columns.start // MX_BLOCK
        last = -(-columns.stop // MX_BLOCK)
        raw = packed.read((index[0], slice(first * MX_BLOCK // 2, last * MX_BLOCK // 2)))
        exponent = scale.read((index[0], slice(first, last))).view(np.uint8).astype(np.int32)
        pairs = np.stack([raw & 15, raw >> 4], axis=-1)
        values = FP4[pairs].reshape(raw.shape[0], -1, MX_BLOCK)
        values = np.ldexp(values, (exponent - 127)[..., None]).reshape(raw.shape[0], -1)
        return values[:, columns.start - first * MX_BLOCK : columns.stop - first * MX_BLOCK]

    return View((rows, 2 * half), read)
