"""Every step has a shape of the list, with room for it; the list is short."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_jax import ChunkMetadata
from kda_jax.serving.buckets import Buckets

BUCKETS = Buckets(budget=1000, max_requests=12, max_prefills=3, checkpoints=6)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_every_step_fits(data: st.DataObject) -> None:
    decodes = data.draw(st.integers(0, 12))
    lengths, room = [], 1000 - decodes
    for _ in range(data.draw(st.integers(0 if decodes else 1, 3))):
        if room:
            lengths.append(data.draw(st.integers(1, room)))
            room -= lengths[-1]
    offsets = [data.draw(st.lists(st.integers(1, n), unique=True, max_size=2)) for n in lengths]
    bucket = BUCKETS.find(decodes, sum(lengths), any(offsets))
    assert bucket in BUCKETS.all()
    assert bucket.decodes >= decodes
    assert (bucket.capacity is not None) == bool(lengths)
    if bucket.capacity is not None:
        ChunkMetadata.from_seq_lens(lengths, checkpoint_offsets=offsets, capacity=bucket.capacity)
        assert (bucket.capacity.checkpoints > 0) == any(map(bool, offsets))


def test_the_list() -> None:
    """Five sizes of prefills with and without checkpoints and decodes, five numbers of decodes."""
    buckets = BUCKETS.all()
    assert len(buckets) == len(set(buckets)) == 4 * 5 + 5
    assert str(buckets[0]) == "1024 tokens of prompts, checkpoints"
    assert str(buckets[-1]) == "64 tokens of prompts, 16 decodes"
    without = dataclasses.replace(BUCKETS, checkpoints=0).all()
    assert len(without) == 2 * 5 + 5
    assert {bucket.decodes for bucket in without if bucket.capacity is None} == {1, 2, 4, 8, 16}


@pytest.mark.parametrize(("tokens", "capacity"), [(1, 64), (64, 64), (65, 128), (1000, 1024)])
def test_sizes(tokens: int, capacity: int) -> None:
    found = BUCKETS.find(0, tokens, False).capacity
    assert found is not None and found.tokens == capacity
    assert np.log2(capacity) % 1 == 0
