"""The engine in a thread of its own, and requests to it from an event loop.

Only the driver's thread touches the engine: what others want of it (submit, cancel) waits in a list until the step that
runs is over, so a cancelled request is gone within one step, and the event loop never waits for the engine's lock.
After each step every request's new pieces go to its event loop in one call.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from forerun.engine.engine import Engine
from forerun.engine.handle import RequestHandle
from forerun.engine.output import Piece, RequestOutput
from forerun.errors import ForerunError
from forerun.sample.params import SamplingParams

Outcome = Literal["stop", "length", "cancelled", "error", "timeout", "rejected"]
"""How a request ended: the first two as its finish reason says; "rejected": before it began."""

_MAX_BROKEN_STEPS: Final = 3
"""Steps that may fail in a row before everyone in them is told so."""


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
    """What to ask of the engine; as `Engine.submit` has it, with the prompt as tokens."""

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
    """A request that has ended, for who counts them."""

    outcome: Outcome
    output: RequestOutput | None
    waited_seconds: float
    total_seconds: float


Event = list[Piece] | Ended
Observer = Callable[[Record], None]
StepObserver = Callable[[Engine], None]


@dataclass(eq=False)
class Ticket:
    """One request, as the event loop that submitted it sees it. Iterate for its events: the last one is `Ended`."""

    job: Job
    driver: EngineDriver
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    submitted: float = field(default_factory=time.perf_counter)
    started: float | None = None
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
        observer: is told of every request that ended, in the driver's thread.
        on_step: is called after every step, in the driver's thread.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits | None = None,
        *,
        observer: Observer | None = None,
        on_step: StepObserver | None = None,
    ) -> None:
        self.engine = engine
        self.limits = limits or Limits()
        self._observer = observer
        self._on_step = on_step
        self._arrivals: deque[Ticket] = deque()
        self._cancelled: deque[Ticket] = deque()
        self._live: dict[Ticket, None] = {}  # in the order of arrival
        self._wake = threading.Condition()
        self._closing = self._stopped = False
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
    def accepting(self) -> bool:
        """Whether new requests are taken."""
        return self.alive and not self._closing

    @property
    def n_live(self) -> int:
        """Requests that were taken and haven't ended."""
        with self._wake:
            return len(self._live) + len(self._arrivals)

    @property
    def n_waiting(self) -> int:
        """Requests of these that no step has run yet."""
        with self._wake:
            return sum(ticket.started is None for ticket in tuple(self._live)) + len(self._arrivals)

    def submit(self, job: Job) -> Ticket:
        """Takes a request; from an event loop's thread.

        Raises:
            ClosingError: the server is shutting down.
            OverloadedError: too many wait already.
        """
        if not self.accepting:
            raise ClosingError("the server is shutting down and takes no new requests")
        if self.n_waiting >= self.limits.max_waiting:
            raise OverloadedError(
                f"{self.limits.max_waiting} requests wait already; try again later", max(1.0, self._pace)
            )
        ticket = Ticket(job, self, asyncio.get_running_loop())
        with self._wake:
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
        while True:
            with self._wake:
                while not (self._arrivals or self._cancelled or self._live or self._stopped):
                    self._wake.wait()
                arrivals, self._arrivals = self._arrivals, deque()
                cancelled, self._cancelled = self._cancelled, deque()
                for ticket in arrivals:
                    self._live[ticket] = None
                stopped = self._stopped
            for ticket in arrivals:
                self._begin(ticket)
            for ticket in cancelled:
                self._end(ticket, "cancelled", None, ServerError("the request was cancelled"))
            if stopped:
                for ticket in tuple(self._live):
                    self._end(ticket, "cancelled", None, ClosingError("the server has shut down"))
                return
            self._expire()
            if self._live:
                self._step()

    def _begin(self, ticket: Ticket) -> None:
        job = ticket.job
        try:
            ticket.handle = self.engine.submit(
                job.prompt_ids, job.params, speculate=job.speculate, draft_len=job.draft_len, scope=job.scope
            )
        except ForerunError as error:
            self._end(ticket, "rejected", None, error)

    def _expire(self) -> None:
        now = time.perf_counter()
        for ticket in tuple(self._live):
            age = now - ticket.submitted
            most = ticket.job.timeout if ticket.job.timeout is not None else self.limits.request_seconds
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
        except Exception as error:
            # The engine computes everybody anew after a step that failed; what fails again and again ends them.
            self._broken += 1
            if self._broken >= _MAX_BROKEN_STEPS:
                self._broken = 0
                for ticket in tuple(self._live):
                    if ticket.started is not None or len(self._live) == 1:
                        self._end(ticket, "error", None, error)
        now = time.perf_counter()
        for ticket in tuple(self._live):
            self._deliver(ticket, now)
        if self._on_step is not None:
            self._on_step(self.engine)

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
            self._post(ticket, pieces)
        if handle.finished:
            output = handle.result()
            outcome: Outcome = "cancelled" if output.finish_reason == "cancelled" else _outcome(output)
            self._end(ticket, outcome, output, None)

    def _end(self, ticket: Ticket, outcome: Outcome, output: RequestOutput | None, error: Exception | None) -> None:
        if ticket.ended:
            return
        ticket.ended = True
        self._live.pop(ticket, None)
        if ticket.handle is not None:
            ticket.handle.cancel()
        now = time.perf_counter()
        if self._observer is not None:
            waited = (ticket.started or now) - ticket.submitted
            self._observer(Record(outcome, output, waited, now - ticket.submitted))
        self._post(ticket, Ended(output, error))

    def _post(self, ticket: Ticket, event: Event) -> None:
        try:
            ticket.loop.call_soon_threadsafe(ticket.events.put_nowait, event)
        except RuntimeError:  # its event loop is closed: nobody waits for it
            self.cancel(ticket)


def _outcome(output: RequestOutput) -> Outcome:
    reasons = {sample.finish_reason for sample in output.samples}
    return "length" if "length" in reasons else "stop"
