"""The convolution and the steps of one token in a pool, against themselves without one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_same_bits
from programs import count_compiles, quick_jit

from kda_jax import Capacity, ChunkMetadata
from kda_jax.conv import causal_conv1d, causal_conv1d_step
from kda_jax.decode import kda_decode_step
from kda_jax.serving import StepRows, step_rows

C, R, POOL_CHANNELS, POOL_COLUMNS = 6, 12, 11, 5
FIRST = 3  # channels of the pool before those of x
CAPACITY = Capacity(64, 8, 16, 4)
LENGTHS = [20, 0, 1, 2, 5, 0]
OFFSETS = [[1, 18], [], [], [2], [], []]


def random(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


class Windows:
    """A pool of windows with NaN in all that no window is read from, and a step's rows of it."""

    def __init__(self, seed: int, dtype: Any, width: int = 4) -> None:
        rng = np.random.default_rng(seed)
        order = rng.permutation(R)
        self.metadata = ChunkMetadata.from_seq_lens(
            LENGTHS, checkpoint_offsets=OFFSETS, capacity=CAPACITY
        )
        live, saved = order[:6].copy(), order[6:9].copy()
        live[seed % 6], saved[seed % 3] = -1, -3
        self.has = np.array([True, True, False, True, False, False])
        self.rows: StepRows = step_rows(
            self.metadata,
            R,
            live,
            has_initial_state=self.has,
            checkpoint_state_indices=saved,
        )
        self.pool = np.full((R, POOL_CHANNELS, POOL_COLUMNS), np.nan, dtype)
        self.part = slice(FIRST, FIRST + C), slice(0, width - 1)
        self.state = random(6, C, width - 1, seed=seed + 1, dtype=dtype)
        for n in np.flatnonzero(self.has & (live >= 0)):
            self.pool[live[n], *self.part] = self.state[n]
        self.has &= live >= 0

    def after(self, want: Any) -> np.ndarray:
        pool = self.pool.copy()
        for row, window in zip(self.rows.state_indices, want.final_state, strict=True):
            if row >= 0:
                pool[row, *self.part] = window
        saved = self.rows.checkpoint_state_indices
        for row, window in zip(saved, want.checkpoint_state, strict=True):
            if row >= 0:
                pool[row, *self.part] = window
        return pool


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_convolution(seed: int, dtype: Any) -> None:
    """Channels and columns of a row that are not the window's keep their bits, too."""
    w = Windows(seed, dtype)
    x, weight = random(64, C, dtype=dtype), random(C, 4)
    has = np.concatenate([w.has, [False, False]])
    want = causal_conv1d(
        x,
        weight,
        w.metadata,
        initial_state=w.metadata.pad_states(w.state),
        has_initial_state=has,
    )
    pool = jnp.asarray(w.pool)
    got = causal_conv1d(
        x, weight, w.metadata, state_cache=pool, first_channel=FIRST, **w.rows._asdict()
    )
    assert_same_bits(pool, w.pool, "the caller's pool")
    assert_same_bits(got.state_cache, w.after(want))
    np.testing.assert_allclose(
        np.asarray(got.y, np.float32), np.asarray(want.y, np.float32), rtol=1e-6
    )


def test_a_checkpoint_equals_a_convolution_that_stops_there() -> None:
    w = Windows(1, np.float32)
    x, weight = random(64, C), random(C, 4)
    options = w.rows._asdict()
    got = causal_conv1d(
        x, weight, w.metadata, state_cache=jnp.asarray(w.pool), first_channel=FIRST, **options
    )
    for m, (n, offset) in enumerate(w.metadata.checkpoints[:3].tolist()):
        row = w.rows.checkpoint_state_indices[m]
        if row < 0:
            continue
        lengths = [offset if i == n else 0 for i in range(6)]
        stop = ChunkMetadata.from_seq_lens(lengths, capacity=CAPACITY)
        first = int(w.metadata.seqs[n, 0])
        stopped = causal_conv1d(
            np.roll(x, -first, axis=0),
            weight,
            stop,
            state_cache=jnp.asarray(w.pool),
            first_channel=FIRST,
            **options | {"checkpoint_state_indices": np.full(4, -1, np.int32)},
        )
        live = w.rows.state_indices[n]
        assert_same_bits(
            got.state_cache[row][w.part], stopped.state_cache[live][w.part], f"{n} at {offset}"
        )


def test_width_one_has_no_window() -> None:
    w = Windows(0, np.float32, width=1)
    got = causal_conv1d(
        random(64, C),
        random(C, 1),
        w.metadata,
        state_cache=jnp.zeros((R, C, 0)),
        **w.rows._asdict(),
    )
    assert got.state_cache.shape == (R, C, 0) and np.isfinite(got.y).all()


