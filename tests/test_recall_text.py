"""Recall prompts: every answer can be read off the list, and the same seed gives the same list."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_jax.serving import recall_text as recall

LINE = re.compile(r"@(?P<section>[a-z])|(?P<key>[a-z]{2})(?P<value>[0-9]{2})|\.{4}")


@given(st.integers(recall.SMALLEST, 3000), st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_answers_are_those_of_a_reader_of_the_text(size, seed):
    listed = recall.facts(size, seed)
    assert size - 5 < len(listed.text) <= size and listed.text.isascii()
    lines = [LINE.fullmatch(line) for line in listed.text.splitlines()]
    assert all(lines) and lines[0]["section"]
    read = {m["key"]: m["value"] for m in lines if m["key"]}
    section = [m["section"] for m in lines if m["section"]][-1]
    assert all(len({key[place] for key in read}) == len(read) for place in (0, 1))
    assert list(read) == listed.keys and len(read) == sum(m["key"] is not None for m in lines)
    slots = sum(m["section"] is None for m in lines)
    assert len(read) == min(slots, recall.MOST_FACTS)
    for key, value in read.items():
        assert recall.answer(listed, key) == f"{value}{section}\n"
        assert len(recall.answer(listed, key)) == recall.ANSWER_SIZE
        assert len(recall.question(key)) == recall.QUESTION_SIZE
    if size >= 64:
        assert listed.text.rindex("@") <= len(listed.text) / 2


def test_one_seed_one_list():
    assert recall.facts(500, 3) == recall.facts(500, 3)
    assert recall.facts(500, 3).text != recall.facts(500, 4).text
    generator = np.random.default_rng(0)
    assert recall.facts(500, generator).text != recall.facts(500, generator).text


def test_sections_and_values_vary():
    many = [recall.facts(300, seed) for seed in range(400)]
    assert {each.section for each in many} == set("abcdefghijklmnopqrstuvwxyz")
    assert {each.text.count("@") for each in many} == {1, 2, 3, 4}
    values = [value for each in many for value in each.values.values()]
    assert len(set(values)) == 100  # of about 4,800


def test_facts_lie_anywhere_in_a_long_list():
    places = [
        recall.facts(2000, seed).text.index(key)
        for seed in range(50)
        for key in recall.facts(2000, seed).keys
    ]
    counts = np.histogram(places, bins=10, range=(0, 2000))[0]
    assert len(places) == 50 * recall.MOST_FACTS and counts.min() > 30 and counts.max() < 90


def test_sizes_that_are_too_small_and_unknown_keys_are_refused():
    assert len(recall.facts(recall.SMALLEST, 0).values) == 1
    with pytest.raises(ValueError, match=r"size is 7, want an integer of at least 8"):
        recall.facts(7, 0)
    listed = recall.facts(8, 0)
    with pytest.raises(ValueError, match=r"key is '..', want one of the list, e.g. '[a-z]{2}'"):
        recall.answer(listed, "..")
