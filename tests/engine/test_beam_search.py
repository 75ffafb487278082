"""Beam search finds what a brute-force search finds, whatever runs beside it and however small the pool is."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from forerun import BeamOutput, BeamSequence, Engine, SamplingParams
from forerun.engine.beam_rules import BeamRules, Candidate, Selection
from forerun.engine.beams import LiveBeam
from forerun.engine.request import FinishReason
from forerun.sample.edits import LogitEdits
from reference.beams import Found, LogProbs, beam_search, exhaustive, log_probabilities
from reference.plain_model import PlainModel
from reference.speculation import emptied
from reference.tiny import EOS_ID, TinySpec, write_tiny_gguf

PROMPT = (250, 7, 33, 90, 120, 4, 18, 99, 64, 201, 8)
LONG = tuple((7 * n * n + 3) % 250 for n in range(70))
STOPS = tuple(range(0, 290, 5))
"""So many tokens end a text that texts of all lengths are found."""

SPECS = {
    "llama": TinySpec("llama", layers=2),
    "qwen3": TinySpec("qwen3", layers=2),
    "gemma3": TinySpec("gemma3", layers=3, window=8),
}


class Case:
    """A tiny model, how the reference sees it, and an engine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.after: LogProbs = log_probabilities(PlainModel(path))
        self.engine = engine(path)


def engine(path: Path, **options: Any) -> Engine:
    options = {"kv_tokens": 2048, "draft": "none"} | options
    return Engine(path, threads=1, cache_weights=False, **options)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("models")
    return {name: Case(write_tiny_gguf(folder / f"{name}.gguf", spec)) for name, spec in SPECS.items()}


@pytest.fixture
def llama(cases: dict[str, Case]) -> Iterator[Case]:
    yield cases["llama"]
    emptied(cases["llama"].engine)


def found(output: BeamOutput) -> list[Found]:
    return [Found(s.score, s.logprob, s.token_ids, s.finish_reason) for s in output.sequences]


def check_sequence(sequence: BeamSequence, penalty: float) -> None:
    assert sequence.logprob == sum(sequence.logprobs)
    assert len(sequence.logprobs) == len(sequence.token_ids)
    assert sequence.score == pytest.approx(sequence.logprob / len(sequence.token_ids) ** penalty)


def compare(case: Case, prompt: tuple[int, ...], beams: int, penalty: float, early: Any) -> list[Found]:
    ends = {*STOPS, *case.engine.tokenizer.eos_ids}
    expected = beam_search(
        case.after, prompt, ends, beams=beams, max_tokens=7, length_penalty=penalty, early_stopping=early
    )
    output = case.engine.beam_search(
        prompt, beams, max_tokens=7, length_penalty=penalty, early_stopping=early, stop_token_ids=STOPS
    )
    got = found(output)
    assert [(f.tokens, f.reason, f.total) for f in got] == [(f.tokens, f.reason, f.total) for f in expected]
    assert [f.score for f in got] == pytest.approx([f.score for f in expected], rel=1e-12)
    for sequence in output.sequences:
        check_sequence(sequence, penalty)
    return got


PROMPTS = itertools.cycle([PROMPT, PROMPT[:3], LONG[:20], (99,), (1, 2, 3), LONG[30:37], (260, 12)])
SETTINGS = [
    (prompt, *setting)
    for prompt, setting in zip(
        PROMPTS, itertools.product((1, 2, 3, 4, 5), (-1.0, 0.0, 0.5, 1.0, 2.0), (False, True, "never")), strict=False
    )
]


@pytest.mark.parametrize("architecture", sorted(SPECS))
def test_it_finds_what_the_reference_finds(cases: dict[str, Case], architecture: str) -> None:
    case = cases[architecture]
    results = [compare(case, *setting) for setting in SETTINGS]
    emptied(case.engine)
    assert {f.reason for result in results for f in result} == {"stop", "length"}
    assert len({len(f.tokens) for result in results for f in result}) >= 4


