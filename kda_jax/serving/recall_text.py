"""The text of a recall prompt: a stock list in sections, then a question about one of its items.

    @q        a section opens, named by a letter
    kx40      a fact: of the item kx there are 40
    ....      an empty line
    @t
    cd98
    ?kx       the question; its answer is "40t\\n"

The answer is the number of the item and the name of the section that was opened last. Both are
known from the states that a model keeps: a server that resumes a prompt from a wrong state gives a
wrong answer. A list has at most `MOST_FACTS` facts, spread over as many lines as the size asks for.

Prompts are ASCII, and a model that reads bytes has one token per character. Sections open in the
first half of a list alone, so that none opens after the last whole block of a prompt of two blocks
or more, and a request that resumes there knows the section from the cached state.
"""

from __future__ import annotations

import dataclasses
import string

import numpy as np

from .arguments import at_least

_LETTERS = string.ascii_lowercase
_FACT, _EMPTY, _HEADER = len("kx40\n"), "....\n", len("@q\n")
_MOST_SECTIONS = 4
MOST_FACTS = 12
QUESTION_SIZE = len("?kx")
ANSWER_SIZE = len("40t\n")
SMALLEST = _HEADER + _FACT


@dataclasses.dataclass(frozen=True)
class Facts:
    """A list of facts.

    Attributes:
      text: the list, whole lines.
      values: of each key, in the order of the list.
      section: the name of the last one.
    """

    text: str
    values: dict[str, str]
    section: str

    @property
    def keys(self) -> list[str]:
        """In the order of the list."""
        return list(self.values)


def facts(size: int, seed: int | np.random.Generator) -> Facts:
    """A random list of facts; no two keys share a letter in the same place.

    Args:
      size: of the text in characters, at least `SMALLEST`; what whole lines leave over, fewer than
        5 characters, stays unused.
      seed: the same one gives the same list; or the generator to draw from.

    Raises:
      ValueError: size is too small.
    """
    at_least("size", size, SMALLEST)
    random = np.random.default_rng(seed)
    sections = min(int(random.integers(1, _MOST_SECTIONS + 1)), (size - _FACT) // _HEADER)
    slots = (size - sections * _HEADER) // _FACT
    count = min(slots, MOST_FACTS)
    first, second = (random.permutation(list(_LETTERS))[:count] for _ in range(2))
    keys = [f"{a}{b}" for a, b in zip(first, second, strict=True)]
    values = [f"{n:02}" for n in random.integers(0, 100, count)]
    lines = [_EMPTY] * slots
    for slot, key, value in zip(
        np.sort(random.choice(slots, count, replace=False)), keys, values, strict=True
    ):
        lines[slot] = f"{key}{value}\n"
    names = [_LETTERS[n] for n in random.integers(0, len(_LETTERS), sections)]
    places = np.sort(random.integers(0, max(0, slots - sections) // 2 + 1, sections))
    places[0] = 0
    for place, name in zip(places[::-1], names[::-1], strict=True):
        lines.insert(int(place), f"@{name}\n")
    return Facts("".join(lines), dict(zip(keys, values, strict=True)), names[-1])


def question(key: str) -> str:
    """What follows the list in a prompt, `QUESTION_SIZE` characters."""
    return f"?{key}"


def answer(listed: Facts, key: str) -> str:
    """The only right continuation of a prompt, `ANSWER_SIZE` characters; the last ends it.

    Raises:
      ValueError: the list has no such key.
    """
    if key not in listed.values:
        raise ValueError(f"key is {key!r}, want one of the list, e.g. {listed.keys[0]!r}")
    return f"{listed.values[key]}{listed.section}\n"
