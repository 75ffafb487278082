"""The engine's thread by itself: what is submitted ends, once, whatever is cancelled or closed meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from forerun import Engine, Regex, SamplingParams
from forerun.engine.output import Piece
from forerun.errors import CapacityError
from forerun.serve.driver import (
    ClosingError,
    Ended,
    EngineDriver,
    Job,
    Limits,
    OverloadedError,
    RequestTimeoutError,
    ServerError,
    Ticket,
)
from reference.driving import LONG, PROMPT, SHORT, begun, gate, go, running


def test_events_join_to_the_text_and_end_once(engine: Engine) -> None:
    [expected] = engine.generate([PROMPT], LONG)

    async def work() -> None:
        async with running(engine) as driver:
            events = [event async for event in driver.submit(Job(PROMPT, LONG))]
            pieces = [piece for event in events[:-1] for piece in event]  # type: ignore[union-attr]
            assert "".join(pieces) == expected.text
            assert all(isinstance(piece, Piece) for piece in pieces)
            end = events[-1]
            assert isinstance(end, Ended)
            assert end.output is not None
            assert end.output.token_ids == expected.token_ids
            [record] = driver._observer.records  # type: ignore[union-attr]
            assert record.outcome == "length"
            assert 0 <= record.waited_seconds <= record.total_seconds

    go(work)


def test_many_at_once_are_what_they_are_alone(engine: Engine) -> None:
    params = [SamplingParams(max_tokens=20 + n, temperature=1.0, seed=n, n=1 + n % 3) for n in range(20)]
    expected = [engine.generate([[n, n + 1]], p)[0] for n, p in enumerate(params)]

    async def work() -> None:
        async with running(engine) as driver:
            tickets = [driver.submit(Job([n, n + 1], p)) for n, p in enumerate(params)]
            for ticket, alone in zip(tickets, expected, strict=True):
                output = await ticket.result()
                assert [s.text for s in output.samples] == [s.text for s in alone.samples]

    go(work)


def test_what_the_engine_refuses_is_told(engine: Engine) -> None:
    async def work() -> None:
        async with running(engine) as driver:
            with pytest.raises(CapacityError):
                await driver.submit(Job([1] * 3000, SHORT)).result()
            assert (await driver.submit(Job(PROMPT, SHORT)).result()).finish_reason == "length"
            assert [record.outcome for record in driver._observer.records] == ["rejected", "length"]  # type: ignore[union-attr]

    go(work)


def test_cancelled_within_one_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are counted: the one that runs when `cancel` is called is the last that the request has a part in."""
    allowed = gate(monkeypatch, engine)

    async def work() -> None:
        async with running(engine) as driver:
            doomed, other = driver.submit(Job(PROMPT, LONG)), driver.submit(Job([9], LONG))
            allowed.release(3)
            while engine.loop.steps < 3:
                await asyncio.sleep(0.001)
            live = doomed.handle.live  # type: ignore[union-attr]
            doomed.cancel()
            allowed.release(1)  # the step that runs
            with pytest.raises(ServerError, match="cancelled"):
                await doomed.result()
            assert live.request.finished
            assert live.request.table is None
            assert live.request.steps <= 4
            assert engine.loop.steps <= 4
            assert not other.ended
            other.cancel()
            allowed.release(100)
            with pytest.raises(ServerError, match="cancelled"):
                await other.result()

    go(work)


