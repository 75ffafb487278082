"""What drafting leaves behind: nothing. Cancellations, forks, interruptions and drafters that fail in every way.

Whatever happens to one request or to the drafter, the other answers are those without speculation, the KV books are in
order, and every state that a drafter began is freed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import forerun
from forerun import RequestHandle, RequestOutput, SamplingParams
from forerun.draft.base import Drafter, DraftRow, DraftTree
from forerun.errors import ForerunError
from reference.bigram import write_bigram_gguf
from reference.drafters import Oracle, RandomTrees, Scripted, Watched
from reference.failing import fail_once
from reference.speculation import FREE, PROMPTS, SAMPLED, Ask, Unspeculated, check_sums, emptied, engine_for, same

pytestmark = pytest.mark.usefixtures("steady_times")


@pytest.fixture(scope="module")
def alone(tiny: Path) -> Unspeculated:
    return Unspeculated.of_prompts(tiny)


def continued(output: RequestOutput, expected: RequestOutput) -> None:
    """A cancelled request has the beginning of its answer."""
    n = len(output.token_ids)
    assert output.finish_reason == "cancelled"
    assert output.token_ids == expected.token_ids[:n]
    assert output.logprobs == expected.logprobs[:n]


Act = tuple[str, int]
ACTS = ("submit", "submit", "step", "step", "step", "cancel", "fork", "read")


@given(
    draft=st.sampled_from(["oracle", "random", "suffix", "lookup", "model", "combined"]),
    acts=st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 99)), max_size=40),
    kv_blocks=st.integers(5, 30),
    max_rows=st.integers(1, 5),
    draft_len=st.sampled_from(["auto", 1, 4, 9]),
)
@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_cancellations_and_forks_leave_nothing_behind(
    tiny: Path, alone: Unspeculated, draft: str, acts: list[Act], kv_blocks: int, max_rows: int, draft_len: Any
) -> None:
    """Requests come, are forked, read and cancelled in any order; books are checked after every step."""
    makers: dict[str, Callable[[], str | Drafter]] = {
        "oracle": lambda: Oracle(alone.truth),
        "random": lambda: RandomTrees(alone.truth, kv_blocks),
        "model": lambda: f"model:{tiny}",
        "combined": lambda: f"combined:{tiny}",
    }
    drafter = makers.get(draft, lambda: draft)()
    engine = engine_for(tiny, drafter, draft_len, kv_tokens=16 * kv_blocks, max_rows=max_rows, max_step_tokens=40)
    assert engine.speculator is not None
    watched = engine.speculator.drafter = Watched(engine.speculator.drafter)
    live: list[tuple[RequestHandle, Ask]] = []
    streams: dict[int, Iterator[str]] = {}
    for act, number in acts:
        if act == "submit":
            ask = Ask(PROMPTS[number % 4], (FREE, SAMPLED)[number % 2], number % 5 > 0)
            live.append((engine.submit(ask.prompt, ask.params, speculate=ask.speculate), ask))
        elif act == "step":
            engine.step()
            engine.check_integrity()
        elif live:
            handle, ask = live[number % len(live)]
            if act == "cancel":
                handle.cancel()
            elif act == "read":
                next(streams.setdefault(id(handle), iter(handle)), None)
            elif not handle.live.request.finished:
                live.append((engine.fork(handle), ask))
        engine.check_integrity()
    while engine.step():
        engine.check_integrity()
    for handle, ask in live:
        output, expected = handle.result(), alone.answer(ask.prompt, ask.params)
        if output.finish_reason == "cancelled":
            continued(output, expected)
        else:
            same(output, expected)
        assert ask.speculate or output.stats.speculation.proposed == 0
        check_sums(output.stats.speculation)
    emptied(engine)
    assert watched.balanced()
    assert engine.speculator.failure is None


def test_a_cancelled_request_is_out_of_the_next_step(tiny: Path, alone: Unspeculated) -> None:
    """Case 43: its row, its KV and its draft state are gone; the neighbours draft on."""
    watched = Watched(Oracle(alone.truth))
    engine = engine_for(tiny, watched)
    handles = [engine.submit(prompt, FREE) for prompt in PROMPTS]
    engine.step()
    engine.step()
    assert len(watched.live) == 4
    used = engine.stats().kv_blocks_used
    handles[1].cancel()
    assert len(watched.live) == 3
    assert engine.stats().kv_blocks_used < used
    stream: Any = engine.stream(PROMPTS[1], SAMPLED)
    next(stream)
    stream.close()  # a client that disconnects
    for i in (0, 2, 3):
        same(handles[i].result(), alone.answer(PROMPTS[i], FREE))
    continued(handles[1].result(), alone.answer(PROMPTS[1], FREE))
    emptied(engine)
    assert watched.balanced()


def test_a_fork_drafts_with_a_state_of_its_own(tiny: Path, alone: Unspeculated) -> None:
    watched = Watched(Oracle(alone.truth))
    engine = engine_for(tiny, watched, 3)
    parent = engine.submit(PROMPTS[0], FREE)
    for _ in range(2):
        engine.step()
    children = [engine.fork(parent), engine.fork(parent)]
    quiet = engine.fork(engine.submit(PROMPTS[0], FREE, speculate=False))
    children[1].cancel()
    for handle in (parent, children[0], quiet):
        same(handle.result(), alone.answer(PROMPTS[0], FREE))
    assert children[0].result().stats.speculation.accepted > 0
    assert quiet.result().stats.speculation.drafted == 0
    while engine.step():
        pass
    emptied(engine)
    assert watched.balanced()
    assert len(watched.scopes) == 3


@pytest.mark.parametrize("params", [SAMPLED, replace(SAMPLED, seed=8, temperature=1.5), replace(FREE, max_tokens=20)])
def test_a_fork_with_parameters_of_its_own(tiny: Path, alone: Unspeculated, params: SamplingParams) -> None:
    """It goes on from the tokens that its parent had, as it would without speculation."""
    engine = engine_for(tiny, "none")
    parent = engine.submit(PROMPTS[0], FREE)
    for _ in range(5):
        engine.step()
    expected = engine.fork(parent, params).result()
    alone.truth.add(params, PROMPTS[0], expected.token_ids)
    engine = engine_for(tiny, Oracle(alone.truth), 3)
    parent = engine.submit(PROMPTS[0], FREE)
    for _ in range(2):
        engine.step()
    output = engine.fork(parent, params).result()
    same(output, expected)
    assert output.stats.speculation.accepted > 0
    same(parent.result(), alone.answer(PROMPTS[0], FREE))
    emptied(engine)


def test_threads_that_generate_at_once(tiny: Path, alone: Unspeculated) -> None:
    """Each gets what it would alone, whoever's step drafts for it."""
    asks = [Ask(PROMPTS[i % 4], (FREE, SAMPLED)[i % 2]) for i in range(12)]
    watched = Watched(RandomTrees(alone.truth, 4))
    engine = engine_for(tiny, watched, 5, kv_tokens=256, max_rows=3, max_step_tokens=20, threads=2)
    found: dict[int, RequestOutput] = {}
    start = threading.Barrier(len(asks))

    def work(i: int) -> None:
        start.wait()
        [found[i]] = engine.generate([asks[i].prompt], asks[i].params)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(asks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone.compare(asks, [found[i] for i in range(len(asks))])
    emptied(engine)
    assert watched.balanced()


def test_scopes_reach_the_drafter(tiny: Path, alone: Unspeculated) -> None:
    watched = Watched(Oracle(alone.truth))
    engine = engine_for(tiny, watched)
    for scope in (None, "a", "b"):
        [output] = engine.generate([PROMPTS[0]], FREE, scope=scope)
        same(output, alone.answer(PROMPTS[0], FREE))
        assert output.stats.cached_tokens == 0  # nothing is shared between scopes
    assert list(watched.scopes.values()) == [None, "a", "b"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("place", ["plan", "propose", "trim", "load", "forward", "sampled", "greedy"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_step_is_done_again(
    tiny: Path,
    alone: Unspeculated,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    place: str,
    after: bool,
) -> None:
    """Before anything is committed, nothing has happened: drafts are made again, and each token counts once."""
    mixed = [FREE, SAMPLED, replace(FREE, logprobs=None), replace(SAMPLED, logprobs=None)]
    asks = [Ask(prompt, params) for prompt, params in zip(PROMPTS, mixed, strict=True)]
    for ask in asks:
        alone.answer(ask.prompt, ask.params)
    for steps in (0, 1, 2, 4):
        watched = Watched(RandomTrees(alone.truth, steps))
        engine = engine_for(tiny, watched, 6, max_rows=4)
        owner = {
            "plan": engine.scheduler, "trim": engine.scheduler, "propose": watched, "load": engine.batch,
            "forward": engine.executor, "sampled": engine.chooser, "greedy": engine.chooser,
        }[place]  # fmt: skip
        handles = [engine.submit(ask.prompt, ask.params) for ask in asks]
        for _ in range(steps):
            engine.step()
        with monkeypatch.context() as patch:
            fail_once(patch, owner, place, error, after)
            with pytest.raises(error):
                while engine.step():
                    pass
        engine.check_integrity()
        alone.compare(asks, [handle.result() for handle in handles])
        emptied(engine)
        assert watched.balanced()
        assert engine.speculator is not None
        assert engine.speculator.failure is None


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("place", ["observe", "accept", "move_slot", "commit", "_count"])
def test_an_interrupted_commit_costs_at_most_its_own_request(
    tiny: Path, alone: Unspeculated, monkeypatch: pytest.MonkeyPatch, place: str, after: bool
) -> None:
    """A request whose text is half taken in ends in an error that says so; no answer has a token twice or lacks one.

    The first request ends in that very step.
    """
    for steps in (2, 3):
        each = [replace(FREE, max_tokens=steps + 1), FREE, FREE, FREE]
        watched = Watched(RandomTrees(alone.truth, 5, right=0.9))
        engine = engine_for(tiny, watched, 8)
        handles = [
            engine.submit(prompt, params, speculate=params is FREE)  # one token a step without drafts
            for prompt, params in zip(PROMPTS, each, strict=True)
        ]
        for _ in range(steps):
            engine.step()
        owner = {
            "observe": watched, "accept": handles[1].live, "move_slot": engine.executor.kv, "commit": engine.scheduler,
            "_count": handles[0]._loop,
        }[place]  # fmt: skip
        with monkeypatch.context() as patch:
            fail_once(patch, owner, place, KeyboardInterrupt, after)
            with pytest.raises(KeyboardInterrupt):
                while engine.step():
                    pass
        engine.check_integrity()
        assert handles[0].live.request.finished
        lost = 0
        for handle, prompt, params in zip(handles, PROMPTS, each, strict=True):
            try:
                output = handle.result()
            except ForerunError as error:
                assert "submit it again" in str(error)  # noqa: PT017
                lost += 1
            else:
                same(output, alone.answer(prompt, params))
        assert lost <= 1
        emptied(engine)
        check_sums(engine.stats().speculation)
        assert watched.balanced()


def test_a_result_is_complete_whoever_reads_it(
    tiny: Path, alone: Unspeculated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread that sees the request finished in the midst of a step waits for the step to end."""
    engine = engine_for(tiny, Oracle(alone.truth))
    handle = engine.submit(PROMPTS[0], FREE)
    finish = engine.scheduler.finish
    found: list[RequestOutput | BaseException] = []

    def read() -> None:
        try:
            found.append(handle.result())
        except BaseException as error:
            found.append(error)

    reader = threading.Thread(target=read)

    def finishing(*args: Any) -> bool:
        done = finish(*args)
        reader.start()
        reader.join(0.2)
        return done

    monkeypatch.setattr(engine.scheduler, "finish", finishing)
    output = handle.result()
    reader.join()
    assert found == [output]
    same(output, alone.answer(PROMPTS[0], FREE))


def calls_during(work: Callable[[], object]) -> list[tuple[str, str]]:
    """(file, function) of every Python call into the package."""
    package = str(Path(forerun.__file__).parent)
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(package):
            calls.append((str(Path(file).relative_to(package)), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_speculation_that_is_off_does_no_work(tiny: Path, alone: Unspeculated) -> None:
    """Case 45: without a drafter no code of drafting, pacing or tree building runs; a request's own switch silences
    the drafter."""
    engine = engine_for(tiny, "none", "auto")
    handles = [engine.submit(prompt, FREE) for prompt in PROMPTS[:3]]
    engine.step()
    calls = calls_during(engine.step)
    assert ("engine/loop.py", "_step") in calls
    working = {call for call in calls if call[0].startswith("draft/")} - {("draft/base.py", "__len__")}
    paced = {call for call in calls if call[0].removeprefix("engine/") in PACING}
    assert working | paced == set()
    for handle in handles:
        handle.cancel()
    watched = Watched(Oracle(alone.truth))
    engine = engine_for(tiny, watched)
    for output, prompt in zip(engine.generate(PROMPTS, FREE, speculate=False), PROMPTS, strict=True):
        same(output, alone.answer(prompt, FREE))
    assert (watched.calls, watched.scopes) == (0, {})
    # The same measure sees the work where there is some.
    handle = engine.submit(PROMPTS[0], FREE)
    engine.step()
    calls = calls_during(engine.step)
    assert ("engine/speculate.py", "draft") in calls
    handle.cancel()


PACING = ("speculate.py", "pace.py", "auto.py", "goodput.py", "acceptance.py", "steptime.py")


def test_drafts_of_one_row_are_not_its_neighbours(tmp_path: Path) -> None:
    """Rows with drafts of different shapes and lengths in one step: each gets its own verdict."""
    scripts = [[200 + i, *range(20 * i, 20 * i + 20)] for i in range(8)]
    path = write_bigram_gguf(tmp_path / "b.gguf", *scripts)

    def tree(row: DraftRow) -> DraftTree:
        script = scripts[row.tokens[0] - 200]
        following = script[script.index(row.tokens[-1]) + 1 :]
        width = row.tokens[0] - 200
        if width % 3 == 2:
            return DraftTree([following[0] ^ 1, *following[: width - 1]], [-1, -1, *range(1, width - 1)])
        return DraftTree.chain([*following[: width // 2], *(299,) * (width % 3)])

    engine = engine_for(path, Scripted(tree), 9)
    params = [SamplingParams(max_tokens=10, logprobs=[None, 1][i % 2]) for i in range(8)]
    outputs = engine.generate([[200 + i] for i in range(8)], params)
    for script, output in zip(scripts, outputs, strict=True):
        assert list(output.token_ids) == script[1:11]
    emptied(engine)
