"""Causal attention of latent queries on a compressed cache (the absorbed form of MLA).

DeepSeek-V2 (arXiv:2405.04434), section 2.1: with the key expansion moved into the query and the
value expansion behind the sum, all heads read one row of the cache per token, which is its latent
and, behind it, the part of the key that all heads share:

    out[t, h] = sum_s softmax_s(scale * q[t, h] . cache[s]) cache[s, :value_dim]        s <= t
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from ..metadata import ChunkMetadata

_KEY_BLOCK = 512
_HIGHEST = lax.Precision.HIGHEST


def write_rows(
    cache: jax.Array, rows: jax.Array, sequence: jax.Array, position: jax.Array
) -> jax.Array:
    """Puts rows [R, C] at (sequence, position) of a cache [N, S, C]; position < 0: nowhere."""
    position = jnp.where(position < 0, cache.shape[1], position)
    return cache.at[sequence, position].set(rows.astype(cache.dtype), mode="drop")


def decode_attention(
    q: jax.Array, cache: jax.Array, length: jax.Array, scale: float, value_dim: int
) -> jax.Array:
    """One query per row: q [D, H, C] on the first `length` [D] rows of cache [D, S, C].

    Returns [D, H, value_dim] in float32; zeros where the length is 0.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    # A row that nobody sees may hold anything, and 0 times NaN is NaN.
    cache = jnp.where((jnp.arange(cache.shape[1]) < length[:, None])[..., None], cache, 0)
    scores = scale * jnp.einsum(
        "dhc,dsc->dhs", q, cache, precision=_HIGHEST, preferred_element_type=wide
    )
    seen = (jnp.arange(cache.shape[1]) < length[:, None])[:, None]
    peak = jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1, keepdims=True, initial=-1e30)
    weight = jnp.where(seen, jnp.exp(jnp.where(seen, scores, peak) - peak), 0)
    total = jnp.maximum(jnp.sum(weight, axis=-1, keepdims=True), 1e-30)
    return jnp.einsum(
        "dhs,dsc->dhc",
        (weight / total).astype(cache.dtype),
        cache[..., :value_dim],
        precision=_HIGHEST,
        preferred_element_type=wide,
    )


def prefill_attention(
    q: jax.Array,
    cache: jax.Array,
    metadata: ChunkMetadata,
    start: jax.Array,
    scale: float,
    value_dim: int,
) -> jax.Array:
    """Packed queries on a cache that holds their own rows already.

    Walks the chunk table, so that a query block belongs to one sequence, and the keys of each in
    blocks with a running maximum and sum (online softmax, arXiv:2205.14135); blocks that lie
    behind the last query of the chunk are skipped.

    Args:
      q: [T, H, C].
      cache: [N, S, C].
      metadata: of the T rows.
      start: int32 [N], the position of each sequence's first query.
      scale: on the scores. value_dim: how much of a cache row is the value.

    Returns:
      [T, H, value_dim] in float32 (float64 for a float64 q), zeros in rows of padding.
    """
    T, H, C = q.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)
    size, block = metadata.chunk_size, math.gcd(cache.shape[1], _KEY_BLOCK)
    seqs, chunks = jnp.asarray(metadata.seqs), jnp.asarray(metadata.chunks)
    step = jnp.arange(size)

    def one_chunk(chunk: jax.Array) -> jax.Array:
        sequence, first, rows = jnp.maximum(chunk[0], 0), chunk[1], chunk[2]
        query = q[jnp.minimum(first + step, T - 1)]
        position = start[sequence] + first - seqs[sequence, 0] + step
        last = position[0] + rows - 1

        def attend(carry: tuple[jax.Array, ...], key0: jax.Array) -> tuple[jax.Array, ...]:
            peak, total, out = carry
            keys = lax.dynamic_slice(cache, (sequence, key0, 0), (1, block, C))[0]
            keys = jnp.where((key0 + jnp.arange(block) <= last)[:, None], keys, 0)
            scores = scale * jnp.einsum(
                "bhc,sc->bhs", query, keys, precision=_HIGHEST, preferred_element_type=wide
            )
            seen = (key0 + jnp.arange(block) <= position[:, None]) & (step < rows)[:, None]
            scores = jnp.where(seen[:, None], scores, -1e30)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
            weight = jnp.where(seen[:, None], jnp.exp(scores - new_peak[..., None]), 0)
            fade = jnp.exp(peak - new_peak)
            added = jnp.einsum(
                "bhs,sc->bhc",
                weight.astype(cache.dtype),
                keys[:, :value_dim],
                precision=_HIGHEST,
                preferred_element_type=wide,
            )
            total = total * fade + jnp.sum(weight, axis=-1)
            return new_peak, total, out * fade[..., None] + added

        def maybe(carry: tuple[jax.Array, ...], key0: jax.Array) -> tuple[tuple, None]:
            needed = (rows > 0) & (key0 <= last)
            return lax.cond(needed, attend, lambda carry, _: carry, carry, key0), None

        zero = jnp.zeros_like(query, wide, shape=(size, H))
        carry = (zero - 1e30, zero, jnp.zeros_like(query, wide, shape=(size, H, value_dim)))
        starts = jnp.arange(0, cache.shape[1], block)
        (_, total, out), _ = lax.scan(maybe, carry, starts)
        return out / jnp.maximum(total, 1e-30)[..., None]

    done = lax.map(one_chunk, chunks)
    rows = jnp.where(step < chunks[:, 2:3], chunks[:, 1:2] + step, T)
    out = jnp.zeros_like(q, wide, shape=(T, H, value_dim))
    return out.at[rows].set(done, mode="drop")
