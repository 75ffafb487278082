"""LogitEdits gives the bits of the token-by-token reference, whatever the history, and puts the raw logits back."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from forerun.sample import LogitEdits, SamplingParams, Saved
from forerun.sample.arrays import LateEdits
from forerun.sample.bad_words import BadWords, token_sequences
from forerun.sample.params import STAGES
from reference import sampling as reference

INF = math.inf
SPECIAL = np.array([0.0, -0.0, -INF, np.nan, 3e38, -3e38, 1e-40], np.float32)


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.int32), b.view(np.int32))


def random_params(rng: np.random.Generator, V: int) -> SamplingParams:
    def maybe(off: float, values: Sequence[float]) -> float:
        return off if rng.random() < 0.4 else float(rng.choice(values))

    biased = rng.permutation(V)[: rng.integers(0, V)] if rng.random() < 0.5 else []
    return SamplingParams(
        max_tokens=None,
        repetition_penalty=maybe(1.0, [0.5, 1.1, 1.3, 100, 0.01, 1 + 1e-9]),
        frequency_penalty=maybe(0.0, [-2, -0.3, 0.7, 2, 1e-60]),
        presence_penalty=maybe(0.0, [-1.7, 0.1, 2]),
        logit_bias={int(token): float(rng.choice([-100, -0.1, 0, 1e-50, 0.3, 100])) for token in biased},
        min_tokens=int(rng.choice([0, 0, 1, 3, 8])),
        **({} if rng.random() < 0.8 else {"temperature": 0.5, "order": ("temperature", "penalties")}),
    )


def random_tokens(rng: np.random.Generator, V: int, most: int) -> list[int]:
    return rng.integers(0, V, rng.integers(0, most + 1)).tolist()


def random_paths(rng: np.random.Generator, V: int) -> list[list[int]]:
    """The root and some nodes of a tree, in any order."""
    paths: list[list[int]] = [[]]
    for _ in range(rng.integers(0, 6)):
        paths.append([*paths[rng.integers(0, len(paths))], *rng.integers(0, V, rng.integers(1, 3)).tolist()])
    return [paths[i] for i in rng.permutation(len(paths))]


def late_disagreement(
    edits: LogitEdits, params: SamplingParams, prompt: list[int], output: list[int], path: list[int], raw: np.ndarray
) -> str | None:
    """How the late edits differ from the penalties that the reference applies at once."""
    late = edits.late(path)
    if not params.late_penalties:
        return None if late is None else "late edits in the default order"
    if late is None:
        return "no late edits"
    if len(set(late.ids.tolist())) < len(late.ids):
        return "a token twice"
    x = raw.copy()
    with np.errstate(all="ignore"):
        values = x[late.ids] + late.bias
        values = np.where(values < 0, values * late.factor, values / late.factor)
        x[late.ids] = values - late.by_count - late.by_presence
        first = dataclasses.replace(params, order=STAGES, min_tokens=0)
        expected = reference.edited(raw, first, prompt, output + path)
    return None if np.array_equal(x, expected, equal_nan=True) else f"late edits after {prompt} | {output} + {path}"


def disagreement(cls: type[LogitEdits], seed: int) -> str | None:
    """Runs a random program of appends, truncations, forks and steps; says how `cls` differs from the reference."""
    rng = np.random.default_rng(seed)
    V = int(rng.choice([3, 7, 30]))
    params = random_params(rng, V)
    prompt = random_tokens(rng, V, 10)
    banned = set(random_tokens(rng, V, 3))
    bad_words = [rng.integers(0, V, rng.choice([1, 2, 2, 3])).tolist() for _ in range(rng.choice([0, 0, 2, 9]))]
    raw = (rng.standard_normal((8, V)) * 3).astype(np.float32)
    odd = rng.random(raw.shape) < 0.3
    raw[odd] = rng.choice(SPECIAL, int(odd.sum()))

    edits = cls.of(params, prompt, banned, bad_words)
    if edits is None:
        kept = reference.edited(raw[0], params, prompt, random_tokens(rng, V, 10), banned, bad_words)
        return None if same_bits(kept, raw[0]) else "no edits, but the reference changes logits"
    twins: list[tuple[LogitEdits, list[int]]] = [(edits, [])]
    for _ in range(12):
        edits, output = twins[rng.integers(0, len(twins))]
        action = rng.random()
        if action < 0.35:
            tokens = random_tokens(rng, V, 4)
            edits.append(tokens)
            output += tokens
        elif action < 0.45:
            del output[rng.integers(0, len(output) + 1) :]
            edits.truncate(len(output))
        elif action < 0.55:
            twins.append((edits.fork(), output.copy()))
        else:
            logits = raw.copy()
            saved: list[tuple[Saved, np.ndarray]] = []
            for row, path in zip(logits, random_paths(rng, V), strict=False):
                before = row.copy()
                changes = edits.applies(len(path))
                saved.append((edits.apply(row, path), row))
                if not same_bits(row, reference.edited(before, params, prompt, output + path, banned, bad_words)):
                    return f"logits after {prompt} | {output} + {path}"
                if not changes and not same_bits(row, before):
                    return "changed where nothing applies"
                if wrong := late_disagreement(edits, params, prompt, output, path, before):
                    return wrong
            if rng.random() < 0.3:
                edits.append([0])
                output.append(0)
            for note, row in saved:
                note.restore(row)
            if not same_bits(logits, raw):
                return "restored values"
        if edits.n_output != len(output):
            return "output tokens"
    return None


@pytest.mark.parametrize("part", range(4))
def test_random_histories_equal_the_reference(part):
    for seed in range(100 * part, 100 * (part + 1)):
        assert disagreement(LogitEdits, seed) is None, seed


@pytest.mark.slow
def test_many_random_histories_equal_the_reference():
    for seed in range(1000, 11_000):
        assert disagreement(LogitEdits, seed) is None, seed


class IgnoresThePath(LogitEdits):
    def apply(self, logits: np.ndarray, path: Sequence[int] = ()) -> Saved:
        return super().apply(logits, path[:0])


class PenaltiesIgnoreThePath(LogitEdits):
    def apply(self, logits: np.ndarray, path: Sequence[int] = ()) -> Saved:
        counts, self._counts_output = self._counts_output, False
        saved = super().apply(logits, path)
        self._counts_output = counts
        return saved


class BanIgnoresThePath(LogitEdits):
    def apply(self, logits: np.ndarray, path: Sequence[int] = ()) -> Saved:
        least, self._min_tokens = self._min_tokens, self._min_tokens + len(path)
        saved = super().apply(logits, path)
        self._min_tokens = least
        return saved


class BanLastsOneLonger(LogitEdits):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._min_tokens += self._min_tokens > 0


class ChangesTheRootAlone(LogitEdits):
    def apply(self, logits: np.ndarray, path: Sequence[int] = ()) -> Saved:
        return super().apply(logits if not path else logits.copy(), path)


class CountsThePromptInFrequency(LogitEdits):
    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], *others: Any) -> None:
        super().__init__(params, prompt_ids, *others)
        for token in prompt_ids:
            self._count_one(token)
        self._counted.clear()


class CountsStepsNotTokens(LogitEdits):
    def append(self, tokens: Sequence[int]) -> None:
        super().append(tokens[:1])
        self._n_output += len(tokens[1:])
        self._counted += tokens[1:]  # what is committed, but not counted


class CountsEachTokenOnce(LogitEdits):
    def _set_count(self, slot: int, count: int) -> None:
        super()._set_count(slot, count)
        self._by_count[slot] = self._frequency if count else 0.0


class RepetitionForEachOccurrence(LogitEdits):
    def _set_count(self, slot: int, count: int) -> None:
        super()._set_count(slot, count)
        if count > 1:
            self._factor[slot] = min(self._repetition**count, 1e30)


class RepetitionForgetsThePrompt(LogitEdits):
    def _set_count(self, slot: int, count: int) -> None:
        super()._set_count(slot, count)
        if count == 0:
            self._factor[slot] = 1.0


class SignOfZeroLost(LogitEdits):
    def _set_count(self, slot: int, count: int) -> None:
        super()._set_count(slot, count)
        self._by_count[slot] = self._frequency * count


class BiasComesLast(LogitEdits):
    def _edited(self, raw: np.ndarray) -> np.ndarray:
        bias, self._bias = self._bias, self._bias[:0]
        x = super()._edited(raw)
        self._bias = bias
        x[: len(bias)] += bias
        return x


class FrequencyComesFirst(LogitEdits):
    def _edited(self, raw: np.ndarray) -> np.ndarray:
        frequency, self._frequency = self._frequency, 0.0
        with np.errstate(over="ignore"):
            x = super()._edited(raw - self._by_count[: len(raw)])
        self._frequency = frequency
        return x


class PenaltiesAddedFirst(LogitEdits):
    """One subtraction of a sum, where two are promised."""

    def _edited(self, raw: np.ndarray) -> np.ndarray:
        kept = self._frequency, self._presence
        self._frequency = self._presence = 0.0
        x = super()._edited(raw)
        self._frequency, self._presence = kept
        return x - (self._by_count[: len(raw)] + self._by_presence[: len(raw)])


class RestoresByArithmetic(LogitEdits):
    def apply(self, logits: np.ndarray, path: Sequence[int] = ()) -> Saved:
        before = logits.copy()
        saved = super().apply(logits, path)
        with np.errstate(all="ignore"):
            after = logits[saved.ids]
            return Saved(saved.ids, after + (before[saved.ids] - after))


class RestoresByLiveIds(LogitEdits):
    def apply(self, logits: np.ndarray, path: Sequence[int] = ()) -> Saved:
        saved = super().apply(logits, path)
        return Saved(self._ids[: len(saved.ids)], saved.values) if len(saved.ids) == self._n_slots else saved


class RestoresWithoutTheBan(LogitEdits):
    def apply(self, logits: np.ndarray, path: Sequence[int] = ()) -> Saved:
        saved = super().apply(logits, path)
        return Saved(saved.ids[: self._n_slots], saved.values[: self._n_slots])


class TruncationForgetsCounts(LogitEdits):
    def truncate(self, n_output: int) -> None:
        self._count(())
        del self._counted[n_output:]
        self._n_output = n_output


class BadWordsIgnoreThePath(LogitEdits):
    def _banned_after(self, path: Sequence[int]) -> np.ndarray:
        path = list(path)
        return super()._banned_after([-1] * len(path))


class BadWordsForgetThePrompt(LogitEdits):
    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], banned: Any, bad_words: Any = ()) -> None:
        super().__init__(params, prompt_ids, banned, bad_words)
        self._bad_words = BadWords(bad_words, [])


class BadWordsMatchAnywhere(LogitEdits):
    """The last token is banned wherever the one before it stands, whatever comes before that."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], banned: Any, bad_words: Any = ()) -> None:
        super().__init__(params, prompt_ids, banned, [word[-2:] for word in bad_words])


