"""Causal attention of latent queries on a compressed, paged cache (the absorbed form of MLA).

DeepSeek-V2 (arXiv:2405.04434), section 2.1: with the key expansion moved into the query and the
value expansion behind the sum, all heads read one row of the cache per token, which is its latent
and, behind it, the part of the key that all heads share:

    out[t, h] = sum_s softmax_s(scale * q[t, h] . cache[s]) cache[s, :value_dim]        s <= t

The rows lie in pages [P, B, C]; a table names the pages of each sequence in order, so that several
sequences can share a prefix (PagedAttention, arXiv:2309.06180). Keys are taken in blocks with a
running maximum and sum (online softmax, arXiv:2205.14135).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ..metadata import ChunkMetadata

_KEY_BLOCK = 512
_HIGHEST = lax.Precision.HIGHEST


def contiguous_pages(cache: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A cache [N, S, C] with S rows for each sequence as pages, and its table [N, S / B]."""
    N, S, C = cache.shape
    size = _divisor(S)
    table = jnp.arange(N * (S // size), dtype=jnp.int32).reshape(N, -1)
    return cache.reshape(-1, size, C), table


def write_rows(
    pages: jax.Array, table: jax.Array, rows: jax.Array, sequence: jax.Array, position: jax.Array
) -> jax.Array:
    """Puts rows [R, C] at positions of sequences; position < 0 or past the table: nowhere."""
    size, width = pages.shape[1], table.shape[1]
    column = jnp.where(position < 0, width, position // size)
    page = table.at[sequence, column].get(mode="fill", fill_value=pages.shape[0])
    return pages.at[page, position % size].set(rows.astype(pages.dtype), mode="drop")


def decode_attention(
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    length: jax.Array,
    scale: float,
    value_dim: int,
) -> jax.Array:
    """One query per row, on the first `length` tokens of its sequence.

    Args:
      q: [D, H, C].
      pages: [P, B, C]. table: int32 [D, W].
      length: int32 [D]. The longest one decides how many blocks are read.
      scale: on the scores. value_dim: how much of a cache row is the value.

    Returns:
      [D, H, value_dim] in float32 (float64 for a float64 q); zeros where the length is 0.
    """
    size, per_page = _key_blocks(pages)

    def attend(block: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        page = lax.dynamic_index_in_dim(table, block // per_page, axis=1, keepdims=False)
        seen = block * size + jnp.arange(size) < length[:, None]
        # A row that nobody sees may hold anything, and 0 times NaN is NaN.
        keys = jax.vmap(lambda one: _keys(pages, one, block % per_page, size))(page)
        keys = jnp.where(seen[..., None], keys, 0)
        return _attend(carry, q, keys, seen[:, None], "dhc,dsc->dhs", scale, value_dim)

    needed = -(-jnp.max(length, initial=0) // size)
    needed = jnp.minimum(needed, table.shape[1] * per_page)
    return _normalised(lax.fori_loop(0, needed, attend, _nothing(q, value_dim)))


def prefill_attention(
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    metadata: ChunkMetadata,
    start: jax.Array,
    scale: float,
    value_dim: int,
    *,
    differentiable: bool = True,
) -> jax.Array:
    """Packed queries on a cache that holds their own rows already.

    Walks the chunk table, so that a query block belongs to one sequence; key blocks that lie behind
    the last query of the chunk are skipped.

    Args:
      q: [T, H, C].
      pages: [P, B, C]. table: int32 [N, W].
      metadata: of the T rows.
      start: int32 [N], the position of each sequence's first query.
      scale: on the scores. value_dim: how much of a cache row is the value.
      differentiable: in reverse, too. That takes a loop of a fixed number of turns, one for each
        key block of the table, needed or not; without, a chunk takes as many as it needs.

    Returns:
      [T, H, value_dim] in float32 (float64 for a float64 q), zeros in rows of padding.
    """
    T, H, C = q.shape
    chunk_size = metadata.chunk_size
    size, per_page = _key_blocks(pages)
    seqs, chunks = jnp.asarray(metadata.seqs), jnp.asarray(metadata.chunks)
    step = jnp.arange(chunk_size)

    def one_chunk(chunk: jax.Array) -> jax.Array:
        sequence, first, rows = jnp.maximum(chunk[0], 0), chunk[1], chunk[2]
        query = q[jnp.minimum(first + step, T - 1)]
        position = start[sequence] + first - seqs[sequence, 0] + step
        last = position[0] + rows - 1

        def attend(carry: tuple[jax.Array, ...], block: jax.Array) -> tuple[jax.Array, ...]:
            keys = _keys(pages, table[sequence, block // per_page], block % per_page, size)
            key = block * size + jnp.arange(size)
            keys = jnp.where((key <= last)[:, None], keys, 0)
            seen = (key <= position[:, None]) & (step < rows)[:, None]
            return _attend(carry, query, keys, seen[:, None], "dhc,sc->dhs", scale, value_dim)

        count = table.shape[1] * per_page
        if not differentiable:
            needed = jnp.where(rows > 0, jnp.clip(last // size + 1, 0, count), 0)
            nothing = _nothing(query, value_dim)
            return _normalised(lax.fori_loop(0, needed, lambda i, carry: attend(carry, i), nothing))

        def maybe(carry: tuple[jax.Array, ...], block: jax.Array) -> tuple[tuple, None]:
            needed = (rows > 0) & (block * size <= last)
            return lax.cond(needed, attend, lambda carry, _: carry, carry, block), None

        return _normalised(lax.scan(maybe, _nothing(query, value_dim), jnp.arange(count))[0])

    done = lax.map(one_chunk, chunks)
    rows = jnp.where(step < chunks[:, 2:3], chunks[:, 1:2] + step, T)
    out = jnp.zeros_like(q, _wide(q), shape=(T, H, value_dim))
    return out.at[rows].set(done, mode="drop")


def _wide(q: jax.Array) -> jnp.dtype:
    return jnp.promote_types(q.dtype, jnp.float32)


def _divisor(rows: int) -> int:
    """The largest divisor within the size of a key block."""
    return max(n for n in range(1, min(rows, _KEY_BLOCK) + 1) if rows % n == 0)


def _key_blocks(pages: jax.Array) -> tuple[int, int]:
    """Of pages [P, B, C]: rows of a key block, at most _KEY_BLOCK, and how many a page has."""
    size = _divisor(pages.shape[1])
    return size, pages.shape[1] // size


def _keys(pages: jax.Array, page: jax.Array, block: jax.Array, size: int) -> jax.Array:
    """A key block [size, C] of a page. Cut out of the pages as they are: with a reshape of all of
    them XLA's CPU copies them for the loop."""
    return lax.dynamic_slice(pages, (page, block * size, 0), (1, size, pages.shape[2]))[0]


def _nothing(q: jax.Array, value_dim: int) -> tuple[jax.Array, ...]:
    """Peak, total and output of rows [R, H] that have seen no key."""
    zero = jnp.zeros_like(q, _wide(q), shape=q.shape[:2])
    return zero - 1e30, zero, jnp.zeros_like(q, _wide(q), shape=(*q.shape[:2], value_dim))


def _attend(
    carry: tuple[jax.Array, ...],
    q: jax.Array,
    keys: jax.Array,
    seen: jax.Array,
    product: str,
    scale: float,
    value_dim: int,
) -> tuple[jax.Array, ...]:
    """One key block: `product` makes scores [R, H, s] of q and keys; seen: bool [R, 1, s]."""
    peak, total, out = carry
    wide = _wide(q)
    scores = scale * jnp.einsum(product, q, keys, precision=_HIGHEST, preferred_element_type=wide)
    scores = jnp.where(seen, scores, -1e30)
    new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
    weight = jnp.where(seen, jnp.exp(scores - new_peak[..., None]), 0)
    fade = jnp.exp(peak - new_peak)
    inputs, result = product.split("->")
    queries, values = inputs.split(",")
    added = jnp.einsum(
        f"{result},{values}->{queries}",
        weight.astype(keys.dtype),
        keys[..., :value_dim],
        precision=_HIGHEST,
        preferred_element_type=wide,
    )
    total = total * fade + jnp.sum(weight, axis=-1)
    return new_peak, total, out * fade[..., None] + added


def _normalised(carry: tuple[jax.Array, ...]) -> jax.Array:
    _, total, out = carry
    return out / jnp.maximum(total, 1e-30)[..., None]
