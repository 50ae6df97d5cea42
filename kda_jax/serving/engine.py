"""The engine: one thread that plans steps, submits them and hands out what they sampled.

While the device runs a step, the thread plans and submits the next one; only then does it wait for
the first one's tokens. Any thread may submit and cancel requests; what they get is called back from
the engine's thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol

from ..grid import Array
from .cache_stats import CacheStats
from .engine_config import EngineConfig, PoolSizes
from .pools import Pools
from .request import Output, Request, SamplingParams, prompt_of
from .running import StepPlan
from .scheduler import Scheduler, SchedulerStats

_log = logging.getLogger(__name__)
State = Literal["new", "running", "draining", "closed", "failed"]
_IN_FLIGHT = 1  # steps whose tokens the host has not seen when it submits another one


class EngineBusyError(RuntimeError):
    """As many requests wait as may; try again later."""


class EngineClosedError(RuntimeError):
    """The engine takes no more requests; says why."""


class Device(Protocol):
    """What the engine asks of the device. Called by the engine's thread alone."""

    def submit(self, plan: StepPlan) -> Any:
        """Starts a step behind those submitted before, without waiting; returns a handle."""

    def fetch(self, handle: Any) -> tuple[Array, Array]:
        """Waits for a step; the tokens of its decodes [D] and of its parts [N]."""


