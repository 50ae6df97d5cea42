"""Which tokens of a step get a checkpoint, and where its state goes.

The scheduler, the cache manager and the step all ask `plan_checkpoints`, so that they cannot
disagree. Per request, with B the block size, U the hash unit (B unless given), s the tokens
computed before the step, e those after it and L the length of the prompt (e unless given):

"every_unit": positions p are multiples of U with s < p <= e, (p - s) % alignment == 0 and
    p <= last = floor((L - 1) / U) * U, one U less under the draft-block drop; of the multiples of U
    up to `last`, the deepest `max_per_request`. Each has a row of its own (`with_rows`).
"last_block": at most one position, p = floor((L - 1) / U) * U, one U less under the drop. It counts
    if s % U == 0, s + U <= p < e, (p - s) % alignment == 0 and
    ceil(e / B) - 2 > floor((s - 1) / B). Its state goes to column ceil(L / B) - 2 of the request's
    block table, unless that is the null block or the column that holds the live state at e.

A request reuses at most L - 1 tokens, since the last one must run to give logits; a checkpoint
past `last` would only serve a longer prompt.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

from ..grid import Array, as_nested
from ..metadata import Capacity, ChunkMetadata
from .arguments import at_least, lengths_of, same_size, table_of

Policy = Literal["every_unit", "last_block"]
NULL_BLOCK = 0


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
        return max(0, int(self._last(np.int64(prompt_len))))

    def _last(self, prompt_len: Any) -> Any:
        return (prompt_len - 1) // self.unit * self.unit - self.unit * self.drop_draft_block


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
        used = rows[rows >= 0]
        values, counts = np.unique(used, return_counts=True)
        if (counts > 1).any():
            raise ValueError(f"rows holds {values[counts > 1][0]} twice; each checkpoint needs one")
        both = np.intersect1d(used, lengths_of("in_use", in_use, least=None))
        if both.size:
            raise ValueError(
                f"rows holds {both[0]}, which is in use in this step; take a row that is free"
            )
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


def plan_checkpoints(
    rule: CheckpointRule,
    lengths: Any,
    computed: Any,
    *,
    prompt_lens: Any = None,
    rows: Any = None,
    block_tables: Any = None,
    caching: bool = True,
) -> CheckpointPlan:
    """The checkpoints of one step.

    Args:
      rule: what holds for every step.
      lengths: ``[N]``, tokens of each request after this step. Integers on the host, like all here.
      computed: ``[N]``, tokens before this step, at most lengths.
      prompt_lens: ``[N]``, tokens of the prompts, where prefill may end in a later step; None: it
        ends in this one, as lengths say.
      rows: which requests are prefilled in this step, by index, in the order of the packed tokens;
        None: all. Leave out decodes and requests that verify drafts, whose tokens may be rejected.
      block_tables: ``[N, W]``, blocks of each request in the state pool; "last_block" only. Without
        them the plan has positions and columns and no destinations.
      caching: False: this step has no checkpoints and offers nothing.

    Raises:
      ValueError: naming the argument, the entry and what is allowed.
    """
    ends, starts = lengths_of("lengths", lengths), lengths_of("computed", computed)
    same_size("computed", starts, "lengths", ends)
    if (starts > ends).any():
        i = int(np.argmax(starts > ends))
        raise ValueError(f"computed[{i}] is {starts[i]}, want at most lengths[{i}], {ends[i]}")
    prompts = ends
    if prompt_lens is not None:
        prompts = lengths_of("prompt_lens", prompt_lens)
        same_size("prompt_lens", prompts, "lengths", ends)
    tables = None
    if block_tables is not None:
        if rule.policy != "last_block":
            raise ValueError(
                f"block_tables is given, but policy {rule.policy!r} gives each checkpoint a row of "
                "its own: pass them to with_rows"
            )
        tables = table_of("block_tables", block_tables, ends, rule.block_size)
    if rows is not None:
        index = lengths_of("rows", rows)
        if index.size and index.max() >= ends.size:
            raise ValueError(f"rows holds {index.max()}, want indices below {ends.size}")
        ends, starts, prompts = ends[index], starts[index], prompts[index]
        tables = None if tables is None else tables[index]

    none = np.zeros(0, np.int64)
    if not (caching and rule.enabled):
        row = position = column = none
    elif rule.policy == "last_block":
        row, position, column = _last_block(rule, starts, ends, prompts, tables)
    else:
        row, position = _every_unit(rule, starts, ends, prompts)
        column = (position - 1) // rule.block_size
    destination = np.full(row.size, -1) if tables is None else tables[row, column]
    live: list[tuple[int, int] | None] = [None] * ends.size
    if caching and tables is not None:
        for r in np.flatnonzero((ends % rule.block_size == 0) & (ends > starts)).tolist():
            block = int(tables[r, ends[r] // rule.block_size - 1])
            live[r] = (int(ends[r]), block) if block > NULL_BLOCK else None
    return CheckpointPlan(
        ends - starts, row, position - starts[row], position, column, destination, tuple(live)
    )


def _every_unit(
    rule: CheckpointRule, starts: Array, ends: Array, prompts: Array
) -> tuple[Array, Array]:
    """(row, position) of "every_unit"."""
    unit = rule.unit
    last = rule._last(prompts) // unit
    first = starts // unit + 1
    if rule.max_per_request is not None:
        first = np.maximum(first, last - rule.max_per_request + 1)
    counts = np.maximum(np.minimum(last, ends // unit) - first + 1, 0)
    row = np.repeat(np.arange(ends.size), counts)
    nth = np.arange(row.size) - (np.cumsum(counts) - counts)[row]
    position = (first[row] + nth) * unit
    keep = (position - starts[row]) % rule.alignment == 0
    return row[keep], position[keep]


def _last_block(
    rule: CheckpointRule, starts: Array, ends: Array, prompts: Array, tables: Array | None
) -> tuple[Array, Array, Array]:
    """(row, position, column) of "last_block"."""
    unit, block = rule.unit, rule.block_size
    position = rule._last(prompts)
    column = -(-prompts // block) - 2
    read, live = (starts - 1) // block, (ends - 1) // block
    valid = (
        (starts % unit == 0)
        & (starts + unit <= position)
        & (position < ends)
        & ((position - starts) % rule.alignment == 0)
        & (-(-ends // block) - 2 > read)
        # These two follow from the others where the prompt ends in this step.
        & (column > read)
        & (column != live)
    )
    if tables is not None and valid.any():
        safe = np.where(valid, column, 0)
        valid &= np.take_along_axis(tables, safe[:, None], axis=1)[:, 0] > NULL_BLOCK
    row = np.flatnonzero(valid)
    return row, position[row], column[row]
