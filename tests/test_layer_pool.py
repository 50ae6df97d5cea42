"""A layer's step in a pool against the same layer with its states passed in and out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from programs import FUSED, quick_jit

from kda_jax import Capacity, ChunkMetadata
from kda_jax.layer import KDACache, KDALayerConfig, KDAState, KimiDeltaAttention
from kda_jax.layer_pool import step_in_pool
from kda_jax.serving import step_rows

CONFIG = KDALayerConfig(hidden=32, heads=2, head_dim=64, dtype="float32")
ROWS = 9


@pytest.mark.parametrize("backend", ["chunked", FUSED])
def test_step_in_pool(backend: str) -> None:
    """Decode rows, a fresh prefill, one that goes on, a checkpoint; other rows keep their bits."""
    layer = KimiDeltaAttention(CONFIG, rngs=nnx.Rngs(0))
    random = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape), jnp.float32)

    pool = KDAState(0.3 * draw(ROWS, 2, 64, 64), draw(ROWS, 384, 3))
    lengths, offsets = [20, 70], [[], [64]]
    metadata = ChunkMetadata.from_seq_lens(
        lengths, checkpoint_offsets=offsets, capacity=Capacity(128, 4, 6, 2)
    )
    rows = step_rows(
        metadata, ROWS, [3, 5], has_initial_state=[False, True], checkpoint_state_indices=[7]
    )
    decode_rows, active = jnp.array([1, 0, -1]), jnp.array([True, True, False])
    x = draw(3 + 128, 32).at[3 + sum(lengths) :].set(0)
    run = quick_jit(step_in_pool, static_argnames=("backend",))
    y, after = run(layer, x, pool, metadata, rows, decode_rows, active=active, backend=backend)

    start = KDAState(pool.recurrent[np.array([3, 5, 0, 0])], pool.conv[np.array([3, 5, 0, 0])])
    cache = KDACache(start, jnp.array([False, True, False, False]))
    one = KDAState(pool.recurrent[np.array([1, 0, 2])], pool.conv[np.array([1, 0, 2])])
    want, states, decoded = layer.step(x, metadata, cache, one, active=active, backend="scan")
    used = np.r_[0, 1, 3 : 3 + sum(lengths)]
    np.testing.assert_allclose(y[used], want[used], rtol=1e-4, atol=1e-5)
    expected = jax.tree.map(np.array, pool)
    for field in ("recurrent", "conv"):
        table = getattr(expected, field)
        table[[1, 0]] = getattr(decoded, field)[:2]
        table[[3, 5]] = getattr(states.final, field)[:2]
        table[7] = getattr(states.checkpoint, field)[0]
        got = np.asarray(getattr(after, field))
        np.testing.assert_allclose(got, table, rtol=1e-4, atol=1e-5)
        untouched = [2, 4, 6, 8]
        np.testing.assert_array_equal(got[untouched], getattr(pool, field)[np.array(untouched)])
