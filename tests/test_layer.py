"""KimiDeltaAttention against a forward pass in NumPy float64, written from the formulas."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kda_jax import ChunkMetadata
from kda_jax.layer import KDACache, KDALayerConfig, KDAState, KimiDeltaAttention

CONFIG = KDALayerConfig(hidden=24, heads=2, head_dim=8, dtype="float32", backend="scan")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def forward(layer, x, recurrent=None, conv=None):
    """One sequence: y [T, hidden], the state [H, V, K] and conv windows [3 H K, W-1] at its end."""
    c = layer.config
    p = {
        "/".join(map(str, path)): np.asarray(leaf[...], np.float64)
        for path, leaf in nnx.to_flat_state(nnx.state(layer, nnx.Param))
    }
    x = np.asarray(x, np.float64)
    tokens, reach = len(x), c.conv_width - 1
    conv = np.zeros((3, c.channels, reach)) if conv is None else conv.reshape(3, c.channels, reach)
    qkv, windows = [], []
    for name, old in zip("qkv", np.asarray(conv, np.float64), strict=True):
        rows = np.concatenate([old.T, x @ p[f"{name}_proj/kernel"]])
        out = np.stack(
            [sum(p[f"{name}_conv1d"][:, j] * rows[t + j] for j in range(c.conv_width))
             for t in range(tokens)]
        ) if tokens else np.zeros((0, c.channels))  # fmt: skip
        qkv.append((out * sigmoid(out)).reshape(tokens, c.heads, c.head_dim))
        windows.append(rows[tokens:].T)
    q, k, v = qkv
    q = q / np.sqrt((q**2).sum(-1, keepdims=True) + 1e-6) * c.head_dim**-0.5
    k = k / np.sqrt((k**2).sum(-1, keepdims=True) + 1e-6)
    raw_g = (x @ p["f_a_proj/kernel"] @ p["f_b_proj/kernel"] + p["dt_bias"]).reshape(q.shape)
    rate = np.exp(p["A_log"])[:, None]
    if c.lower_bound is None:
        g = -rate * np.logaddexp(0, raw_g)
    else:
        g = c.lower_bound * sigmoid(rate * raw_g)
    beta = sigmoid(x @ p["b_proj/kernel"])
    S = np.zeros((c.heads, c.head_dim, c.head_dim)) if recurrent is None else recurrent
    S = np.array(S, np.float64)
    o = np.zeros(q.shape)
    for t in range(tokens):
        for h in range(c.heads):
            S[h] *= np.exp(g[t, h])
            S[h] += beta[t, h] * np.outer(v[t, h] - S[h] @ k[t, h], k[t, h])
            o[t, h] = S[h] @ q[t, h]
    o = o / np.sqrt((o**2).mean(-1, keepdims=True) + c.rms_eps) * p["o_norm"]
    y = (o.reshape(tokens, c.channels) * sigmoid(x @ p["g_proj/kernel"])) @ p["o_proj/kernel"]
    return y, S, np.concatenate(windows)


def make(config=CONFIG, seed=0):
    layer = KimiDeltaAttention(config, rngs=nnx.Rngs(seed))
    # A norm weight of ones would hide a layer that forgets it.
    values = np.random.default_rng(seed).uniform(0.5, 1.5, config.head_dim)
    layer.o_norm[...] = jnp.asarray(values, config.dtype)
    return layer


@functools.partial(jax.jit, static_argnames=("graph", "backend"))
def _step(graph, weights, x, metadata, cache, backend):
    return nnx.merge(graph, weights)(x, metadata, cache, backend=backend)


def run(layer, x, metadata, cache=None, backend=None):
    """The layer under jit, one compile for all tests of equal shapes."""
    x = x if len(x) == metadata.capacity.tokens else metadata.pad_tokens(x, 0)
    y, states = _step(*nnx.split(layer), x, metadata, cache, backend)
    return y[: metadata.num_tokens], states


def text(rows, seed=1, config=CONFIG):
    return np.random.default_rng(seed).standard_normal((rows, config.hidden)).astype("float32")


def some_cache(sequences, seed=2, config=CONFIG):
    random = np.random.default_rng(seed)
    shape = (sequences, config.heads, config.head_dim, config.head_dim)
    recurrent = random.standard_normal(shape).astype("float32")
    conv = random.standard_normal((sequences, 3 * config.channels, 3)).astype("float32")
    return KDAState(jnp.asarray(recurrent), jnp.asarray(conv))


def lengths(seq_lens, **options):
    """Bucketed, so that most tests share one compiled program."""
    return ChunkMetadata.from_seq_lens(seq_lens, capacity="bucket", **options)


close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("backend", ["scan", "chunked"])
def test_packed_batch_with_states_equals_the_reference(lower_bound, backend):
    layer = make(dataclasses.replace(CONFIG, lower_bound=lower_bound))
    seq_lens = [70, 0, 2, 33]
    metadata = lengths(seq_lens, checkpoint_offsets=[[64, 5], [], [], [33]])
    x = text(metadata.capacity.tokens)
    x[105:] = np.nan  # padding content has no effect
    state = some_cache(4)
    has = jnp.array([True, True, True, False])
    y, states = run(layer, x, metadata, KDACache(state, has), backend=backend)
    first = 0
    for n, length in enumerate(seq_lens):
        start = (state.recurrent[n], np.asarray(state.conv[n])) if has[n] else (None, None)
        want_y, want_s, want_conv = forward(layer, x[first : first + length], *start)
        close(y[first : first + length], want_y)
        close(states.final.recurrent[n], want_s)
        close(states.final.conv[n], want_conv)
        first += length
    assert first == len(y)
    for row, (n, offset) in enumerate([(0, 64), (0, 5), (3, 33)]):
        begin = sum(seq_lens[:n])
        start = (state.recurrent[n], np.asarray(state.conv[n])) if has[n] else (None, None)
        _, want_s, want_conv = forward(layer, x[begin : begin + offset], *start)
        close(states.checkpoint.recurrent[row], want_s)
        close(states.checkpoint.conv[row], want_conv)
    assert not any(np.any(part[3:]) for part in states.checkpoint)


def test_rows_of_padding_are_zeros():
    layer, metadata = make(), lengths([5, 1])
    x = text(metadata.capacity.tokens)
    x[6:] = np.nan
    y, states = _step(*nnx.split(layer), x, metadata, None, "scan")
    assert np.isfinite(y).all() and not np.any(y[6:])
    assert not any(np.any(part[2:]) for part in states.final)


def test_split_prefill_equals_one_run():
    layer, x = make(), text(100)
    y, states = run(layer, x, lengths([100]))
    parts, cache, first = [], layer.empty_cache(1), 0
    for n in (1, 1, 62, 36):
        part, after = run(layer, x[first : first + n], lengths([n]), cache)
        parts.append(part)
        cache, first = KDACache(after.final), first + n
    close(np.concatenate(parts), y)
    jax.tree.map(close, cache.state, states.final)


@pytest.mark.parametrize("offset", [2, 64, 77])
def test_resume_from_a_checkpoint_equals_one_run(offset):
    """A checkpoint is complete: the recurrent state and the convolutions' windows."""
    layer, x = make(), text(100)
    y, states = run(layer, x, lengths([100], checkpoint_offsets=[[offset]]))
    rest = lengths([100 - offset])
    y_rest, after = run(layer, x[offset:], rest, KDACache(states.checkpoint))
    close(y_rest, y[offset:])
    jax.tree.map(close, after.final, states.final)


