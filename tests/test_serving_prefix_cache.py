"""`PrefixCache`: hashes, what is found, what is kept together and dropped, counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax.serving import CacheStats, CheckpointRule, Freed, Lease, PrefixCache, chain_hashes

UNIT = 4
CHECKPOINT, BLOCK = 100, 10
A, B, C = (list(range(start, start + 40)) for start in (0, 100, 200))


def make(entries: int = 100, freed: list[Freed] | None = None) -> PrefixCache:
    """A cache with room for that many entries of two units each."""
    return PrefixCache(
        unit=UNIT,
        checkpoint_bytes=CHECKPOINT,
        block_bytes=BLOCK,
        budget_bytes=entries * (CHECKPOINT + 2 * BLOCK),
        on_free=None if freed is None else freed.extend,
    )


def store(cache: PrefixCache, lease: Lease, position: int, name: str) -> bool:
    units = range(lease.position // UNIT, position // UNIT)
    return cache.insert(
        lease, position, checkpoint=f"{name}@{position}", blocks=[f"{name}{i}" for i in units]
    )


def fill(cache: PrefixCache, tokens: list[int], name: str, *positions: int) -> None:
    lease = cache.acquire(tokens)
    for position in positions:
        assert store(cache, lease, position, name)
    cache.release(lease)


def found(cache: PrefixCache, tokens: Any, **options: Any) -> int:
    lease = cache.acquire(tokens, **options)
    cache.release(lease)
    return lease.cached_tokens


def test_hashes_name_the_whole_prefix() -> None:
    one = chain_hashes([1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    assert len(one) == 2 and len({*one}) == 2
    assert chain_hashes(np.array([1, 2, 3, 4, 5], np.int32), 4) == one[:1]
    other = chain_hashes([0, 2, 3, 4, 5, 6, 7, 8], 4)
    assert not {*one} & {*other}  # the second unit is the same, its prefix is not
    assert chain_hashes([1, 2, 3], 4) == chain_hashes([], 4) == []
    assert chain_hashes([1, 2, 3, 4, 5, 6, 7, 8], 8) != one[1:]


def test_extra_keys_cannot_be_mistaken_for_each_other() -> None:
    keys: list[tuple[Any, ...]] = [
        (), ("",), ("", ""), ("a",), (b"a",), ("ab",), ("a", "b"), ("1",), (1,), (-1,), ("a|s1:b",)
    ]  # fmt: skip
    hashes = [chain_hashes([1, 2, 3, 4], 4, key)[0] for key in keys]
    assert len({*hashes}) == len(keys)
    with pytest.raises(ValueError, match="extra_keys is 'lora', want a tuple of keys"):
        chain_hashes([1], 4, "lora")
    for bad in (1.5, True, None):
        with pytest.raises(ValueError, match=r"extra_keys\[1\] is .*, want a str, bytes or int"):
            chain_hashes([1], 4, ("a", bad))  # type: ignore[arg-type]


def test_a_second_request_goes_on_where_the_first_has_been() -> None:
    cache = make()
    lease = cache.acquire(A)
    assert (lease.position, lease.checkpoint, lease.blocks) == (0, None, [])
    assert store(cache, lease, 8, "a") and store(cache, lease, 20, "a")
    assert (lease.position, lease.cached_tokens) == (20, 0)
    second = cache.acquire(A[:30] + C)
    assert (second.cached_tokens, second.checkpoint) == (20, "a@20")
    assert second.blocks == ["a0", "a1", "a2", "a3", "a4"] == lease.blocks
    assert found(cache, A[:19] + C) == 8  # a block past the last checkpoint is of no use
    assert found(cache, A[:7] + C) == found(cache, C) == 0


def test_the_last_token_must_run() -> None:
    cache = make()
    fill(cache, A, "a", 8, 12)
    assert found(cache, A[:13]) == 12
    assert found(cache, A[:12]) == 8
    assert found(cache, A[:8]) == found(cache, A[:1]) == found(cache, []) == 0


def test_the_position_rule_limits_what_is_found() -> None:
    cache = make()
    fill(cache, A, "a", 4, 8, 12)
    rule = CheckpointRule(UNIT, drop_draft_block=True)
    for length, tokens in ((16, 8), (17, 12), (9, 4), (8, 0)):
        assert found(cache, A[:length], max_tokens=rule.last_position(length)) == tokens


def test_adapters_do_not_share() -> None:
    cache = make()
    lease = cache.acquire(A, extra_keys=("lora-7", 3))
    store(cache, lease, 8, "a")
    assert found(cache, A, extra_keys=("lora-7", 3)) == 8
    for keys in ((), ("lora-7",), ("lora-7", 4), ("lora-7", "3")):
        assert found(cache, A, extra_keys=keys) == 0


def test_least_recently_used_goes_first_and_whole() -> None:
    freed: list[Freed] = []
    cache = make(2, freed)
    fill(cache, A, "a", 8)
    fill(cache, B, "b", 8)
    assert found(cache, A) == 8  # now B is the older one
    fill(cache, C, "c", 8)
    assert freed == [Freed("b@8", ("b0", "b1"))]  # the states and the blocks of their tokens
    assert (found(cache, A), found(cache, B), found(cache, C)) == (8, 0, 8)


def test_a_prefix_outlives_what_goes_on_from_it() -> None:
    freed: list[Freed] = []
    cache = make(3, freed)
    fill(cache, A, "a", 8, 16)
    fill(cache, A[:8] + B, "b", 16)  # goes on from A's first checkpoint
    assert freed == []
    fill(cache, C, "c", 8)
    assert [f.checkpoint for f in freed] == ["a@16"]
    assert (found(cache, A), found(cache, A[:8] + B)) == (8, 16)
    assert cache.evict(10**9) == 3 * 120
    assert [f.checkpoint for f in freed[1:]] == ["c@8", "b@16", "a@8"]


def test_what_requests_hold_stays() -> None:
    freed: list[Freed] = []
    cache = make(2, freed)
    lease = cache.acquire(A)
    assert store(cache, lease, 8, "a") and store(cache, lease, 16, "a")
    other = cache.acquire(B)
    assert not store(cache, other, 8, "b") and other.position == 0
    assert cache.evict(1) == 0 and freed == []
    cache.release(lease)
    assert store(cache, other, 8, "b")
    assert freed == [Freed("a@16", ("a2", "a3"))]


def test_too_large_for_the_budget_evicts_nothing() -> None:
    cache = PrefixCache(unit=UNIT, checkpoint_bytes=100, block_bytes=10, budget_bytes=150)
    fill(cache, A, "a", 8)
    lease = cache.acquire(B)
    assert not store(cache, lease, 40, "b")
    assert found(cache, A) == 8
    nothing = make(0)
    assert not store(nothing, nothing.acquire(A), 4, "a")


def test_two_requests_write_the_same() -> None:
    freed: list[Freed] = []
    cache = make(100, freed)
    one, two = cache.acquire(A), cache.acquire(A)
    assert store(cache, one, 8, "one")
    assert not store(cache, two, 8, "two")  # the second keeps its handles
    assert two.position == 0 and found(cache, A) == 8
    assert store(cache, two, 16, "two")  # from its own start, with its own blocks
    assert two.blocks == ["two0", "two1", "two2", "two3"]
    cache.release(one)
    cache.release(two)
    cache.evict(10**9)
    assert [f.checkpoint for f in freed] == ["one@8", "two@16"]


def test_reset() -> None:
    freed: list[Freed] = []
    cache = make(100, freed)
    fill(cache, B, "b", 8)
    held, missed = cache.acquire(A), cache.acquire(C)
    store(cache, held, 8, "a")
    same = cache.acquire(A)
    assert cache.clear() == 2
    assert [f.checkpoint for f in freed] == ["b@8"]
    assert found(cache, A) == 0 and held.checkpoint == same.checkpoint == "a@8"
    for old in (held, missed):  # states of before the reset
        assert not store(cache, old, 16, "old")
    new = cache.acquire(A)
    assert store(cache, new, 8, "new")
    cache.release(held)
    assert len(freed) == 1
    cache.release(same)
    assert freed[1:] == [Freed("a@8", ("a0", "a1"))]
    assert found(cache, A) == 8
    assert cache.stats().used_bytes == cache.stats().pinned_bytes == 120


def test_counters() -> None:
    cache = make(2)
    fill(cache, A, "a", 8)
    assert found(cache, A[:20]) == 8
    lease = cache.acquire(A)
    assert not store(cache, cache.acquire(A), 40, "a") and lease.position == 8
    fill(cache, B, "b", 8)
    cache.release(lease)
    fill(cache, C, "c", 8)
    assert cache.stats() == CacheStats(
        hits=3,
        misses=3,
        queried_tokens=5 * 40 + 20,
        hit_tokens=3 * 8,
        stored=3,
        refused=1,
        evictions=1,
        evicted_bytes=120,
        entries=2,
        leases=1,
        used_bytes=240,
        pinned_bytes=120,
        budget_bytes=240,
    )


def test_prometheus_text() -> None:
    text = CacheStats(hits=3, used_bytes=7).prometheus()
    assert text.startswith(
        "# HELP kda_prefix_cache_hits_total Requests that found a part of their prefix.\n"
        "# TYPE kda_prefix_cache_hits_total counter\n"
        "kda_prefix_cache_hits_total 3\n"
    )
    assert "# TYPE kda_prefix_cache_used_bytes gauge\nkda_prefix_cache_used_bytes 7\n" in text
    assert "kda_prefix_cache_evictions_total 0\n" in text and text.endswith("\n")
    assert CacheStats().prometheus("x").splitlines()[2] == "x_hits_total 0"


def test_refusals() -> None:
    cache = make()
    lease = cache.acquire(A[:10])
    cases: Sequence[tuple[int, int, str]] = [
        (6, 1, "position is 6, want a multiple of 4, the unit"),
        (0, 0, "position is 0, want an integer of at least 1"),
        (12, 3, "position is 12, want one past 0, which the lease holds, and at most 10"),
        (8, 1, "blocks has 1 handles, want one for each unit of 4 tokens from 0 to 8"),
    ]
    for position, blocks, message in cases:
        with pytest.raises(ValueError, match=message):
            cache.insert(lease, position, checkpoint=0, blocks=[0] * blocks)
    store(cache, lease, 4, "a")
    with pytest.raises(ValueError, match="position is 4, want one past 4"):
        cache.insert(lease, 4, checkpoint=0, blocks=[])
    with pytest.raises(ValueError, match="lease is of another PrefixCache"):
        make().release(lease)
    cache.release(lease)
    assert (lease.position, lease.checkpoint, lease.blocks) == (0, None, [])
    for call in (lambda: cache.release(lease), lambda: store(cache, lease, 8, "a")):
        with pytest.raises(ValueError, match="lease was released already"):
            call()
    with pytest.raises(ValueError, match=r"tokens\[1\] is -2, want at least 0"):
        cache.acquire([1, -2])
    with pytest.raises(ValueError, match="tokens is a JAX array"):
        cache.acquire(jnp.arange(3))
    with pytest.raises(ValueError, match="max_tokens is -1"):
        cache.acquire([1], max_tokens=-1)
    with pytest.raises(ValueError, match="nbytes is -1"):
        cache.evict(-1)
    for name in ("unit", "checkpoint_bytes", "block_bytes", "budget_bytes"):
        sizes = {"unit": 1, "checkpoint_bytes": 1, "block_bytes": 1, "budget_bytes": 1, name: -1}
        with pytest.raises(ValueError, match=f"{name} is -1"):
            PrefixCache(**sizes)
