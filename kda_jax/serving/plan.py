"""The checkpoints of one step: their tokens, their rows of the state pool, and what to offer."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

from ..grid import Array, as_nested
from ..metadata import Capacity, ChunkMetadata
from ..pool_rows import refuse_duplicates, refuse_rows_in_use
from .arguments import lengths_of


@dataclasses.dataclass(frozen=True, eq=False)
class CheckpointPlan:
    """The checkpoints of one step; M of them, by row, then by position. All arrays are int64.

    Attributes:
      seq_lens: ``[R]``, tokens of each row in this step.
      row: ``[M]``, which of these rows.
      offset: ``[M]``, tokens from the start of the row in this step, 1..seq_lens[row].
      position: ``[M]``, tokens from the start of the prompt: the prefix whose state it is.
      column: ``[M]``, of the request's block table: the destination under "last_block"; under
        "every_unit" the block that ends at the position or holds it.
      destination: ``[M]``, row of the state pool, or -1 while that is not known.
      live: per row, (position, block) of the state at the end of the step where that is a whole
        block of the request's table and stays there, else None.
    """

    seq_lens: Array
    row: Array
    offset: Array
    position: Array
    column: Array
    destination: Array
    live: tuple[tuple[int, int] | None, ...]

    @property
    def num_checkpoints(self) -> int:
        """M."""
        return int(self.row.size)

    @property
    def checkpoint_offsets(self) -> list[list[int]] | None:
        """The argument of `ChunkMetadata.from_seq_lens`; None if no row has a checkpoint."""
        if not self.row.size:
            return None
        return as_nested(self.row, self.offset, self.seq_lens.size)

    def offered(self, row: int) -> list[tuple[int, int]]:
        """(position, destination) of the states of a row that may be reused after the step.

        These are the ones that the step writes and that stay as they are. A block that is
        allocated for the step but not in this list holds no state of any prefix: it must not get
        a hash.
        """
        mine = np.flatnonzero((self.row == row) & (self.destination >= 0))
        pairs = [(int(self.position[i]), int(self.destination[i])) for i in mine]
        live = self.live[row]
        return pairs if live is None else [*pairs, live]

    def with_rows(self, rows: Any, *, in_use: Any = ()) -> CheckpointPlan:
        """The plan with rows of the state pool as destinations.

        Args:
          rows: ``[M]`` integers, on the host; a negative one skips the write.
          in_use: rows that the step reads or that hold a request's live state.

        Raises:
          ValueError: the size is wrong, or a row is given twice or is in use: a step that read a
            row and wrote a checkpoint to it would depend on which came first.
        """
        rows = lengths_of("rows", rows, least=None)
        if rows.size != self.num_checkpoints:
            raise ValueError(
                f"rows has {rows.size} entries for {self.num_checkpoints} checkpoints: allocate "
                "num_checkpoints rows"
            )
        refuse_duplicates("rows", rows, "each checkpoint needs one")
        used = lengths_of("in_use", in_use, least=None)
        refuse_rows_in_use("rows", rows, used, "which is in use in this step")
        return dataclasses.replace(self, destination=rows)

    def metadata(
        self, *, chunk_size: int = 64, capacity: Capacity | Literal["bucket"] | None = None
    ) -> ChunkMetadata:
        """The `ChunkMetadata` of the step's rows; its checkpoints are in the order of the plan."""
        return ChunkMetadata.from_seq_lens(
            self.seq_lens,
            chunk_size=chunk_size,
            checkpoint_offsets=self.checkpoint_offsets,
            capacity=capacity,
        )