def test_fresh_rows_ignore_their_state():
    layer, x = make(), text(20)
    metadata = lengths([12, 8])
    nan = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), some_cache(2))
    y, _ = run(layer, x, metadata, KDACache(nan, jnp.zeros(2, bool)))
    np.testing.assert_array_equal(y, run(layer, x, metadata, layer.empty_cache(2))[0])
    close(y, run(layer, x, metadata)[0])


def test_no_retrace_and_no_transfer():
    """Other lengths and other checkpoints in one bucket run the same program, without a sync."""
    parts = jax.device_put(nnx.split(make())[1])
    graph, x = nnx.split(make())[0], jax.device_put(text(64))
    batches = jax.device_put(
        [lengths([n, 20], checkpoint_offsets=[[n // 2], []]) for n in (13, 14, 30, 44)]
    )
    before = _step._cache_size()
    with jax.transfer_guard("disallow"):
        for metadata in batches:
            _step(graph, parts, x, metadata, None, "scan")
    assert _step._cache_size() - before == 1


def test_bfloat16_is_close_and_keeps_dtypes():
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    layer = make(config)
    y, states = run(layer, text(80), lengths([80]))
    assert y.dtype == states.final.conv.dtype == jnp.bfloat16
    assert states.final.recurrent.dtype == jnp.float32
    want = forward(layer, jnp.asarray(text(80), jnp.bfloat16))[0]
    error = np.linalg.norm(np.asarray(y, np.float64) - want) / np.linalg.norm(want)
    assert error < 2e-2


def test_parameters_have_the_published_names_and_shapes():
    layer = KimiDeltaAttention(CONFIG, rngs=nnx.Rngs(0))
    shapes = {
        ".".join(map(str, path)): leaf.shape
        for path, leaf in nnx.to_flat_state(nnx.state(layer, nnx.Param))
    }
    assert shapes == {
        "q_proj.kernel": (24, 16),
        "k_proj.kernel": (24, 16),
        "v_proj.kernel": (24, 16),
        "q_conv1d": (16, 4),
        "k_conv1d": (16, 4),
        "v_conv1d": (16, 4),
        "f_a_proj.kernel": (24, 8),
        "f_b_proj.kernel": (8, 16),
        "b_proj.kernel": (24, 2),
        "A_log": (2,),
        "dt_bias": (16,),
        "o_norm": (8,),
        "g_proj.kernel": (24, 16),
        "o_proj.kernel": (16, 24),
    }
    assert float(layer.dt_bias[...].min()) >= -7.8 and float(layer.dt_bias[...].max()) <= -1.4


def test_gradients_are_finite_with_padding():
    layer = make()
    metadata = lengths([10, 0])
    x = text(metadata.capacity.tokens)

    def loss(layer, x):
        y, states = layer(x, metadata)
        return jnp.sum(y**2) + jnp.sum(states.final.recurrent)

    weights, inputs = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(layer, x)
    for leaf in jax.tree.leaves((weights, inputs)):
        assert np.isfinite(leaf).all()
    assert not np.any(inputs[10:])


@pytest.mark.parametrize(
    ("x", "cache", "options", "message"),
    [
        (np.zeros((4, 23), "f"), None, {}, r"x has shape \(4, 23\), want \(T, 24\)"),
        (np.zeros((4, 24), "i"), None, {}, "x is int32"),
        (np.zeros((3, 24), "f"), None, {}, "3 rows"),
        (np.zeros((4, 24), "f"), 2, {}, r"cache.state.conv has shape .* want \(1, 48, 3\)"),
        (np.zeros((4, 24), "f"), None, {"backend": "none"}, "none"),
    ],
)
def test_errors(x, cache, options, message):
    layer = make()
    cache = None if cache is None else layer.empty_cache(cache)
    with pytest.raises(ValueError, match=message):
        layer(x, ChunkMetadata.from_seq_lens([4]), cache, **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"heads": 0}, "heads is 0"), ({"dtype": "int8"}, "dtype is 'int8'")],
)
def test_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        KDALayerConfig(**fields)
