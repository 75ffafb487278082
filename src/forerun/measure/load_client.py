"""Requests to an OpenAI-compatible endpoint, each with the times at which its answer came."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit, urlunsplit

import httpx

from forerun.errors import ForerunError, InvalidRequestError
from forerun.measure.load import Api, Exchange
from forerun.measure.load_sse import Reading, StreamError, error_text
from forerun.measure.tasks import Task

Clock = Callable[[], float]
CLOCK: Final[Clock] = time.perf_counter

_MOST_ERROR_BYTES: Final = 64 << 10
_PATHS: Final[Mapping[Api, str]] = {"chat": "/chat/completions", "completions": "/completions"}

OWN_FIELDS: Final = frozenset(
    (
        "model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature",
        "seed", "n", "best_of", "echo",
    )
)  # fmt: skip
"""Fields of a request that the benchmark sets, or whose answers it couldn't read."""


class EndpointError(ForerunError):
    """The endpoint can't be used: nobody answers, or not as OpenAI's servers do."""


@dataclass(frozen=True)
class Order:
    """A request to send: its task, and its body."""

    task: Task
    body: bytes

    @classmethod
    def of(
        cls, task: Task, api: Api, model: str, *, max_tokens: int, temperature: float, seed: int,
        extra: Mapping[str, Any],
    ) -> Order:  # fmt: skip
        """A task as a streaming request; `max_tokens` caps the task's own. Only sampled answers get the seed."""
        most = max_tokens if task.max_tokens is None else min(max_tokens, task.max_tokens)
        body: dict[str, Any] = {
            **extra,
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": most,
            "temperature": temperature,
        }
        if temperature > 0:
            body["seed"] = seed
        if api == "chat":
            body["messages"] = [{"role": "user", "content": task.prompt}]
        else:
            body["prompt"] = task.prompt
        return cls(task, json.dumps(body, ensure_ascii=False).encode())


def base_url(url: str) -> str:
    """The address that OpenAI's clients call base_url: "/v1" is added to one without a path.

    Raises:
        InvalidRequestError: it is no address, or has a password, query or fragment.
    """
    try:
        parts = urlsplit(url.strip())
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidRequestError(f"{url!r} is no address: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidRequestError(f"{url!r} is no address; expected http://HOST:PORT or https://HOST/v1")
    if parts.username is not None or parts.query or parts.fragment:
        # It would stand in the report.
        raise InvalidRequestError("the address may have no user, query or fragment; give the key by the environment")
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") or "/v1", "", ""))


class LoadClient:
    """A client of one endpoint, for as long as the scope lasts. It opens as many connections as there are requests at a
    time, tries nothing twice and follows no redirect.

    Args:
        base: as `base_url` gives it.
        key: sent as a bearer token.
        timeout: seconds for a whole request.
        clock: seconds.

    Raises:
        InvalidRequestError: the key can't be sent.
    """

    def __init__(
        self, base: str, api: Api, *, key: str | None = None, timeout: float = 600.0, clock: Clock = CLOCK
    ) -> None:
        self._base = base
        self._path = base + _PATHS[api]
        self._timeout = timeout
        self._clock = clock
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if key is not None:
            if not (key.isascii() and key.isprintable()):
                raise InvalidRequestError("the API key has characters that no header can hold; check the variable")
            headers["Authorization"] = f"Bearer {key}"
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=min(30.0, timeout)),
            # A limit would make requests wait here, where no clock sees them.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=not _local(base),
        )

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self._client.__aexit__(exc_type, exc, traceback)

    async def only_model(self) -> str:
        """The one model that the endpoint lists. Raises EndpointError if there are others, or no list."""
        address = self._base + "/models"
        try:
            async with asyncio.timeout(min(30.0, self._timeout)):
                response = await self._client.get(address)
        except (httpx.HTTPError, TimeoutError, OSError) as error:
            raise EndpointError(f"{address} doesn't answer: {_reason(error)}; check the address") from error
        if response.status_code != httpx.codes.OK:
            said = _said(response.content)
            raise EndpointError(f"{address} answers with status {response.status_code}: {said}; give --model")
        try:
            names = [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise EndpointError(f"{address} isn't a list of models; give --model") from error
        if len(names) != 1:
            shown = ", ".join(names[:10]) or "none"
            raise EndpointError(f"the endpoint has {len(names)} models ({shown}); choose one with --model")
        if not names[0].isprintable():
            raise EndpointError("the endpoint's model has a name with control characters; give --model")
        return names[0]

    async def ask(self, order: Order, due: float | None = None) -> Exchange:
        """Sends a request and reads its answer; what goes wrong is part of what it returns."""
        reading = Reading()
        error = message = server = None
        sent = self._clock()
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._client.stream("POST", self._path, content=order.body) as response,
            ):
                server = error_text(response.headers.get("server", ""), 100) or None
                if response.status_code != httpx.codes.OK:
                    raise StreamError(f"http_{response.status_code}", await _body_text(response))
                kind = response.headers.get("content-type", "")
                if not kind.startswith("text/event-stream"):
                    raise StreamError("malformed", f"no event stream, but {kind or 'no content type'}")
                # To the end of the body, not of the events, so that the connection can be used again.
                async for chunk in response.aiter_bytes():
                    reading.push(chunk, self._clock())
                if not reading.complete:
                    raise StreamError("cut_off", "the stream ended before the answer did")
        except StreamError as failure:
            error, message = failure.kind, str(failure)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError) as failure:
            if not reading.done:
                error, message = _kind(failure), _reason(failure)
        ended = reading.ended if error is None and reading.ended is not None else self._clock()
        return Exchange(
            task_id=order.task.task_id,
            category=order.task.category,
            due=due,
            sent=sent,
            ended=ended,
            arrivals=tuple(reading.arrivals),
            n_events=reading.n_events,
            error=error,
            message=message or "",
            prompt_tokens=reading.prompt_tokens,
            output_tokens=reading.output_tokens,
            finish_reason=reading.finish_reason,
            speculation=reading.speculation,
            server=server,
        )


async def _body_text(response: httpx.Response) -> str:
    """The beginning of an error's body."""
    data = b""
    with suppress(httpx.HTTPError):
        async for chunk in response.aiter_bytes():
            data += chunk
            if len(data) > _MOST_ERROR_BYTES:
                break
    return _said(data)


def _said(data: bytes) -> str:
    try:
        return error_text(json.loads(data))
    except (ValueError, RecursionError):
        return error_text(data[:1000].decode(errors="replace"))


def _kind(failure: Exception) -> str:
    if isinstance(failure, httpx.TimeoutException | TimeoutError):
        return "timeout"
    if isinstance(failure, httpx.ConnectError | httpx.UnsupportedProtocol | httpx.InvalidURL | httpx.ProxyError):
        return "connect"
    return "cut_off"


def _reason(failure: Exception) -> str:
    return error_text(str(failure) or type(failure).__name__)


def _local(base: str) -> bool:
    """Whether the endpoint is on this machine: then no proxy of the environment is meant."""
    host = urlsplit(base).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
