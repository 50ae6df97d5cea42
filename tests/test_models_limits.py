"""Tokens outside the vocabulary or past the end of a cache: never logits that look right."""

from __future__ import annotations

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import LINEAR, decode_step, k3, mixed_step, prefill, random_model, text

from kda_jax import Capacity, ChunkMetadata, models
from kda_jax.models.cache import LOST
from kda_jax.models.training import mean_loss, next_token_loss

ROOM, VOCAB = 64, 96


@pytest.fixture(scope="module")
def model():
    return random_model(k3(), backend="scan")


def packed(lengths, **options):
    metadata = ChunkMetadata.from_seq_lens(lengths, capacity=Capacity(64, 2, 4, 2), **options)
    return jnp.asarray(text(64)), metadata


def empty(model):
    return models.empty_cache(model.config, 2, ROOM)


def filled(model, lengths):
    """A cache of some content, as if that many tokens were in it."""
    cache = jax.tree.map(lambda x: jnp.full_like(x, 0.25), empty(model))
    return cache._replace(length=jnp.asarray(lengths, jnp.int32))


def same(got, want):
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_decode_past_the_end_is_nan_and_stays_so(model):
    tokens = jnp.array([5, 6])
    want, clean = decode_step(model, tokens, filled(model, [63, 20]), jnp.array([False, True]))
    out, cache = decode_step(model, tokens, filled(model, [63, 20]))
    assert np.isfinite(out.logits).all()  # the last place
    out, after = decode_step(model, tokens, filled(model, [64, 20]))
    assert np.isnan(out.logits[0]).all()
    same(out.logits[1], want.logits[1])
    for got, right in zip(jax.tree.leaves(after), jax.tree.leaves(clean), strict=True):
        same(got[1], right[1])  # nothing was written into the other row
    again, _ = decode_step(model, tokens, after)
    assert np.isnan(again.logits[0]).all() and np.isfinite(again.logits[1]).all()
    idle, after = decode_step(model, tokens, after, jnp.array([False, True]))
    assert not idle.logits[0].any() and after.length.tolist() == [LOST, 22]


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1])
def test_decode_outside_the_vocabulary_is_nan_and_stays_so(model, token):
    want, _ = decode_step(model, jnp.array([5, 6]), filled(model, [9, 20]))
    out, cache = decode_step(model, jnp.array([token, 6]), filled(model, [9, 20]))
    assert np.isnan(out.logits[0]).all()
    same(out.logits[1], want.logits[1])
    again, _ = decode_step(model, jnp.array([5, 6]), cache)
    assert np.isnan(again.logits[0]).all() and np.isfinite(again.logits[1]).all()


def test_prefill_past_the_end_is_nan_from_there_on(model):
    """With every row asked for: those before the end, and the other sequence, stay to the bit."""
    tokens, metadata = packed([24, 40], checkpoint_offsets=[[], [14, 30]])
    want, _ = prefill(model, tokens, metadata, filled(model, [0, 24]), all_logits=True)
    out, cache = prefill(model, tokens, metadata, filled(model, [0, 50]), all_logits=True)
    assert np.isfinite(want.logits).all()
    same(out.logits[:24], want.logits[:24])
    lost = np.isnan(out.logits).all(-1)
    assert lost.tolist() == [False] * 38 + [True] * 26
    assert cache.length.tolist() == [24, LOST] and out.checkpoints.length.tolist() == [64, LOST]
    last, _ = prefill(model, tokens, metadata, filled(model, [0, 50]))
    assert np.isfinite(last.logits[0]).all() and np.isnan(last.logits[1]).all()


def test_prefill_outside_the_vocabulary_is_nan_from_there_on(model):
    tokens, metadata = packed([24, 30], checkpoint_offsets=[[], [10, 11]])
    want, _ = prefill(model, tokens, metadata, empty(model), all_logits=True)
    bad = tokens.at[34].set(VOCAB).at[60].set(-1)  # the last one lies in the padding
    out, cache = prefill(model, bad, metadata, empty(model), all_logits=True, hidden_states=True)
    same(out.logits[:34], want.logits[:34])
    for rows in (out.logits, out.hidden_states[-1]):
        assert np.isnan(rows[34:54]).all() and np.isfinite(rows[:34]).all()
    assert np.isfinite(out.logits[54:]).all()
    assert cache.length.tolist() == [24, LOST] and out.checkpoints.length.tolist() == [10, LOST]
    first, second = (models.resume(cache, out.checkpoints, row) for row in (0, 1))
    assert first.length.tolist() == [10] and second.length.tolist() == [LOST]


