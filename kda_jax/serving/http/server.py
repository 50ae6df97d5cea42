"""The process: uvicorn around the application, and an end that loses no request."""

from __future__ import annotations

import asyncio
import logging
import socket
from types import FrameType

import uvicorn

from ..engine import Engine
from .app import make_app
from .completions import Service

_log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Serves until SIGTERM or SIGINT: then it refuses new requests with 503, finishes those it has,
    and `run` returns. A second signal ends it at once.

    grace: seconds after the last token that clients get to read it, and to finish a request that
    they began to send. Without an end to it, one that does neither would keep the process alive.
    """

    def __init__(self, service: Service, host: str, port: int, *, grace: int = 30) -> None:
        # log_config: the process decides where logs go, not a library in it.
        config = uvicorn.Config(
            make_app(service),
            host=host,
            port=port,
            log_config=None,
            lifespan="off",
            timeout_graceful_shutdown=grace,
        )
        super().__init__(config)
        self._engine: Engine = service.engine
        self._name = service.model_name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Says where it listens: port 0 is any free one."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"{self._name} is served at http://{shown}:{port}", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal; it may come in the middle of anything, so the loop does the work."""
        if self._loop is None or self._ending is not None:
            super().handle_exit(sig, frame)
        else:
            self._loop.call_soon_threadsafe(self._begin_to_end)

    def _begin_to_end(self) -> None:
        if self._ending is None:
            _log.warning("no new requests; those that run are finished")
            self._engine.drain()
            self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        await asyncio.to_thread(self._engine.join)
        self.should_exit = True  # uvicorn sends what is left to send, and closes
