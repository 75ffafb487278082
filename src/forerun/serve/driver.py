"""The engine in a thread of its own, and requests to it from an event loop.

Only the driver's thread touches the engine: what others want of it (submit, cancel) waits in a list until the step that
runs is over, so a cancelled request is gone within one step, and the event loop never waits for the engine's lock.
After each step the new pieces of all requests go to their event loop in one call.

A step that fails is tried again, by an engine that computes everybody anew. What fails again and again is blamed on the
request that began last, which ends; then on the one before it. So a request that breaks the engine takes along only
those that began after it, and an engine that is broken for good answers every request with an error. Should the thread
itself fail, it ends them all, and `failure` says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from forerun.engine.engine import Engine
from forerun.engine.handle import RequestHandle
from forerun.engine.output import Piece, RequestOutput
from forerun.errors import ForerunError
from forerun.sample.params import SamplingParams

Outcome = Literal["stop", "length", "cancelled", "error", "timeout", "rejected"]
"""How a request ended: the first two as its finish reason says; "rejected": before it began."""

LOG: Final = logging.getLogger("forerun.serve")

_MAX_BROKEN_STEPS: Final = 3
"""Steps that may fail in a row before a request ends for it."""


class ServerError(ForerunError):
    """A request that the server gives up, for no fault of the engine's."""


class OverloadedError(ServerError):
    """Too many requests wait already, or this one has waited too long.

    retry_after: seconds after which it may be worth another try.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestTimeoutError(ServerError):
    """A request ran longer than it may."""


class ClosingError(ServerError):
    """The server is shutting down and takes no new requests."""


class EngineFailedError(ServerError):
    """The engine failed on a request, or the thread that steps it has ended."""


@dataclass(frozen=True)
class Limits:
    """What bounds the queue and a request's time.

    max_waiting: requests that may wait for their first step. queue_seconds: longest such wait; None: no limit.
    request_seconds: from submission to the end; None: no limit.
    """

    max_waiting: int = 256
    queue_seconds: float | None = 60.0
    request_seconds: float | None = 600.0


@dataclass(frozen=True)
class Job:
    """What to ask of the engine; as `Engine.submit` has it, with the prompt as tokens.

    timeout: seconds, where that is less than the driver's own limit.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    speculate: bool = True
    draft_len: int | None = None
    scope: str | None = None
    timeout: float | None = None


@dataclass(frozen=True)
class Ended:
    """The last event of a request: its output, or what ended it."""

    output: RequestOutput | None
    error: Exception | None = None


@dataclass(frozen=True)
class Record:
    """A request that has ended, for who counts them. waited_seconds: before its first step; None: it had none."""

    outcome: Outcome
    output: RequestOutput | None
    waited_seconds: float | None
    total_seconds: float


Event = list[Piece] | Ended


class Observer(Protocol):
    """Is told what happens, in the driver's thread; must be quick and not raise."""

    def ended(self, record: Record) -> None:
        """A request has ended. From any thread, if it was refused at once."""

    def began(self, seconds: float, prompt_tokens: int) -> None:
        """So long after its arrival a request with such a prompt has its first event."""

    def stepped(self, engine: Engine) -> None:
        """A step is over."""

    def gap(self, seconds: float) -> None:
        """So long after its last event a request has another one."""


@dataclass(eq=False)
class Ticket:
    """One request, as the event loop that submitted it sees it. Iterate for its events: the last one is `Ended`."""

    job: Job
    driver: EngineDriver
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    submitted: float = field(default_factory=time.perf_counter)
    started: float | None = None
    last_event: float | None = None
    handle: RequestHandle | None = None
    ended: bool = False

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self.events.get()
            yield event
            if isinstance(event, Ended):
                return

    async def result(self) -> RequestOutput:
        """Waits for the end. Raises what ended the request, if it was an error."""
        async for event in self:
            if isinstance(event, Ended):
                if event.output is None:
                    assert event.error is not None
                    raise event.error
                return event.output
        raise AssertionError("a request's events end with Ended")

    def cancel(self) -> None:
        """Ends the request after the step that runs, if it hasn't ended. From any thread."""
        self.driver.cancel(self)


