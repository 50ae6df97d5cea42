"""The layer that the commands run: seeded weights, bytes in, one jitted prefill."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..layer import KDACache, KDALayerConfig, KimiDeltaAttention, LayerStates, OpInputs
from ..metadata import ChunkMetadata


@functools.partial(jax.jit, static_argnames=("graph", "backend"))
def _prefill(
    graph: Any,
    weights: Any,
    table: jax.Array,
    tokens: jax.Array,
    metadata: ChunkMetadata,
    cache: KDACache | None,
    backend: str,
) -> tuple[jax.Array, LayerStates]:
    return nnx.merge(graph, weights)(table[tokens], metadata, cache, backend=backend)


@functools.partial(jax.jit, static_argnames=("graph",))
def _op_inputs(
    graph: Any, weights: Any, table: jax.Array, tokens: jax.Array, metadata: ChunkMetadata
) -> OpInputs:
    return nnx.merge(graph, weights).op_inputs(table[tokens], metadata)


class Model:
    """A byte embedding [256, hidden] of unit variance and one KDA layer, all from one seed."""

    def __init__(self, config: KDALayerConfig, seed: int):
        self.config, self.seed = config, seed
        layer = KimiDeltaAttention(config, rngs=nnx.Rngs(seed))
        self.A_log, self.dt_bias = layer.A_log[...], layer.dt_bias[...]
        self._graph, self._weights = nnx.split(layer)
        key = jax.random.fold_in(jax.random.key(seed), 1)
        self._table = jax.random.normal(key, (256, config.hidden), jnp.dtype(config.dtype))

    def prefill(
        self,
        tokens: np.ndarray | jax.Array,
        metadata: ChunkMetadata,
        cache: KDACache | None = None,
        *,
        backend: str,
    ) -> tuple[jax.Array, LayerStates]:
        """y [T, hidden] and the states; compiled once per capacity bucket and backend."""
        return _prefill(
            self._graph, self._weights, self._table, tokens, metadata, cache, backend=backend
        )

    def op_inputs(self, tokens: np.ndarray | jax.Array, metadata: ChunkMetadata) -> OpInputs:
        """What the layer feeds to the operator for these tokens."""
        return _op_inputs(self._graph, self._weights, self._table, tokens, metadata)

    def fingerprint(self) -> str:
        """sha256 over all weights: the same seed must still mean the same layer at resume."""
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves((self._table, self._weights)):
            array = np.ascontiguousarray(leaf)
            digest.update(f"{array.dtype}{array.shape}".encode())
            digest.update(array.tobytes())
        return digest.hexdigest()
