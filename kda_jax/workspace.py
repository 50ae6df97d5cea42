"""How much scratch memory the kernel of a platform asks XLA for, and in how many pieces it works.

The handler checks the size and refuses one that is too small; it never allocates. Linear in the
tokens in flight, and bounded: chunks are taken in slabs, except with groups, which need all chunks
at once.
"""

from __future__ import annotations

from typing import NamedTuple

from .metadata import ChunkMetadata

_TILE = 16
# Memory in flight. CPU: enough tasks for many threads, and still near the caches. GPU: long enough
# slabs that a launch costs nothing beside its work.
_SLAB_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30, "rocm": 1 << 30}
_ELEMENT_BYTES = {"cpu": 4, "cuda": 2, "rocm": 2}


class Workspace(NamedTuple):
    """Chunks in flight, and bytes."""

    slab_chunks: int
    num_bytes: int


def workspace(
    platform: str,
    H: int,
    K: int,
    V: int,
    metadata: ChunkMetadata,
    groups: int = 1,
    in_pool: bool = False,
) -> Workspace:
    """The workspace of a call on "cpu", "cuda" or "rocm".

    A chunk of one head leaves kd, qg and kg ``[C, K]`` and the lower 16 x 16 tiles of Aqk and of
    the inverse ``[C, C]`` in the target's operand type, the decay ``[K]`` in float32 and 128 bytes
    of flags (ffi/kernel/workspace.h). A group leaves a float32 ``[V + K, K]``
    (ffi/kernel/group_scan.h). With states in a pool and more than one slab, two states wait between
    slabs. The last bytes are the status of the call (ffi/kernel/schedule.h). Chunks of one token
    need no workspace.
    """
    C, capacity = metadata.chunk_size, metadata.capacity
    if C == 1:  # ffi/gpu/tokens.h
        return Workspace(max(1, capacity.chunks), 0)
    tiles = C // _TILE
    elements = 3 * C * K + tiles * (tiles + 1) * _TILE * _TILE
    chunk = H * (elements * _ELEMENT_BYTES[platform] + 4 * K + 128)
    status = -(-4 * (1 + capacity.sequences * H * (V // _TILE)) // 128) * 128
    slab = max(1, capacity.chunks)
    if groups == 1:
        slab = max(1, min(slab, _SLAB_BYTES[platform] // chunk))
    if platform == "cuda":  # how far the prologue is
        status += -(-(32 + H * min(slab, capacity.chunks)) // 128) * 128
    if groups > 1:
        slots = 4 * capacity.sequences * H * groups * (V + K) * K
        return Workspace(slab, slab * chunk + slots + status)
    waiting = 2 * 4 * H * K * V if in_pool and slab < capacity.chunks else 0
    return Workspace(slab, slab * chunk + waiting + status)
