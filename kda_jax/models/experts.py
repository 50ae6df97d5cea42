"""The experts' MLPs over the tokens that chose them, one block of tokens at a time.

Token-expert pairs are sorted by expert and cut into blocks that belong to one expert each, so every
block is one dense product with one expert's weights: no capacity limit, no dropped token, and no
expansion over experts (what `jax.lax.ragged_dot` does on ROCm, CUDA and CPU).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ..linear import normal
from .batch import Axes
from .config import Activation
from .mlp import gated

_HIGHEST = lax.Precision.HIGHEST


class Experts(nnx.Module):
    """gate and up: [E, width, I], down: [E, I, width]."""

    def __init__(
        self,
        experts: int,
        width: int,
        inner: int,
        activation: Activation,
        dtype: str,
        *,
        rngs: nnx.Rngs | None,
    ):
        self.activation, self.total = activation, experts

        self.gate = normal(rngs, (experts, width, inner), dtype, width**-0.5)
        self.up = normal(rngs, (experts, width, inner), dtype, width**-0.5)
        self.down = normal(rngs, (experts, inner, width), dtype, inner**-0.5)

    def __call__(self, x: jax.Array, choice: jax.Array, weight: jax.Array, axes: Axes) -> jax.Array:
        """The weighted sum of the chosen experts' outputs.

        Args:
          x: [R, width].
          choice: int32 [R, k], global expert numbers; a number past the last is no expert.
          weight: float32 [R, k].
          axes: with `axes.expert`, this device holds a run of the experts and returns its part of
            the sum over devices; with `axes.model`, likewise for split columns.

        Returns:
          [R, width] in float32 (float64 for a float64 x).
        """
        gate, up, down = self.gate[...], self.up[...], self.down[...]
        E, (R, k) = gate.shape[0], choice.shape
        wide = jnp.promote_types(x.dtype, jnp.float32)
        local = choice - axes.first(axes.expert, E)
        local = jnp.where((local >= 0) & (local < E), local, E).reshape(-1)
        order = jnp.argsort(local, stable=True)
        counts = jnp.zeros((E,), jnp.int32).at[local].add(1, mode="drop")
        size = block_size(R * k, self.total)
        blocks = -(-counts // size)
        block_end, pair_end = jnp.cumsum(blocks), jnp.cumsum(counts)
        most = min(R * k, R * k // size + E)
        pairs = weight.reshape(-1)

        def work(out: jax.Array, block: jax.Array, expert: jax.Array) -> jax.Array:
            first = pair_end[expert] - counts[expert]
            first += (block - (block_end[expert] - blocks[expert])) * size
            index = first + jnp.arange(size)
            used = index < pair_end[expert]
            pair = order[jnp.minimum(index, R * k - 1)]
            rows = x[pair // k]
            inner = gated(_product(rows, gate, expert), _product(rows, up, expert), self.activation)
            y = _product(inner, down, expert).astype(wide) * pairs[pair][:, None].astype(wide)
            return out.at[jnp.where(used, pair // k, R)].add(y, mode="drop")

        def step(out: jax.Array, block: jax.Array) -> tuple[jax.Array, None]:
            expert = jnp.searchsorted(block_end, block, side="right").astype(jnp.int32)
            run = expert < E
            return lax.cond(run, work, lambda out, *_: out, out, block, expert), None

        out, _ = lax.scan(step, jnp.zeros_like(x, wide), jnp.arange(most, dtype=jnp.int32))
        return out


def block_size(pairs: int, experts: int) -> int:
    """Rows of a block: about an expert's mean share, a power of two in 8..128."""
    share = max(1, pairs // experts)
    return min(128, max(8, 1 << (share - 1).bit_length()))


def _product(rows: jax.Array, weights: jax.Array, expert: jax.Array) -> jax.Array:
    weight = lax.dynamic_index_in_dim(weights, expert, keepdims=False)
    return jnp.matmul(rows.astype(weight.dtype), weight, precision=_HIGHEST)
