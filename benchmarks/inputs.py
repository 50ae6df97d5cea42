"""Random arguments of the operator, made on the device: large shapes never cross from the host.

The kinds are those of `kda_jax.testing` where the names are the same, with other random numbers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax import ChunkMetadata
from kda_jax.testing import Case

from .shapes import Shape

DTYPE = "bfloat16"
# "random": everything normal, A_log and dt_bias uniform in [0, 1): strong decay; what the peers are
# timed on. "k3": the gates of Kimi-K3, slow decay.
KINDS = ("random", "k3")
Arrays = tuple[jax.Array, ...]


@functools.partial(jax.jit, static_argnames=("kind", "tokens", "H", "K", "V", "dtype"))
def arrays(
    seed: Any, *, kind: str, tokens: int, H: int, K: int = 128, V: int = 128, dtype: str = DTYPE
) -> Arrays:
    """q, k, v, raw_g, raw_beta in ``dtype``; A_log, dt_bias in float32."""
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 7)

    def normal(i: int, *shape: int) -> jax.Array:
        # Drawn in float32: bfloat16 draws have a few hundred different values.
        return jax.random.normal(keys[i], (1, tokens, *shape)).astype(jnp.dtype(dtype))

    q, k, v, raw_g = normal(0, H, K), normal(1, H, K), normal(2, H, V), normal(3, H, K)
    raw_beta = normal(4, H)
    if kind == "k3":
        raw_beta = jnp.minimum(1.5 + 1.5 * raw_beta, 2.94).astype(raw_beta.dtype)
        A_log = 0.3 * jax.random.normal(keys[5], (H,))
        dt_bias = jax.random.uniform(keys[6], (H, K), minval=-7.8, maxval=-1.4)
    else:
        A_log = jax.random.uniform(keys[5], (H,))
        dt_bias = jax.random.uniform(keys[6], (H, K))
    return q, k, v, raw_g, raw_beta, A_log, dt_bias


def of_shape(shape: Shape, kind: str, seed: int, dtype: str = DTYPE) -> Arrays:
    """`arrays` for a packed batch."""
    return arrays(
        seed, kind=kind, tokens=shape.tokens, H=shape.H, K=shape.K, V=shape.V, dtype=dtype
    )


def layout(shape: Shape, **options: Any) -> ChunkMetadata:
    """The metadata of a shape, on the device; options as in `ChunkMetadata.from_seq_lens`."""
    return jax.device_put(ChunkMetadata.from_seq_lens(list(shape.seq_lens), **options))


# The head axis of each argument.
_HEAD_AXIS = (2, 2, 2, 2, 2, 0, 0)


def host_case(picked: list[tuple[Arrays, int]], shape: Shape) -> Case:
    """The case that holds these heads side by side, each from the arguments that it is paired with.

    Heads do not interact, so a reference of some heads needs these heads alone.
    """
    columns: list[Any] = [
        np.concatenate([np.asarray(head_of(x[i], head, axis)) for x, head in picked], axis)
        for i, axis in enumerate(_HEAD_AXIS)
    ]
    metadata = ChunkMetadata.from_seq_lens(list(shape.seq_lens))
    q, k, v, raw_g, raw_beta, A_log, dt_bias = columns
    name = f"{shape.name}, {len(picked)} heads"
    return Case(name, q, k, v, raw_g, raw_beta, A_log, dt_bias, metadata)


def head_of(x: jax.Array, head: int, axis: int) -> jax.Array:
    """One head, its axis kept: only that is copied to the host."""
    return jax.lax.dynamic_slice_in_dim(x, head, 1, axis)  # dynamic: compiled once for all heads