class EngineDriver:
    """Runs an engine's steps in a thread for as long as there is work.

    Args:
        engine: nobody else steps it meanwhile.
        limits: see `Limits`.
        observer: is told of requests and steps.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits | None = None,
        *,
        observer: Observer | None = None,
    ) -> None:
        self.engine = engine
        self.limits = limits or Limits()
        self._observer = observer
        self._arrivals: deque[Ticket] = deque()
        self._cancelled: deque[Ticket] = deque()
        self._live: dict[Ticket, None] = {}  # in the order of arrival
        self._wake = threading.Condition()
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Event]]] = {}
        self._closing = self._stopped = False
        self._failure: BaseException | None = None
        self._broken = 0
        self._pace = 0.0  # seconds a request waited for its first step, smoothed
        self._thread = threading.Thread(target=self._run, name="forerun-engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def failure(self) -> BaseException | None:
        """What ended the thread, if it wasn't told to end."""
        return self._failure

    @property
    def accepting(self) -> bool:
        """Whether new requests are taken."""
        return self.alive and not self._closing and self._failure is None

    @property
    def n_live(self) -> int:
        """Requests that were taken and haven't ended."""
        with self._wake:
            return len(self._live) + len(self._arrivals)

    @property
    def n_waiting(self) -> int:
        """Requests of these that no step has run yet."""
        with self._wake:
            return self._n_waiting()

    def _n_waiting(self) -> int:
        begun = sum(ticket.handle is not None and ticket.handle.started for ticket in tuple(self._live))
        return len(self._live) - begun + len(self._arrivals)

    def submit(self, job: Job) -> Ticket:
        """Takes a request; from an event loop's thread.

        Raises:
            ClosingError: the server is shutting down.
            EngineFailedError: the engine's thread has ended.
            OverloadedError: too many wait already.
        """
        ticket = Ticket(job, self, asyncio.get_running_loop())
        with self._wake:
            if self._closing:
                raise ClosingError("the server is shutting down and takes no new requests")
            if self._failure is not None or not self.alive:
                raise EngineFailedError("the engine has stopped; restart the server")
            if self._n_waiting() >= self.limits.max_waiting:
                if self._observer is not None:
                    self._observer.ended(Record("rejected", None, None, 0.0))
                raise OverloadedError(
                    f"{self.limits.max_waiting} requests wait already; try again later", max(1.0, self._pace)
                )
            self._arrivals.append(ticket)
            self._wake.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request after the step that runs."""
        if ticket.ended:
            return
        with self._wake:
            self._cancelled.append(ticket)
            self._wake.notify()

    def close(self, grace_seconds: float = 30.0) -> None:
        """Takes no new requests, lets the others end for so long, ends the rest, and stops the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        deadline = time.monotonic() + grace_seconds
        while self.n_live and self.alive and time.monotonic() < deadline:
            time.sleep(0.01)
        with self._wake:
            self._stopped = True
            self._wake.notify()
        if self.alive and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            LOG.critical("the engine's thread failed", exc_info=error)
            with self._wake:
                self._failure = error
                left = [*self._live, *self._arrivals]
                self._live.clear()
                self._arrivals.clear()
            for ticket in left:
                self._give_up(ticket)
        finally:
            self._flush()

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not (self._arrivals or self._cancelled or self._live or self._stopped):
                    self._wake.wait()
                arrivals, self._arrivals = self._arrivals, deque()
                cancelled, self._cancelled = self._cancelled, deque()
                for ticket in arrivals:
                    self._live[ticket] = None
                stopped = self._stopped
            for ticket in cancelled:
                self._end(ticket, "cancelled", None, ServerError("the request was cancelled"))
            if stopped:
                for ticket in tuple(self._live):
                    self._end(ticket, "cancelled", None, ClosingError("the server has shut down"))
                return
            for ticket in arrivals:
                if not ticket.ended:
                    self._begin(ticket)
            self._expire()
            self._flush()  # who has ended need not wait for the step
            if self._live:
                self._step()

    def _give_up(self, ticket: Ticket) -> None:
        """Ends a request without the engine, which can't be relied on."""
        ticket.ended = True
        if ticket.handle is not None:
            with contextlib.suppress(Exception):
                ticket.handle.cancel()
        self._post(ticket, Ended(None, EngineFailedError("the engine has stopped; restart the server")))

    def _begin(self, ticket: Ticket) -> None:
        job = ticket.job
        try:
            ticket.handle = self.engine.submit(
                job.prompt_ids, job.params, speculate=job.speculate, draft_len=job.draft_len, scope=job.scope
            )
        except ForerunError as error:
            self._end(ticket, "rejected", None, error)
        except BaseException as error:  # a panic of the grammar library is no Exception
            LOG.error("a request could not be submitted", exc_info=error)
            self._end(ticket, "error", None, _failed(error))

    def _expire(self) -> None:
        now = time.perf_counter()
        for ticket in tuple(self._live):
            age = now - ticket.submitted
            bounds = [seconds for seconds in (ticket.job.timeout, self.limits.request_seconds) if seconds is not None]
            most = min(bounds, default=None)
            waited = self.limits.queue_seconds
            if ticket.started is None and waited is not None and age > waited:
                error = OverloadedError(f"the request waited longer than {waited:g} s for its turn", age)
                self._end(ticket, "rejected", None, error)
            elif most is not None and age > most:
                self._end(ticket, "timeout", None, RequestTimeoutError(f"the request took longer than {most:g} s"))

    def _step(self) -> None:
        try:
            self.engine.step()
            self._broken = 0
        except BaseException as error:  # a panic of the grammar library is no Exception
            LOG.error("a step failed", exc_info=error)
            self._broken += 1
            if self._broken >= _MAX_BROKEN_STEPS:
                self._blame(error)
        now = time.perf_counter()
        for ticket in tuple(self._live):
            self._deliver(ticket, now)
        self._flush()
        if self._observer is not None:
            self._observer.stepped(self.engine)

    def _blame(self, error: BaseException) -> None:
        """Ends the request that began last; where none began, the one that is next."""
        self._broken = 0
        tickets = tuple(self._live)
        begun = [ticket for ticket in tickets if ticket.handle is not None and ticket.handle.started]
        self._end(begun[-1] if begun else tickets[0], "error", None, _failed(error))

    def _deliver(self, ticket: Ticket, now: float) -> None:
        handle = ticket.handle
        assert handle is not None, "who is live was submitted"
        if ticket.started is None and handle.started:
            ticket.started = now
            self._pace += 0.1 * (now - ticket.submitted - self._pace)
        try:
            pieces = handle.poll()
        except ForerunError as error:
            self._end(ticket, "error", None, error)
            return
        if pieces:
            if self._observer is not None:
                if ticket.last_event is None:
                    self._observer.began(now - ticket.submitted, len(ticket.job.prompt_ids))
                else:
                    self._observer.gap(now - ticket.last_event)
            ticket.last_event = now
            self._post(ticket, pieces)
        if handle.finished:
            output = handle.result()
            self._end(ticket, _outcome(output), output, None)

    def _end(self, ticket: Ticket, outcome: Outcome, output: RequestOutput | None, error: Exception | None) -> None:
        if ticket.ended:
            return
        ticket.ended = True
        self._live.pop(ticket, None)
        if ticket.handle is not None:
            ticket.handle.cancel()
        now = time.perf_counter()
        if self._observer is not None:
            waited = None if ticket.started is None else ticket.started - ticket.submitted
            self._observer.ended(Record(outcome, output, waited, now - ticket.submitted))
        self._post(ticket, Ended(output, error))

    def _post(self, ticket: Ticket, event: Event) -> None:
        self._outbox.setdefault(ticket.loop, []).append((ticket, event))

    def _flush(self) -> None:
        """Hands what the step brought to the event loops."""
        outbox, self._outbox = self._outbox, {}
        for loop, events in outbox.items():
            try:
                loop.call_soon_threadsafe(_put, events)
            except RuntimeError:  # the event loop is closed: nobody waits for these
                for ticket, _ in events:
                    self.cancel(ticket)


def _put(events: Sequence[tuple[Ticket, Event]]) -> None:
    for ticket, event in events:
        ticket.events.put_nowait(event)


def _failed(error: BaseException) -> Exception:
    """What a request is told that ends for a failure of the engine's."""
    if isinstance(error, ForerunError):
        return error
    return EngineFailedError(f"the engine failed on this request ({type(error).__name__}); try it again")


def _outcome(output: RequestOutput) -> Outcome:
    reasons = {sample.finish_reason for sample in output.samples}
    return "cancelled" if "cancelled" in reasons else "length" if "length" in reasons else "stop"