def test_with_more_beams_than_texts_it_finds_them_all(llama: Case) -> None:
    alphabet = (5, 17, 130, EOS_ID)
    for penalty in (-2.0, 0.0, 1.0, 2.0):
        expected = exhaustive(llama.after, PROMPT, alphabet, [EOS_ID], max_tokens=4, length_penalty=penalty)
        output = llama.engine.beam_search(PROMPT, 256, max_tokens=4, length_penalty=penalty, allowed_token_ids=alphabet)
        assert len(output.sequences) == len(expected) == 1 + 3 + 9 + 27 + 81
        assert [s.score for s in output.sequences] == pytest.approx([f.score for f in expected], rel=1e-6)
        assert {s.token_ids for s in output.sequences} == {f.tokens for f in expected}
        assert output.sequences[0].token_ids == expected[0].tokens


@pytest.mark.parametrize("architecture", sorted(SPECS))
def test_one_beam_is_greedy_decoding(cases: dict[str, Case], architecture: str) -> None:
    case = cases[architecture]
    for settings in (
        {},
        {"stop_token_ids": STOPS},
        {"frequency_penalty": 0.7, "presence_penalty": 0.4, "logit_bias": {9: 2.0, 44: -3.0}},
        {"min_tokens": 5, "stop_token_ids": STOPS},
        {"bad_words": [[16], [254, 238]], "allowed_token_ids": range(200, 290)},
    ):
        params = SamplingParams(max_tokens=12, logprobs=0, **settings)
        greedy = case.engine.generate([PROMPT], params)[0]
        output = case.engine.beam_search(PROMPT, 1, max_tokens=12, early_stopping=True, **settings)
        [sequence] = output.sequences
        assert sequence.token_ids == greedy.token_ids
        assert (sequence.text, sequence.finish_reason) == (greedy.text, greedy.finish_reason)
        if len(settings) < 2:
            assert sequence.logprobs == tuple(entry.logprob for entry in greedy.logprobs)
    emptied(case.engine)


PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": -0.3, "logit_bias": {292: 2.5, 238: -1.0},
}  # fmt: skip


