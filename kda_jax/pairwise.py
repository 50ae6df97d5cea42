"""The state-free part of a chunk, for any gate: no exponent above zero, no difference of sums.

``exp(G_i - G_j)`` cannot be split into ``exp(G_i) * exp(-G_j)`` over a chunk: at g = -5 the second
factor passes 2^127 after 18 rows, and next to one gate of -150 the difference of the sums has lost
the digits of the small ones. So the chunk is put together from blocks of one row, neighbours
joining in pairs: between an earlier block a and a later block b the decay is (from row j to the
end of a) * (from the start of b through row i), and each block carries its rows already decayed to
its two ends. All factors are <= 1, and a row's result depends on no later gate.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Chunk(NamedTuple):
    """With G the sum of g from the chunk's start through a row.

    q_start ``q exp(G)``, k_start ``beta k exp(G)``, k_end ``k exp(G_last - G)``: ``[..., C, K]``;
    decay ``exp(G_last)`` ``[..., K]``; Aqk ``[..., C, C]``; inverse ``(I + Akk)^-1``.
    """

    q_start: jax.Array
    k_start: jax.Array
    k_end: jax.Array
    decay: jax.Array
    Aqk: jax.Array
    inverse: jax.Array


def join_rows(q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array) -> Chunk:
    """Builds a `Chunk` from q, k, g ``[..., C, K]`` and beta ``[..., C]``, C a power of two.

    The inverse is joined with the blocks: (I + [[a, 0], [c, b]])^-1 has -b^-1 c a^-1 below its
    diagonal blocks. Unlike a product of powers of Akk, its terms do not outgrow the result.
    """
    *lead, blocks, channels = k.shape
    size = 1
    decay = jnp.exp(g)
    q_start, k_start, k_end = q * decay, beta[..., None] * k * decay, k
    Aqk = jnp.sum(q * k, axis=-1)[..., None, None]  # [..., blocks, size, size]
    inverse = jnp.ones_like(Aqk)
    while blocks > 1:
        blocks //= 2
        pairs = (*lead, blocks, 2, size, channels)
        q_start, k_start, k_end = (x.reshape(pairs) for x in (q_start, k_start, k_end))
        keys = k_end[..., 0, :, :].swapaxes(-1, -2)
        Aqk = _join(Aqk, _matmul(q_start[..., 1, :, :], keys))
        Akk = _matmul(k_start[..., 1, :, :], keys)
        inverse_a, inverse_b = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        inverse = _join(inverse, -_matmul(_matmul(inverse_b, Akk), inverse_a))

        total = jnp.sum(g.reshape(pairs), axis=-2, keepdims=True)
        total_a, total_b = total[..., 0, :, :], total[..., 1, :, :]
        is_b = jnp.arange(2)[:, None, None] == 1
        to_start = jnp.where(is_b, jnp.exp(total_a)[..., None, :, :], 1)
        q_start, k_start = q_start * to_start, k_start * to_start
        k_end = k_end * jnp.where(is_b, 1, jnp.exp(total_b)[..., None, :, :])
        size *= 2
    return Chunk(
        q_start.reshape(k.shape),
        k_start.reshape(k.shape),
        k_end.reshape(k.shape),
        jnp.exp(jnp.sum(g, axis=-2)),
        Aqk.squeeze(-3),
        inverse.squeeze(-3),
    )


def _join(diagonal: jax.Array, below: jax.Array) -> jax.Array:
    """Blocks twice as large, [[a, 0], [below, b]], from neighbours a and b."""
    a, b = diagonal[..., 0::2, :, :], diagonal[..., 1::2, :, :]
    top = jnp.concatenate([a, jnp.zeros_like(a)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([below, b], axis=-1)], axis=-2)


def _matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)
