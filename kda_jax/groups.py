"""Into how many groups the chunks of a sequence are split when the caller leaves it open.

The walk is serial in the chunks and parallel over sequences, heads and slices of 16 values. Groups
make it parallel along a sequence, at about twice the work (each group but the first is walked once
for its transfer and once for its outputs), so they pay only where most of the machine would idle.
"""

from __future__ import annotations

import os

_SLICE = 16
_CHUNKS_PER_GROUP = 8  # shorter groups spend their time in the scan over groups
_LIMIT = 16


def choose_groups(platform: str, sequences: int, heads: int, V: int, chunks: int) -> int:
    """The number of groups for a call's static sizes.

    On the CPU: 1 unless the independent walks are fewer than a third of the threads, then as many
    as give every third thread one. 1 on a GPU: there V is sliced to 16 first and the walk of one
    sequence runs beside the prologue, which groups cannot: on an H200 (2026-12-01, V = 128) one
    head of 65,536 tokens takes 0.92 ms in one piece and 1.9 ms in the best of 8 to 64 groups, of
    8192 tokens 0.13 and 0.50 ms; with more heads the difference is larger.
    """
    walks = sequences * heads * (V // _SLICE)
    if platform != "cpu" or walks == 0:
        return 1
    threads = os.cpu_count() or 1
    if walks * 3 >= threads:
        return 1
    return max(1, min(threads // (3 * walks) + 1, chunks // sequences // _CHUNKS_PER_GROUP, _LIMIT))
