"""Steps: prefill in parts, decode, mixed steps, checkpoints, traces, dtypes."""

from __future__ import annotations

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import LINEAR, decode_step, k3, mixed_step, prefill, random_model, text
from programs import needs_fused

from kda_jax import Capacity, ChunkMetadata, models
from kda_jax.models import generation

close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)

PROMPTS = [text(n, seed=n) for n in (3, 70, 1, 29)]


@pytest.fixture(scope="module")
def model():
    return random_model(k3(), backend="scan")


def packed(parts, **options):
    options.setdefault("capacity", Capacity(128, 4, 6))
    metadata = ChunkMetadata.from_seq_lens([len(p) for p in parts], **options)
    return metadata.pad_tokens(np.concatenate(parts), 0), metadata


def empty(model, rows=4):
    return models.empty_cache(model.config, rows, 128)


@pytest.fixture(scope="module")
def whole(model):
    """One prefill of all prompts: outputs and cache."""
    offsets = [[], [64, 5], [], []]
    room = Capacity(128, 4, 6, 2)
    parts = packed(PROMPTS, checkpoint_offsets=offsets, capacity=room)
    return prefill(model, *parts, empty(model))


def test_split_prefill_equals_one(model, whole):
    """Uneven parts, some of them empty, then the same states and logits."""
    cuts = [(3, 10, 0, 29), (0, 60, 1, 0)]
    cache, done, logits = empty(model), np.zeros(4, int), np.zeros((4, 96), "f")
    for lengths in cuts:
        parts = [p[d : d + n] for p, d, n in zip(PROMPTS, done, lengths, strict=True)]
        out, cache = prefill(model, *packed(parts), cache)
        logits = np.where(np.array(lengths)[:, None] > 0, out.logits, logits)
        done += lengths
    close(logits, whole[0].logits)
    same_state(cache, whole[1])


def same_state(got, want):
    """The same lengths, states and the MLA rows that count."""
    np.testing.assert_array_equal(got.length, want.length)
    for a, b in zip(got.layers, want.layers, strict=True):
        if hasattr(a, "rows"):
            seen = (np.arange(a.rows.shape[1]) < np.asarray(want.length)[:, None])[..., None]
            close(np.where(seen, a.rows, 0), np.where(seen, b.rows, 0))
        else:
            jax.tree.map(close, a, b)


def test_decode_equals_prefill(model, whole):
    """Rows at different positions; an idle row keeps its cache and predicts nothing."""
    nexts = [text(3, seed=50 + i) for i in range(4)]
    _, start = whole
    active = jnp.array([True, True, False, True])
    cache = start
    for step in range(3):
        tokens = jnp.asarray([n[step] for n in nexts])
        out, cache = decode_step(model, tokens, cache, active)
        assert not np.any(out.logits[2])
    parts = [n if i != 2 else n[:0] for i, n in enumerate(nexts)]
    want, after = prefill(model, *packed(parts), start)
    close(out.logits, want.logits)
    same_state(cache, after)


@pytest.mark.parametrize(
    "backend",
    [
        "scan",
        pytest.param("chunked", marks=pytest.mark.slow),
        pytest.param("fused", marks=[pytest.mark.slow, needs_fused]),
    ],
)
def test_mixed_step_equals_its_two_halves(model, whole, backend):
    """Decode rows first, then a prefill: the same as one after the other."""
    _, start = whole
    tokens = jnp.asarray([7, 8, 9, 10], jnp.int32)
    active = jnp.array([True, False, True, True])
    news, metadata = packed([PROMPTS[3], PROMPTS[0], PROMPTS[1][:40], PROMPTS[2][:0]])
    together = jnp.concatenate([tokens, news])
    out, decoded, filled = mixed_step(
        model, together, metadata, start, empty(model), active, backend=backend
    )
    want_decode, want_decoded = decode_step(model, tokens, start, active)
    want_fill, want_filled = prefill(model, news, metadata, empty(model))
    close(out.logits[:4], want_decode.logits)
    close(out.logits[4:], want_fill.logits)
    same_state(decoded, want_decoded)
    same_state(filled, want_filled)


@pytest.mark.parametrize(("row", "offset"), [(0, 64), (1, 5)])
def test_a_checkpoint_is_complete(model, whole, row, offset):
    """Recurrent state, convolution window and MLA length: the prompt goes on from it."""
    out, cache = whole
    assert int(out.checkpoints.length[row]) == offset
    again = models.resume(cache, out.checkpoints, row)
    rows = models.put_rows(empty(model), jnp.array([2]), again)
    parts = [PROMPTS[0][:0], PROMPTS[0][:0], PROMPTS[1][offset:], PROMPTS[0][:0]]
    rest, after = prefill(model, *packed(parts), rows)
    close(rest.logits[2], out.logits[1])
    pick = functools.partial(models.take_rows)
    same_state(pick(after, jnp.array([2])), pick(cache, jnp.array([1])))


def test_fresh_rows_ignore_what_the_cache_holds(model, whole):
    nan = jax.tree.map(
        lambda x: jnp.full_like(x, jnp.nan) if x.dtype != jnp.int32 else x, empty(model)
    )
    nan = nan._replace(
        layers=tuple(
            b if hasattr(b, "rows") else a
            for a, b in zip(nan.layers, empty(model).layers, strict=True)
        )
    )
    out, _ = prefill(model, *packed(PROMPTS), nan)
    close(out.logits, whole[0].logits)


