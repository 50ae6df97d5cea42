"""Text to tokens and back, with what a model's folder holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Bytes:
    """One token per byte, for models with a vocabulary of 256."""

    def encode(self, text: str) -> list[int]:
        """UTF-8."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Bytes that are no UTF-8 become U+FFFD."""
        return bytes(tokens).decode(errors="replace")


class FromFile:
    """A tokenizer.json, through the package `tokenizers`."""

    def __init__(self, file: Path):
        from tokenizers import Tokenizer

        try:
            self._tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(
                f"{file}: not a tokenizer or a damaged one ({error}): download it again"
            ) from error

    def encode(self, text: str) -> list[int]:
        """With the special tokens that the file asks for."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Without special tokens."""
        return str(self._tokenizer.decode(list(tokens)))


def load_tokenizer(folder: str | Path, vocab_size: int) -> Bytes | FromFile:
    """The tokenizer of a model's folder: tokenizer.json, or bytes for a vocabulary of 256.

    Raises:
      ValueError: there is none that can be used; says what to do.
      ImportError: there is a tokenizer.json and the package `tokenizers` is missing.
    """
    folder = Path(folder)
    if (folder / "tokenizer.json").is_file():
        return FromFile(folder / "tokenizer.json")
    if vocab_size == 256:
        return Bytes()
    found = "tiktoken.model, whose way to split text is code and not in it; "
    raise ValueError(
        f"{folder} has {found if (folder / 'tiktoken.model').is_file() else ''}no tokenizer.json:"
        " convert the model's tokenizer to one, or give the prompt as token numbers"
    )
