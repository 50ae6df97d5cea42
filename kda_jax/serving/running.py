"""A request that runs: what it holds of the pools, and how far its steps are planned."""

from __future__ import annotations

import dataclasses

from ..grid import Array
from .lease import Lease
from .plan import CheckpointPlan
from .request import Request


@dataclasses.dataclass(eq=False)
class Running:
    """Counts run ahead of the device: they say what is planned, not what is known.

    Attributes:
      slot: where the device keeps its last token.
      lease: of the prefix cache.
      table: int32 [W], its MLA blocks in order; the first ones may be the cache's. Read-only.
      num_blocks: of the table in use. owned: the first block that is the request's own.
      live_row: where its steps leave the states. source: where the next one finds them.
      computed: tokens whose step is planned. sampled: tokens that planned steps will sample.
      delivered: tokens that came back and went to the client.
      ended: its place is given up; steps that were planned before still run.
    """

    request: Request
    slot: int
    lease: Lease | None
    table: Array
    num_blocks: int
    owned: int
    live_row: int
    source: int
    computed: int
    sampled: int = 0
    delivered: int = 0
    ended: bool = False

    @property
    def prompt_len(self) -> int:
        """L."""
        return int(self.request.prompt.size)

    @property
    def prefilled(self) -> bool:
        """Whether the steps of the whole prompt are planned."""
        return self.computed >= self.prompt_len

    @property
    def decodes(self) -> bool:
        """Whether the next step takes one more token of it."""
        return self.prefilled and self.sampled < self.request.params.max_tokens


@dataclasses.dataclass(frozen=True)
class Part:
    """Tokens start..start+length-1 of a prompt, in one step.

    source: the row with the states after `start` tokens. row: where those after the part go. last:
    whether the prompt ends here.
    """

    running: Running
    start: int
    length: int
    source: int
    row: int
    last: bool

    @property
    def stop(self) -> int:
        """Tokens after the step."""
        return self.start + self.length


@dataclasses.dataclass(frozen=True)
class Decode:
    """One token of a request, at position `start`; its states lie in `row`."""

    running: Running
    start: int
    row: int


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One step: decodes first, then the packed parts of prompts.

    checkpoints: of the parts, with rows of the pool as destinations.
    """

    decodes: tuple[Decode, ...]
    parts: tuple[Part, ...]
    checkpoints: CheckpointPlan

    @property
    def tokens(self) -> int:
        """That the step runs."""
        return len(self.decodes) + sum(part.length for part in self.parts)
