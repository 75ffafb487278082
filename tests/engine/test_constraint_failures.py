"""What fails or ends in the midst of a constrained request is that request's affair: nothing is left, others go on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun import Engine, SamplingParams
from forerun.constrain import Choice, Regex
from forerun.constrain.spec import Constraint
from forerun.constrain.state import GrammarState
from forerun.engine.live import LiveRequest
from forerun.errors import ConstraintError, ForerunError, InvalidRequestError
from reference.drafters import RandomTrees
from reference.speculation import Unspeculated, check_identities, emptied, engine_for, same
from reference.tiny import VOCAB_SIZE, TinySpec, write_tiny_gguf

pytestmark = pytest.mark.usefixtures("steady_times")

PROMPT = (250, 7, 33, 90, 120)
FREE = SamplingParams(max_tokens=20, ignore_eos=True)
WORDS = Regex("[a-m]{5,30}")
SAMPLED = SamplingParams(max_tokens=20, temperature=1.0, seed=4, constraint=WORDS)


class Panic(BaseException):
    """As the grammar library's own: no `Exception`."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", TinySpec("llama", layers=1, ffn=256))


@pytest.fixture(scope="module")
def alone(model: Path) -> Unspeculated:
    return Unspeculated(model)


class Scripted(Constraint):
    """Compiles to what a function says, when it is asked."""

    def __init__(self, name: str, grammar: Callable[[], str]) -> None:
        self.name = name
        self._grammar = grammar

    @property
    def content(self) -> str:
        return self.name

    def check(self) -> None:
        return None

    def grammar(self) -> str:
        return self._grammar()


def goes_on(engine: Engine, alone: Unspeculated) -> None:
    """Raises AssertionError unless an engine is empty and serves what comes."""
    emptied(engine)
    for params in (FREE, SAMPLED):
        same(engine.generate([PROMPT], params)[0], alone.answer(PROMPT, params))
    emptied(engine)


@pytest.mark.parametrize("less", [0, 1, 2])
@pytest.mark.parametrize("drafter", ["suffix", "trees"])
def test_a_complete_text_ends_where_min_tokens_is_reached_within_a_draft(
    model: Path, alone: Unspeculated, drafter: str, less: int
) -> None:
    for constraint in (Choice(["the quick brown fox jumps"]), Regex("(abc|bca){4}"), Regex("[ab]{9}")):
        params = SamplingParams(max_tokens=40, temperature=1.0, seed=2, constraint=constraint)
        n = len(alone.answer(PROMPT, params).token_ids)
        params = replace(params, min_tokens=n - less)
        truth = alone.answer(PROMPT, params)
        assert len(truth.token_ids) == n
        engine = engine_for(model, RandomTrees(alone.truth, 3) if drafter == "trees" else drafter, 6)
        [output] = engine.generate([PROMPT], params)
        same(output, truth)
        check_identities(output)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_compile_that_fails_oddly_ends_its_own_request(
    model: Path, alone: Unspeculated, error: type[Exception]
) -> None:
    go = threading.Event()

    def grammar() -> str:
        assert go.wait(60)
        raise error("made to fail")

    engine = engine_for(model, "suffix", 4)
    bad = engine.submit(PROMPT, SamplingParams(constraint=Scripted(f"fails with {error}", grammar)))
    waits = engine.submit(PROMPT, SAMPLED)
    other = engine.submit(PROMPT, FREE)
    go.set()
    same(waits.result(), alone.answer(PROMPT, SAMPLED))
    same(other.result(), alone.answer(PROMPT, FREE))
    with pytest.raises(ConstraintError, match="made to fail"):
        bad.result()
    goes_on(engine, alone)


def test_nothing_is_compiled_for_a_cancelled_request(model: Path) -> None:
    go, compiled = threading.Event(), []

    def first() -> str:
        assert go.wait(60)
        return Choice(["yes"]).grammar()

    def second() -> str:
        compiled.append("second")
        return Choice(["no"]).grammar()

    engine = engine_for(model, "none")
    ahead = engine.submit(PROMPT, SamplingParams(constraint=Scripted("first", first)))
    engine.submit(PROMPT, SamplingParams(constraint=Scripted("second", second))).cancel()
    go.set()
    assert ahead.result().text == "yes"
    engine.prepare_constraints(Choice(["behind", "them"]))
    assert not compiled
    emptied(engine)