class SingleBadWordsAreForgotten(LogitEdits):
    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], banned: Any, bad_words: Any = ()) -> None:
        super().__init__(params, prompt_ids, banned, [word for word in bad_words if len(word) > 1])


class TruncationKeepsBadWordHistory(LogitEdits):
    def truncate(self, n_output: int) -> None:
        history = self._bad_words.fork()
        super().truncate(n_output)
        self._bad_words = history


class LateEditsIgnoreThePath(LogitEdits):
    def late(self, path: Sequence[int] = ()) -> LateEdits | None:
        return super().late(path[:0])


class LateEditsComeFirstToo(LogitEdits):
    def apply(self, logits: np.ndarray, path: Sequence[int] = ()) -> Saved:
        late, self._late = self._late, False
        saved = super().apply(logits, path)
        self._late = late
        return saved


class ForksShareState(LogitEdits):
    def fork(self) -> Any:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin


FAULTS = [cls for cls in LogitEdits.__subclasses__() if cls.__module__ == __name__]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda cls: cls.__name__)
def test_a_planted_fault_is_caught(fault):
    def caught(seed: int) -> bool:
        with contextlib.suppress(KeyError, IndexError):  # a broken state may break down before it disagrees
            return disagreement(fault, seed) is not None
        return False

    assert any(caught(seed) for seed in range(400))


