"""The engine's thread by itself, with failures planted: nobody else's text changes, and nobody waits for ever."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from forerun import Engine, SamplingParams
from forerun.errors import NumericalError
from forerun.serve.driver import EngineFailedError, Job
from reference.driving import LONG, PROMPT, SHORT, begun, go, running


def break_forward(monkeypatch: pytest.MonkeyPatch, engine: Engine, broken: Callable[[], bool]) -> None:
    forward = engine.executor.forward

    def failing(*arguments: Any) -> Any:
        if broken():
            raise RuntimeError("planted")
        return forward(*arguments)

    monkeypatch.setattr(engine.executor, "forward", failing)


def absent(engine: Engine, params: SamplingParams) -> tuple[str, int]:
    """What the prompt's text is, and a token that isn't in it."""
    [output] = engine.generate([PROMPT], params)
    return output.text, next(token for token in range(20, 250) if token not in (*PROMPT, *output.token_ids))


def test_scores_that_are_no_numbers_end_one_request_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's scores after one token are planted NaNs."""
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1)
    text, token = absent(engine, params)
    forward = engine.executor.forward

    def poisoned(step: Any, n_logits: int, best: Any) -> Any:
        logits = forward(step, n_logits, best)
        logits[step.tokens[step.output[:n_logits]] == token] = np.nan
        return logits

    monkeypatch.setattr(engine.executor, "forward", poisoned)

    async def work() -> None:
        async with running(engine) as driver:
            good, bad = (driver.submit(Job(ids, params, speculate=False)) for ids in (PROMPT, [1, token]))
            with pytest.raises(NumericalError):
                await bad.result()
            assert (await good.result()).text == text

    go(work)


@pytest.mark.parametrize("kind", [RuntimeError, BaseException])
def test_one_step_that_fails_is_not_noticed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    [expected] = engine.generate([PROMPT], LONG)
    forward, calls = engine.executor.forward, iter(range(10**9))

    def failing(*arguments: Any) -> Any:
        if next(calls) % 5 == 3:
            raise kind("planted")
        return forward(*arguments)

    monkeypatch.setattr(engine.executor, "forward", failing)

    async def work() -> None:
        async with running(engine) as driver:
            assert (await driver.submit(Job(PROMPT, LONG)).result()).text == expected.text

    with caplog.at_level(logging.CRITICAL):
        go(work)


def test_a_request_that_breaks_the_engine_leaves_those_before_it_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    text, token = absent(engine, params)
    forward = engine.executor.forward

    def failing(step: Any, *rest: Any) -> Any:
        if token in step.tokens:
            raise RuntimeError("planted")
        return forward(step, *rest)

    monkeypatch.setattr(engine.executor, "forward", failing)

    async def work() -> None:
        async with running(engine) as driver:
            good = driver.submit(Job(PROMPT, params, speculate=False))
            await begun(good)
            with pytest.raises(EngineFailedError, match="RuntimeError"):
                await driver.submit(Job([1, token], SHORT)).result()
            assert not good.ended
            assert (await good.result()).text == text

    go(work)


def test_an_engine_that_is_broken_answers_everyone_and_goes_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [True]
    break_forward(monkeypatch, engine, lambda: broken[0])

    async def work() -> None:
        async with running(engine) as driver:
            for ticket in [driver.submit(Job([n], SHORT)) for n in range(7)]:
                with pytest.raises(EngineFailedError):
                    await ticket.result()
            broken[0] = False
            assert (await driver.submit(Job(PROMPT, SHORT)).result()).finish_reason == "length"
            assert {record.outcome for record in driver._observer.records} == {"error", "length"}  # type: ignore[union-attr]

    go(work)


@pytest.mark.parametrize("kind", [RuntimeError, BaseException])
def test_a_submission_that_fails_ends_that_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    submit = engine.submit

    def failing(prompt: Any, *arguments: Any, **options: Any) -> Any:
        if prompt == [99]:
            raise kind("planted")
        return submit(prompt, *arguments, **options)

    monkeypatch.setattr(engine, "submit", failing)

    async def work() -> None:
        async with running(engine) as driver:
            with pytest.raises(EngineFailedError):
                await driver.submit(Job([99], SHORT)).result()
            assert (await driver.submit(Job(PROMPT, SHORT)).result()).finish_reason == "length"

    go(work)


def test_a_thread_that_fails_tells_everyone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An observer must not raise: one that does ends the thread, and nobody waits for ever."""

    def raising(*_: object) -> None:
        raise RuntimeError("planted")

    async def work() -> None:
        async with running(engine) as driver:
            tickets = [driver.submit(Job([n], LONG)) for n in range(6)]
            monkeypatch.setattr(driver._observer, "stepped", raising)
            for ticket in tickets:
                with pytest.raises(EngineFailedError, match="restart"):
                    await ticket.result()
            driver._thread.join(10)
            assert not driver.alive
            assert not driver.accepting
            assert isinstance(driver.failure, RuntimeError)
            with pytest.raises(EngineFailedError):
                driver.submit(Job(PROMPT, SHORT))

    go(work)
