"""How many forward steps a prompt should take, from the rule for positions alone.

A prompt that is prefilled alone takes steps of the whole budget, in whole units unless the step
ends the prompt. A prefix cache wants the states after `CheckpointRule.last_position` tokens. With
checkpoints a step exports them on its way; without, no step may pass them, so one ends there.
"""

from __future__ import annotations

import dataclasses

from kda_jax.serving import CheckpointRule

UNIT = 64  # a step that does not end its prompt takes whole chunks


def step_ends(
    prompt_len: int, budget: int, stop_at: int = 0, *, computed: int = 0, unit: int = UNIT
) -> list[int]:
    """After how many tokens of the prompt each step ends; no step passes `stop_at` (0: none)."""
    ends = [computed]
    while ends[-1] < prompt_len:
        end = min(prompt_len, ends[-1] + budget)
        if end < prompt_len:
            end -= (end - ends[-1]) % unit
        if ends[-1] < stop_at < end:
            end = stop_at
        ends.append(end)
    return ends[1:]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Of one prompt on an empty cache, and of another one with the same `position` first tokens.

    Attributes:
      position: where the kept state lies, so what the second prompt reads from the cache; 0: none.
      steps: with checkpoints. split_steps: without. warm_steps: of the second prompt.
      unchanged: why the first two are the same number; empty if they are not.
    """

    position: int
    steps: int
    split_steps: int
    warm_steps: int
    unchanged: str


def predict(rule: CheckpointRule, prompt_len: int, budget: int) -> Prediction:
    """The steps of a prompt that is prefilled alone."""
    position = rule.last_position(prompt_len)
    ends = step_ends(prompt_len, budget)
    split = step_ends(prompt_len, budget, position)
    why = ""
    if len(split) == len(ends):
        if not position:
            why = "no whole block before the last token"
        elif position in ends:
            why = "the checkpoint is on a step boundary"
        else:
            why = "the checkpoint is in a step that is not the last"
    warm = step_ends(prompt_len, budget, computed=position)
    return Prediction(position, len(ends), len(split), len(warm), why)
