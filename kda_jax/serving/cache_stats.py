"""The prefix cache's counters."""

from __future__ import annotations

import dataclasses

from .stats import Stats, counter, gauge


@dataclasses.dataclass
class CacheStats(Stats):
    """Counters since the cache was made, and gauges of now. The help texts say what they count."""

    hits: int = counter("Requests that found a part of their prefix.")
    misses: int = counter("Requests that found nothing.")
    queried_tokens: int = counter("Tokens of the requests that asked.")
    hit_tokens: int = counter("Tokens that the hits did not have to run again.")
    stored: int = counter("Checkpoints stored, each with the blocks of its tokens.")
    duplicates: int = counter("Checkpoints not stored because another request had stored them.")
    refused: int = counter("Checkpoints not stored for want of room, or from before a reset.")
    evictions: int = counter("Checkpoints evicted, each with its blocks, to make room.")
    evicted_bytes: int = counter("Bytes that evictions gave back.")
    resets: int = counter("Times that the cache was cleared.")
    entries: int = gauge("Checkpoints that can be found.")
    leases: int = gauge("Requests that hold a lease.")
    used_bytes: int = gauge("Bytes of all checkpoints and blocks held.")
    pinned_bytes: int = gauge("Bytes that requests in flight depend on.")
    budget_bytes: int = gauge("Bytes that the cache may hold.")

    def prometheus(self, prefix: str = "kda_prefix_cache") -> str:
        """The text exposition format 0.0.4; counters end in ``_total``."""
        return super().prometheus(prefix)