def test_mixed_step_marks_both_parts(model):
    tokens, metadata = packed([20, 20])
    together = jnp.concatenate([jnp.array([5, VOCAB]), tokens.at[3].set(-7)])
    out, decoded, filled_cache = mixed_step(
        model, together, metadata, filled(model, [64, 9]), empty(model)
    )
    assert np.isnan(out.logits).all(-1).tolist() == [True, True, True, False]
    assert decoded.length.tolist() == [LOST, LOST] and filled_cache.length.tolist() == [LOST, 20]


def test_a_lost_request_stays_so_however_long_it_goes_on(model):
    """Its length does not grow, until int32 would wrap around to one that looks right."""
    tokens, metadata = packed([24, 40])
    _, cache = prefill(model, tokens, metadata, filled(model, [LOST, 0]))
    assert cache.length.tolist() == [LOST, 40]
    _, cache = decode_step(model, tokens[:2], cache)
    assert cache.length.tolist() == [LOST, 41]
    out, decoded, _ = mixed_step(
        model, jnp.concatenate([tokens[:2], tokens]), metadata, cache, empty(model)
    )
    assert decoded.length.tolist() == [LOST, 42] and np.isnan(out.logits[0]).all()


def test_without_attention_there_is_no_end():
    """KDA layers keep no rows; the vocabulary ends all the same."""
    model = random_model(k3(1, ()), backend="scan")
    out, cache = decode_step(model, jnp.array([5, VOCAB]), filled(model, [10**6, 3]))
    assert np.isfinite(out.logits[0]).all() and np.isnan(out.logits[1]).all()
    assert cache.length.tolist() == [10**6 + 1, LOST]


def test_the_loss_is_nan_or_refused(model):
    tokens, metadata = packed([40, 10])
    with pytest.raises(ValueError, match="max_length is 30, want at least 40: the longest"):
        next_token_loss(model, tokens, metadata, max_length=30)


@pytest.mark.parametrize("token", [-1, -100, VOCAB])
def test_the_last_token_of_a_sequence_counts(token):
    """It is predicted, though it predicts nothing; a negative index is none from the end."""
    tokens, metadata = packed([40, 10])
    logits = jnp.zeros((64, VOCAB))
    loss = jax.jit(mean_loss)
    assert np.isfinite(loss(logits, tokens.at[63].set(token), metadata))  # padding may be anything
    for last in (39, 49):
        assert np.isnan(loss(logits, tokens.at[last].set(token), metadata))


def on_host(cache):
    return cache._replace(length=np.asarray(cache.length))


ERRORS = {
    "a token of a prefill": (
        lambda s: models.prefill(s.model, s.bad, s.metadata, s.cache),
        "tokens[4] is 96, want a token of the vocabulary, 0 to 95 (vocab_size is 96)",
    ),
    "a token of a mixed step": (
        lambda s: models.mixed_step(
            s.model, np.concatenate([s.two, s.bad]), s.metadata, s.cache, s.cache
        ),
        "tokens[6] is 96, want a token of the vocabulary",
    ),
    "a token of a decode step": (
        lambda s: models.decode_step(s.model, np.array([5, -1]), s.cache),
        "tokens[1] is -1, want a token of the vocabulary",
    ),
    "a token that int32 would wrap around": (
        lambda s: models.decode_step(s.model, np.array([5, 2**32 + 5]), s.cache),
        "tokens[1] is 4294967301, want a token of the vocabulary",
    ),
    "a sequence longer than the cache": (
        lambda s: models.prefill(
            s.model,
            text(128),
            ChunkMetadata.from_seq_lens([1, 65], capacity=Capacity(128, 2, 4)),
            s.cache,
        ),
        "cache has room for 64 tokens in each row, sequence 1 ends at 65: make it with empty_",
    ),
    "a sequence that goes on past the end": (
        lambda s: models.prefill(s.model, s.tokens, s.metadata, on_host(filled(s.model, [60, 0]))),
        "cache has room for 64 tokens in each row, sequence 0 ends at 80",
    ),
    "a full row": (
        lambda s: models.decode_step(s.model, s.two, on_host(filled(s.model, [3, 64]))),
        "cache has room for 64 tokens in each row, row 1 holds 64 already: make it with",
    ),
    "a lost row": (
        lambda s: models.decode_step(s.model, s.two, on_host(filled(s.model, [LOST, 0]))),
        "row 0 of cache is lost: an earlier step had a token outside the vocabulary or past",
    ),
}


