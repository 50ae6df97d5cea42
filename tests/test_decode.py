"""The step of one token against the prefill of that token."""

from __future__ import annotations

import re

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


ERRORS = [
    ("q", lambda x: x[0], r"q has shape (2, 16), want 3 axes [R, H, K]"),
    ("q", lambda x: x.astype(np.int32), "q has dtype int32, want bfloat16"),
    ("k", lambda x: x[1:], "k has shape (3, 2, 16), want (4, 2, 16): [R, H, K] as q"),
    ("v", lambda x: x[:, :1], "v has shape (4, 1, 8), want [R, H, V] with (4, 2) as q"),
    ("raw_beta", lambda x: x[..., None], "raw_beta has shape (4, 2, 1), want (4, 2): [R, H] as q"),
    ("A_log", lambda x: x[:1], "A_log has shape (1,), want (2,)"),
    ("dt_bias", lambda x: x.ravel(), "dt_bias has shape (32,), want (2, 16)"),
    ("state", lambda x: x[:, :, :4], "state has shape (4, 2, 4, 16), want (4, 2, 8, 16)"),
    ("state", lambda x: None, r"state is None: want (4, 2, 8, 16)"),
    ("state", lambda x: x.astype(np.float16), "state has dtype float16, want float32; cast it"),
    ("active", lambda x: x.astype(np.int8), "active has dtype int8, want bool"),
    ("active", lambda x: x[1:], "active has shape (3,), want (4,): [R], one per row"),
    ("lower_bound", lambda x: -7.0, "lower_bound is -7.0, want a number in [-5, 0)"),
    ("scale", lambda x: 0, "scale is 0, want a Python number"),
]


@pytest.mark.parametrize(("name", "change", "message"), ERRORS, ids=[x[2] for x in ERRORS])
def test_errors(name, change, message):
    arguments = {
        "q": normal(ROWS, H, K),
        "k": normal(ROWS, H, K),
        "v": normal(ROWS, H, V),
        "raw_g": normal(ROWS, H, K),
        "raw_beta": normal(ROWS, H),
        "A_log": normal(H),
        "dt_bias": normal(H, K),
        "state": normal(ROWS, H, V, K),
        "active": ACTIVE,
        "lower_bound": -5.0,
        "scale": None,
    }
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=re.escape(message)):
        kda_decode_step(**arguments)


def test_conv_step_errors():
    x, weight, state = normal(ROWS, 6), normal(6, 4), normal(ROWS, 6, 3)
    for arguments, message in (
        ((x, weight, state[..., 1:]), "state is float32 (4, 6, 2), want float32 (4, 6, 3)"),
        ((x[0], weight, state), "x has shape (6,), want [R, C]"),
        ((x, weight[1:], state), "weight has shape (5, 4), want (6, W)"),
        ((x, weight.astype(int), state), "weight is int64, want a floating dtype"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            causal_conv1d_step(*arguments)
    with pytest.raises(ValueError, match=re.escape("active has shape (3,), want (4,)")):
        causal_conv1d_step(x, weight, state, active=ACTIVE[1:])
