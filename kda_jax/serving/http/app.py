"""The ASGI application: routes, and errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import logging

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..engine import EngineClosedError
from .completions import Service, completions
from .protocol import RequestError

_log = logging.getLogger(__name__)
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def make_app(service: Service) -> ASGIApp:
    """The application; its engine must have been started by the time of the first request."""
    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
    ]
    handlers = {RequestError: _on_request_error, HTTPException: _on_http, Exception: _on_any}
    app = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]
    app.state.service = service
    return _Counted(app, service, {route.path for route in routes})


async def models(request: Request) -> Response:
    """The one model, with what decides which part of a prompt is read from the cache."""
    service: Service = request.app.state.service
    config, rule = service.engine.config, service.engine.sizes.rule
    entry = {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "kda_jax",
        "max_model_len": config.max_model_len,
        "prefix_cache": {
            "enabled": config.cache_bytes > 0,
            "block_size": config.block_size,
            "drop_draft_block": config.drop_draft_block,
            "checkpoints": rule.enabled,
        },
    }
    return JSONResponse({"object": "list", "data": [entry]})


async def reset_prefix_cache(request: Request) -> Response:
    """Forgets all prefixes."""
    service: Service = request.app.state.service
    try:
        done = service.engine.reset_prefix_cache()
        cleared = await asyncio.wrap_future(done)
    except EngineClosedError as error:
        raise RequestError(str(error), status=503, kind="service_unavailable") from None
    return JSONResponse({"cleared": cleared})


async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    service: Service = request.app.state.service
    return PlainTextResponse(
        service.metrics.text(service.engine), headers={"content-type": _METRICS_TYPE}
    )


async def health(request: Request) -> Response:
    """200 while requests are taken, else 503."""
    engine = request.app.state.service.engine
    body = {"status": "ok" if engine.state == "running" else engine.state}
    if engine.problem:
        body["problem"] = engine.problem
    return JSONResponse(body, status_code=200 if engine.state == "running" else 503)


async def _on_request_error(_: Request, error: RequestError) -> Response:
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


async def _on_http(request: Request, error: HTTPException) -> Response:
    path = request.url.path
    path = path if len(path) <= 60 else path[:57] + "..."
    where = f"{request.method} {path}"
    message = {404: f"there is no {path}", 405: f"{where} is not supported"}
    shown = RequestError(message.get(error.status_code, error.detail), status=error.status_code)
    return JSONResponse(shown.body(), status_code=error.status_code, headers=error.headers)


async def _on_any(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    shown = RequestError(f"the server failed: {type(error).__name__}", kind="server_error")
    return JSONResponse(shown.body(), status_code=500)


class _Counted:
    """Counts the responses of the application by path and status."""

    def __init__(self, app: ASGIApp, service: Service, paths: set[str]) -> None:
        self._app, self._service, self._paths = app, service, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Clients choose other paths, and each label lives for ever.
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._service.metrics.responses.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)
