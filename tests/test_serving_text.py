"""Text out of tokens while they come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kda_jax.serving.http.text import TextStream


class Bytes:
    def decode(self, tokens: Any) -> str:
        return bytes(tokens).decode(errors="replace")

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


@pytest.mark.parametrize("seed", range(20))
def test_text_streams(seed: int) -> None:
    """Characters of one to four bytes, cut at the first stop string; no part of a character."""
    random = np.random.default_rng(seed)
    text = "".join(random.choice(list("abé漢😀"), 60))
    stops = [text[i : i + n] for i, n in random.integers(1, [50, 4], (2, 2))]
    stream = TextStream(Bytes(), stops)
    pieces = [stream.push(token) for token in text.encode()]
    pieces.append(stream.finish())
    cut = min(text.find(stop) for stop in stops)
    assert "".join(pieces) == text[:cut]
    assert stream.stopped
    plain = TextStream(Bytes(), ["never"])
    pieces = [plain.push(token) for token in text.encode()]
    assert all("�" not in piece for piece in pieces)
    assert "".join(pieces) + plain.finish() == text
    # What is no UTF-8 is not held back for ever, and what is left over comes at the end.
    broken = TextStream(Bytes())
    assert broken.push(0xE6) == broken.push(0xBC) == ""
    assert broken.finish() == "�"
