"""Whether the pools fit the device, asked before they are made: afterwards nobody can say much.

A device that has too little refuses the one array that was too much, by its bytes; a host may end
the process instead.
"""

from __future__ import annotations

from pathlib import Path

import jax

from .engine_config import EngineConfig, PoolSizes

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")  # of a container with version 2; elsewhere there are no such files
# Counted as in use, and given up when memory is needed: of files, such as weights read before.
_GIVEN_UP = ("active_file", "inactive_file", "slab_reclaimable")
_USED = 0.8  # of what is free, by the pools that are proposed: the steps need memory, too


def free_bytes(device: jax.Device) -> int | None:
    """What can be allocated there now; None: unknown."""
    try:
        stats = device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:  # a plugin without them
        stats = {}
    if limit := stats.get("bytes_limit"):  # 0: an allocator without a limit of its own
        return max(0, limit - stats.get("bytes_in_use", 0))
    return _host_free() if device.platform == "cpu" else None


def bytes_text(count: float) -> str:
    """As people read it: 1.5 GiB."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def check_pools(config: EngineConfig, sizes: PoolSizes, device: jax.Device) -> None:
    """Refuses pools that are larger than what is free.

    Raises:
      MemoryError: names the arguments, what they take, what is free, and what would fit.
    """
    free = free_bytes(device)
    if free is None or sizes.total_bytes <= free:
        return
    room = int(free * _USED)
    has = f"{device.platform} has {bytes_text(free)} free"
    live = sizes.live_bytes
    if live <= room and sizes.cache_bytes:
        fits = max(0, room - live) >> 20
        raise MemoryError(
            f"cache_bytes is {config.cache_bytes} ({bytes_text(config.cache_bytes)}), but {has} and"
            f" the {config.max_requests} running requests (max_requests) take {bytes_text(live)} of"
            f" it: cache_bytes {fits}M would fit"
        )
    tokens = config.live_blocks * config.block_size
    rows = config.max_requests * sizes.checkpoint_bytes
    needs = (
        f"states of {config.max_requests} requests take {bytes_text(rows)} and {tokens} tokens"
        f" {bytes_text(live - rows)}, but {has}"
    )
    fits = max(0, room - rows) // max(1, sizes.block_bytes) * config.block_size
    if config.live_tokens is not None and config.max_model_len <= fits < config.live_tokens:
        raise MemoryError(
            f"live_tokens is {config.live_tokens}: {needs}; live_tokens {fits} would fit, with"
            " cache_bytes 0"
        )
    raise MemoryError(
        f"max_requests is {config.max_requests} and max_model_len {config.max_model_len}: {needs};"
        f" {_fewer(config, sizes, room)}"
    )


def _fewer(config: EngineConfig, sizes: PoolSizes, room: int) -> str:
    """What fits with no prefix cache beside it: requests of that length, or a shorter one."""
    most = room // (sizes.checkpoint_bytes + config.table_width * sizes.block_bytes)
    if most:
        return f"max_requests {most} would fit, with cache_bytes 0"
    blocks = max(0, room - sizes.checkpoint_bytes) // max(1, sizes.block_bytes)
    if not blocks:
        return "not even one request of one block fits"
    return f"max_requests 1 and max_model_len {blocks * config.block_size} would fit"


def _host_free() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
        available = next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(x.split() for x in (_CGROUP / "memory.stat").read_text().splitlines())
        kept = sum(int(stat.get(name, 0)) for name in _GIVEN_UP)
    except (OSError, ValueError):  # no limit reads "max"
        return available
    return max(0, min(available, limit - used + kept))
