"""POST /v1/completions: from the body to the engine, and its tokens to the client."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ..engine import Engine, EngineBusyError, EngineClosedError
from ..request import Output
from ..request import Request as EngineRequest
from .metrics import Metrics
from .protocol import CompletionRequest, RequestError, as_request_error
from .text import TextStream, Tokenizer

# Of a body that is too long so much more is read, and dropped: a connection that is closed while
# the client still sends is reset, and the client would not see the answer that says why.
_MOST_UNREAD = 16 * 2**20


@dataclasses.dataclass(frozen=True)
class Service:
    """What the handlers share.

    Attributes:
      engine: started.
      model_name: as clients name it.
      tokenizer: None: prompts are token numbers, and choices hold the tokens.
      max_body: bytes of a request body, at most.
      created: when the server started, seconds since 1970.
    """

    engine: Engine
    model_name: str
    tokenizer: Tokenizer | None
    max_body: int
    metrics: Metrics = dataclasses.field(default_factory=Metrics)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))


async def completions(request: Request) -> Response:
    """The handler."""
    service: Service = request.app.state.service
    wanted = CompletionRequest.parse(await _body(request, service.max_body))
    if wanted.model not in (None, service.model_name):
        raise RequestError(
            f"model is {wanted.model!r}, want {service.model_name!r}, the only one here",
            status=404,
            param="model",
        )
    run = await _Run.start(service, wanted)
    if wanted.stream:
        return StreamingResponse(_events(run, request), media_type="text/event-stream")
    async with _cancelled_with(run, request):
        text = "".join([piece async for piece in run.pieces()])
    return JSONResponse(run.body([run.choice(text, run.tokens, run.reason)], usage=True))


async def _body(request: Request, most: int) -> bytes:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise RequestError(f"content-encoding is {encoding}, want a body as it is", status=415)
    raw, size = bytearray(), 0
    try:
        async for part in request.stream():
            size += len(part)
            if size <= most:
                raw += part
            elif size > most + _MOST_UNREAD:
                break
    except ClientDisconnect:
        raise RequestError("the client is gone", status=499) from None
    if size > most:
        raise RequestError(f"the body has more than {most} bytes, the server's limit", status=413)
    return bytes(raw)


async def _events(run: _Run, request: Request) -> AsyncIterator[str]:
    """Server-sent events, as OpenAI's API has them."""
    async with _cancelled_with(run, request):
        sent = 0
        try:
            async for piece in run.pieces():
                tokens, sent = run.tokens[sent:], len(run.tokens)
                if piece or tokens:
                    yield _event(run.body([run.choice(piece, tokens, run.reason)]))
        except RequestError as error:  # the status is sent already
            yield _event(error.body())
            return
        if run.wanted.include_usage:
            yield _event(run.body([], usage=True))
        yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


@contextlib.asynccontextmanager
async def _cancelled_with(run: _Run, request: Request) -> AsyncIterator[None]:
    """Cancels the run when the client goes away, and whenever the block is left before its end."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        run.client_is_gone()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        run.cancel()


class _Run:
    """One request in the engine, seen from the event loop."""

    def __init__(self, service: Service, wanted: CompletionRequest, prompt_tokens: int) -> None:
        self.service, self.wanted = service, wanted
        self.tokens: list[int] = []
        self.reason: str | None = None
        self._prompt_tokens = prompt_tokens
        self._name = f"cmpl-{uuid.uuid4().hex}"
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()
        self._request: EngineRequest | None = None
        self._gone = False

    @classmethod
    async def start(cls, service: Service, wanted: CompletionRequest) -> _Run:
        """Submits the prompt.

        Raises:
          RequestError: it is refused; 400, 429 where too many wait, 503 where the engine ends.
        """
        prompt = wanted.prompt
        if isinstance(prompt, str):
            if service.tokenizer is None:
                raise RequestError(
                    "prompt is text, but the model's folder has no tokenizer: give token numbers",
                    param="prompt",
                )
            # A long text takes a while; the others' tokens must not wait for it.
            prompt = await run_in_threadpool(service.tokenizer.encode, prompt)
        elif wanted.stop and service.tokenizer is None:
            raise RequestError("stop needs a tokenizer: use stop_token_ids", param="stop")
        run = cls(service, wanted, len(prompt))
        loop, see = asyncio.get_running_loop(), service.metrics.watch()

        def deliver(output: Output) -> None:  # in the engine's thread
            see(output)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(run._outputs.put_nowait, output)

        try:
            run._request = service.engine.submit(prompt, wanted.params, deliver)
        except ValueError as error:
            raise as_request_error(error) from None
        except EngineBusyError as error:
            raise RequestError(
                str(error), status=429, kind="rate_limit_error", headers={"Retry-After": "1"}
            ) from None
        except EngineClosedError as error:
            raise RequestError(
                str(error), status=503, kind="service_unavailable", headers={"Retry-After": "5"}
            ) from None
        return run

    def cancel(self) -> None:
        """Ends it in the engine, if it has not ended."""
        if self._request is not None and self.reason is None:
            self.service.engine.cancel(self._request)

    def client_is_gone(self) -> None:
        """Nobody reads what would come."""
        self._gone = True
        self.cancel()

    async def pieces(self) -> AsyncIterator[str]:
        """The text as it comes; `tokens` and `reason` are up to date at each piece.

        Raises:
          RequestError: the engine failed, or it was closed.
        """
        stream = TextStream(self.service.tokenizer, self.wanted.stop)
        while self.reason is None:
            token, reason = await self._outputs.get()
            if reason == "error":
                problem = f"the engine failed: {self.service.engine.problem}"
                raise RequestError(problem, status=500, kind="server_error")
            if reason == "cancelled":
                problem = "the client is gone" if self._gone else "the server shuts down"
                raise RequestError(
                    problem, status=499 if self._gone else 503, kind="service_unavailable"
                )
            assert token is not None
            self.tokens.append(token)
            # A token that ends the text is not part of it.
            piece = stream.push(token) if reason != "stop" else ""
            if reason is not None:
                piece += stream.finish()
            if stream.stopped:
                self.cancel()
                reason = "stop"
            self.reason = reason
            yield piece

    def choice(self, text: str, tokens: list[int], reason: str | None) -> dict[str, Any]:
        """The one choice of a response or of a chunk of it."""
        made = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        if self.wanted.return_token_ids or self.service.tokenizer is None:
            made["token_ids"] = tokens
        return made

    def body(self, choices: list[dict[str, Any]], *, usage: bool = False) -> dict[str, Any]:
        """A response, or a chunk."""
        made = {
            "id": self._name,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.service.model_name,
            "choices": choices,
        }
        if usage:
            assert self._request is not None
            made["usage"] = {
                "prompt_tokens": self._prompt_tokens,
                "completion_tokens": len(self.tokens),
                "total_tokens": self._prompt_tokens + len(self.tokens),
                "prompt_tokens_details": {"cached_tokens": self._request.cached_tokens or 0},
            }
        return made