def test_convolutions_in_place() -> None:
    """q, k and v of a layer share the rows of one pool: three calls, and it stays where it is."""
    w = Windows(0, np.float32)
    x, weight = random(64, C), random(C, 4)

    def three(pool: jax.Array, x: Any, metadata: Any, rows: StepRows) -> Any:
        y = []
        for first in (0, 2, 5):
            one, pool = causal_conv1d(
                x, weight, metadata, state_cache=pool, first_channel=first, **rows._asdict()
            )
            y.append(one)
        return y, pool

    pool = jnp.zeros((4096, POOL_CHANNELS, POOL_COLUMNS))
    address = pool.unsafe_buffer_pointer()
    program = jax.jit(three, donate_argnums=0).lower(pool, x, w.metadata, w.rows).compile()
    assert program.memory_analysis().temp_size_in_bytes < pool.nbytes / 4
    _, after = program(pool, x, w.metadata, w.rows)
    assert after.unsafe_buffer_pointer() == address


D, H, K, V = 5, 2, 16, 8
ROWS = np.array([3, -2, 8, 0, 11], np.int32)
ACTIVE = np.array([True, True, True, False, True])
HAS = np.array([True, True, False, True, True])


def step_pool(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """A pool with NaN in all rows that are not read, and the states by request."""
    pool = np.full((R, *shape), np.nan, np.float32)
    state = random(D, *shape, seed=4)
    read = ACTIVE & HAS & (ROWS >= 0)
    pool[ROWS[read]] = state[read]
    state[~read] = 0
    return pool, state


def decode(state: Any = None, **options: Any) -> Any:
    q, k, raw_g = random(3, D, H, K)
    v, raw_beta = random(D, H, V, seed=1), random(D, H)
    gate = random(H, seed=2) * 0.3, random(H, K, seed=3) - 3
    return kda_decode_step(q, k, v, raw_g, raw_beta, *gate, state, **options)


def conv_step(state: Any = None, **options: Any) -> Any:
    return causal_conv1d_step(random(D, C), random(C, 4), state, **options)


@pytest.mark.parametrize(("fn", "shape"), [(decode, (H, V, K)), (conv_step, (C, 3))])
def test_a_step(fn: Any, shape: tuple[int, ...]) -> None:
    pool, state = step_pool(shape)
    out, after = fn(jnp.asarray(state), active=ACTIVE)
    want = pool.copy()
    written = ACTIVE & (ROWS >= 0)
    want[ROWS[written]] = np.asarray(after)[written]
    rows = {"state_indices": ROWS, "has_initial_state": HAS, "active": ACTIVE}
    got, new = fn(state_cache=jnp.asarray(pool), **rows)
    others = np.setdiff1d(np.arange(R), ROWS[written])
    assert_same_bits(new[others], pool[others])
    np.testing.assert_allclose(new, want, rtol=1e-6)
    np.testing.assert_allclose(got[ACTIVE], out[ACTIVE], rtol=1e-5, atol=1e-6)
    # A traced index outside of the pool is no row.
    odd = jnp.asarray(np.where(ROWS == -2, R, ROWS).astype(np.int32))
    again, same = fn(state_cache=jnp.asarray(pool), **rows | {"state_indices": odd})
    assert_same_bits(same, new)
    assert_same_bits(again, got)


@pytest.mark.parametrize(("fn", "shape"), [(decode, (H, V, K)), (conv_step, (C, 3))])
def test_steps_in_place(fn: Any, shape: tuple[int, ...]) -> None:
    """Many steps, other rows in each: one program, one place."""
    pool = jnp.zeros((4096, *shape))
    address, temp = pool.unsafe_buffer_pointer(), pool.nbytes / 4

    def step(pool: jax.Array, rows: Any, active: Any) -> Any:
        return fn(state_cache=pool, state_indices=rows, active=active)

    program = quick_jit(step, donate_argnums=0)
    assert program.lower(pool, ROWS, ACTIVE).compile().memory_analysis().temp_size_in_bytes < temp
    with count_compiles() as compiles:
        for i in range(3):
            out, pool = program(pool, (ROWS + i).astype(np.int32), np.roll(ACTIVE, i))
            assert pool.unsafe_buffer_pointer() == address
    assert len(compiles) <= 1 and np.isfinite(out).all()


def test_a_long_decode_in_the_pool_equals_one_by_state() -> None:
    pool, state = step_pool((H, V, K))
    rows = {"state_indices": ROWS, "active": ACTIVE}
    new = jnp.asarray(pool)
    after = jnp.asarray(state)
    has = HAS
    for _ in range(4):
        got, new = decode(state_cache=new, has_initial_state=has, **rows)
        out, after = decode(jnp.where((ROWS >= 0)[:, None, None, None], after, 0), active=ACTIVE)
        has = np.ones(D, bool)
    np.testing.assert_allclose(got[ACTIVE], out[ACTIVE], rtol=1e-5, atol=1e-6)
