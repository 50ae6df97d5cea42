"""Products of rows of a chunk under their decay, for any gate: no exponent above zero.

``exp(G_i - G_j)`` cannot be split into ``exp(G_i) * exp(-G_j)`` over a chunk: at g = -5 the second
factor passes 2^127 after 18 rows, and where one gate is far below its neighbours the difference of
the sums loses the neighbours' digits. So the chunk is halved, and again: between the two halves of
a block the decay is (from the later half's start through row i) * (from after row j to the end of
the earlier half). Both are sums of gates of one sign, built from the halves' own sums: nothing
cancels, both exponents are <= 0, and a row's result depends on no later gate.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def decayed_products(
    q: jax.Array, k: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Decayed products of all pairs of rows, and the sums of the gates.

    Args:
      q, k, g: ``[..., C, K]``, C a power of two.

    Returns:
      ``kk[..., i, j] = sum_d k_i k_j exp(G_i - G_j)`` for i > j, else 0;
      ``qk[..., i, j] = sum_d q_i k_j exp(G_i - G_j)`` for i >= j, else 0;
      the sum of g through each row, and the sum of g after each row, ``[..., C, K]``.
    """
    *lead, rows, channels = k.shape
    # Blocks of one row; each pass joins neighbours: kk, qk [..., blocks, size, size].
    qk = jnp.sum(q * k, axis=-1)[..., None, None]
    kk = jnp.zeros_like(qk)
    through, after = g, jnp.zeros_like(g)
    size = 1
    while size < rows:

        def halves(x: jax.Array, size: int = size) -> tuple[jax.Array, jax.Array]:
            x = x.reshape(*lead, rows // (2 * size), 2, size, channels)
            return x[..., 0, :, :], x[..., 1, :, :]

        through_a, through_b = halves(through)
        after_a, after_b = halves(after)
        keys = halves(k)[0] * jnp.exp(after_a)
        decay_b = jnp.exp(through_b)
        qk = _join(qk, _products(halves(q)[1] * decay_b, keys))
        kk = _join(kk, _products(halves(k)[1] * decay_b, keys))
        total_a, total_b = through_a[..., -1:, :], through_b[..., -1:, :]
        through = jnp.concatenate([through_a, total_a + through_b], axis=-2)
        after = jnp.concatenate([after_a + total_b, after_b], axis=-2)
        size *= 2
    shape = (*lead, rows, rows)
    return kk.reshape(shape), qk.reshape(shape), through.reshape(k.shape), after.reshape(k.shape)


def _products(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum("...ik,...jk->...ij", x, y, precision=lax.Precision.HIGHEST)


def _join(diagonal: jax.Array, lower: jax.Array) -> jax.Array:
    """Blocks twice as large: two neighbours on the diagonal, ``lower`` below, zeros above."""
    *lead, blocks, size, _ = diagonal.shape
    diagonal = diagonal.reshape(*lead, blocks // 2, 2, size, size)
    early, late = diagonal[..., 0, :, :], diagonal[..., 1, :, :]
    top = jnp.concatenate([early, jnp.zeros_like(early)], axis=-1)
    bottom = jnp.concatenate([lower, late], axis=-1)
    return jnp.concatenate([top, bottom], axis=-2)
