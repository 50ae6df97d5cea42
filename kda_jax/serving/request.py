"""What a client asks for, and what it gets back, token by token."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from ..grid import Array
from .arguments import at_least, lengths_of

_log = logging.getLogger(__name__)
_HOTTEST = float(np.finfo(np.float32).max)  # the device's; Python's integers go on
FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the continuation of one prompt is chosen, and when it ends.

    Attributes:
      max_tokens: at most so many new tokens, at least 1.
      temperature: 0 is greedy; else tokens are drawn from softmax(logits / temperature).
      top_p: draw from the most likely tokens that together have this share, in (0, 1].
      seed: of the draws, 0..2**32 - 1. A prompt, a seed and a position always draw the same number,
        whatever else runs in the same step.
      stop_token_ids: tokens that end the continuation, beside the model's own; the last of it.
      ignore_eos: whether the model's own end tokens do not end it.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        at_least("max_tokens", self.max_tokens, 1)
        if not (_is_number(self.temperature) and 0 <= self.temperature <= _HOTTEST):
            raise ValueError(
                f"temperature is {self.temperature!r}, want 0 (greedy) or more,"
                " and finite in float32"
            )
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p is {self.top_p!r}, want a number in (0, 1]")
        at_least("seed", self.seed, 0)
        if self.seed >= 2**32:
            raise ValueError(f"seed is {self.seed}, want at most {2**32 - 1}")
        lengths_of("stop_token_ids", self.stop_token_ids)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Output(NamedTuple):
    """One step's news of a request.

    token: the new token, or None where it ended without one. finish_reason: None while more will
    come; "stop" after a token that ends it, "length" after max_tokens, "cancelled", "error".
    """

    token: int | None
    finish_reason: FinishReason | None


@dataclasses.dataclass(eq=False)
class Request:
    """One prompt on its way through the engine. Made by `Engine.submit`.

    Attributes:
      prompt: int32 [L], read-only. params: how to go on from it.
      on_output: called by the engine's thread with each `Output`; it must not block.
      extra_keys: as in `chain_hashes`.
      cached_tokens: of the prompt, read from the prefix cache; None while it waits.
      steps: steps that ran a part of the prompt.
    """

    prompt: Array
    params: SamplingParams
    on_output: Callable[[Output], None]
    extra_keys: tuple[str | bytes | int, ...] = ()
    cached_tokens: int | None = None
    steps: int = 0
    finished: bool = False

    def deliver(self, output: Output) -> None:
        """Hands the output on; nothing follows the one with a finish_reason."""
        assert not self.finished
        self.finished = output.finish_reason is not None
        try:
            self.on_output(output)
        except Exception:  # the client's fault must not end the other requests
            _log.exception("on_output of a request raised")


def prompt_of(tokens: Any, vocab_size: int) -> Array:
    """The prompt as int32 [L], checked.

    Raises:
      ValueError: it is empty, or holds no integers or a token outside the vocabulary.
    """
    ids = lengths_of("prompt", tokens, least=None)
    if not ids.size:
        raise ValueError("prompt is empty: give it at least one token (e.g. the BOS)")
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        i = int(np.argmax(outside))
        raise ValueError(f"prompt[{i}] is {ids[i]}, want a token in 0..{vocab_size - 1}")
    prompt = ids.astype(np.int32)
    prompt.flags.writeable = False
    return prompt
