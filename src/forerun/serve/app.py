"""The HTTP application: endpoints, limits, and what happens when a client goes away."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun import __version__
from forerun.errors import ForerunError
from forerun.serve.errors import ApiError, api_error
from forerun.serve.metrics import CONTENT_TYPE, Metrics
from forerun.serve.protocol import (
    LENIENT,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from forerun.serve.service import Answer, Service
from forerun.serve.status import PAGE_FILES, PAGE_HEADERS, page, status

LOG: Final = logging.getLogger("forerun.serve")

_STREAM: Final = "text/event-stream"

_ERROR: Final = {
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {
                    "error": {
                        "type": "object",
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": {"type": ["string", "null"]},
                            "code": {"type": ["string", "null"]},
                        },
                        "required": ["message", "type", "param", "code"],
                    }
                },
                "required": ["error"],
            }
        }
    }
}
_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {"description": "The request can't be answered as it is.", **_ERROR},
    "5XX": {"description": "The server can't answer now, or failed.", **_ERROR},
}
_WHOLE_OR_STREAM: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "The answer, or its events with stream: true.", "content": {_STREAM: {}}}
}


@dataclass(frozen=True)
class Settings:
    """What the server lets in.

    api_keys: what clients must send as a bearer token; empty: nothing. max_body_bytes: of a request. body_seconds: in
    which it has to arrive. lenient: unknown fields are dropped instead of refused.
    """

    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 8 << 20
    body_seconds: float = 30.0
    lenient: bool = False


def create_app(service: Service, metrics: Metrics, settings: Settings | None = None) -> FastAPI:
    """The application around a service whose driver runs and tells `metrics`."""
    settings = settings or Settings()
    app = FastAPI(title="Forerun", version=__version__, docs_url=None, redoc_url=None, responses=_ERRORS)
    app.state.service = service
    app.state.metrics = metrics
    app.add_middleware(Gate, settings=settings)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(ForerunError, _refused)
    app.add_exception_handler(RequestValidationError, _unprocessable)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _broken)
    app.include_router(_ROUTER)
    for path in PAGE_FILES:
        app.add_api_route(path, _page(path), include_in_schema=False)
    return app


async def _refused(_: Request, error: Exception) -> Response:
    return _error_response(api_error(error))


async def _unprocessable(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _error_response(_validation_error(error))


async def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error_response(ApiError(error.status_code, str(error.detail)))


async def _broken(request: Request, error: Exception) -> Response:
    LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _error_response(api_error(error))


# The endpoints are functions of the module, not of `create_app`: FastAPI keeps what it learns of a function for as long
# as the process lives, and with it all that the function refers to.
_ROUTER: Final = APIRouter()


def _service(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def _metrics(request: Request) -> Metrics:
    metrics = request.app.state.metrics
    assert isinstance(metrics, Metrics)
    return metrics


@_ROUTER.get("/health")
async def health(request: Request) -> Response:
    """Whether the engine's thread runs."""
    driver = _service(request).driver
    if not driver.alive or driver.failure is not None:
        raise ApiError(503, "the engine has stopped", kind="server_error")
    return JSONResponse({"status": "ok"})


@_ROUTER.get("/ready")
async def ready(request: Request) -> Response:
    """Whether new requests are taken."""
    if not _service(request).driver.accepting:
        raise ApiError(503, "shutting down", kind="server_error", code="shutting_down")
    return JSONResponse({"status": "ready"})


@_ROUTER.get("/metrics", response_class=PlainTextResponse)
async def metric(request: Request) -> Response:
    """Counts and times for Prometheus."""
    return Response(await asyncio.to_thread(_metrics(request).text), media_type=CONTENT_TYPE)


@_ROUTER.get("/status.json")
async def status_json(request: Request, since: int = 0) -> Response:
    """What the status page shows: now, and each second after `since` (seconds since 1970) that had a step."""
    service, metrics = _service(request), _metrics(request)
    driver = service.driver
    metrics.refresh()
    body = status(driver.engine, metrics.history, service.name, accepting=driver.accepting, since=since)
    return JSONResponse(body, headers={"Cache-Control": "no-store"})


@_ROUTER.get("/v1/models")
async def models(request: Request) -> Response:
    """The model that is served."""
    return JSONResponse({"object": "list", "data": [_model(_service(request))]})


@_ROUTER.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> Response:
    """One model."""
    service = _service(request)
    service.check_model(name)
    return JSONResponse(_model(service))


@_ROUTER.post("/v1/completions", responses=_WHOLE_OR_STREAM)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continues prompts."""
    return await _answer(request, await _service(request).complete(body), bool(body.stream))


@_ROUTER.post("/v1/chat/completions", responses=_WHOLE_OR_STREAM)
async def chat(body: ChatCompletionRequest, request: Request) -> Response:
    """Answers a conversation."""
    return await _answer(request, await _service(request).chat(body), bool(body.stream))


@_ROUTER.post("/v1/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The tokens of a text or a conversation."""
    return JSONResponse(await asyncio.to_thread(_tokenized, _service(request), body))


