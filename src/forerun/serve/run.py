"""Serves an engine over HTTP until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import uvicorn
from fastapi import FastAPI

from forerun.engine.engine import Engine
from forerun.errors import ConfigurationError
from forerun.serve.app import Settings, create_app
from forerun.serve.driver import EngineDriver, Limits
from forerun.serve.metrics import Metrics
from forerun.serve.service import Service

KEEP_ALIVE_SECONDS = 30

_LAST_WORDS_SECONDS = 3
"""After the time of grace, for telling whoever still waits that the server shuts down."""


@dataclass(frozen=True)
class ServeOptions:
    """Where and how to serve.

    host, port: port 0 takes a free one. names: the model's, the first one is what answers carry. grace_seconds: for
    requests that run when the server is told to stop. cors: origins of browsers' pages that may ask; none by default.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ("forerun",)
    tool_format: str = "qwen"
    grace_seconds: float = 30.0
    cors: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    settings: Settings = field(default_factory=Settings)


def application(engine: Engine, options: ServeOptions) -> FastAPI:
    """The application around an engine; its lifespan starts and stops the engine's thread."""
    metrics = Metrics(options.names[0], engine)
    driver = EngineDriver(engine, options.limits, observer=metrics)
    service = Service(driver, options.names[0], aliases=options.names[1:], tool_format=options.tool_format)
    app = create_app(service, metrics, options.settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        driver.start()
        try:
            yield
        finally:
            # Whoever could finish in the time of grace has: connections are closed by now.
            driver.close(0.0)

    app.router.lifespan_context = lifespan
    app.state.driver = driver
    if options.cors:
        from starlette.middleware.cors import CORSMiddleware

        app.add_middleware(
            CORSMiddleware, allow_origins=list(options.cors), allow_methods=["*"], allow_headers=["*"]
        )  # fmt: skip
    return app


def serve(engine: Engine, options: ServeOptions, ready: Callable[[str], None] = lambda _: None) -> None:
    """Serves until SIGINT or SIGTERM; requests that run then have `grace_seconds` to end.

    `ready` is called with the address once connections are taken.

    Raises:
        ConfigurationError: the address can't be used.
    """
    engine.prepare_constraints()
    with bound(options.host, options.port) as sock:
        _allow_connections()
        server = Server(application(engine, options), options, lambda: ready(_address(sock)))
        server.run(sockets=[sock])


class Server(uvicorn.Server):
    """Tells when it is ready, and ends in order.

    A signal to stop closes the listening socket at once. What was accepted may go on for the time of grace; what then
    still runs gets an error that says so, and no half answer.
    """

    def __init__(self, app: FastAPI, options: ServeOptions, ready: Callable[[], None] = lambda: None) -> None:
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(options.grace_seconds) + _LAST_WORDS_SECONDS,
        )
        super().__init__(config)
        self._driver: EngineDriver = app.state.driver
        self._grace = options.grace_seconds
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(asyncio.to_thread(self._driver.close, self._grace))
        await super().shutdown(sockets)
        if self.force_exit:
            await asyncio.to_thread(self._driver.close, 0.0)
        await ending

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals end the server in order, and the process with exit code 0: it did what it was asked to do."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ConfigurationError if the address can't be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigurationError(
            f"can't listen at {host}:{port}: {error.strerror or error}; choose another --host or --port"
        ) from error


def _address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _allow_connections() -> None:
    """As many open connections as the system lets one process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
