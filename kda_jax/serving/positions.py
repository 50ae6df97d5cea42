"""Which tokens of a step get a checkpoint, and where its state goes.

The scheduler, the cache manager and the step all ask `plan_checkpoints`, so that they cannot
disagree. Per request, with B the block size, U the hash unit (B unless given), s the tokens
computed before the step, e those after it and L the length of the prompt (e unless given):

"every_unit": positions p are multiples of U with s < p <= e, (p - s) % alignment == 0 and
    p <= last = floor((L - 1) / U) * U, one U less under the draft-block drop; of the multiples of U
    up to `last`, the deepest `max_per_request`. Each has a row of its own (`with_rows`).
"last_block": at most one position, p = floor((L - 1) / U) * U, one U less under the drop. Its state
    goes to column c = ceil(L / B) - 2 of the request's block table. It counts if s % U == 0,
    s + U <= p < e, (p - s) % alignment == 0, the block of column c is not the null block, and
    floor((s - 1) / B) < c < floor((e - 1) / B): neither the column of the state that the step
    starts from nor that of the live state, which it leaves at e.

A request reuses at most L - 1 tokens, since the last one must run to give logits; a checkpoint
past `last` would only serve a longer prompt.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..grid import Array
from .arguments import lengths_of, same_size, table_of
from .plan import CheckpointPlan
from .rule import CheckpointRule

NULL_BLOCK = 0


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
    last = rule.last_positions(prompts) // unit
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
    position = rule.last_positions(prompts)
    column = -(-prompts // block) - 2
    read, live = (starts - 1) // block, (ends - 1) // block
    valid = (
        (starts % unit == 0)
        & (starts + unit <= position)
        & (position < ends)
        & ((position - starts) % rule.alignment == 0)
        & (read < column)
        & (column < live)
    )
    if tables is not None and valid.any():
        safe = np.where(valid, column, 0)
        valid &= np.take_along_axis(tables, safe[:, None], axis=1)[:, 0] > NULL_BLOCK
    row = np.flatnonzero(valid)
    return row, position[row], column[row]