@_ROUTER.post("/v1/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of tokens."""
    return JSONResponse(await asyncio.to_thread(_detokenized, _service(request), body))


def _page(path: str) -> Callable[[], Awaitable[Response]]:
    text, kind = page(path)

    async def given() -> Response:
        return Response(text, media_type=kind, headers=PAGE_HEADERS)

    return given


async def _answer(request: Request, answer: Answer, stream: bool) -> Response:
    """The answer whole, or as a stream that begins when its first event or error is there."""
    if not stream:
        body = await _unless_gone(request, answer.body(), answer.cancel)
        return Response(status_code=499) if body is None else JSONResponse(body)
    events = answer.events()
    first = await _unless_gone(request, anext(events), answer.cancel)
    if first is None:
        await events.aclose()
        return Response(status_code=499)

    async def all_events() -> AsyncIterator[bytes]:
        try:
            yield first
            async for event in events:
                yield event
        finally:
            answer.cancel()

    return StreamingResponse(all_events(), media_type=_STREAM, headers={"Cache-Control": "no-cache"})


async def _unless_gone(request: Request, work: Awaitable[Any], cancel: Callable[[], None]) -> Any:
    """What `work` gives, or None if the client goes away before; then the work is cancelled."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        cancel()
        return None
    finally:
        for task in (working, leaving):
            task.cancel()
        # A generator that is still running can't be closed.
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(request: Request) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "forerun",
        "max_model_len": service.driver.engine.max_model_len,
    }


def _tokenized(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    tokenizer = service.tokenizer
    if body.messages is not None:
        ids = service.chat_ids(ChatCompletionRequest(messages=body.messages))
    else:
        assert body.prompt is not None
        ids = tokenizer.encode(body.prompt, add_special=body.add_special_tokens)
    found: dict[str, Any] = {
        "count": len(ids), "max_model_len": service.driver.engine.max_model_len, "tokens": ids,
    }  # fmt: skip
    if body.return_token_strs:
        found["token_strs"] = [service.logprobs.text(token) for token in ids]
    return found


def _detokenized(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    service.check_model(body.model)
    return {"prompt": service.decoded(body.tokens, "tokens")}


def _error_response(error: ApiError) -> Response:
    headers = {} if error.retry_after is None else {"Retry-After": str(max(1, round(error.retry_after)))}
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body, status_code=error.status, headers=headers)


def _validation_error(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")[:200]
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{place} is no parameter of this endpoint; leave it out", param=place)
    if first["type"] == "json_invalid":
        return ApiError(400, "the body isn't JSON")
    return ApiError(400, f"{place or 'body'}: {first['msg']}", param=place or None)


_MAX_ITEMS: Final = 150_000
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def _check_items(body: bytes) -> None:
    """Raises ApiError for a body of so many lists, objects and entries that reading it would hold everyone else up."""
    if _n_items(body) <= _MAX_ITEMS:
        return
    # Those within texts don't count; but so many texts are as bad.
    if body.count(b'"') > 2 * _MAX_ITEMS or _n_items(_STRING.sub(b"", body)) > _MAX_ITEMS:
        raise ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body has more than {_MAX_ITEMS} lists, objects and entries of such", code="too_large",
        )  # fmt: skip


def _n_items(body: bytes) -> int:
    return sum(map(body.count, (b",", b"[", b"{")))


class Gate:
    """What a request must be before it is read: authorised, and neither too large nor too slow.

    A plain ASGI middleware, so that streams pass through unbuffered.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        try:
            self._authorise(scope["path"], headers)
            if scope["method"] == "POST" and not _is_json(headers):
                # Not guessed: a browser's page may send other types to a loopback address without asking first.
                raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send Content-Type: application/json")
            body = await self._body(headers, receive) if scope["method"] in ("POST", "PUT", "PATCH") else b""
            _check_items(body)
        except ApiError as error:
            await _error_response(error)(scope, receive, send)
            return
        except _GoneError:
            return
        LENIENT.set(self._settings.lenient)
        given = False

        async def replay() -> Message:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        await self._app(scope, replay, send)

    def _authorise(self, path: str, headers: dict[bytes, bytes]) -> None:
        keys = self._settings.api_keys
        if not keys or not path.startswith("/v1/"):
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        # In constant time each, and all of them: the time tells nothing about the keys.
        if sum(hmac.compare_digest(given.strip(), key.encode()) for key in keys) == 0 or scheme.lower() != b"bearer":
            raise ApiError(401, "a valid API key is needed", kind="authentication_error", code="invalid_api_key")

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        most = self._settings.max_body_bytes
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > most:
            raise _too_large(most)
        try:
            async with asyncio.timeout(self._settings.body_seconds):
                return await self._read(receive, most)
        except TimeoutError:
            raise ApiError(
                HTTPStatus.REQUEST_TIMEOUT, f"the body took longer than {self._settings.body_seconds:g} s"
            ) from None

    async def _read(self, receive: Receive, most: int) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _GoneError
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > most:
                raise _too_large(most)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)


def _is_json(headers: dict[bytes, bytes]) -> bool:
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower() == b"application/json"


class _GoneError(Exception):
    """The client went away while it sent its body."""


def _too_large(most: int) -> ApiError:
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is larger than {most} bytes", code="too_large")
