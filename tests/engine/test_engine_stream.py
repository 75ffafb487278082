"""Answers as they grow, side by side, interrupted, cancelled and repeated: each is what it would be alone."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun import Engine, Piece, RequestHandle, RequestOutput, SamplingParams
from forerun.errors import CapacityError, ForerunError, InvalidRequestError
from reference.bigram import write_bigram_gguf
from reference.failing import fail_once
from reference.tiny import VOCAB_SIZE, TinySpec, write_tiny_gguf

PROMPTS = [[1, 2, 3], [250, 7], [99], list(range(40))]
FREE = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", TinySpec("llama", layers=1))


@pytest.fixture(scope="module")
def alone(path: Path) -> Engine:
    """Answers one request at a time, for comparison."""
    return Engine(path, kv_tokens=1024, threads=1, prefix_cache=False, cache_weights=False)


@pytest.fixture(scope="module")
def shared(path: Path) -> Engine:
    return Engine(path, kv_tokens=1024, threads=1, cache_weights=False)


@pytest.fixture
def engine(path: Path) -> Engine:
    return Engine(path, kv_tokens=1024, threads=1, cache_weights=False)


def emptied(engine: Engine) -> None:
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0
    assert not engine.step()


def check_pieces(pieces: list[Piece], output: RequestOutput) -> None:
    assert "".join(pieces) == output.text
    assert [t for piece in pieces for t in piece.token_ids] == list(output.token_ids)
    assert [entry for piece in pieces for entry in piece.logprobs] == list(output.logprobs)
    for piece in pieces:
        if output.logprobs:
            assert [entry.token_id for entry in piece.logprobs] == list(piece.token_ids)
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [output.finish_reason]


@given(
    asked=st.lists(
        st.builds(
            SamplingParams,
            max_tokens=st.integers(1, 12),
            temperature=st.sampled_from([0.0, 1.0]),
            seed=st.integers(0, 9),
            stop=st.lists(st.text(st.sampled_from("abet \ufffd"), min_size=1, max_size=3), max_size=2),
            logprobs=st.sampled_from([None, 0, 2]),
            ignore_eos=st.booleans(),
        ),
        min_size=1,
        max_size=4,
    ),
    order=st.integers(0, 2**32 - 1).map(np.random.default_rng),
)
@settings(max_examples=60, deadline=None)
def test_pieces_make_up_the_output(shared: Engine, asked: list[SamplingParams], order: np.random.Generator) -> None:
    """Streams are read in any order, some after others have ended, as several readers would."""
    engine = shared
    outputs = [engine.generate([PROMPTS[i]], params)[0] for i, params in enumerate(asked)]
    handles = [engine.submit(PROMPTS[i], params) for i, params in enumerate(asked)]
    open_streams = [(iter(handle), i) for i, handle in enumerate(handles)]
    pieces: list[list[Piece]] = [[] for _ in asked]
    while open_streams:
        stream, i = open_streams[order.integers(len(open_streams))]
        piece = next(stream, None)
        if piece is None:
            open_streams.remove((stream, i))
        else:
            assert isinstance(piece, str)
            pieces[i].append(piece)
    for i, output in enumerate(outputs):
        check_pieces(pieces[i], output)
        assert list(handles[i]) == []  # all is said
        assert handles[i].result().text == output.text
    emptied(engine)


def test_a_piece_comes_with_every_token_that_completes_text(tmp_path: Path) -> None:
    emoji = "😀".encode()
    script = [0xFF, *b"a", *emoji, *b"b", *"é".encode()]
    engine = Engine(write_bigram_gguf(tmp_path / "b.gguf", script), kv_tokens=64, threads=1, cache_weights=False)
    pieces = list(engine.stream([0xFF], SamplingParams(max_tokens=8, logprobs=0)))
    # Case 41: the four tokens of a character are one piece, and the last piece tells the end.
    assert [str(p) for p in pieces] == ["a", "😀", "b", "é"]
    assert [p.token_ids for p in pieces] == [(97,), tuple(emoji), (98,), tuple("é".encode())]
    check_pieces(pieces, engine.generate([[0xFF]], SamplingParams(max_tokens=8, logprobs=0))[0])
    cut = list(engine.stream([0xFF], SamplingParams(max_tokens=3)))
    assert [str(p) for p in cut] == ["a", "\ufffd"]
    assert cut[-1].finish_reason == "length"


def test_text_held_back_for_a_stop_string_is_given_at_the_end(tmp_path: Path) -> None:
    engine = Engine(
        write_bigram_gguf(tmp_path / "b.gguf", [0xFF, *b"abcd", 42], metadata={"tokenizer.ggml.eos_token_id": 42}),
        kv_tokens=64, threads=1, cache_weights=False,
    )  # fmt: skip
    params = SamplingParams(max_tokens=9, stop=["cdX", "bcX"])
    pieces = list(engine.stream([0xFF], params))
    assert [str(p) for p in pieces] == ["a", "b", "cd"]
    assert [p.token_ids for p in pieces] == [(97,), (98, 99, 100), (42,)]
    limited = list(engine.stream([0xFF], replace(params, max_tokens=3)))
    assert [(str(p), p.finish_reason) for p in limited] == [("a", None), ("bc", "length")]
    check_pieces(pieces, engine.generate([[0xFF]], params)[0])


def test_log_probabilities_are_those_of_the_score(alone: Engine) -> None:
    """Case 14, for greedy, sampled and banned tokens, of the whole output and within pieces of several tokens."""
    for params in (
        replace(FREE, logprobs=5),
        replace(FREE, logprobs=5, temperature=1.3, top_k=9, seed=3),
        replace(FREE, logprobs=5, stop_token_ids=range(150), min_tokens=8),
        replace(FREE, logprobs=5, stop=["\ufffd\ufffdzz"]),
    ):
        prompt = PROMPTS[3]
        output = alone.generate([prompt], params)[0]
        scores = alone.score([*prompt, *output.token_ids], top=VOCAB_SIZE)
        for n, entry in enumerate(output.logprobs):
            row = len(prompt) - 1 + n
            assert entry.token_id == output.token_ids[n]
            assert [t for t, _ in entry.top] == scores.ids[row, :5].tolist()
            assert [p for _, p in entry.top] == scores.logprobs[row, :5].tolist()
            assert entry.logprob == scores.logprobs[row, scores.ids[row].tolist().index(entry.token_id)]
        assert all(entry.logprob < 0 for entry in output.logprobs)
        check_pieces(list(alone.stream(prompt, params)), output)


def test_closing_a_stream_cancels_it_and_nothing_else(engine: Engine, alone: Engine) -> None:
    """Case 43."""
    others = [engine.submit(p, FREE) for p in PROMPTS[:2]]
    stream = engine.stream(PROMPTS[3], FREE)
    next(stream)
    used = engine.stats().kv_blocks_used
    stream.close()
    assert engine.stats().kv_blocks_used < used
    engine.check_integrity()
    for piece in engine.stream(PROMPTS[2], FREE):
        assert piece.token_ids
        break  # the generator is dropped, and so is its request
    gc.collect()
    engine.stream(PROMPTS[2], FREE).close()  # never started
    assert [h.result().token_ids for h in others] == [alone.generate([p], FREE)[0].token_ids for p in PROMPTS[:2]]
    emptied(engine)


@pytest.mark.parametrize("steps", [0, 1, 5, 99])
def test_a_cancelled_request_keeps_what_it_had(engine: Engine, alone: Engine, steps: int) -> None:
    handle, other = engine.submit(PROMPTS[0], FREE), engine.submit(PROMPTS[1], FREE)
    for _ in range(steps):
        engine.step()
    handle.cancel()
    handle.cancel()
    expected = alone.generate([PROMPTS[0]], FREE)[0]
    output = handle.result()
    assert output.token_ids == expected.token_ids[:steps]
    assert output.finish_reason == ("cancelled" if steps < 12 else "length")
    check_pieces(list(handle), output)
    assert other.result().token_ids == alone.generate([PROMPTS[1]], FREE)[0].token_ids
    emptied(engine)


@pytest.mark.parametrize("place", ["plan", "load", "forward", "sampled"])
def test_cancelling_within_a_step_waits_for_its_end(
    engine: Engine, alone: Engine, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A stream that the collector finds, or a signal's handler, may cancel in the midst of this thread's own step."""
    handles = [engine.submit(p, replace(FREE, logprobs=1)) for p in PROMPTS[:3]]
    engine.step()
    owner: Any = {"plan": engine.scheduler, "load": engine.batch, "forward": engine.executor, "sampled": engine.chooser}
    run = getattr(owner[place], place)

    def cancelling(*args: Any) -> Any:
        result = run(*args)
        handles[1].cancel()
        return result

    monkeypatch.setattr(owner[place], place, cancelling)
    engine.step()
    cancelled = handles[1].result()
    assert cancelled.finish_reason == "cancelled"
    assert len(cancelled.token_ids) == len(cancelled.logprobs) == 2
    assert cancelled.text == engine.tokenizer.decode(cancelled.token_ids)
    for handle, prompt in ((handles[0], PROMPTS[0]), (handles[2], PROMPTS[2])):
        assert handle.result().token_ids == alone.generate([prompt], FREE)[0].token_ids
    emptied(engine)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("place", ["_admit", "load", "forward", "sampled"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_step_that_is_interrupted_is_done_again(
    path: Path, alone: Engine, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], place: str, after: bool
) -> None:
    params = replace(FREE, logprobs=VOCAB_SIZE, temperature=0.7, seed=3)
    for steps in (0, 1, 2, 7):
        engine = Engine(path, kv_tokens=160, max_rows=2, max_step_tokens=16, threads=1, cache_weights=False)
        owner = {
            "_admit": engine.scheduler, "load": engine.batch, "forward": engine.executor, "sampled": engine.chooser,
        }[place]  # fmt: skip
        handles = [engine.submit(p, params) for p in PROMPTS]
        for _ in range(steps):
            engine.step()
        with monkeypatch.context() as patch:
            fail_once(patch, owner, place, error, after)
            with pytest.raises(error):
                while engine.step():
                    pass
        engine.check_integrity()
        for handle, prompt in zip(handles, PROMPTS, strict=True):
            output, expected = handle.result(), alone.generate([prompt], params)[0]
            assert (output.text, output.token_ids) == (expected.text, expected.token_ids)
            assert output.logprobs == expected.logprobs
        emptied(engine)


def test_a_fork_after_an_interrupted_step_gets_a_row(
    path: Path, alone: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that wait for their step to be repeated hold no line of the step batch."""
    engine = Engine(path, kv_tokens=512, max_rows=2, threads=1, cache_weights=False)
    first, second = engine.submit(PROMPTS[0], FREE), engine.submit(PROMPTS[1], FREE)
    engine.step()
    with monkeypatch.context() as patch:
        fail_once(patch, engine.executor, "forward", KeyboardInterrupt, after=False)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    child = engine.fork(first)
    expected = [alone.generate([p], FREE)[0].token_ids for p in (PROMPTS[0], PROMPTS[1], PROMPTS[0])]
    assert [h.result().token_ids for h in (first, second, child)] == expected
    emptied(engine)


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_an_interrupted_call_leaves_nothing_running(engine: Engine, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    fail_once(monkeypatch, engine.executor, "forward", KeyboardInterrupt, after=True)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, FREE) if call == "generate" else list(engine.stream(PROMPTS[0], FREE))
    emptied(engine)
    assert len(engine.generate(PROMPTS, FREE)) == 4


def test_a_request_whose_text_is_lost_ends_in_an_error_and_the_others_go_on(
    engine: Engine, alone: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = [engine.submit(p, FREE) for p in PROMPTS[:3]]
    engine.step()
    fail_once(monkeypatch, handles[1]._live, "accept", MemoryError, after=False)
    with pytest.raises(MemoryError):
        engine.step()
    steps = engine.stats().steps
    with pytest.raises(ForerunError, match=f"{handles[1].request_id!r}.*MemoryError.*submit it again"):
        handles[1].result()
    assert engine.stats().steps == steps
    for i in (0, 2):
        assert handles[i].result().token_ids == alone.generate([PROMPTS[i]], FREE)[0].token_ids
    emptied(engine)


def test_threads_that_stream_at_once_get_what_they_would_alone(path: Path, alone: Engine) -> None:
    asked = [
        (PROMPTS[i % 4], SamplingParams(max_tokens=8 + i, temperature=i % 3 * 0.8, seed=i, ignore_eos=True, logprobs=1))
        for i in range(10)
    ]
    expected = [alone.generate([prompt], params)[0] for prompt, params in asked]
    engine = Engine(path, kv_tokens=256, max_rows=3, max_step_tokens=20, threads=2, cache_weights=False)
    pieces: list[list[Piece]] = [[] for _ in asked]
    start = threading.Barrier(len(asked) + 3)

    def read(i: int) -> None:
        start.wait()
        for piece in engine.stream(*asked[i]):
            pieces[i].append(piece)

    def disturb() -> None:
        start.wait()
        for i in range(6):
            stream = engine.stream(PROMPTS[3], replace(FREE, temperature=1.0))
            for _ in range(i):
                next(stream, None)  # it may have ended: other threads drive it, too
            stream.close()
            engine.check_integrity()

    def score() -> None:
        start.wait()
        for _ in range(5):
            with contextlib.suppress(CapacityError):  # the pool may be in use
                np.testing.assert_array_equal(engine.score([1, 2, 3], top=4).ids, scored)

    def batch() -> None:
        start.wait()
        assert [o.token_ids for o in engine.generate(PROMPTS, FREE)] == greedy

    scored = alone.score([1, 2, 3], top=4).ids
    greedy = [alone.generate([p], FREE)[0].token_ids for p in PROMPTS]
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    work: list[Callable[[], None]] = [disturb, score, batch, *(lambda i=i: read(i) for i in range(len(asked)))]
    threads = [threading.Thread(target=guarded, args=(w,)) for w in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for i, output in enumerate(expected):
        check_pieces(pieces[i], output)
    emptied(engine)


def test_requests_without_a_seed_differ_and_say_how_to_repeat_them(path: Path, engine: Engine) -> None:
    """Case 13."""
    params = SamplingParams(max_tokens=10, temperature=1.0, ignore_eos=True)
    outputs = engine.generate([PROMPTS[0]] * 6, params)
    assert len({o.seed for o in outputs}) == 6
    assert len({o.token_ids for o in outputs}) == 6
    small = Engine(path, kv_tokens=64, max_rows=4, threads=1, cache_weights=False, prefix_cache=False)
    again = small.generate([PROMPTS[0]] * 6, [replace(params, seed=o.seed) for o in outputs])
    assert [o.token_ids for o in again] == [o.token_ids for o in outputs]
    handle = engine.submit(PROMPTS[0], params)
    twin = engine.fork(handle)
    other = engine.fork(handle, params)
    assert handle.result().seed == twin.result().seed
    assert handle.result().token_ids == twin.result().token_ids
    assert other.result().seed != handle.result().seed


def test_a_seed_repeats_through_preemption(path: Path, alone: Engine) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=11, ignore_eos=True)
    prompts = [[*PROMPTS[3][:20], i] for i in range(4)]
    engine = Engine(path, kv_tokens=16 * 8, max_rows=4, threads=1, cache_weights=False)
    outputs = engine.generate(prompts, params)
    assert sum(o.stats.preemptions for o in outputs) == engine.stats().preemptions > 0
    assert [o.token_ids for o in outputs] == [alone.generate([p], params)[0].token_ids for p in prompts]
    emptied(engine)


def test_equal_scores_are_decided_alike_with_and_without_log_probabilities(tmp_path: Path) -> None:
    """A token that nothing follows has equal scores for all: both ways to choose take the lowest id."""
    path = write_bigram_gguf(tmp_path / "b.gguf", [9, 200], [9, 200, 31])
    engine = Engine(path, kv_tokens=64, threads=2, cache_weights=False)
    params = SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=[200])
    plain, detailed = (engine.generate([[9]], replace(params, logprobs=n))[0] for n in (None, 2))
    assert plain.token_ids == detailed.token_ids
    assert plain.token_ids[0] == 0


def test_a_fork_has_log_probabilities_for_all_its_tokens_or_none(engine: Engine) -> None:
    def after_three_steps(params: SamplingParams) -> RequestHandle:
        handle = engine.submit(PROMPTS[0], params)
        for _ in range(3):
            engine.step()
        return handle

    for params, expected in ((None, 12), (replace(FREE, logprobs=0), 12), (FREE, 0)):
        child = engine.fork(after_three_steps(replace(FREE, logprobs=2)), params)
        check_pieces(list(child), child.result())
        assert len(child.result().logprobs) == expected
    plain = after_three_steps(FREE)
    with pytest.raises(InvalidRequestError, match="ask for logprobs when the parent is submitted"):
        engine.fork(plain, replace(FREE, logprobs=2))
    plain.cancel()
    with pytest.raises(InvalidRequestError, match="only a live request"):
        engine.fork(plain)
    early = engine.submit(PROMPTS[0], FREE)
    assert len(engine.fork(early, replace(FREE, logprobs=2)).result().logprobs) == 12
    while engine.step():
        pass
    emptied(engine)


def test_counts_and_times(engine: Engine) -> None:
    """Cases 7, 37 and 39: counts are of delivered tokens, a rate is of tokens, and without data there is none."""
    before = engine.stats()
    assert (before.steps, before.computed_tokens, before.emitted_tokens, before.kv_blocks_used) == (0, 0, 0, 0)
    outputs = engine.generate(PROMPTS, FREE)
    after = engine.stats()
    assert after.emitted_tokens == sum(len(o.token_ids) for o in outputs) == sum(o.stats.output_tokens for o in outputs)
    assert after.computed_tokens == sum(len(p) + 11 for p in PROMPTS)
    assert after.steps == 12
    assert 0 < after.native_seconds <= after.step_seconds
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        stats = output.stats
        assert (stats.prompt_tokens, stats.output_tokens, stats.steps) == (len(prompt), 12, 12)
        assert stats.first_token_seconds is not None
        assert 0 <= stats.queue_seconds <= stats.first_token_seconds <= stats.total_seconds
        assert stats.decode_tokens_per_second == pytest.approx(11 / (stats.total_seconds - stats.first_token_seconds))
        assert output.prompt_token_ids == tuple(prompt)
    single = engine.generate([[1]], replace(FREE, max_tokens=1))[0].stats
    assert single.decode_tokens_per_second is None
    unstarted = engine.submit([1], FREE)
    unstarted.cancel()
    assert unstarted.result().stats.first_token_seconds is None
    assert unstarted.result().stats.decode_tokens_per_second is None
    cached = engine.generate([PROMPTS[3]], FREE)[0].stats
    assert cached.cached_tokens == 32
    assert engine.stats().prefix_hit_tokens == 32


def test_scores_do_not_disturb_running_requests(engine: Engine, alone: Engine) -> None:
    handle = engine.submit(PROMPTS[0], FREE)
    stream = iter(handle)
    next(stream)
    scores = engine.score(PROMPTS[3], top=3)
    np.testing.assert_array_equal(scores.ids, alone.score(PROMPTS[3], top=3).ids)
    assert handle.result().token_ids == alone.generate([PROMPTS[0]], FREE)[0].token_ids
    emptied(engine)
