"""The step of one token against the prefill of that token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import quick_jit

from kda_jax import ChunkMetadata, chunk_kda_prefill
from kda_jax.conv import causal_conv1d, causal_conv1d_step
from kda_jax.decode import kda_decode_step

ROWS, H, K, V = 4, 2, 16, 8
ACTIVE = np.array([True, False, True, True])


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("f")


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_decode_step_equals_a_prefill_of_one_token(lower_bound):
    q, k, raw_g = normal(3, ROWS, H, K)
    v, raw_beta, state = normal(ROWS, H, V, seed=1), normal(ROWS, H), normal(ROWS, H, V, K)
    gate = normal(H, seed=2) * 0.3, normal(H, K, seed=3) - 3
    lens = ACTIVE.astype(int)
    metadata = ChunkMetadata.from_seq_lens(lens)
    packed = [x[ACTIVE][None] for x in (q, k, v, raw_g, raw_beta)]
    options = {"lower_bound": lower_bound, "backend": "scan", "scale": 0.3}
    want = chunk_kda_prefill(*packed, *gate, metadata=metadata, initial_state=state, **options)
    step = quick_jit(
        lambda *a: kda_decode_step(*a, active=ACTIVE, scale=0.3, lower_bound=lower_bound)
    )
    out, after = step(q, k, v, raw_g, raw_beta, *gate, state)
    np.testing.assert_allclose(out[ACTIVE], want.out[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after, want.final_state, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(after[1], state[1])  # an idle row keeps its state
    assert not np.any(out[1]) and out.dtype == v.dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_conv_step_equals_a_prefill_of_one_token(dtype):
    dtype = jnp.dtype(dtype)
    x, weight = normal(ROWS, 6).astype(dtype), normal(6, 4).astype(dtype)
    state = normal(ROWS, 6, 3, seed=1).astype(dtype)
    metadata = ChunkMetadata.from_seq_lens(ACTIVE.astype(int))
    want = causal_conv1d(x[ACTIVE], weight, metadata, initial_state=state)
    step = quick_jit(lambda *a: causal_conv1d_step(*a, active=ACTIVE))
    y, after = jax.device_get(step(x, weight, state))
    want = jax.device_get(want)
    np.testing.assert_allclose(y[ACTIVE].astype("f"), want.y.astype("f"), rtol=1e-2, atol=1e-6)
    np.testing.assert_array_equal(after, want.final_state)


def test_errors():
    x = normal(ROWS, H, K)
    with pytest.raises(ValueError, match=r"state has shape \(4, 2, 8, 8\), want \(4, 2, 16, 16\)"):
        kda_decode_step(x, x, x, x, x[..., 0], x[0, :, 0], x[0], normal(ROWS, H, 8, 8))
    with pytest.raises(ValueError, match=r"state is float32 \(4, 6, 2\), want float32 \(4, 6, 3\)"):
        causal_conv1d_step(normal(ROWS, 6), normal(6, 4), normal(ROWS, 6, 2))
