"""Searches that are interrupted or fail: everything they hold is freed, and nobody else notices."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun import Engine, ForerunError, SamplingParams
from forerun.engine.beams import BeamSearch, LiveBeam
from forerun.errors import NumericalError
from reference.failing import fail_once
from reference.gguf_writer import write_gguf
from reference.quant import make_tensor
from reference.speculation import emptied
from reference.tiny import TinySpec, tiny_metadata, tiny_weights

PROMPT = (5, 80, 33, 121, 9)
OTHER = SamplingParams(max_tokens=40)


@pytest.fixture
def engine(tiny: Path) -> Engine:
    return Engine(tiny, kv_tokens=1024, threads=1, cache_weights=False, draft="none")


def owner(engine: Engine, name: str) -> Any:
    """Whose method it is."""
    if name == "forward":
        return engine.executor
    if name == "load":
        return engine.batch
    if name in ("read", "take", "twin", "reason"):
        return LiveBeam
    return BeamSearch if name.startswith("_") else engine.scheduler


PLACES = (
    "forward", "load", "plan", "hold", "fork", "extend",
    "read", "take", "twin", "reason", "_advance", "_go_on", "_fork", "_sequence", "_measure",
)  # fmt: skip


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_anywhere_frees_everything(
    engine: Engine, place: str, error: type[BaseException], after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engine.beam_search(PROMPT, 4, max_tokens=12)
    other = engine.generate([(1, 2, 3)], OTHER)[0].token_ids
    for skipped in (0, 5):
        beside = engine.submit((1, 2, 3), OTHER)
        step, steps = engine.loop._step, 0

        def counted(began: float, skipped: int = skipped, step: Any = step) -> None:
            nonlocal steps
            steps += 1
            if steps == 1 + skipped:
                fail_once(monkeypatch, owner(engine, place), place, error, after)
            step(began)

        with monkeypatch.context() as patch:
            patch.setattr(engine.loop, "_step", counted)
            # Where nothing of the kind happens any more, nothing fails.
            try:
                output = engine.beam_search(PROMPT, 4, max_tokens=12)
                assert output.sequences == expected.sequences
            except (error, ForerunError):
                pass
        monkeypatch.undo()
        engine.check_integrity()
        left = [*engine.scheduler.running, *engine.scheduler.waiting]
        assert left == ([] if beside.finished else [beside.live.request])
        assert set(engine.loop.live) == {request.request_id for request in left}
        assert beside.result().token_ids == other
        emptied(engine)
        assert engine.beam_search(PROMPT, 4, max_tokens=12).sequences == expected.sequences
    emptied(engine)


@pytest.mark.parametrize("place", ["forward", "hold", "fork", "extend"])
def test_ctrl_c_ends_a_search_after_the_step(engine: Engine, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = getattr(owner(engine, place), place)
    calls: list[int] = []

    def signalled(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(100):  # where a handler would run
                pass
        return run(*args)

    beside = engine.submit((1, 2, 3), OTHER)
    with monkeypatch.context() as patch:
        patch.setattr(owner(engine, place), place, signalled)
        with pytest.raises(KeyboardInterrupt):
            engine.beam_search(PROMPT, 4, max_tokens=30)
    engine.check_integrity()
    assert engine.scheduler.running == [beside.live.request]
    assert beside.result().token_ids == engine.generate([(1, 2, 3)], OTHER)[0].token_ids
    emptied(engine)


def test_another_thread_may_step_a_search_that_is_cancelled(engine: Engine) -> None:
    """Threads that step at the same time: whoever is in the step when a search ends leaves nothing behind."""
    expected = [engine.beam_search(PROMPT, n, max_tokens=10).sequences for n in (2, 3, 4)]
    going = threading.Event()

    def step() -> None:
        while not going.is_set():
            engine.step()

    stepper = threading.Thread(target=step)
    stepper.start()
    try:
        for _ in range(5):
            assert [engine.beam_search(PROMPT, n, max_tokens=10).sequences for n in (2, 3, 4)] == expected
    finally:
        going.set()
        stepper.join()
    emptied(engine)


def test_scores_that_are_no_numbers_end_the_search(tmp_path: Path, engine: Engine) -> None:
    output = engine.beam_search(PROMPT, 3, max_tokens=6)
    # All but the last token are computed.
    bad = next(t for s in output.sequences for t in s.token_ids[2:-1] if t not in (*PROMPT, *s.token_ids[:2]))
    spec = TinySpec("llama", layers=1, tied=False)
    weights = tiny_weights(spec)
    weights["token_embd.weight"][bad] = np.nan
    path = write_gguf(tmp_path / "bad.gguf", tiny_metadata(spec), [make_tensor(n, w) for n, w in weights.items()])
    broken = Engine(path, kv_tokens=1024, threads=1, cache_weights=False, draft="none")
    with pytest.raises(NumericalError, match="not numbers at position"):
        broken.beam_search(PROMPT, 3, max_tokens=6)
    emptied(broken)


def test_a_search_that_fails_leaves_the_others_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two searches at once: one meets its error, the other finds what it finds."""
    expected = engine.beam_search(PROMPT, 4, max_tokens=15).sequences
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(engine.beam_search(PROMPT, 4, max_tokens=15).sequences))
    advance = BeamSearch._advance

    def failing(self: BeamSearch, loop: Any, now: float) -> None:
        if self.rules.beams == 3 and self._steps == 4:
            raise NumericalError("made to fail")
        advance(self, loop, now)

    monkeypatch.setattr(BeamSearch, "_advance", failing)
    thread.start()
    with pytest.raises(NumericalError, match="made to fail"):
        engine.beam_search(PROMPT, 3, max_tokens=15)
    thread.join()
    assert found == [expected]
    emptied(engine)