@pytest.fixture(scope="module")
def step(model):
    tokens, metadata = packed([20, 20])
    tokens = np.array(tokens)
    tokens[-1] = -1  # padding may be anything
    bad = tokens.copy()
    bad[4] = VOCAB
    two, cache = np.array([5, 6], np.int32), empty(model)
    return types.SimpleNamespace(
        model=model, tokens=tokens, bad=bad, metadata=metadata, two=two, cache=cache
    )


@pytest.mark.parametrize("what", ERRORS)
def test_what_the_host_sees_is_an_error(step, what):
    call, message = ERRORS[what]
    with pytest.raises(ValueError, match=re.escape(message)):
        call(step)


def test_a_step_waits_for_no_device(model, step, monkeypatch):
    """The checks read nothing back: neither lengths nor tokens that lie on a device."""
    cache = filled(model, [64, 64])
    tokens = jnp.array([VOCAB, -1])
    args = (model, tokens, cache)
    with jax.transfer_guard_device_to_host("disallow_explicit"):
        models.arguments.check_decode(*args)
        models.arguments.check_prefill(model, jnp.asarray(step.bad), step.metadata, cache)


WRONG = {
    "tokens in a list": (
        lambda s: models.decode_step(s.model, [1, 2], s.cache),
        "tokens is a list, want an int32 array [2]: np.asarray(tokens, np.int32)",
    ),
    "packed tokens in a list": (
        lambda s: models.prefill(s.model, [1] * 64, s.metadata, s.cache),
        "tokens is a list, want an int32 array [64]",
    ),
    "metadata": (
        lambda s: models.prefill(s.model, s.tokens, [20, 20], s.cache),
        "metadata is a list, want a ChunkMetadata: ChunkMetadata.from_seq_lens([...])",
    ),
    "metadata of a mixed step": (
        lambda s: models.mixed_step(s.model, s.tokens, None, s.cache, s.cache),
        "metadata is a NoneType, want a ChunkMetadata",
    ),
    "cache": (
        lambda s: models.prefill(s.model, s.tokens, s.metadata, None),
        "cache is a NoneType, want a ModelCache: make one with empty_cache(config, sequences",
    ),
    "decode_cache": (
        lambda s: models.mixed_step(s.model, s.tokens, s.metadata, "x", s.cache),
        "decode_cache is a str, want a ModelCache",
    ),
    "model": (
        lambda s: models.decode_step(LINEAR, s.two, s.cache),
        "model is a dict, want a KimiLinear or KimiK3",
    ),
    "active": (
        lambda s: models.decode_step(s.model, s.two, s.cache, [True, False]),
        "active is a list, want a bool array [2]: np.asarray(active, bool)",
    ),
    "an argument that is missing": (
        lambda s: models.decode_step(s.model, s.two),
        "decode_step() missing 1 required positional argument: 'cache'",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_types_are_named(step, what):
    call, message = WRONG[what]
    with pytest.raises(TypeError, match=re.escape(message)):
        call(step)


def test_wrong_dtypes_are_named(step):
    with pytest.raises(ValueError, match="tokens is float32, want an integer dtype: cast it to"):
        models.decode_step(step.model, step.two.astype("f"), step.cache)
    with pytest.raises(ValueError, match="active is int32, want bool: cast it"):
        models.decode_step(step.model, step.two, step.cache, step.two)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("64", 64), TypeError, "sequences is '64', want an integer"),
        ((1, "64"), TypeError, "max_length is '64', want an integer"),
        ((1, 64.0), TypeError, "max_length is 64.0, want an integer"),
        ((True, 64), TypeError, "sequences is True, want an integer"),
        ((0, 64), ValueError, "sequences is 0, want at least 1"),
    ],
    ids=str,
)
def test_empty_cache_names_what_is_wrong(model, arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        models.empty_cache(model.config, *arguments)
    with pytest.raises(TypeError, match="config is a dict, want a ModelConfig: "):
        models.empty_cache(LINEAR, 1, 64)
    assert models.empty_cache(model.config, np.int64(1), 64).length.shape == (1,)
