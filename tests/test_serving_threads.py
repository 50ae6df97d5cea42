"""`PrefixCache` from eight threads at once: no foreign state, no lost handle."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Sequence

from kda_jax.serving import Freed, Lease, PrefixCache


def test_threads() -> None:
    """Handles come from a shared pool and are poisoned when freed; readers check every one."""
    pool_lock = threading.Lock()
    free = list(range(400))
    content: dict[int, tuple[int, ...] | None] = {}

    def on_free(entries: Sequence[Freed]) -> None:
        with pool_lock:
            for entry in entries:
                for handle in (entry.checkpoint, *entry.blocks):
                    content[handle] = None
                    free.append(handle)

    cache = PrefixCache(unit=2, checkpoint_bytes=3, block_bytes=1, budget_bytes=60, on_free=on_free)
    errors: list[BaseException] = []

    def client(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(150):
                tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
                lease = cache.acquire(tokens)
                for _ in range(rng.randrange(3)):
                    check(lease, tokens)
                    steps = (len(tokens) - lease.position) // 2
                    if not steps:
                        break
                    position = lease.position + 2 * rng.randint(1, steps)
                    ends = range(lease.position + 2, position + 1, 2)
                    with pool_lock:
                        handles = [free.pop() for _ in (0, *ends)]
                    for handle, end in zip(handles, (position, *ends), strict=True):
                        content[handle] = tuple(tokens[:end])
                    if not cache.insert(lease, position, checkpoint=handles[0], blocks=handles[1:]):
                        with pool_lock:
                            free.extend(handles)
                check(lease, tokens)
                cache.release(lease)
                if rng.random() < 0.02:
                    cache.clear()
        except BaseException as error:
            errors.append(error)

    def check(lease: Lease, tokens: list[int]) -> None:
        if lease.position:
            assert content[lease.checkpoint] == tuple(tokens[: lease.position])
            for i, handle in enumerate(lease.blocks):
                assert content[handle] == tuple(tokens[: 2 * i + 2])

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors[0]
    stats = cache.stats()
    assert stats.leases == stats.pinned_bytes == 0 and stats.evictions and stats.hits
    cache.evict(10**9)
    assert sorted(free) == list(range(400))  # nothing lost, nothing given back twice
    assert cache.stats().used_bytes == 0
