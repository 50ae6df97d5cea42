"""What /metrics says: the engine's and the cache's counters, and the times that clients see."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from ..engine import Engine
from ..request import Output

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """One server's; a registry of its own, so that several can live in one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._first = self._histogram("time_to_first_token", "Until the first token of a request.")
        self._between = self._histogram("time_per_output_token", "Between two tokens of a request.")
        self._whole = self._histogram("request", "Until a request ended.")
        self.responses = Counter(
            "kda_http_responses",
            "Responses by path and status.",
            ["path", "status"],
            registry=self._registry,
        )

    def text(self, engine: Engine) -> str:
        """The text exposition format 0.0.4."""
        scheduler, cache = engine.stats()
        own = generate_latest(self._registry).decode()
        return scheduler.prometheus("kda_engine") + cache.prometheus() + own

    def watch(self) -> Callable[[Output], None]:
        """To be called with every output of one request, from now on."""
        begin = last = time.perf_counter()
        tokens = 0

        def see(output: Output) -> None:
            nonlocal last, tokens
            now = time.perf_counter()
            if output.token is not None:
                (self._between if tokens else self._first).observe(now - last)
                last, tokens = now, tokens + 1
            if output.finish_reason is not None:
                self._whole.observe(now - begin)

        return see

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"kda_{name}_seconds", text, buckets=_SECONDS, registry=self._registry)
