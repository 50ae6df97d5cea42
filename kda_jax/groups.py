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
    as give every third thread one. 1 on a GPU: there V is sliced to 16 first, and what groups gain
    beyond that has not been measured with this kernel.
    """
    walks = sequences * heads * (V // _SLICE)
    if platform != "cpu" or walks == 0:
        return 1
    threads = os.cpu_count() or 1
    if walks * 3 >= threads:
        return 1
    return max(1, min(threads // (3 * walks) + 1, chunks // sequences // _CHUNKS_PER_GROUP, _LIMIT))
