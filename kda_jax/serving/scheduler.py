"""Which requests run, and what each step does: NumPy and plain Python on the host.

A step takes one token of every request that decodes, and spends the rest of the token budget on
prompts in the order of arrival. It is planned while the device still runs the step before, so its
counts rest on what is planned, and a request that turns out to have ended takes part in one step
too many: what that samples is dropped. Rows and blocks can change owners at once, because steps
run in the order in which they were submitted.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from .engine_config import CHUNK, EngineConfig
from .free_list import FreeList
from .lease import Lease
from .plan import CheckpointPlan
from .pools import Pools
from .positions import plan_checkpoints
from .request import FinishReason, Output, Request
from .running import Decode, Part, Running, StepPlan
from .stats import Stats, counter, gauge


@dataclasses.dataclass
class SchedulerStats(Stats):
    """Counters since the start, and gauges of now."""

    steps: int = counter("Steps submitted to the device.")
    prefill_steps: int = counter("Steps that ran a part of a prompt.")
    prompt_tokens: int = counter("Tokens of prompts that steps ran.")
    decode_tokens: int = counter("Tokens that decode rows ran.")
    generated_tokens: int = counter("Tokens delivered to requests.")
    checkpoints: int = counter("States inside prompts that steps exported.")
    split_steps: int = counter("Prefills that ended a step early so that a state could be kept.")
    finished: int = counter("Requests that ended by a stop token or by their length.")
    cancelled: int = counter("Requests that were cancelled.")
    failed: int = counter("Requests that ended in an error.")
    waiting: int = gauge("Requests that wait for a place.")
    running: int = gauge("Requests that run.")
    held_blocks: int = gauge("Blocks of the MLA pools that running requests use.")
    free_blocks: int = gauge("Blocks of the MLA pools that nobody holds.")
    free_rows: int = gauge("Rows of the KDA pools that nobody holds.")


class Scheduler:
    """See the module's docstring. The engine's thread owns it.

    Args:
      config: the sizes.
      pools: rows, blocks and the prefix cache.
      eos: tokens that end any continuation.
    """

    def __init__(self, config: EngineConfig, pools: Pools, eos: Sequence[int] = ()) -> None:
        self.config, self.pools = config, pools
        self._rule = pools.sizes.rule
        self._eos = frozenset(eos)
        self._slots = FreeList(config.max_requests)
        self._waiting: deque[Request] = deque()
        self._running: dict[Request, Running] = {}
        self._stats = SchedulerStats()

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self._waiting and not self._running

    def stats(self) -> SchedulerStats:
        """A copy of the counters."""
        return dataclasses.replace(
            self._stats,
            waiting=len(self._waiting),
            running=len(self._running),
            free_blocks=self.pools.free_blocks,
            free_rows=self.pools.free_rows,
        )

    def check(self, prompt_len: int, max_tokens: int) -> None:
        """Refuses what can never run.

        Raises:
          ValueError: the prompt and the new tokens together are longer than max_model_len.
        """
        total = prompt_len + max_tokens
        if total > self.config.max_model_len:
            raise ValueError(
                f"max_tokens is {max_tokens} after a prompt of {prompt_len} tokens, {total}"
                f" together; want at most {self.config.max_model_len}, the server's max_model_len"
            )

    def add(self, request: Request) -> None:
        """Appends a request to those that wait."""
        self._waiting.append(request)

    def cancel(self, request: Request, reason: FinishReason = "cancelled") -> None:
        """Ends a request where it is; nothing if it has ended."""
        if request.finished:
            return
        if request in self._running:
            self._end(self._running[request])
        else:
            self._waiting.remove(request)
        self._stats.cancelled += reason == "cancelled"
        self._stats.failed += reason == "error"
        request.deliver(Output(None, reason))

    def cancel_all(self, reason: FinishReason) -> None:
        """`cancel` for every request."""
        for request in [*self._running, *self._waiting]:
            self.cancel(request, reason)

    def plan(self) -> StepPlan | None:
        """The next step; None if no request has anything to run until a step comes back.

        Submit it, then call `submitted`, before the next one is planned.
        """
        decodes = []
        for running in self._running.values():
            if running.decodes:
                decodes.append(Decode(running, running.computed, running.live_row))
                running.computed += 1
                running.sampled += 1
        parts = self._parts(self.config.budget - len(decodes))
        if not decodes and not parts:
            return None
        return StepPlan(tuple(decodes), tuple(parts), self._checkpoints(parts, decodes))

    def submitted(self, plan: StepPlan) -> None:
        """Offers the states that the step writes to the prefix cache; counts the step."""
        stats = self._stats
        stats.steps += 1
        stats.prefill_steps += bool(plan.parts)
        stats.decode_tokens += len(plan.decodes)
        stats.checkpoints += plan.checkpoints.num_checkpoints
        for i, part in enumerate(plan.parts):
            running = part.running
            running.request.steps += 1
            stats.prompt_tokens += part.length
            for position, row in plan.checkpoints.offered(i):
                blocks = self._blocks(running, position)
                assert running.lease is not None
                if self.pools.store(running.lease, position, row, blocks):
                    running.owned = position // self.config.block_size
            if self._splits(running, part.start) == part.stop:
                self._keep_live_row(running, part.stop)

    def complete(self, plan: StepPlan, decoded: np.ndarray, prefilled: np.ndarray) -> None:
        """Delivers what a step sampled.

        Args:
          plan: of the step.
          decoded: [D], the tokens of its decodes. prefilled: [N], those of its parts; only the
            last part of a prompt has one.
        """
        pairs = [(d.running, decoded[i]) for i, d in enumerate(plan.decodes)]
        pairs += [(p.running, prefilled[i]) for i, p in enumerate(plan.parts) if p.last]
        for running, token in pairs:
            if not running.ended:
                self._deliver(running, int(token))

    def _deliver(self, running: Running, token: int) -> None:
        request, params = running.request, running.request.params
        running.delivered += 1
        self._stats.generated_tokens += 1
        ends = token in params.stop_token_ids or (not params.ignore_eos and token in self._eos)
        reason: FinishReason | None = "stop" if ends else None
        if reason is None and running.delivered == params.max_tokens:
            reason = "length"
        if reason is not None:
            self._end(running)
            self._stats.finished += 1
        request.deliver(Output(token, reason))

    def _parts(self, room: int) -> list[Part]:
        """Parts of prompts for that many tokens; admits requests while there is a place."""
        parts: list[Part] = []
        for running in self._running.values():
            if not running.prefilled:
                room -= self._append(parts, running, room)
        while self._waiting and room >= CHUNK and len(parts) < self.config.max_prefills:
            running_or_none = self._admit(self._waiting[0])
            if running_or_none is None:
                break
            self._waiting.popleft()
            room -= self._append(parts, running_or_none, room)
        return parts

    def _append(self, parts: list[Part], running: Running, room: int) -> int:
        """Appends the next part of a prompt, if there is room; returns its length."""
        start, left = running.computed, running.prompt_len - running.computed
        length = min(left, room)
        if length < left:  # whole chunks, which a checkpoint's alignment may widen
            length -= length % math.lcm(CHUNK, self._rule.alignment or 1)
        if length <= 0 or len(parts) == self.config.max_prefills:
            return 0
        split = self._splits(running, start)
        if start < split < start + length:
            length = split - start
            self._stats.split_steps += 1
        last = start + length == running.prompt_len
        parts.append(Part(running, start, length, running.source, running.live_row, last))
        running.computed += length
        running.sampled += last
        running.source = running.live_row
        return length

    def _splits(self, running: Running, start: int) -> int:
        """Where a step that starts there must end, so that its live state can be kept; 0: not."""
        if running.lease is None or self._rule.enabled:
            return 0
        position = self._rule.last_position(running.prompt_len)
        return position if position > max(start, running.lease.cached_tokens) else 0

    def _checkpoints(self, parts: list[Part], decodes: list[Decode]) -> CheckpointPlan:
        stops = [part.stop for part in parts]
        starts = [part.start for part in parts]
        prompts = [part.running.prompt_len for part in parts]
        plan = plan_checkpoints(
            self._rule, stops, starts, prompt_lens=prompts, caching=self.pools.caching
        )
        if not plan.num_checkpoints:
            return plan
        rows = [self.pools.take_checkpoint_row() for _ in range(plan.num_checkpoints)]
        in_use = {decode.row for decode in decodes}
        for part in parts:
            in_use |= {part.source, part.row}
        return plan.with_rows([-1 if row is None else row for row in rows], in_use=sorted(in_use))

    def _admit(self, request: Request) -> Running | None:
        """Gives a request a place; None while there is none."""
        total = int(request.prompt.size) + request.params.max_tokens
        num_blocks = -(-total // self.config.block_size)
        held = self._stats.held_blocks + num_blocks
        if not len(self._slots) or held > self.config.live_blocks:
            return None
        lease: Lease | None = None
        cached: list[int] = []
        if self.pools.caching:
            limit = self._rule.last_position(int(request.prompt.size))
            lease = self.pools.cache.acquire(
                request.prompt, extra_keys=request.extra_keys, max_tokens=limit
            )
            cached = lease.blocks
        table = np.zeros(self.config.table_width, np.int32)
        table[: len(cached)] = cached
        table[len(cached) : num_blocks] = self.pools.take_blocks(num_blocks - len(cached))
        row = self.pools.take_live_row()
        request.cached_tokens = lease.cached_tokens if lease else 0
        running = Running(
            request=request,
            slot=self._slots.take(),
            lease=lease,
            table=table,
            num_blocks=num_blocks,
            owned=len(cached),
            live_row=row,
            source=row if lease is None or lease.checkpoint is None else lease.checkpoint,
            computed=request.cached_tokens,
        )
        self._stats.held_blocks = held
        self._running[request] = running
        return running

    def _keep_live_row(self, running: Running, position: int) -> None:
        """The cache takes the live row; the request goes on in another one."""
        assert running.lease is not None
        blocks = self._blocks(running, position)
        if self.pools.store_live_row(running.lease, position, running.live_row, blocks):
            running.owned = position // self.config.block_size
            running.source, running.live_row = running.live_row, self.pools.take_live_row()

    def _blocks(self, running: Running, position: int) -> list[int]:
        """The blocks that a checkpoint there adds to the prefix which the lease holds."""
        return running.table[running.owned : position // self.config.block_size].tolist()

    def _end(self, running: Running) -> None:
        """Gives up all that a request holds."""
        running.ended = True
        del self._running[running.request]
        self._slots.give_back([running.slot])
        self.pools.give_back_live_row(running.live_row)
        self.pools.give_back_blocks(running.table[running.owned : running.num_blocks].tolist())
        if running.lease is not None:
            self.pools.cache.release(running.lease)
        self._stats.held_blocks -= running.num_blocks
