"""The server's engine thread by itself: a driver at work, and what it tells its observer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from forerun import Engine, SamplingParams
from forerun.serve.driver import EngineDriver, Limits, Record, Ticket

LONG = SamplingParams(max_tokens=700, ignore_eos=True)
SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPT = [5, 6, 7]


class Seen:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.gaps: list[float] = []
        self.steps = 0

    def ended(self, record: Record) -> None:
        self.records.append(record)

    def stepped(self, engine: Engine) -> None:  # noqa: ARG002
        self.steps += 1

    def began(self, *_: object) -> None:
        pass

    def gap(self, seconds: float, *_: object) -> None:
        self.gaps.append(seconds)


@asynccontextmanager
async def running(engine: Engine, limits: Limits | None = None, grace: float = 0.0) -> AsyncIterator[EngineDriver]:
    """A driver at work; afterwards its thread is gone and the engine empty."""
    driver = EngineDriver(engine, limits, observer=Seen())
    driver.start()
    try:
        yield driver
    finally:
        await asyncio.to_thread(driver.close, grace)
        assert not driver.alive
        assert not any(thread.name == "forerun-engine" for thread in threading.enumerate())
        engine.check_integrity()
        assert not engine.loop.live
        assert engine.stats().kv_blocks_used == 0


def go(work: Callable[[], Awaitable[None]]) -> None:
    """Runs a test's work, for a minute at the most."""

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(bounded())


async def begun(ticket: Ticket) -> None:
    """Until a step has run it."""
    while ticket.handle is None or not ticket.handle.started:
        await asyncio.sleep(0.001)


def gate(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> threading.Semaphore:
    """Steps wait until they are let through."""
    allowed, step = threading.Semaphore(0), engine.loop.step

    def waiting() -> bool:
        assert allowed.acquire(timeout=30)
        return step()

    monkeypatch.setattr(engine.loop, "step", waiting)
    return allowed
