"""causal_conv1d against a loop over tokens in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax import ChunkMetadata
from kda_jax.conv import causal_conv1d

PACKS = [[5], [1, 2, 3, 4], [0, 7, 0, 1, 0], [64, 65, 2], [0, 0]]
CHANNELS = 6


def loop(x, weight, seq_lens, state, offsets, silu=True):
    """The definition: y, the final windows and the windows at `offsets`, in float64."""
    channels, width = weight.shape
    y, final, inside, first = [], [], [], 0
    for n, length in enumerate(seq_lens):
        rows = np.concatenate([state[n].T, x[first : first + length]])
        for t in range(length):
            total = sum(weight[:, j] * rows[t + j] for j in range(width))
            y.append(total / (1 + np.exp(-total)) if silu else total)
        final.append(rows[length:].T)
        inside += [rows[o : o + width - 1].T for o in offsets[n]]
        first += length
    return (
        np.array(y).reshape(-1, channels),
        np.array(final),
        np.array(inside) if inside else np.zeros((0, channels, width - 1)),
    )


def make(seq_lens, *, width=4, seed=0, rows=None, dtype=np.float32):
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows or sum(seq_lens), CHANNELS)).astype(dtype)
    weight = random.standard_normal((CHANNELS, width)).astype(dtype)
    state = random.standard_normal((len(seq_lens), CHANNELS, width - 1)).astype(dtype)
    return x, weight, state


@pytest.mark.parametrize(("seq_lens", "width"), [*((p, 4) for p in PACKS), ([3, 9], 2), ([5], 1)])
@pytest.mark.parametrize("with_state", [False, True])
def test_equals_the_loop(seq_lens, width, with_state):
    x, weight, state = make(seq_lens, width=width)
    offsets = [sorted({1, n // 2, n} - {0}) if n else [] for n in seq_lens]
    metadata = ChunkMetadata.from_seq_lens(seq_lens, checkpoint_offsets=offsets)
    got = jax.jit(causal_conv1d)(
        x, weight, metadata, initial_state=jnp.asarray(state) if with_state else None
    )
    want = loop(x, weight, seq_lens, state if with_state else 0 * state, offsets)
    np.testing.assert_allclose(got.y, want[0], rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(got.final_state, want[1])  # raw rows, never computed
    np.testing.assert_array_equal(got.checkpoint_state, want[2])


def test_without_activation():
    x, weight, state = make([9])
    metadata = ChunkMetadata.from_seq_lens([9])
    got = causal_conv1d(x, weight, metadata, initial_state=jnp.asarray(state), activation=None)
    want = loop(x, weight, [9], state, [[]], silu=False)[0]
    np.testing.assert_allclose(got.y, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_accumulates_in_float32(dtype):
    x, weight, state = (jnp.asarray(a, dtype) for a in make([40]))
    metadata = ChunkMetadata.from_seq_lens([40])
    got = causal_conv1d(x, weight, metadata, initial_state=state)
    assert got.y.dtype == got.final_state.dtype == jnp.dtype(dtype)
    wide = [np.asarray(a, np.float64) for a in (x, weight, state)]
    want = loop(wide[0], wide[1], [40], wide[2], [[]])[0]
    # One rounding of the result: half a unit in the last place.
    ulp = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    np.testing.assert_allclose(np.asarray(got.y, np.float64), want, rtol=1.01 * ulp, atol=1e-4)


def test_float64(enable_x64_here):
    x, weight, state = make([20], dtype=np.float64)
    got = causal_conv1d(
        x, weight, ChunkMetadata.from_seq_lens([20]), initial_state=jnp.asarray(state)
    )
    assert got.y.dtype == np.float64
    np.testing.assert_allclose(got.y, loop(x, weight, [20], state, [[]])[0], rtol=1e-12)


@pytest.fixture
def enable_x64_here():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 17, 30])
def test_checkpoint_is_the_state_of_a_truncated_prefill(offset):
    x, weight, state = make([30])
    state = jnp.asarray(state)
    full = ChunkMetadata.from_seq_lens([30], checkpoint_offsets=[[offset]])
    short = ChunkMetadata.from_seq_lens([offset])
    got = causal_conv1d(x, weight, full, initial_state=state)
    want = causal_conv1d(x[:offset], weight, short, initial_state=state)
    np.testing.assert_array_equal(got.checkpoint_state, want.final_state)


def test_pieces_equal_one_run():
    x, weight, _ = make([23])
    whole = causal_conv1d(x, weight, ChunkMetadata.from_seq_lens([23]))
    state, parts, first = None, [], 0
    for n in (1, 1, 0, 2, 16, 3):
        part = ChunkMetadata.from_seq_lens([n])
        step = causal_conv1d(x[first : first + n], weight, part, initial_state=state)
        parts.append(step.y)
        state, first = step.final_state, first + n
    np.testing.assert_allclose(np.concatenate(parts), whole.y, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(state, whole.final_state)


def test_padding_and_fresh_rows_have_no_effect():
    """NaN in padding, in another sequence and in states that are not used stays where it is."""
    seq_lens = [5, 2, 30]
    metadata = ChunkMetadata.from_seq_lens(
        seq_lens, checkpoint_offsets=[[2], [], [30]], capacity="bucket"
    )
    tokens, sequences = metadata.capacity.tokens, metadata.capacity.sequences
    x, weight, state = make(seq_lens, rows=tokens + 3)
    state = np.concatenate([state, np.full((sequences - 3, *state.shape[1:]), np.nan, "float32")])
    has = np.array([True, False, True] + [True] * (sequences - 3))
    clean = state.copy()
    clean[1] = 0
    want = loop(x, weight, seq_lens, clean, [[2], [], [30]])

    x[37:] = np.nan
    state[1] = np.nan
    got = causal_conv1d(
        x,
        weight,
        metadata,
        initial_state=jnp.asarray(state),
        has_initial_state=jnp.asarray(has),
    )
    np.testing.assert_allclose(got.y[:37], want[0], rtol=2e-5, atol=2e-6)
    assert not np.any(got.y[37:])
    np.testing.assert_array_equal(got.final_state[:3], want[1])
    assert not np.any(got.final_state[3:])
    np.testing.assert_array_equal(got.checkpoint_state[:2], want[2])
    assert not np.any(got.checkpoint_state[2:])

    x[5:7] = np.nan  # the whole second sequence
    got = causal_conv1d(x, weight, metadata, initial_state=jnp.asarray(state * has[:, None, None]))
    assert np.isfinite(got.y[:5]).all() and np.isfinite(got.y[7:]).all()


def test_no_retrace_and_no_transfer():
    x, weight, _ = make([64])
    x, weight = jax.device_put((x, weight))
    traces = []

    @jax.jit
    def step(x, weight, metadata):
        traces.append(metadata)
        return causal_conv1d(x, weight, metadata)

    batches = [
        jax.device_put(ChunkMetadata.from_seq_lens([n, 20], capacity="bucket"))
        for n in (13, 14, 30, 44)
    ]
    with jax.transfer_guard("disallow"):
        for metadata in batches:
            step(x, weight, metadata)
    assert len(traces) == 1


def test_gradients_match_finite_differences():
    x, weight, state = make([6, 2])
    metadata = ChunkMetadata.from_seq_lens([6, 2], checkpoint_offsets=[[3], []])

    def loss(x, weight, state):
        r = causal_conv1d(x, weight, metadata, initial_state=state)
        return jnp.sum(r.y**2) + jnp.sum(r.final_state) + 2 * jnp.sum(r.checkpoint_state)

    from jax.test_util import check_grads

    check_grads(loss, tuple(map(jnp.asarray, (x, weight, state))), 1, ["rev"], rtol=2e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((4, 6, 1), "f")}, r"x has shape .* want \[T, C\]"),
        ({"x": np.zeros((4, 6), "i")}, "x is int32"),
        ({"x": np.zeros((3, 6), "f")}, "x has 3 rows, metadata has room for 4"),
        ({"weight": np.zeros((6, 1, 4), "f")}, r"weight has shape .* want \[C, W\]"),
        ({"weight": np.zeros((5, 4), "f")}, r"want \(6, W\)"),
        ({"weight": np.zeros((6, 4), "i")}, "weight is int32"),
        ({"initial_state": np.zeros((2, 6, 3), "f")}, r"want \(1, 6, 3\)"),
        ({"initial_state": np.zeros((1, 6, 3), "e")}, "initial_state is float16, x is float32"),
        ({"has_initial_state": np.ones(1, bool)}, "without initial_state"),
        (
            {
                "initial_state": np.zeros((1, 6, 3), "f"),
                "has_initial_state": np.ones(1, "i"),
            },
            "want bool",
        ),
        ({"activation": "relu"}, "activation is 'relu'"),
        ({"metadata": [4]}, "want a ChunkMetadata"),
    ],
)
@pytest.mark.parametrize("traced", [False, True])
def test_errors_name_the_argument(change, message, traced):
    x, weight, _ = make([4])
    metadata = change.get("metadata", ChunkMetadata.from_seq_lens([4]))
    arrays = {"x": x, "weight": weight} | {
        k: v for k, v in change.items() if k not in ("activation", "metadata")
    }
    activation = change.get("activation", "silu")

    def call(arrays):
        return causal_conv1d(**arrays, metadata=metadata, activation=activation)

    with pytest.raises(ValueError, match=message):
        (jax.jit(call) if traced else call)(arrays)