def penalized(after: LogProbs, prompt: tuple[int, ...]) -> LogProbs:
    """The log-probabilities that `PENALTIES` leave of the model's, in the order of forerun.sample.edits."""

    def changed(tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        row = after(tokens).copy()
        output = Counter(tokens[len(prompt) :])
        for token, bias in PENALTIES["logit_bias"].items():
            row[token] += np.float32(bias)
        for token in set(tokens):
            factor = np.float32(PENALTIES["repetition_penalty"])
            row[token] = row[token] * factor if row[token] < 0 else row[token] / factor
        for token, n in output.items():
            row[token] -= np.float32(PENALTIES["frequency_penalty"]) * n + np.float32(PENALTIES["presence_penalty"])
        return row

    return changed


def compare_penalized(case: Case) -> None:
    ends = {*STOPS, *case.engine.tokenizer.eos_ids}
    for beams, prompt in itertools.product((2, 4), (PROMPT, LONG[:20], (1, 2, 3))):
        expected = beam_search(penalized(case.after, prompt), prompt, ends, beams=beams, max_tokens=9)
        output = case.engine.beam_search(prompt, beams, max_tokens=9, stop_token_ids=STOPS, **PENALTIES)
        assert [s.token_ids for s in output.sequences] == [f.tokens for f in expected]
        assert [s.logprob for s in output.sequences] == pytest.approx([f.total for f in expected], abs=1e-5)


def test_each_beam_has_penalties_of_its_own(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_penalized(llama)
    monkeypatch.setattr(LogitEdits, "fork", lambda edits: edits)
    with pytest.raises(AssertionError):
        compare_penalized(llama)


def test_n_return_and_the_best_text(llama: Case) -> None:
    whole = llama.engine.beam_search(PROMPT, 5, max_tokens=9)
    some = llama.engine.beam_search(PROMPT, 5, max_tokens=9, n_return=2)
    assert some.sequences == whole.sequences[:2]
    assert (some.text, some.token_ids) == (some.sequences[0].text, some.sequences[0].token_ids)
    assert some.prompt_token_ids == PROMPT
    assert some.steps == 9
    text = llama.engine.tokenizer.decode(PROMPT[:3])
    if llama.engine.tokenizer.encode(text) == list(PROMPT[:3]):
        assert llama.engine.beam_search(text, 2) == llama.engine.beam_search(PROMPT[:3], 2)


WAYS: dict[str, dict[str, Any]] = {
    "chunked prefill": {"max_step_tokens": 7, "max_rows": 7},
    "no prefix cache": {"prefix_cache": False},
    "one row": {"max_rows": 1},
    "fewer rows than beams": {"max_rows": 3},
    "one token a step": {"max_rows": 1, "max_step_tokens": 1},
    "a pool for one beam": {"kv_tokens": 96},
    "a pool for one beam without a cache": {"kv_tokens": 96, "prefix_cache": False},
    "a pool for some beams": {"kv_tokens": 128, "prefix_cache": False, "max_rows": 8},
    "a drafter": {"draft": "suffix", "draft_len": 4},
}


@pytest.mark.parametrize("way", sorted(WAYS))
def test_how_it_is_computed_changes_nothing(llama: Case, way: str) -> None:
    """Nor do other requests, which come and go meanwhile and get what they get alone."""
    expected = llama.engine.beam_search(LONG, 5, max_tokens=20, length_penalty=0.6, stop_token_ids=STOPS[::4])
    others = [
        ((1, 2, 3), SamplingParams(max_tokens=30)),
        (LONG[:40], SamplingParams(max_tokens=9, temperature=1, seed=4)),
    ]
    alone = [llama.engine.generate([prompt], params)[0].token_ids for prompt, params in others]
    other = engine(llama.path, **WAYS[way])
    for busy in (False, True):
        handles = [other.submit(prompt, params) for prompt, params in others] if busy else []
        output = other.beam_search(LONG, 5, max_tokens=20, length_penalty=0.6, stop_token_ids=STOPS[::4])
        assert output.sequences == expected.sequences
        assert output.steps == expected.steps
        assert busy or other.stats().speculation.drafted == 0
        assert [handle.result().token_ids for handle in handles] == (alone if busy else [])
        if "pool" in way:
            assert output.preemptions > 0
    emptied(other)
    assert (other.stats().speculation.drafted > 0) == (way == "a drafter")


def test_two_searches_and_a_request_in_one_small_pool(llama: Case) -> None:
    asks = [(LONG, 4, 18), (LONG[:50], 3, 25)]
    expected = [llama.engine.beam_search(p, n, max_tokens=m).sequences for p, n, m in asks]
    small = engine(llama.path, kv_tokens=112)
    outputs: list[Any] = [None, None]

    def run(at: int) -> None:
        prompt, n, m = asks[at]
        outputs[at] = small.beam_search(prompt, n, max_tokens=m).sequences

    threads = [threading.Thread(target=run, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    single = small.generate([(1, 2, 3)], SamplingParams(max_tokens=40))[0].token_ids
    for thread in threads:
        thread.join()
    assert outputs == expected
    assert single == llama.engine.generate([(1, 2, 3)], SamplingParams(max_tokens=40))[0].token_ids
    emptied(small)


@pytest.mark.parametrize("seed", range(8))
def test_any_mix_in_any_small_engine_finishes_with_what_each_finds_alone(llama: Case, seed: int) -> None:
    rng = random.Random(seed)
    max_rows = rng.randint(1, 6)
    small = engine(
        llama.path, kv_tokens=rng.choice([96, 128, 160]), max_rows=max_rows, prefix_cache=rng.random() < 0.5,
        max_step_tokens=max_rows + rng.choice([0, 1, 5, 40]), draft=rng.choice(["none", "suffix"]), draft_len=3,
    )  # fmt: skip

    def prompt() -> tuple[int, ...]:
        return tuple(rng.randrange(250) for _ in range(rng.randint(1, 60)))

    searches: list[tuple[tuple[int, ...], int, dict[str, Any]]] = [
        (prompt(), rng.randint(1, 6), {
            "max_tokens": rng.randint(1, 30), "length_penalty": rng.choice([-1, 0, 0.7, 1, 2]),
            "early_stopping": rng.choice([True, False, "never"]), "stop_token_ids": STOPS[::5],
            "repetition_penalty": rng.choice([1.0, 1.3]),
        })
        for _ in range(3)
    ]  # fmt: skip
    params = SamplingParams(max_tokens=20, n=rng.choice([1, 3]), temperature=1.0, seed=seed)
    asks = [prompt(), prompt()]
    expected = [llama.engine.beam_search(p, n, **settings).sequences for p, n, settings in searches]
    alone = [llama.engine.generate([ask], params)[0] for ask in asks]

    handles = [small.submit(ask, params) for ask in asks]
    with ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(small.beam_search, p, n, **settings) for p, n, settings in searches]
        outputs = [handle.result() for handle in handles]
        assert [future.result(60).sequences for future in futures] == expected
    for output, own in zip(outputs, alone, strict=True):
        assert [o.token_ids for o in (output, *output.others)] == [o.token_ids for o in (own, *own.others)]
    emptied(small)


def test_equal_scores_are_ordered_by_beam_and_token() -> None:
    rules = BeamRules(beams=2)
    candidates = [Candidate(1, 3, -1, -2), Candidate(0, 9, -1, -2), Candidate(0, 4, -1, -2), Candidate(1, 2, -1, -2)]
    choice = rules.choose(candidates, 1, lambda _: None)
    assert [(c.beam, c.token) for c in choice.going] == [(0, 4), (0, 9)]


def _length_without_the_end(self: BeamRules, total: float, length: int) -> float:
    return _score(self, total, max(1, length - 1))


def _every_end_counts(
    self: BeamRules, candidates: Any, length: int, ends: Callable[[Candidate], FinishReason | None]
) -> Selection:
    choice = _choose(BeamRules(beams=self.beams + 3), candidates, length, ends)
    scored = [ending._replace(score=self.score(ending.candidate.total, length)) for ending in choice.ended]
    return Selection(choice.going[: self.beams], scored)


def _never_over(self: BeamRules, best: float | None, length: int, longest: int, finished: list[float]) -> bool:
    return best is None or (_over(self, best, length, longest, finished) and self.early_stopping is True)


def _early_is_early(self: BeamRules, *given: Any) -> bool:
    return _over(replace(self, early_stopping=True), *given)


def _never_is_false(self: BeamRules, best: float | None, length: int, _longest: int, finished: list[float]) -> bool:
    return _over(self, best, length, length, finished)


def _totals_stay_with_the_row(self: LiveBeam, token: int, logprob: float) -> None:
    total = self.total
    _take(self, token, logprob)
    if len(self.logprobs) == 3:
        self.total = total


def _twins_share_their_past(self: LiveBeam) -> LiveBeam:
    twin = _twin(self)
    twin.logprobs = self.logprobs
    return twin


def _first_candidates_only(self: LiveBeam, *more: Any) -> None:
    _read(self, *more)
    self.candidates = self.candidates[: self.search.rules.beams]


_score, _choose, _over = BeamRules.score, BeamRules.choose, BeamRules.over
_take, _read, _twin = LiveBeam.take, LiveBeam.read, LiveBeam.twin

FAULTS: dict[str, tuple[object, str, object]] = {
    "the end token doesn't count": (BeamRules, "score", _length_without_the_end),
    "ends beyond the first beams count": (BeamRules, "choose", _every_end_counts),
    "goes on although nothing can be better": (BeamRules, "over", _never_over),
    "ends as soon as enough is finished": (BeamRules, "over", _early_is_early),
    "'never' hopes for the current length": (BeamRules, "over", _never_is_false),
    "a log-probability is lost": (LiveBeam, "take", _totals_stay_with_the_row),
    "forks share what is written next": (LiveBeam, "twin", _twins_share_their_past),
    "end tokens starve the beams": (LiveBeam, "read", _first_candidates_only),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_the_comparison_catches(cases: dict[str, Case], fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, name, planted = FAULTS[fault]
    monkeypatch.setattr(target, name, planted)
    with pytest.raises(AssertionError):
        for setting in SETTINGS:
            compare(cases["llama"], *setting)
    emptied(cases["llama"].engine)
