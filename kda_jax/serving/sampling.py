"""The next token of each row, on the device; every row with its own parameters."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..grid import Array

_GREEDY = 1e-6  # logits over less than this overflow, and the best one wins anyway


class Sampling(NamedTuple):
    """Of R rows: temperature, top_p: float32 [R]; seed: uint32 [R]; position: int32 [R].

    position: of the token to be drawn, which with the seed makes its random number.
    """

    temperature: Array | jax.Array
    top_p: Array | jax.Array
    seed: Array | jax.Array
    position: Array | jax.Array

    @classmethod
    def greedy(cls, rows: int) -> Sampling:
        """NumPy arrays to fill in."""
        zeros, ones = np.zeros(rows, np.float32), np.ones(rows, np.float32)
        return cls(zeros, ones, np.zeros(rows, np.uint32), np.zeros(rows, np.int32))


def sample_rows(logits: jax.Array, how: Sampling) -> jax.Array:
    """int32 [R] from logits [R, V]; see `SamplingParams` for what the parameters mean."""
    greedy = how.temperature < _GREEDY
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> jax.Array:
        scaled = logits / jnp.where(greedy, 1, how.temperature)[:, None]
        scaled = lax.cond(jnp.any(how.top_p < 1), _only_likely, lambda x, _: x, scaled, how.top_p)
        keys = jax.vmap(lambda seed, at: jax.random.fold_in(jax.random.key(seed), at))(
            how.seed, how.position
        )
        drawn = jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)
        return jnp.where(greedy, best, drawn)

    return lax.cond(jnp.all(greedy), lambda: best, draw)


def _only_likely(logits: jax.Array, top_p: jax.Array) -> jax.Array:
    """-inf outside the smallest set of most likely tokens whose share reaches top_p."""
    ordered = -jnp.sort(-logits, axis=-1)
    share = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(share, axis=-1) - share
    kept = jnp.maximum(1, jnp.sum(before < top_p[:, None], axis=-1))  # 1e-50 is 0 in float32
    least = jnp.take_along_axis(ordered, kept[:, None] - 1, axis=-1)
    return jnp.where(logits >= least, logits, -jnp.inf)
