"""A server in a thread of this process, on a free port."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Self

import uvicorn

from forerun import Engine
from forerun.serve.run import ServeOptions, application, bound


class LiveServer:
    """Serves an engine while the scope lasts.

    Attributes:
        url: without a path.
        engine: what is served.
    """

    def __init__(self, engine: Engine, options: ServeOptions | None = None, *, port: int = 0) -> None:
        self.engine = engine
        self.options = options or ServeOptions(names=("tiny",))
        self.app = application(engine, self.options)
        self._socket = bound("127.0.0.1", port)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(self.app, log_level="warning", timeout_graceful_shutdown=5)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="test-server")

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    def __enter__(self) -> Self:
        self._thread.start()
        deadline = time.monotonic() + 30
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise TimeoutError("the server didn't start")
            time.sleep(0.005)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        self._socket.close()
        assert not self._thread.is_alive(), "the server didn't stop"

    def check_idle(self) -> None:
        """Raises AssertionError unless the engine soon holds nothing and is in order."""
        deadline = time.monotonic() + 5
        while self.engine.loop.live and time.monotonic() < deadline:
            time.sleep(0.01)
        self.engine.check_integrity()
        assert not self.engine.loop.live
        assert self.engine.stats().kv_blocks_used == 0
