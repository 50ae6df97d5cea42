"""Attention over pages against a dense softmax in float64; pages of others are never seen."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax import Capacity, ChunkMetadata
from kda_jax.models.mla_attention import (
    contiguous_pages,
    decode_attention,
    prefill_attention,
    write_rows,
)

HEADS, WIDTH, VALUE, SCALE = 3, 12, 8, 0.4


def dense(q: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """One query [H, C] on rows [S, C]: [H, VALUE]."""
    scores = SCALE * np.asarray(q, np.float64) @ np.asarray(rows, np.float64).T
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True) @ rows[:, :VALUE]


class Paged:
    """Sequences of random rows in shuffled pages; what belongs to nobody is NaN."""

    def __init__(self, lengths: list[int], size: int, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.rows = [self.draw(n, WIDTH) for n in lengths]
        width = max(-(-n // size) for n in lengths) + 1
        count = len(lengths) * width
        self.table = self.random.permutation(count + 3)[:count].astype(np.int32)
        self.table = self.table.reshape(len(lengths), width)
        self.pages = np.full((count + 3, size, WIDTH), np.nan, np.float32)
        for table, rows in zip(self.table, self.rows, strict=True):
            for position, row in enumerate(rows):
                self.pages[table[position // size], position % size] = row

    def draw(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("size", [1, 7, 64, 600])
def test_decode(size: int) -> None:
    """600 rows are two key blocks of 300."""
    lengths = [5, 1, 130, 64]
    paged = Paged(lengths, size)
    q = paged.draw(5, HEADS, WIDTH)
    table = np.concatenate([paged.table, paged.table[:1]])
    seen = np.array([*lengths, 0], np.int32)
    got = decode_attention(jnp.asarray(q), jnp.asarray(paged.pages), table, seen, SCALE, VALUE)
    for i, rows in enumerate(paged.rows):
        np.testing.assert_allclose(got[i], dense(q[i], rows), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got[4], 0)  # an idle row
    nobody = decode_attention(jnp.asarray(q), jnp.asarray(paged.pages), table, 0 * seen, 1.0, VALUE)
    np.testing.assert_array_equal(nobody, 0)


@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize("size", [7, 64, 600])
def test_prefill_of_parts_that_share_their_first_pages(size: int, differentiable: bool) -> None:
    """Two sequences with one prefix in the same pages; a third; padding behind."""
    lengths, starts = [150, 150, 20], [130, 90, 0]
    paged = Paged(lengths, size)
    shared = 90 // size
    paged.table[1, :shared] = paged.table[0, :shared]
    paged.rows[1][: shared * size] = paged.rows[0][: shared * size]
    parts = [n - s for n, s in zip(lengths, starts, strict=True)]
    metadata = ChunkMetadata.from_seq_lens(parts, capacity=Capacity(128, 4, 8))
    q = paged.draw(128, HEADS, WIDTH)
    table = np.pad(paged.table, ((0, 1), (0, 0)))
    start = np.array([*starts, 0], np.int32)
    got = prefill_attention(
        jnp.asarray(q), jnp.asarray(paged.pages), jnp.asarray(table), metadata,
        jnp.asarray(start), SCALE, VALUE, differentiable=differentiable,
    )  # fmt: skip
    first = 0
    for rows, begin, count in zip(paged.rows, starts, parts, strict=True):
        for i in range(count):
            want = dense(q[first + i], rows[: begin + i + 1])
            np.testing.assert_allclose(got[first + i], want, rtol=1e-5, atol=1e-5)
        first += count
    np.testing.assert_array_equal(got[first:], 0)


def test_rows_are_written_where_the_table_says() -> None:
    table = np.array([[4, 1], [0, 3]], np.int32)
    before = np.arange(5 * 4 * 2, dtype=np.float32).reshape(5, 4, 2)
    rows = -np.arange(1, 11, dtype=np.float32).reshape(5, 2)
    sequence, position = np.array([0, 0, 1, 1, 0]), np.array([3, 4, 7, -1, 8])
    got = write_rows(jnp.asarray(before), jnp.asarray(table), jnp.asarray(rows), sequence, position)
    want = before.copy()
    want[4, 3], want[1, 0], want[3, 3] = rows[:3]  # the last two are nowhere
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("rows", [64, 1000, 1024, 521])
def test_a_contiguous_cache_is_pages_too(rows: int) -> None:
    cache = jnp.arange(2 * rows * 3, dtype=jnp.float32).reshape(2, rows, 3)
    pages, table = contiguous_pages(cache)
    assert pages.shape[1] <= 512
    np.testing.assert_array_equal(pages[table].reshape(cache.shape), cache)