def test_a_slow_cancel_would_be_seen(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault of the test above: a driver that looks at cancels only every eighth step."""
    serve, rounds = EngineDriver._end, iter(range(10**9))

    def lazy(self: EngineDriver, ticket: Ticket, outcome: Any, *rest: Any) -> None:
        if outcome == "cancelled" and not self._stopped and next(rounds) < 8:
            self._cancelled.append(ticket)
            return
        serve(self, ticket, outcome, *rest)

    monkeypatch.setattr(EngineDriver, "_end", lazy)
    allowed = gate(monkeypatch, engine)

    async def work() -> None:
        async with running(engine) as driver:
            doomed = driver.submit(Job(PROMPT, LONG))
            allowed.release(3)
            while engine.loop.steps < 3:
                await asyncio.sleep(0.001)
            live = doomed.handle.live  # type: ignore[union-attr]
            doomed.cancel()
            allowed.release(100)
            with pytest.raises(ServerError, match="cancelled"):
                await doomed.result()
            assert live.request.steps > 4

    go(work)


def test_cancelled_before_it_began_twice_after_its_end_and_from_other_threads(engine: Engine) -> None:
    async def work() -> None:
        async with running(engine) as driver:
            early = driver.submit(Job(PROMPT, LONG))
            early.cancel()
            early.cancel()
            with pytest.raises(ServerError, match="cancelled"):
                await early.result()
            done = driver.submit(Job(PROMPT, SHORT))
            output = await done.result()
            done.cancel()
            assert output.finish_reason == "length"
            tickets = [driver.submit(Job([n], LONG)) for n in range(4)]
            for ticket in tickets:
                await begun(ticket)
            threads = [threading.Thread(target=ticket.cancel) for ticket in tickets * 3]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for ticket in tickets:
                with pytest.raises(ServerError, match="cancelled"):
                    await ticket.result()
            assert driver.n_live == 0
            outcomes = [record.outcome for record in driver._observer.records]  # type: ignore[union-attr]
            assert sorted(outcomes) == ["cancelled"] * 5 + ["length"]

    go(work)


def test_the_queue_is_bounded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = gate(monkeypatch, engine)

    async def work() -> None:
        async with running(engine, Limits(max_waiting=2)) as driver:
            first = [driver.submit(Job([n], SHORT)) for n in range(2)]
            with pytest.raises(OverloadedError, match="2 requests wait") as caught:
                driver.submit(Job([3], SHORT))
            assert caught.value.retry_after >= 1
            allowed.release(1)
            for ticket in first:
                await begun(ticket)
            assert driver.n_waiting == 0
            more = driver.submit(Job([3], SHORT))  # those that run don't count
            assert driver.n_waiting == 1
            allowed.release(100)
            for ticket in (*first, more):
                assert (await ticket.result()).finish_reason == "length"

    go(work)


def test_who_waits_too_long_is_told(engine: Engine) -> None:
    async def work() -> None:
        async with running(engine, Limits(queue_seconds=0.05)) as driver:
            busy = [driver.submit(Job([n], LONG)) for n in range(4)]
            for ticket in busy:
                await begun(ticket)
            with pytest.raises(OverloadedError, match=r"longer than 0\.05 s") as caught:
                await driver.submit(Job([8], SHORT)).result()
            assert caught.value.retry_after > 0
            assert not any(ticket.ended for ticket in busy)

    go(work)


def test_requests_end_with_their_time(engine: Engine) -> None:
    async def work() -> None:
        async with running(engine, Limits(request_seconds=0.2)) as driver:
            lasting = SamplingParams(max_tokens=2000, ignore_eos=True)
            with pytest.raises(RequestTimeoutError, match=r"0\.05 s"):
                await driver.submit(Job(PROMPT, lasting, timeout=0.05, speculate=False)).result()
            # A client can't have more than the server gives.
            [record] = driver._observer.records  # type: ignore[union-attr]
            assert record.outcome == "timeout"
            driver.limits = Limits(request_seconds=0.01)
            with pytest.raises(RequestTimeoutError, match=r"0\.01 s"):
                await driver.submit(Job(PROMPT, lasting, timeout=1e5, speculate=False)).result()

    go(work)


def test_closing_lets_what_runs_end_and_takes_nothing_new(engine: Engine) -> None:
    async def work() -> None:
        async with running(engine) as driver:
            tickets = [driver.submit(Job([n], SamplingParams(max_tokens=60, ignore_eos=True))) for n in range(9)]
            closing = asyncio.create_task(asyncio.to_thread(driver.close, 30.0))
            while not driver._closing:
                await asyncio.sleep(0)
            assert not driver.accepting
            with pytest.raises(ClosingError):
                driver.submit(Job(PROMPT, SHORT))
            for ticket in tickets:  # those that waited for a row, too
                assert len((await ticket.result()).token_ids) == 60
            await closing
            with pytest.raises(ClosingError):
                driver.submit(Job(PROMPT, SHORT))

    go(work)


def test_what_outlives_the_grace_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = gate(monkeypatch, engine)

    async def work() -> None:
        async with running(engine) as driver:
            tickets = [driver.submit(Job([n], LONG)) for n in range(6)]
            allowed.release(2)
            await begun(tickets[0])
            closing = asyncio.create_task(asyncio.to_thread(driver.close, 0.05))
            await asyncio.sleep(0.1)
            allowed.release(100)
            for ticket in tickets:
                with pytest.raises(ClosingError):
                    await ticket.result()
            await closing

    go(work)


def test_an_event_loop_that_is_closed_frees_its_requests(engine: Engine) -> None:
    driver = EngineDriver(engine)
    driver.start()

    async def leave() -> Ticket:
        ticket = driver.submit(Job(PROMPT, SamplingParams(max_tokens=2000, ignore_eos=True)))
        await begun(ticket)
        return ticket

    ticket = asyncio.run(leave())
    deadline = time.monotonic() + 30
    while driver.n_live and time.monotonic() < deadline:
        time.sleep(0.002)
    assert ticket.handle is not None
    assert ticket.handle.live.request.finish_reason == "cancelled"
    assert driver.alive

    async def again() -> None:
        assert (await driver.submit(Job(PROMPT, SHORT)).result()).finish_reason == "length"

    asyncio.run(again())
    driver.close(0.0)


def test_grammars_that_compile_hold_nobody_up(engine: Engine) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, constraint=Regex("[0-9]{5}"))

    async def work() -> None:
        async with running(engine) as driver:
            tickets = [driver.submit(Job(PROMPT, params)), driver.submit(Job(PROMPT, SHORT))]
            constrained, plain = [await ticket.result() for ticket in tickets]
            assert constrained.text.isdigit()
            assert plain.finish_reason == "length"
            lasting = SamplingParams(max_tokens=9, constraint=Regex("[a-z]{7}"))
            early = driver.submit(Job(PROMPT, lasting))
            early.cancel()
            with pytest.raises(ServerError):
                await early.result()

    go(work)
