"""What decides the checkpoints of every step alike; `plan_checkpoints` says what it means."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

from .arguments import at_least
from .spec import KDACacheSpec

Policy = Literal["every_unit", "last_block"]


@dataclasses.dataclass(frozen=True)
class CheckpointRule:
    """What stays the same from step to step.

    Attributes:
      block_size: tokens of a cache block (B).
      hash_unit: tokens that one hash of the prefix cache covers (U), a divisor of block_size; None:
        the block size.
      alignment: `KDACacheSpec.prefill_checkpoint_alignment`: offsets from the start of a step are
        multiples of it; None: no backend exports states, so there are no checkpoints.
      max_per_request: `KDACacheSpec.num_prefill_checkpoint_blocks`: how many checkpoints one prompt
        may have; None: any number, 0: none. "last_block" never has more than one in a step.
      drop_draft_block: whether a lookup gives up its last unit, as speculative decoding does, so
        that the checkpoint lies one unit earlier.
      policy: "every_unit" is ours; "last_block" is that of engines which keep states in the block
        table of the request.
    """

    block_size: int
    hash_unit: int | None = None
    alignment: int | None = 1
    max_per_request: int | None = None
    drop_draft_block: bool = False
    policy: Policy = "every_unit"

    def __post_init__(self) -> None:
        at_least("block_size", self.block_size, 1)
        if self.hash_unit is not None:
            at_least("hash_unit", self.hash_unit, 1)
            if self.block_size % self.hash_unit:
                raise ValueError(
                    f"hash_unit is {self.hash_unit}, want a divisor of block_size, "
                    f"{self.block_size}"
                )
        if self.alignment is not None:
            at_least("alignment", self.alignment, 1)
        if self.max_per_request is not None:
            at_least("max_per_request", self.max_per_request, 0)
        if self.policy not in ("every_unit", "last_block"):
            raise ValueError(f"policy is {self.policy!r}, want 'every_unit' or 'last_block'")

    @classmethod
    def from_spec(
        cls,
        spec: KDACacheSpec,
        *,
        hash_unit: int | None = None,
        drop_draft_block: bool = False,
        policy: Policy = "every_unit",
    ) -> CheckpointRule:
        """The rule of a layer's spec: its block size, alignment and number of blocks."""
        return cls(
            spec.block_size,
            hash_unit,
            spec.prefill_checkpoint_alignment,
            spec.num_prefill_checkpoint_blocks,
            drop_draft_block,
            policy,
        )

    @property
    def unit(self) -> int:
        """Tokens between two places where a checkpoint may lie."""
        return self.hash_unit or self.block_size

    @property
    def enabled(self) -> bool:
        """Whether any step can have a checkpoint."""
        return self.alignment is not None and self.max_per_request != 0

    def last_position(self, prompt_len: int) -> int:
        """The deepest position that a prompt of that many tokens can resume from; 0: none.

        So it is also what a warm request of that length reads from a cache that holds its prefix,
        in tokens, and the most that it should ask the cache for.
        """
        at_least("prompt_len", prompt_len, 0)
        return max(0, int(self.last_positions(np.int64(prompt_len))))

    def last_positions(self, prompt_lens: Any) -> Any:
        """`last_position` of an integer array, element by element; 0 or less: none."""
        return (prompt_lens - 1) // self.unit * self.unit - self.unit * self.drop_draft_block
