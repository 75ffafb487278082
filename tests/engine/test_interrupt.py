"""Ctrl-C and re-entrance: a step is whole, or it has not begun."""

# ruff: noqa: ARG002

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from forerun import Engine, ForerunError, SamplingParams
from forerun.draft.base import Drafter, DraftRow, DraftTree
from forerun.errors import DraftWarning
from reference.speculation import FREE, PROMPTS

PLACES = ("forward", "load", "commit", "finish", "sampled", "greedy", "plan")


@pytest.fixture
def engine(tiny: Path) -> Engine:
    return Engine(tiny, kv_tokens=1024, threads=1, cache_weights=False, draft="none")


@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_in_a_step_takes_effect_after_it(engine: Engine, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """A real signal, in the midst of every part of a step: the step is completed, then KeyboardInterrupt is raised."""
    expected = [o.token_ids for o in engine.generate(PROMPTS, FREE)]
    owners: dict[str, Any] = {
        "forward": engine.executor, "load": engine.batch, "commit": engine.scheduler, "finish": engine.scheduler,
        "sampled": engine.chooser, "greedy": engine.chooser, "plan": engine.scheduler,
    }  # fmt: skip
    run = getattr(owners[place], place)
    interrupted_at: list[int] = []

    def signalled(*args: Any) -> Any:
        if not interrupted_at:
            interrupted_at.append(1)
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(100):  # where a handler would run
                pass
        return run(*args)

    handles = [engine.submit(p, FREE) for p in PROMPTS]
    with monkeypatch.context() as patch:
        patch.setattr(owners[place], place, signalled)
        with pytest.raises(KeyboardInterrupt):
            while engine.step():
                pass
    assert interrupted_at
    engine.check_integrity()
    assert [h.result().token_ids for h in handles] == expected
    assert engine.stats().speculation.emitted == 2 * sum(len(ids) for ids in expected)  # nothing twice, nothing lost
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_handlers_and_threads_are_left_alone(tiny: Path) -> None:
    seen: list[object] = []

    class Looking(Drafter):
        name = "looking"

        def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
            seen.append(signal.getsignal(signal.SIGINT))
            return [DraftTree.chain([1]) for _ in rows]

    def mine(*_: object) -> None:
        raise AssertionError

    watched = Engine(tiny, kv_tokens=256, threads=1, cache_weights=False, draft=Looking(), draft_len=1)
    before = signal.signal(signal.SIGINT, mine)
    try:
        watched.generate(PROMPTS[:1], FREE)
        assert set(seen) == {mine}
    finally:
        signal.signal(signal.SIGINT, before)
    seen.clear()
    thread = threading.Thread(target=lambda: watched.generate(PROMPTS[:1], FREE))
    thread.start()
    thread.join()
    assert set(seen) == {signal.default_int_handler}


@pytest.mark.parametrize("method", ["propose", "observe", "free", "begin"])
def test_a_drafter_that_runs_the_engine_is_turned_off_and_nobody_fails(tiny: Path, method: str) -> None:
    plain = Engine(tiny, kv_tokens=1024, threads=1, cache_weights=False, draft="none")
    expected = [o.token_ids for o in plain.generate(PROMPTS, FREE)]

    class Reentrant(Drafter):
        name = "reentrant"
        engine: Engine

        def _call(self, name: str) -> None:
            if name == method:
                self.engine.generate([[1, 2]], SamplingParams(max_tokens=2))

        def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
            self._call("propose")
            return [DraftTree.chain([1, 2]).first(row.budget) for row in rows]

        def begin(self, key: int, scope: str | None) -> None:
            self._call("begin")

        def observe(self, key: int, tree: DraftTree, accepted: Sequence[int]) -> None:
            self._call("observe")

        def free(self, key: int, tokens: Sequence[int]) -> None:
            self._call("free")

    drafter = Reentrant()
    engine = drafter.engine = Engine(tiny, kv_tokens=1024, threads=1, cache_weights=False, draft=drafter, draft_len=2)
    with pytest.warns(DraftWarning, match="a step is running"):
        outputs = engine.generate(PROMPTS, FREE)
    assert [o.token_ids for o in outputs] == expected
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0


@pytest.mark.parametrize("write", ["append", "__setitem__", "clear", "__delitem__"])
def test_a_drafter_cannot_write_to_a_text(tiny: Path, write: str) -> None:
    class Writing(Drafter):
        name = "writing"

        def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
            getattr(rows[0].tokens, write)(
                *{"append": (5,), "__setitem__": (-1, 5), "__delitem__": (-1,)}.get(write, ())
            )
            return [DraftTree.chain([1]) for _ in rows]

    expected = Engine(tiny, kv_tokens=256, threads=1, cache_weights=False, draft="none").generate(PROMPTS[:1], FREE)
    engine = Engine(tiny, kv_tokens=256, threads=1, cache_weights=False, draft=Writing(), draft_len=1)
    with pytest.warns(DraftWarning, match="AttributeError"):
        output = engine.generate(PROMPTS[:1], FREE)[0]
    assert output.token_ids == expected[0].token_ids


def test_stepping_within_a_step_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.submit(PROMPTS[0], FREE)
    run = engine.executor.forward

    def nested(*args: Any) -> Any:
        with pytest.raises(ForerunError, match="a step is running"):
            engine.step()
        return run(*args)

    monkeypatch.setattr(engine.executor, "forward", nested)
    assert engine.step()