class Engine:
    """See the module's docstring. ``with Engine(...) as engine`` starts it, and drains at the end.

    Args:
      device: runs the steps.
      config: the sizes.
      sizes: of the device's pools.
      vocab_size: of the model.
      eos: tokens that end a continuation.
    """

    def __init__(
        self,
        device: Device,
        config: EngineConfig,
        sizes: PoolSizes,
        *,
        vocab_size: int,
        eos: Sequence[int] = (),
    ) -> None:
        self.config, self.sizes = config, sizes
        self._device, self._vocab_size = device, vocab_size
        self._pools = Pools(sizes)
        self._scheduler = Scheduler(config, self._pools, eos)
        self._wake = threading.Condition()  # guards what follows
        self._state: State = "new"
        self._problem = ""
        self._arrived: list[Request] = []
        self._cancelled: list[Request] = []
        self._calls: list[tuple[Callable[[], Any], Future]] = []
        self._waiting = 0
        self._stats = self._scheduler.stats()
        self._thread = threading.Thread(target=self._run, name="kda-engine", daemon=True)

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.drain()
        self.join()

    def start(self) -> None:
        """Starts the thread; once."""
        with self._wake:
            if self._state != "new":
                raise RuntimeError(f"the engine is {self._state}: start it once")
            self._state = "running"
        self._thread.start()

    @property
    def state(self) -> State:
        """Where it stands."""
        return self._state

    @property
    def problem(self) -> str:
        """What made it fail."""
        return self._problem

    def submit(
        self,
        prompt: Any,
        params: SamplingParams,
        on_output: Callable[[Output], None],
        *,
        extra_keys: Sequence[str | bytes | int] = (),
    ) -> Request:
        """Queues a prompt.

        Args:
          prompt: token numbers, at least one, integers on the host.
          params: how to go on from it.
          on_output: called by the engine's thread for every token, in order, and at the end; it
            must not block.
          extra_keys: what changes the states beside the tokens: `chain_hashes`.

        Raises:
          ValueError: naming the argument, the value and what is allowed.
          EngineBusyError: too many requests wait.
          EngineClosedError: the engine drains, has ended or has failed.
        """
        tokens = prompt_of(prompt, self._vocab_size)
        for i, token in enumerate(params.stop_token_ids):
            if token >= self._vocab_size:  # it would never come: surely a mistake
                raise ValueError(
                    f"stop_token_ids[{i}] is {token}, want a token in 0..{self._vocab_size - 1}"
                )
        self._scheduler.check(tokens.size, params.max_tokens)
        request = Request(tokens, params, on_output, tuple(extra_keys))
        with self._wake:
            self._refuse_if_closed()
            if self._waiting + len(self._arrived) >= self.config.max_waiting:
                raise EngineBusyError(
                    f"{self.config.max_waiting} requests wait already (max_waiting): try again"
                )
            self._arrived.append(request)
            self._wake.notify()
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request; it gets an `Output` with "cancelled" unless it has ended already."""
        with self._wake:
            self._cancelled.append(request)
            self._wake.notify()

    def reset_prefix_cache(self) -> Future[int]:
        """Forgets all prefixes; the result is how many checkpoints there were.

        Raises:
          EngineClosedError: the engine has ended.
        """
        return self._call(self._pools.cache.clear)

    def stats(self) -> tuple[SchedulerStats, CacheStats]:
        """Counters and gauges, as of the last step."""
        with self._wake:
            waiting = self._waiting + len(self._arrived)
            stats = dataclasses.replace(self._stats, waiting=waiting)
        return stats, self._pools.cache.stats()

    def drain(self) -> None:
        """Takes no more requests; those it has are run to their end."""
        with self._wake:
            if self._state == "running":
                self._state = "draining"
            self._wake.notify()

    def close(self) -> None:
        """Takes no more requests and cancels those it has."""
        self.drain()
        with contextlib.suppress(EngineClosedError):
            self._call(lambda: self._scheduler.cancel_all("cancelled"))

    def join(self, timeout: float | None = None) -> bool:
        """Waits until a drained or closed engine has ended; False after `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _call(self, call: Callable[[], Any]) -> Future:
        done: Future = Future()
        with self._wake:
            if self._state not in ("running", "draining"):
                raise EngineClosedError(self._why_closed())
            self._calls.append((call, done))
            self._wake.notify()
        return done

    def _refuse_if_closed(self) -> None:
        if self._state != "running":
            raise EngineClosedError(self._why_closed())

    def _why_closed(self) -> str:
        if self._state == "draining":
            return "the engine shuts down and takes no more requests"
        return f"the engine is {self._state}" + (f": {self._problem}" if self._problem else "")

    def _run(self) -> None:
        flight: deque[tuple[StepPlan, Any]] = deque()
        try:
            while self._listen(wait=self._scheduler.idle and not flight):
                self._advance(flight)
        except Exception as error:
            _log.exception("the engine failed")
            self._end("failed", f"{type(error).__name__}: {error}")
        else:
            self._end("closed", "")

    def _advance(self, flight: deque[tuple[StepPlan, Any]]) -> None:
        """Submits a step, if there is one to run, then waits for the oldest if it must."""
        plan = self._scheduler.plan()
        if plan is not None:
            flight.append((plan, self._device.submit(plan)))
            self._scheduler.submitted(plan)
        if flight and (plan is None or len(flight) > _IN_FLIGHT):
            done, handle = flight.popleft()
            self._scheduler.complete(done, *self._device.fetch(handle))
        with self._wake:
            self._stats = self._scheduler.stats()
            self._waiting = self._stats.waiting

    def _listen(self, wait: bool) -> bool:
        """Takes in what other threads want; False when all is done and nothing will come."""
        with self._wake:
            while wait and not (self._arrived or self._cancelled or self._calls):
                if self._state != "running":
                    return False
                self._wake.wait()
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
            calls, self._calls = self._calls, []
            self._waiting += len(arrived)
        for request in arrived:
            self._scheduler.add(request)
        for request in cancelled:
            self._scheduler.cancel(request)
        for call, done in calls:
            if done.set_running_or_notify_cancel():
                done.set_result(call())
        return True

    def _end(self, state: State, problem: str) -> None:
        with self._wake:
            self._state, self._problem = state, problem
            arrived, self._arrived = self._arrived, []
            calls, self._calls = self._calls, []
        for request in arrived:
            self._scheduler.add(request)
        self._scheduler.cancel_all("error")
        for _, done in calls:
            if done.set_running_or_notify_cancel():
                done.set_exception(EngineClosedError(self._why_closed()))
        with self._wake:
            self._stats = self._scheduler.stats()
            self._waiting = 0
