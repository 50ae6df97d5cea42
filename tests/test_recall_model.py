"""The trained model in tests/data/recall answers, and only from the right states."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax import ChunkMetadata
from kda_jax.layer_types import KDAState
from kda_jax.models import (
    KimiK3,
    ModelCache,
    decode_step,
    empty_cache,
    from_pretrained,
    generate,
    prefill,
)
from kda_jax.models.tokenizer import load_tokenizer
from kda_jax.serving import CheckpointRule
from kda_jax.serving import recall_text as recall

FOLDER = Path(__file__).parent / "data" / "recall"
BLOCK = 128
LENGTHS = (300, 700, 1200, 1900)  # 2 to 14 blocks of 128
PROMPTS = 32  # of each length
SEED = 7  # (SEED, ...): training draws from seeds of four numbers, (run, kind, batch, sequence)


@functools.cache
def model() -> KimiK3:
    return from_pretrained(FOLDER)


def prompts(length: int, count: int) -> tuple[list[list[int]], list[str]]:
    """Prompts of `length` tokens or a few less, each with a list of its own, and the answers."""
    tokenizer = load_tokenizer(FOLDER, model().config.vocab_size)
    texts, answers = [], []
    for i in range(count):
        random = np.random.default_rng((SEED, length, i))
        listed = recall.facts(length - recall.QUESTION_SIZE, random)
        key = str(random.choice(listed.keys))
        texts.append(tokenizer.encode(listed.text + recall.question(key)))
        answers.append(recall.answer(listed, key))
    return texts, answers


def text(tokens: list[int]) -> str:
    return bytes(tokens).decode()


def test_the_asset_is_small_and_in_the_published_format():
    size = sum(file.stat().st_size for file in FOLDER.iterdir())
    assert {file.name for file in FOLDER.iterdir()} == {"config.json", "model.safetensors"}
    assert size <= 2 * 10**6
    config = model().config
    assert isinstance(model(), KimiK3) and config.dtype == "float32"
    assert config.full_attn_layers == (3,) and config.num_hidden_layers == 4
    assert config.eos_token_id == (ord("\n"),)


def test_held_out_prompts_get_the_right_answer():
    """At least 99 % of them, at four lengths that cross several blocks."""
    wrong = []
    for length in LENGTHS:
        texts, answers = prompts(length, PROMPTS)
        got = [text(new) for new in generate(model(), texts, recall.ANSWER_SIZE + 2)]
        wrong += [(length, a, b) for a, b in zip(got, answers, strict=True) if a != b]
    assert len(wrong) <= 0.01 * PROMPTS * len(LENGTHS), wrong


@functools.cache
def halves() -> tuple[ModelCache, np.ndarray, list[str]]:
    """The cache of eight prompts after their last whole block but one, the rest, the answers.

    The questions are about facts in that part.
    """
    length, count = 700, 8
    position = CheckpointRule(BLOCK, drop_draft_block=True).last_position(length)
    starts, rests, answers = [], [], []
    for i in range(count):
        listed = recall.facts(length - recall.QUESTION_SIZE, SEED + i)
        key = listed.keys[i % 6]  # of twelve, in the first two thirds of the list
        assert listed.text.index(f"\n{key}") < position - 5
        tokens = list((listed.text + recall.question(key)).encode())
        starts.append(tokens[:position])
        rests.append(tokens[position:])
        answers.append(recall.answer(listed, key))
    cache = empty_cache(model().config, count, 1024)
    metadata = ChunkMetadata.from_seq_lens([position] * count)
    _, cache = prefill(model(), np.concatenate(starts).astype(np.int32), metadata, cache)
    return cache, rests, answers


def resumed(cache: ModelCache) -> list[bool]:
    """Which of the prompts get the right answer from a cache."""
    _, rests, answers = halves()
    metadata = ChunkMetadata.from_seq_lens([len(rest) for rest in rests])
    tokens = np.concatenate(rests).astype(np.int32)
    out, cache = prefill(model(), tokens, metadata, jax.tree.map(jnp.copy, cache))
    new = []
    for _ in range(recall.ANSWER_SIZE):
        new.append(jnp.argmax(out.logits, axis=-1).astype(jnp.int32))
        out, cache = decode_step(model(), new[-1], cache)
    got = [text(row) for row in np.stack(new, 1).tolist()]
    return [a == b for a, b in zip(got, answers, strict=True)]


@pytest.mark.parametrize("how", [jnp.zeros_like, functools.partial(jnp.roll, shift=1, axis=0)])
def test_a_wrong_state_gives_wrong_answers(how):
    """Zeros, or another request's recurrent states: so a check of answers can fail.

    The model hardly reads its MLA layer (KDA finds the facts), so wrong MLA rows are not seen here.
    """
    cache = halves()[0]
    assert all(resumed(cache))
    layers = tuple(
        layer._replace(recurrent=how(layer.recurrent)) if isinstance(layer, KDAState) else layer
        for layer in cache.layers
    )
    assert sum(resumed(cache._replace(layers=layers))) <= 2  # of eight