@pytest.mark.parametrize("name", ["forced", "reachable", "masks", "advance"])
@pytest.mark.parametrize("error", [RuntimeError, Panic])
def test_a_grammar_that_fails_is_nobody_elses_affair(
    model: Path, alone: Unspeculated, monkeypatch: pytest.MonkeyPatch, name: str, error: type[BaseException]
) -> None:
    engine = engine_for(model, RandomTrees(alone.truth, 3), 5)
    engine.prepare_constraints(WORDS)
    truth, other = alone.answer(PROMPT, SAMPLED), alone.answer(PROMPT, FREE)
    called = []

    def broken(*_: Any) -> Any:
        called.append(name)
        raise error("made to fail")

    handles = [engine.submit(PROMPT, params) for params in (SAMPLED, FREE)]
    with monkeypatch.context() as patch:
        patch.setattr(GrammarState, name, broken)
        same(handles[1].result(), other)
        if name in ("forced", "reachable"):
            same(handles[0].result(), truth)
        else:
            with pytest.raises(ConstraintError, match="made to fail"):
                handles[0].result()
    assert called
    assert engine.speculator is not None
    assert engine.speculator.failure is None
    goes_on(engine, alone)


def test_an_interrupted_wait_for_masks_leaves_no_thread_in_the_grammar(
    model: Path, alone: Unspeculated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler of the caller's own that raises while the loop waits: the step is done again, by one thread."""
    engine = engine_for(model, "suffix", 4)
    truth = alone.answer(PROMPT, SAMPLED)
    engine.prepare_constraints(WORDS)
    masks = GrammarState.masks
    entered, running = threading.Event(), threading.Lock()

    def slow(self: GrammarState, *args: Any) -> list[bool]:
        with running:
            if not entered.is_set():
                entered.set()
                threading.Event().wait(0.4)
            return masks(self, *args)

    def interrupt(*_: object) -> None:
        raise TimeoutError("the caller's own")

    monkeypatch.setattr(GrammarState, "masks", slow)
    before = signal.signal(signal.SIGALRM, interrupt)
    finish = engine.loop.masks.finish

    def finishing() -> None:
        if entered.is_set() and not interrupted:
            interrupted.append(1)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        finish()

    interrupted: list[int] = []
    monkeypatch.setattr(engine.loop.masks, "finish", finishing)
    try:
        handle = engine.submit(PROMPT, SAMPLED)
        with pytest.raises(TimeoutError, match="the caller's own"):
            while engine.step():
                pass
        assert interrupted
        assert not running.locked()
        engine.check_integrity()
        same(handle.result(), truth)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    goes_on(engine, alone)


@pytest.mark.parametrize("constraint", [None, WORDS])
def test_texts_that_branch_off_while_their_request_is_cancelled_end_with_it(
    model: Path, alone: Unspeculated, monkeypatch: pytest.MonkeyPatch, constraint: Constraint | None
) -> None:
    """As a collected generator does it, within the very step that branches."""
    engine = engine_for(model, "suffix", 4)
    engine.prepare_constraints(WORDS)
    handle = engine.submit(PROMPT, replace(SAMPLED, n=4, constraint=constraint))
    forward = engine.executor.forward

    def cancelling(*args: Any) -> Any:
        handle.cancel()
        return forward(*args)

    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "forward", cancelling)
        engine.step()
    assert handle.finished
    assert [sample.finish_reason for sample in handle.result().samples] == ["cancelled"] * 4
    goes_on(engine, alone)


