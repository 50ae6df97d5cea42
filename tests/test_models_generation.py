"""`generate` for a batch of prompts, its programs, and sampling."""

from __future__ import annotations

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import decode_step, k3, prefill, random_model, text
from programs import FUSED

from kda_jax import Capacity, ChunkMetadata, models
from kda_jax.models import generation

PROMPTS = [text(n, seed=n) for n in (3, 70, 1, 29)]


@pytest.fixture(scope="module")
def model():
    return random_model(k3(), backend="scan")


def generate(*args, **options):
    """models.generate on steps that are compiled by layer."""
    steps = {"prefill": prefill, "decode_step": decode_step}
    with mock.patch.multiple(generation, **steps):
        return models.generate(*args, **options)


@pytest.fixture(scope="module")
def tokens_of_chunked(model):
    return generate(model, PROMPTS, 8, eos=(), backend="chunked")


@pytest.mark.parametrize("backend", [FUSED])
def test_same_tokens_from_every_backend(model, tokens_of_chunked, backend):
    assert generate(model, PROMPTS, 8, eos=(), backend=backend) == tokens_of_chunked


def test_generate_is_greedy_stops_and_splits(model, tokens_of_chunked):
    """Against single steps; a prefill budget and the end of text change nothing else."""
    assert [len(t) for t in tokens_of_chunked] == [8] * 4
    ends = [tokens_of_chunked[0][2], tokens_of_chunked[1][5]]
    # Steps in one capacity, which the other tests have compiled.
    build = functools.partial(ChunkMetadata.from_seq_lens, capacity=Capacity(128, 4, 6))
    with mock.patch.object(generation, "ChunkMetadata") as metadata:
        metadata.from_seq_lens = lambda lengths, capacity: build(lengths)
        stopped = generate(model, PROMPTS, 8, eos=ends, step_tokens=40)
    for got, want in zip(stopped, tokens_of_chunked, strict=True):
        stop = next((i for i, t in enumerate(want) if t in ends), 7)
        assert got == want[: stop + 1]


def test_generate_compiles_once_per_bucket():
    """Prompts of 257 to 384 tokens with their continuations: one prefill, one decode step."""
    model = random_model(k3(1, (1,)), backend="scan")  # MLA alone, whose cache grows

    def traces(lengths, new):
        with mock.patch.object(generation, "forward", wraps=generation.forward) as forward:
            for length in lengths:
                assert len(models.generate(model, [text(length)], new, eos=())[0]) == new
        return forward.call_count

    assert traces([260], 2) == 2
    assert traces([257, 330, 382], 2) == 0
    assert traces([310], 74) == 0
    assert traces([382], 3) == 2  # 385 tokens are the next bucket


def test_sampling():
    logits = jnp.log(jnp.array([[0.7, 0.2, 0.1]] * 4000))
    drawn = np.asarray(models.sample(logits, 1.0, jax.random.key(0)))
    share = np.bincount(drawn, minlength=3) / len(drawn)
    np.testing.assert_allclose(share, [0.7, 0.2, 0.1], atol=0.03)
    cold = np.asarray(models.sample(logits, 0.25, jax.random.key(0)))
    assert (cold == 0).mean() > 0.97
    np.testing.assert_array_equal(models.sample(logits, 0.0), np.zeros(4000))
    with pytest.raises(ValueError, match="temperature is -1"):
        models.sample(logits, -1.0)
    with pytest.raises(ValueError, match="without a key"):
        models.sample(logits, 1.0)


def test_sampling_refuses_what_is_no_temperature():
    logits = jnp.array([[0.0, 5.0, 3.0]])
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="temperature is"):
            models.sample(logits, wrong, jax.random.key(0))
    assert models.sample(logits, 1e-40).tolist() == [1]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts is empty"),
        ([[1], []], {}, r"prompts\[1\] is empty"),
        ([[1, 96]], {}, r"prompts\[0\] holds a token outside 0..95"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[1]], {"step_tokens": 0}, "step_tokens is 0"),
    ],
)
def test_generate_errors(model, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        models.generate(model, prompts, **{"max_new_tokens": 1} | options)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([1, 2], {}, r"prompts\[0\] is 1, want a sequence of token numbers; a single prompt is"),
        (["12"], {}, r"prompts\[0\] is '12', want a sequence"),
        ("12", {}, "prompts is text, '12': want token numbers"),
        (None, {}, "prompts is None, want a list of sequences"),
        ([[1]], {"max_new_tokens": True}, "max_new_tokens is True, want an integer"),
        ([[1.5]], {}, r"prompts\[0\] holds float64, want integers"),
        ([[1]], {"max_new_tokens": "3"}, "max_new_tokens is '3', want an integer"),
        ([[1]], {"temperature": 1.0, "key": 0}, "key is 0, want a key"),
    ],
)
def test_generate_refuses_other_types(model, prompts, options, message):
    with pytest.raises(TypeError, match=message):
        models.generate(model, prompts, **{"max_new_tokens": 1} | options)


def test_generate_takes_numpy_integers(model):
    want = models.generate(model, [[5, 6]], 2)
    got = models.generate(model, np.array([[5, 6]]), np.int64(2), step_tokens=np.int32(8))
    assert got == want
