"""The prefix cache's counters and their Prometheus text form."""

from __future__ import annotations

import dataclasses


def _counter(text: str) -> int:
    return dataclasses.field(default=0, metadata={"help": text, "type": "counter"})


def _gauge(text: str) -> int:
    return dataclasses.field(default=0, metadata={"help": text, "type": "gauge"})


@dataclasses.dataclass
class CacheStats:
    """Counters since the cache was made, and gauges of now. The help texts say what they count."""

    hits: int = _counter("Requests that found a part of their prefix.")
    misses: int = _counter("Requests that found nothing.")
    queried_tokens: int = _counter("Tokens of the requests that asked.")
    hit_tokens: int = _counter("Tokens that the hits did not have to run again.")
    stored: int = _counter("Checkpoints stored, each with the blocks of its tokens.")
    duplicates: int = _counter("Checkpoints not stored because another request had stored them.")
    refused: int = _counter("Checkpoints not stored for want of room, or from before a reset.")
    evictions: int = _counter("Checkpoints evicted, each with its blocks, to make room.")
    evicted_bytes: int = _counter("Bytes that evictions gave back.")
    resets: int = _counter("Times that the cache was cleared.")
    entries: int = _gauge("Checkpoints that can be found.")
    leases: int = _gauge("Requests that hold a lease.")
    used_bytes: int = _gauge("Bytes of all checkpoints and blocks held.")
    pinned_bytes: int = _gauge("Bytes that requests in flight depend on.")
    budget_bytes: int = _gauge("Bytes that the cache may hold.")

    def prometheus(self, prefix: str = "kda_prefix_cache") -> str:
        """The text exposition format 0.0.4; counters end in ``_total``."""
        lines = []
        for field in dataclasses.fields(self):
            kind = field.metadata["type"]
            name = f"{prefix}_{field.name}" + ("_total" if kind == "counter" else "")
            lines += [
                f"# HELP {name} {field.metadata['help']}",
                f"# TYPE {name} {kind}",
                f"{name} {getattr(self, field.name)}",
            ]
        return "\n".join(lines) + "\n"