@pytest.mark.parametrize("error", [RuntimeError, Panic])
@pytest.mark.parametrize("late", [False, True])
def test_a_text_that_can_not_branch_off_is_nobody_elses_affair(
    model: Path, alone: Unspeculated, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], late: bool
) -> None:
    engine = engine_for(model, "suffix", 4)
    other, handle = engine.submit(PROMPT, FREE), engine.submit(PROMPT[:3], replace(SAMPLED, n=3))
    target: Any = engine.scheduler if late else LiveRequest
    branch = target.branch

    def broken(*args: Any) -> Any:
        if late:
            branch(*args)
        raise error("made to fail")

    with monkeypatch.context() as patch:
        patch.setattr(target, "branch", broken)
        with pytest.raises(error, match="made to fail"):
            while engine.step():
                pass
    same(other.result(), alone.answer(PROMPT, FREE))
    with pytest.raises(ForerunError, match="submit it again"):
        handle.result()
    goes_on(engine, alone)


def test_a_fork_that_is_refused_leaves_nothing(model: Path, alone: Unspeculated) -> None:
    engine = engine_for(model, "suffix", 4)
    engine.prepare_constraints(WORDS)
    free, bound = engine.submit(PROMPT, FREE), engine.submit(PROMPT, SAMPLED)
    engine.step()
    with pytest.raises(InvalidRequestError, match="every token of the vocabulary"):
        engine.fork(free, replace(FREE, min_tokens=18, stop_token_ids=tuple(range(VOCAB_SIZE))))
    with pytest.raises(InvalidRequestError, match="cut the text short"):
        engine.fork(bound, replace(SAMPLED, stop_token_ids=(97,)))
    same(free.result(), alone.answer(PROMPT, FREE))
    same(bound.result(), alone.answer(PROMPT, SAMPLED))
    goes_on(engine, alone)


def test_a_request_that_waits_for_its_grammar_can_not_be_forked_at_all(model: Path, alone: Unspeculated) -> None:
    go = threading.Event()

    def grammar() -> str:
        assert go.wait(60)
        return Choice(["yes"]).grammar()

    engine = engine_for(model, "none")
    waits = engine.submit(PROMPT, SamplingParams(constraint=Scripted("awaited", grammar)))
    for params in (None, FREE):
        with pytest.raises(InvalidRequestError, match="still waits"):
            engine.fork(waits, params)
    go.set()
    assert waits.result().text == "yes"
    goes_on(engine, alone)


@pytest.mark.parametrize("name", ["add", "get", "fork", "finish"])
def test_ctrl_c_between_steps_leaves_a_request_whole_or_not_begun(
    model: Path, alone: Unspeculated, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A real signal while a request is submitted, forked or cancelled."""
    engine = engine_for(model, "suffix", 4)
    engine.prepare_constraints(WORDS)
    other, bound = engine.submit(PROMPT, FREE), engine.submit(PROMPT, replace(SAMPLED, n=3))
    engine.step()
    run = getattr(engine.scheduler, name)

    def signalled(*args: Any) -> Any:
        found = run(*args)
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):  # where a handler would run
            pass
        return found

    act = {"add": lambda: engine.submit(PROMPT[:2], SAMPLED), "fork": lambda: engine.fork(bound)}
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, name, signalled)
        with pytest.raises(KeyboardInterrupt):
            act.get(name, bound.cancel)()
    engine.check_integrity()
    same(other.result(), alone.answer(PROMPT, FREE))
    if name in act:
        same(bound.result(), alone.answer(PROMPT, SAMPLED))
    else:
        assert [sample.finish_reason for sample in bound.result().samples] == ["cancelled"] * 3
    assert not engine.loop.live
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    goes_on(engine, alone)


def test_ctrl_c_while_a_grammar_is_awaited_leaves_nothing_waiting(model: Path, alone: Unspeculated) -> None:
    """An interrupted wait would stay among those that the grammar's future tells, and may fail when it is told."""
    go = threading.Event()

    def grammar() -> str:
        assert go.wait(60)
        return Choice(["yes"]).grammar()

    engine = engine_for(model, "none")
    constraint = Scripted("interrupted", grammar)
    handles = [engine.submit(PROMPT, SamplingParams(constraint=constraint)) for _ in range(2)]
    for _ in range(5):
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            while engine.step():
                pass
    for future in engine.loop.awaited.futures:
        assert not future._waiters
    go.set()
    assert [handle.result().text for handle in handles] == ["yes", "yes"]
    goes_on(engine, alone)
