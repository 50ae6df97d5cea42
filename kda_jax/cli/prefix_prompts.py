"""What the prefix check asks: a list of facts, and two questions about it."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..serving import recall_text

MOST_NEW_TOKENS = 8  # of an answer
MOST_UNSHARED = 60  # characters, and so at most tokens, of a question's end
_COLOURS = ("amber", "azure", "coral", "ebony", "ivory", "lilac", "ochre", "olive", "pearl", "teal")
_BIRDS = ("crane", "eagle", "finch", "goose", "heron", "ibis", "kite", "raven", "swan", "wren")


@dataclasses.dataclass(frozen=True)
class Questions:
    """Two prompts that differ at their end.

    Attributes:
      shared: what both begin with.
      ends: what follows in each of the two.
      answers: what each continuation must begin with, without white space at its ends.
      max_tokens: that an answer may take.
    """

    shared: str
    ends: tuple[str, str]
    answers: tuple[str, str]
    max_tokens: int

    def prompt(self, which: int) -> str:
        """The first or the second one."""
        return self.shared + self.ends[which]

    @property
    def unshared(self) -> int:
        """Characters, and so at most tokens, of the longer end."""
        return max(map(len, self.ends))


def questions(kind: str, size: int, seed: int) -> Questions:
    """Prompts of about that many characters, at most.

    "recall" is the text that the model in tests/data/recall was trained on; "prose" is English that
    an instructed model answers.
    """
    return _recall(size, seed) if kind == "recall" else _prose(size, seed)


def _recall(size: int, seed: int) -> Questions:
    random = np.random.default_rng((seed, size))
    listed = recall_text.facts(size - recall_text.QUESTION_SIZE, random)
    one, other = random.choice(listed.keys, 2, replace=False)
    first, second = recall_text.question(one), recall_text.question(other)
    same = next(i for i in range(len(first)) if first[i] != second[i])
    return Questions(
        shared=listed.text + first[:same],
        ends=(first[same:], second[same:]),
        answers=(
            recall_text.answer(listed, one).strip(),
            recall_text.answer(listed, other).strip(),
        ),
        max_tokens=recall_text.ANSWER_SIZE + 2,
    )


def _prose(size: int, seed: int) -> Questions:
    random = np.random.default_rng((seed, size))
    lines = ["Here is a list of codes.\n"]
    codes: dict[str, str] = {}
    room = size - 110  # the last line goes beyond, and the question follows
    while not codes or room > sum(map(len, lines)):
        number = len(codes)
        name = f"{random.choice(_COLOURS)} {random.choice(_BIRDS)} {number}"
        codes[name] = str(random.integers(1000, 10000))
        lines.append(f"The code of {name} is {codes[name]}.\n")
    names = random.choice(list(codes), 2, replace=len(codes) < 2)
    return Questions(
        shared="".join(lines) + "\nQuestion: what is the code of ",
        ends=(f"{names[0]}?\nAnswer: the code is", f"{names[1]}?\nAnswer: the code is"),
        answers=(codes[names[0]], codes[names[1]]),
        max_tokens=MOST_NEW_TOKENS,
    )