def test_worked_example():
    params = SamplingParams(
        repetition_penalty=2, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={0: 1.0, 4: -3.0}
    )
    edits = LogitEdits.of(params, [0, 0, 5], [])
    edits.append([1, 1, 2])
    raw = f32(2, -2, 0.5, 1, 1, -1)
    logits = raw.copy()
    saved = edits.apply(logits)
    # 0: (2 + 1) / 2 once; 1: -2 * 2 - 2 * .5 - .25; 2: .5 / 2 - .5 - .25; 3: never seen; 4: bias; 5: prompt alone
    assert logits.tolist() == [1.5, -5.25, -0.5, 1, -2, -2]
    saved.restore(logits)
    assert same_bits(logits, raw)
    edits.apply(logits, [3, 3])
    assert logits.tolist() == [1.5, -5.25, -0.5, 0.5 - 1 - 0.25, -2, -2]


@pytest.mark.parametrize(
    ("knobs", "banned"),
    [
        ({}, [2]),
        ({"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3, "logprobs": 4}, [2]),
        ({"min_tokens": 5}, []),
        ({"logit_bias": {3: 0.0, 4: -0.0, 5: 1e-60}}, []),
        ({"repetition_penalty": 1 + 1e-10}, []),
        ({"frequency_penalty": 1e-60, "presence_penalty": -1e-60}, []),
    ],
    ids=str,
)
def test_a_request_that_changes_no_logits_has_no_edits(knobs, banned):
    assert LogitEdits.of(SamplingParams(**knobs), [1, 2, 3], banned) is None


@pytest.mark.parametrize(
    ("knobs", "prompt", "drafted", "committed"),
    [
        ({"logit_bias": {3: 1.0}}, [], [True, True, True], [True, True, True]),
        ({"repetition_penalty": 1.1}, [7], [True, True, True], [True, True, True]),
        ({"repetition_penalty": 1.1}, [], [False, True, True], [False, True, True]),
        ({"frequency_penalty": 1.0}, [7], [False, True, True], [False, True, True]),
        ({"presence_penalty": 1.0}, [7], [False, True, True], [False, True, True]),
        ({"min_tokens": 2}, [7], [True, True, True], [True, True, False]),
        ({"min_tokens": 1, "presence_penalty": 1.0}, [7], [True, True, True], [True, True, True]),
    ],
    ids=str,
)
def test_applies_says_where_the_raw_logits_hold(knobs, prompt, drafted, committed):
    """A tree needs its logits if any of its nodes is changed: at first a penalty by count changes all but the root."""
    edits = LogitEdits.of(SamplingParams(**knobs), prompt, [2])
    assert [edits.applies(n) for n in range(3)] == drafted
    for n, applies in enumerate(committed):
        assert edits.applies() == applies
        row = np.ones(8, np.float32)
        saved = edits.apply(row)
        assert (len(saved.ids) > 0) == (not same_bits(row, np.ones(8, np.float32))) == applies, n
        edits.append([5])


def test_end_tokens_are_banned_before_min_tokens_whatever_their_bias():
    edits = LogitEdits.of(SamplingParams(min_tokens=3, logit_bias={2: 100.0}), [2], [2, 4])
    edits.append([1])
    for path, banned in ([], True), ([5], True), ([5, 5], False), ([5, 5, 5], False):
        logits = np.zeros(6, np.float32)
        saved = edits.apply(logits, path)
        assert logits.tolist() == ([0, 0, -INF, 0, -INF, 0] if banned else [0, 0, 100, 0, 0, 0])
        saved.restore(logits)
        assert not logits.any()


def test_truncation_beyond_the_output_is_refused():
    edits = LogitEdits.of(SamplingParams(presence_penalty=1), [], [])
    edits.append([1, 2])
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=rf"truncate 2 output tokens to {wrong}"):
            edits.truncate(wrong)
    edits.truncate(0)
    assert not edits.applies()


def test_long_paths_and_histories_make_room():
    """More new tokens on a path than the arrays hold, taken back and counted again."""
    params = SamplingParams(frequency_penalty=1.0, repetition_penalty=1.5)
    edits = LogitEdits.of(params, [], [])
    raw = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    paths = [list(range(900)), [], list(range(999, 500, -1)), [3] * 700]
    output: list[int] = []
    for _ in range(2):
        for path in paths:
            logits = raw.copy()
            saved = edits.apply(logits, path)
            assert same_bits(logits, reference.edited(raw, params, [], output + path))
            saved.restore(logits)
            assert same_bits(logits, raw)
        edits.append(list(range(600)))
        output += range(600)


def test_a_row_of_a_larger_array_is_changed_in_place():
    step = np.ones((3, 6), np.float32)
    edits = LogitEdits.of(SamplingParams(logit_bias={1: 2.0}), [], [])
    saved = edits.apply(step[1])
    assert step.tolist() == [[1] * 6, [1, 3, 1, 1, 1, 1], [1] * 6]
    saved.restore(step[1])
    assert (step == 1).all()


def test_a_sequence_is_banned_where_its_beginning_was_just_written():
    edits = LogitEdits.of(SamplingParams(), [1, 2], [], [(5,), (1, 2, 3), (2, 3, 4), (2, 2)])
    assert edits is not None

    def banned(*path: int) -> set[int]:
        row = np.zeros(8, np.float32)
        edits.apply(row, path)
        return set(np.flatnonzero(row == -INF).tolist())

    assert banned() == {5, 3, 2}
    assert banned(2) == {5, 2}
    assert banned(3) == {5, 4}
    edits.append([3])
    assert banned() == {5, 4}
    assert banned(1, 2) == {5, 3, 2}
    edits.truncate(0)
    assert banned() == {5, 3, 2}


def test_texts_are_banned_with_a_space_before_them_and_without():
    def byte_level(text: str) -> list[int]:
        return [*text.replace(" ab", "S").replace("ab", "X").encode()]

    words = ["ab", [7, 8], "ab"]
    assert token_sequences(words, byte_level, adds_space=False) == [(ord("X"),), (ord("S"),), (7, 8)]

    def sentence_piece(text: str) -> list[int]:
        return byte_level(f" {text}")

    assert token_sequences(["ab"], sentence_piece, adds_space=True) == [(ord("S"),), (ord("X"),)]
