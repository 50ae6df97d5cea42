"""Training and held-out sequences: a list of facts, then questions and answers about it.

Every sequence is drawn from a seed of its own: (run, kind, batch, sequence). So training never sees
a held-out one, and what a step sees does not depend on the steps before it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kda_jax import Capacity, ChunkMetadata
from kda_jax.serving import recall_text as recall

TRAINING, HELD_OUT, ROOM = 0, 1, 2


class Packed(NamedTuple):
    """Sequences in a row: tokens int32 [T], weights float32 [T] (1 where an answer is), layout."""

    tokens: np.ndarray
    weights: np.ndarray
    metadata: ChunkMetadata


def sequence(room: int, random: np.random.Generator) -> tuple[bytes, np.ndarray]:
    """One sequence of at most `room` bytes, and which of them are answers.

    Between half and nine tenths of it is the list, more of a long one; questions about different
    keys fill the rest.
    """
    each = recall.QUESTION_SIZE + recall.ANSWER_SIZE
    size = max(int(room * random.uniform(0.5, 0.9)), room - recall.MOST_FACTS * each)
    listed = recall.facts(size, random)
    text, marks = [listed.text], [np.zeros(len(listed.text), bool)]
    asked = random.permutation(listed.keys)[: (room - len(listed.text)) // each]
    one = np.arange(each) >= recall.QUESTION_SIZE
    for key in asked:
        text += [recall.question(key), recall.answer(listed, key)]
        marks.append(one)
    return "".join(text).encode(), np.concatenate(marks)


def batch(room: int, tokens: int, seed: tuple[int, ...]) -> Packed:
    """tokens // room sequences of up to `room` bytes, a multiple of 64: one trace per room."""
    count = tokens // room
    parts = [sequence(room, np.random.default_rng((*seed, i))) for i in range(count)]
    metadata = ChunkMetadata.from_seq_lens(
        [len(text) for text, _ in parts], capacity=Capacity(tokens, count, tokens // 64)
    )
    packed = np.concatenate([np.frombuffer(text, np.uint8) for text, _ in parts])
    marks = np.concatenate([mark for _, mark in parts])
    return Packed(
        metadata.pad_tokens(packed.astype(np.int32), 0),
        metadata.pad_tokens(marks.astype(np.float32), 0),
        metadata,
    )
