"""What the prefix check must know of a server: its blocks, and which prompts cross several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..serving.rule import CheckpointRule
from .errors import CliError
from .prefix_prompts import MOST_NEW_TOKENS, MOST_UNSHARED

LENGTHS = (300, 700, 1200, 1900)  # for blocks of up to 128 tokens, or of a size that nobody knows
_FEWEST, _MOST = 2.3, 5.6  # blocks of the shortest and of the longest prompt
_SURE = 0.97  # of the server's most tokens: those of a prompt are estimated, of a shorter one


def rule_of(
    says: dict[str, Any], block_size: int | None, drop_draft_block: bool | None
) -> CheckpointRule | None:
    """The server's rule, of what /v1/models says and what the user does; None: nobody says.

    Raises:
      CliError: they say different things.
    """
    theirs = says.get("block_size")
    theirs = theirs if isinstance(theirs, int) and theirs > 0 else None
    if block_size and theirs and block_size != theirs:
        raise CliError(
            f"--block-size {block_size}: the server says that its blocks have {theirs} tokens;"
            f" leave the option out, or start the server with --block-size {block_size}"
        )
    drops = says.get("drop_draft_block")
    if drop_draft_block is not None and drops is not None and drop_draft_block != bool(drops):
        option = "--drop-draft-block" if drop_draft_block else "--no-drop-draft-block"
        raise CliError(
            f"{option}: the server says that it {'drops one' if drops else 'drops none'};"
            " leave the option out"
        )
    block = block_size or theirs
    if block is None:
        return None
    drop = bool(drops) if drop_draft_block is None else drop_draft_block
    return CheckpointRule(block, drop_draft_block=drop)


def lengths_for(rule: CheckpointRule, longest: int | None) -> Sequence[int]:
    """Tokens of four prompts that cross several blocks, where the server takes such long ones.

    Args:
      rule: the server's.
      longest: tokens of a prompt and its continuation that the server takes; None: any number.

    Raises:
      CliError: not even one block and a question fit.
    """
    block, dropped = rule.block_size, rule.block_size * rule.drop_draft_block
    first, last = max(LENGTHS[0], _FEWEST * block + dropped), max(LENGTHS[-1], _MOST * block)
    if longest is not None:
        last = min(last, _SURE * (longest - MOST_NEW_TOKENS))
    least = block + dropped + MOST_UNSHARED
    if last < least:
        raise CliError(
            f"the server takes {longest} tokens at most, too few to read a block of {block}"
            " from its cache: a smaller block size, or a larger --max-model-len, there"
        )
    if (first, last) == (LENGTHS[0], LENGTHS[-1]):
        return LENGTHS
    first = min(first, (least + last) / 2)
    return [round(first + (last - first) * i / 3) for i in range(4)]
