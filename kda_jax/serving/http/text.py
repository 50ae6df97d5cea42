"""Text out of tokens while they come: whole characters only, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """What serving needs of one: `kda_jax.models.tokenizer`."""

    def encode(self, text: str) -> list[int]:
        """Text to tokens."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens to text; what is no UTF-8 becomes U+FFFD."""


class TextStream:
    """The text of a continuation, piece by piece.

    Args:
      tokenizer: None: every piece is empty.
      stops: strings that end the text; they are not part of it.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._tokens: list[int] = []
        self._first, self._read = 0, 0  # decoded together: a token's text depends on those before
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Takes one token; returns the text that is certain now."""
        if self._tokenizer is None or self.stopped:
            return ""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._first : self._read])
        text = self._tokenizer.decode(self._tokens[self._first :])
        if text.endswith("�") and len(self._tokens) - self._read < 4:
            return ""  # perhaps the first bytes of a character, of which there are at most four
        self._first, self._read = self._read, len(self._tokens)
        return self._release(text[len(before) :])

    def finish(self) -> str:
        """No token follows: the rest of the text."""
        if self._tokenizer is None or self.stopped:
            return ""
        before = self._tokenizer.decode(self._tokens[self._first : self._read])
        text = self._tokenizer.decode(self._tokens[self._first :])
        released = self._release(text[len(before) :])
        if self.stopped:
            return released
        released, self._held = released + self._held, ""
        return released

    def _release(self, more: str) -> str:
        """Holds back what may be the beginning of a stop string."""
        text = self._held + more
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), keep, -1):
                if text.endswith(stop[:size]):
                    keep = size
                    break
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
