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
from ..ops import chunk_kda_prefill
from ..types import KDAResult


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


@functools.partial(jax.jit, static_argnames=("lower_bound", "backend"))
def _operator(
    inputs: OpInputs,
    A_log: jax.Array,
    dt_bias: jax.Array,
    metadata: ChunkMetadata | None,
    lower_bound: float | None,
    backend: str,
) -> KDAResult:
    return chunk_kda_prefill(
        *inputs, A_log, dt_bias, metadata=metadata, lower_bound=lower_bound, backend=backend
    )


class Model:
    """A byte embedding [256, hidden] of unit variance and one KDA layer, all from one seed."""

    def __init__(self, config: KDALayerConfig, seed: int):
        self.config, self.seed = config, seed
        layer = KimiDeltaAttention(config, rngs=nnx.Rngs(seed))
        self._A_log = layer.A_log[...]
        self._dt_bias = layer.dt_bias[...].reshape(config.heads, config.head_dim)
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

    def operator(
        self, inputs: OpInputs, metadata: ChunkMetadata | None = None, *, backend: str
    ) -> KDAResult:
        """The operator alone, on what op_inputs returned."""
        bound = self.config.lower_bound
        return _operator(inputs, self._A_log, self._dt_bias, metadata, bound, backend)

    def reference(self, inputs: OpInputs, metadata: ChunkMetadata | None = None) -> KDAResult:
        """The same in float64 by the token recurrence, as NumPy arrays."""
        gate = (self._A_log, self._dt_bias)
        wide, gate = jax.tree.map(lambda x: np.asarray(x, np.float64), (inputs, gate))
        with jax.enable_x64(True):
            bound = self.config.lower_bound
            return jax.device_get(_operator(wide, *gate, metadata, bound, "scan"))

    def fingerprint(self) -> str:
        """sha256 over all weights: the same seed must still mean the same layer at resume."""
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves((self._table, self._weights)):
            array = np.ascontiguousarray(leaf)
            digest.update(f"{array.dtype}{array.shape}".encode())
            digest.update(array.tobytes())
        return digest.hexdigest()
