"""Compiling ahead of serving: one call per capacity that steps will have.

With metadata from ``capacity="bucket"`` a server meets a bounded set of capacities, and XLA
compiles one program for each. `warmup` meets them first::

    jax.config.update("jax_compilation_cache_dir", "/var/cache/kda")        # if it is to last
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)      # the native kernel
    kda_jax.warmup(step, max_tokens=8192, max_sequences=64)                 #   compiles in less
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .metadata import Capacity, ChunkMetadata
from .ops import chunk_kda_prefill
from .types import StateLayout

Source = Literal["compiled", "persistent cache", "memory"]
_COMPILE = "/jax/core/compile/backend_compile_duration"
_HIT = "/jax/compilation_cache/cache_hits"


class WarmProgram(NamedTuple):
    """One capacity (or `serving` Bucket): how long its first step took, and whence it came."""

    capacity: Any
    seconds: float
    source: Source


class WarmupReport(NamedTuple):
    """What `warmup` did.

    Attributes:
      programs: in the order in which they ran.
      reachable: how many capacities there are within the maxima, ``len(programs)`` or more.
    """

    programs: tuple[WarmProgram, ...]
    reachable: int

    @property
    def seconds(self) -> float:
        """Of all programs."""
        return sum(program.seconds for program in self.programs)

    def count(self, source: Source) -> int:
        """How many programs came from there."""
        return sum(program.source == source for program in self.programs)

    def __str__(self) -> str:
        places: tuple[Source, ...] = ("compiled", "persistent cache", "memory")
        origin = ", ".join(f"{self.count(p)} {p}" for p in places if self.count(p))
        done = f"{len(self.programs)} of {self.reachable} capacities"
        return f"{done} in {self.seconds:.1f} s ({origin})"


def warmup(
    step: Callable[[ChunkMetadata], Any] | None = None,
    *,
    max_tokens: int,
    max_sequences: int = 1,
    max_checkpoints: int = 0,
    chunk_size: int = 64,
    limit: int = 64,
    heads: int = 1,
    K: int = 128,
    V: int = 128,
    dtype: Any = "bfloat16",
    lower_bound: float | None = -5.0,
    initial_state: bool = True,
    state_layout: StateLayout = "vk",
    backend: str = "auto",
    groups: int | None = None,
    progress: bool = True,
) -> WarmupReport:
    """Compiles and runs the programs of the capacities that a server will meet.

    Args:
      step: called with each `ChunkMetadata`; makes inputs for its capacity, calls the program that
        will serve, say a jitted model, and returns the results. A program is compiled for the
        types and shapes of *all* its arguments, so give it what serving gives it. None: the
        operator itself, called outside of jit, in the way that the arguments from ``heads`` on
        describe; for any other program, ``step`` is needed.
      max_tokens, max_sequences, max_checkpoints: of one step.
      chunk_size: of the metadata.
      limit: at most so many capacities; the largest and the extremes come first.
      heads, K, V, dtype, lower_bound, state_layout, backend, groups: as in `chunk_kda_prefill`.
      initial_state: whether calls pass initial_state and has_initial_state.
      progress: a bar on stderr, where that is a terminal.

    Returns:
      `WarmupReport`; ``print`` it.

    Raises:
      ValueError: a maximum or the limit is too small.
      Whatever the step raises.
    """
    found = buckets(max_tokens, max_sequences, max_checkpoints, chunk_size)
    if limit < 1:
        raise ValueError(f"limit is {limit}, want at least 1")
    if step is None:
        step = functools.partial(
            _call,
            H=heads,
            K=K,
            V=V,
            dtype=dtype,
            initial_state=initial_state,
            options={
                "lower_bound": lower_bound,
                "state_layout": state_layout,
                "backend": backend,
                "groups": groups,
            },
        )
    from .cli.screen import progress as bar  # rich only where it is used

    programs = []
    with bar(hidden=not progress) as shown:
        task = shown.add_task("warmup", total=min(limit, len(found)))
        for capacity in found[:limit]:
            shown.update(task, description=_describe(capacity))
            programs.append(_run(step, capacity, chunk_size))
            shown.update(task, advance=1)
    return WarmupReport(tuple(programs), len(found))


def buckets(
    max_tokens: int, max_sequences: int, max_checkpoints: int = 0, chunk_size: int = 64
) -> list[Capacity]:
    """All capacities that ``capacity="bucket"`` makes within these maxima.

    Ordered so that the first of them are the most useful ones: for each number of tokens, largest
    first, the most sequences without checkpoints; then one sequence, or the most checkpoints; then
    what lies between.

    Raises:
      ValueError: a maximum is too small.
    """
    for name, value, low in (
        ("max_tokens", max_tokens, 1),
        ("max_sequences", max_sequences, 1),
        ("max_checkpoints", max_checkpoints, 0),
    ):
        if value < low:
            raise ValueError(f"{name} is {value}, want at least {low}")
    largest = Capacity.bucket(max_tokens, max_sequences, max_checkpoints, chunk_size)
    tokens = [n for power in _powers(64, largest.tokens) for n in (power, power * 3 // 2)]
    tokens = sorted((n for n in tokens if n <= largest.tokens), reverse=True)
    sequences = [largest.sequences, *_powers(1, largest.sequences // 2)]
    checkpoints = [0]
    if largest.checkpoints:
        checkpoints += [largest.checkpoints, *_powers(1, largest.checkpoints // 2)]
    order = [
        (i + j, -t, Capacity.bucket(t, n, m, chunk_size))
        for i, n in enumerate(sequences)
        for j, m in enumerate(checkpoints)
        for t in tokens
        if max(n, m) <= t
    ]
    return [capacity for _, _, capacity in sorted(order, key=lambda each: each[:2])]


def _powers(first: int, last: int) -> list[int]:
    found = []
    while first <= last:
        found.append(first)
        first *= 2
    return found


def metadata_for(capacity: Capacity, chunk_size: int = 64) -> ChunkMetadata:
    """A full batch of that capacity: sequences of equal length, checkpoints spread over them."""
    lengths = _shares(capacity.tokens, capacity.sequences)
    offsets = [
        np.linspace(1, length, count).astype(int).tolist()
        for length, count in zip(
            lengths, _shares(capacity.checkpoints, capacity.sequences), strict=True
        )
    ]
    return ChunkMetadata.from_seq_lens(
        lengths, chunk_size=chunk_size, checkpoint_offsets=offsets, capacity=capacity
    )


def _shares(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]


def _describe(capacity: Capacity) -> str:
    text = f"{capacity.tokens} tokens, {capacity.sequences} sequences"
    return f"{text}, {capacity.checkpoints} checkpoints" if capacity.checkpoints else text


def _run(step: Callable[[ChunkMetadata], Any], capacity: Capacity, chunk_size: int) -> WarmProgram:
    metadata = metadata_for(capacity, chunk_size)
    return WarmProgram(capacity, *timed(lambda: step(metadata)))


def timed(call: Callable[[], Any]) -> tuple[float, Source]:
    """Seconds until the results of a call are there, and where its program came from."""
    counts = _listen()
    before = dict(counts)
    start = time.perf_counter()
    jax.block_until_ready(call())
    seconds = time.perf_counter() - start
    compiled, hits = (counts[event] - before[event] for event in (_COMPILE, _HIT))
    # JAX counts what it takes out of its persistent cache as compiled, too.
    source: Source = "memory"
    if compiled:
        source = "compiled" if compiled > hits else "persistent cache"
    return seconds, source


@functools.cache
def _listen() -> dict[str, int]:
    """Counts, from the first call on, that JAX keeps up to date; there is no stopping it."""
    counts = {_COMPILE: 0, _HIT: 0}

    def count(event: str, *_: Any, **__: Any) -> None:
        if event in counts:
            counts[event] += 1

    jax.monitoring.register_event_listener(count)
    jax.monitoring.register_event_duration_secs_listener(count)
    return counts


def _call(
    metadata: ChunkMetadata,
    *,
    H: int,
    K: int,
    V: int,
    dtype: Any,
    initial_state: bool,
    options: dict[str, Any],
) -> Any:
    T, N = metadata.capacity.tokens, metadata.capacity.sequences

    def zeros(*shape: int, of: Any = dtype) -> Any:  # without a program of their own
        return jax.device_put(np.zeros(shape, jnp.dtype(of)))

    q = zeros(1, T, H, K)
    if initial_state:
        state = (V, K) if options["state_layout"] == "vk" else (K, V)
        options = options | {
            "initial_state": zeros(N, H, *state, of="float32"),
            "has_initial_state": zeros(N, of="bool"),
        }
    heads = (zeros(H, of="float32"), zeros(H, K, of="float32"))
    args = (q, q, zeros(1, T, H, V), q, zeros(1, T, H), *heads)
    return chunk_kda_prefill(*args, metadata=metadata, **options)