def test_one_trace_per_bucket(model):
    """Other lengths and other checkpoints in one bucket are the same program."""
    cache = models.empty_cache(model.config, 4, 64)
    with mock.patch.object(generation, "forward", wraps=generation.forward) as forward:
        for lengths in ([3, 20, 40], [64, 0, 0, 0], [1, 1, 61], [16, 16, 16, 16]):
            offsets = [[n // 2] if n > 1 else [] for n in lengths][:1]
            offsets += [[]] * (len(lengths) - 1)
            parts = [text(n) for n in lengths]
            size = Capacity(64, 4, 6, 1)
            tokens, metadata = packed(parts, checkpoint_offsets=offsets, capacity=size)
            models.prefill.trace(model, tokens, metadata, cache, backend="scan")
            models.decode_step.trace(model, tokens[:4], cache, np.ones(4, bool))
        assert forward.call_count == 2
        tokens, metadata = packed([PROMPTS[1]], capacity="bucket")
        models.prefill.trace(model, tokens, metadata, empty(model, 1), backend="scan")
        assert forward.call_count == 3  # another bucket is another program


def test_decode_donates_its_cache(model):
    """Every array of the cache is given to the result that takes its place."""
    cache = models.empty_cache(model.config, 4, 64)
    text = models.decode_step.lower(model, np.zeros(4, np.int32), cache).as_text()
    aliased = re.findall(r"tf\.aliasing_output = (\d+)", text)
    assert len(set(aliased)) == len(jax.tree.leaves(cache))


def test_bfloat16_keeps_its_dtypes():
    """Of weights, caches and logits, in every step: what serving runs; nothing is compiled."""
    half = random_model(k3(), dtype="bfloat16")
    cache = empty(half)
    tokens, metadata = packed(PROMPTS)
    together = np.concatenate([tokens[:4], tokens])
    out, filled = jax.eval_shape(models.prefill, half, tokens, metadata, cache)
    next_out, decoded = jax.eval_shape(models.decode_step, half, tokens[:4], cache)
    _, *mixed = jax.eval_shape(models.mixed_step, half, together, metadata, cache, cache)
    assert out.logits.dtype == next_out.logits.dtype == jnp.float32
    for after in (filled, decoded, *mixed):
        for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(cache), strict=True):
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert {x.dtype.name for x in jax.tree.leaves(cache)} == {"bfloat16", "float32", "int32"}


@pytest.mark.slow
def test_bfloat16_is_close():
    # All experts: where two score alike, rounding chooses another one, and that is no small error.
    hf = k3(num_experts_per_token=8)
    half = random_model(hf, dtype="bfloat16", backend="scan")
    wide = random_model(hf, dtype="float32", backend="scan")
    same = [x.astype(jnp.float32) for x in jax.tree.leaves(half)]
    wide = jax.tree.unflatten(jax.tree.structure(wide), same)
    step = packed(PROMPTS)
    got, cache = prefill(half, *step, empty(half))
    want, wide_cache = prefill(wide, *step, empty(wide))
    for _ in range(2):
        error = np.linalg.norm(got.logits - want.logits) / np.linalg.norm(want.logits)
        assert error < 3e-2
        tokens = jnp.argmax(want.logits, -1).astype(jnp.int32)
        got, cache = decode_step(half, tokens, cache)
        want, wide_cache = decode_step(wide, tokens, wide_cache)


def test_step_errors(model):
    tokens, metadata = packed(PROMPTS)
    with pytest.raises(ValueError, match=r"tokens has shape \(127,\), want \(128,\)"):
        models.prefill(model, tokens[1:], metadata, empty(model))
    with pytest.raises(ValueError, match="tokens is float32"):
        models.prefill(model, tokens.astype("f"), metadata, empty(model))
    with pytest.raises(ValueError, match="cache has 3 rows, want 4"):
        models.prefill(model, tokens, metadata, empty(model, 3))
    with pytest.raises(ValueError, match=r"active has shape \(3,\), cache has 4 rows"):
        models.decode_step(model, tokens[:4], empty(model), jnp.ones(3, bool))
    with pytest.raises(ValueError, match="max_length is 0"):
        models.empty_cache(model.config, 1, 0)
    with pytest.raises(ValueError, match="attn_res_block_size is None"):
        models.KimiK3(models.from_config(LINEAR), rngs=None)


def test_a_prefill_of_fewer_sequences_leaves_the_other_rows(model):
    """Rows of padding are somebody's: their state, window and length stay."""
    cache = models.empty_cache(model.config, 4, 64)
    tokens = text(64)
    both = ChunkMetadata.from_seq_lens([5, 9], capacity=Capacity(64, 4, 8))
    _, cache = models.prefill(model, tokens, both, cache)
    one = ChunkMetadata.from_seq_lens([4], capacity=Capacity(64, 4, 8))
    _, after = models.prefill(model, tokens, one, cache)
    assert after.length.tolist() == [9, 9, 0, 0]
    for before, now in zip(cache.layers, after.layers, strict=True):
        for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(now), strict=True):
            np.testing.assert_array_equal(x[1], y[1])


def test_a_decode_row_without_a_past_ignores_what_its_row_holds(model):
    clean, used = (models.empty_cache(model.config, 2, 64) for _ in range(2))  # steps take them
    used = used._replace(layers=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), used.layers))
    tokens = jnp.array([7, 8], jnp.int32)
    want, _ = models.decode_step(model, tokens, clean)
    got, _ = models.decode_step(model, tokens, used)
    np.testing.assert_array_equal(got.logits, want.logits)
