"""Behaviour that broke other engines, on a toy model: penalties, min_tokens, min_p, bias and log-probabilities when
several positions are verified at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from forerun import _native
from forerun.sample import LogitEdits, SamplingParams
from reference import native
from reference import sampling as reference

V = 24
END = 0
PROMPT = (3, 8, 3)
TABLE = (np.random.default_rng(11).standard_normal((V, V)) * 2).astype(np.float32)

Drafter = Callable[[Sequence[int]], list[int]]
Keep = Callable[[int, int], bool]


def scores(token: int) -> np.ndarray:
    """The toy model's raw logits float32[V] after a token."""
    return TABLE[token]


def everywhere(row: int, rows: int) -> bool:
    return row < rows


def on_the_bonus_row(row: int, rows: int) -> bool:
    return row == rows - 1


def choose(
    logits: np.ndarray, rows: Sequence[int], params: SamplingParams, positions: Sequence[int], min_p: Keep = everywhere
) -> list[int]:
    n = len(rows)
    return native.sample(
        logits,
        rows,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=[params.min_p * min_p(row, n) for row in range(n)],
        seed=77,
        position=positions,
    ).tolist()


def unspeculated(params: SamplingParams, n: int, banned: Sequence[int] = ()) -> list[int]:
    """One token a step, with the token-by-token reference for the edits."""
    output: list[int] = []
    while len(output) < n:
        last = (*PROMPT, *output)[-1]
        row = reference.edited(scores(last), params, PROMPT, output, banned)
        output += choose(row[None], [0], params, [len(PROMPT) + len(output)])
    return output


def speculated(
    params: SamplingParams,
    n: int,
    draft: Drafter,
    banned: Sequence[int] = (),
    *,
    edited_rows: Keep = everywhere,
    min_p: Keep = everywhere,
    committed: Callable[[list[int]], list[int]] = lambda tokens: tokens,
) -> list[int]:
    """Several positions a step, all edited in one array of logits in which other rows lie between."""
    edits = LogitEdits.of(params, PROMPT, banned)
    output: list[int] = []
    while len(output) < n:
        drafts = draft(output)
        known = [*PROMPT, *output, *drafts]
        at = len(PROMPT) + len(output)
        raw = np.full((2 * len(drafts) + 2, V), 9.0, np.float32)
        rows = range(1, len(raw), 2)
        for i, row in enumerate(rows):
            raw[row] = scores(known[at - 1 + i])
        logits = raw.copy()
        saved = []
        for i, row in enumerate(rows):
            if edits is not None and edited_rows(i, len(rows)):
                saved.append((edits.apply(logits[row], drafts[:i]), row))
        wanted = choose(logits, rows, params, range(at, at + len(rows)), min_p)
        for note, row in saved:
            note.restore(logits[row])
        assert np.array_equal(logits.view(np.int32), raw.view(np.int32))
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == wanted[accepted]:
            accepted += 1
        new = wanted[: accepted + 1]
        if edits is not None:
            edits.append(committed(new))
        output += new
    return output[:n]


def oracle(text: Sequence[int], length: int) -> Drafter:
    return lambda output: list(text[len(output) : len(output) + length])


def half_right(text: Sequence[int], seed: int) -> Drafter:
    """Drafts of 0 to 5 tokens, each of them right with a probability of 0.7."""
    rng = np.random.default_rng(seed)

    def draft(output: Sequence[int]) -> list[int]:
        right = text[len(output) : len(output) + rng.integers(0, 6)]
        return [token if rng.random() < 0.7 else int(rng.integers(0, V)) for token in right]

    return draft


KNOBS = [
    {"frequency_penalty": 2.0},
    {"frequency_penalty": -2.0},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.6},
    {"logit_bias": {4: 3.0, 9: -100.0}},
    {"min_tokens": 30, "max_tokens": None},
    {"temperature": 1.2, "min_p": 0.2, "logit_bias": {4: 2.0}},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    {
        "temperature": 1.5,
        "min_p": 0.05,
        "frequency_penalty": -0.4,
        "presence_penalty": 0.3,
        "repetition_penalty": 0.8,
        "logit_bias": {7: -2.0, END: 4.0},
        "min_tokens": 13,
        "max_tokens": None,
    },
]


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_verifying_several_positions_at_once_gives_the_same_text(knobs):
    params = SamplingParams(**knobs)
    text = unspeculated(params, 60, [END])
    for length in (0, 1, 3, 8):
        assert speculated(params, 60, oracle(text, length), [END]) == text
    for seed in range(8):
        assert speculated(params, 60, half_right(text, seed), [END]) == text


class TestCase8:
    """Penalties and min_tokens count tokens, not steps."""

    def test_opposite_frequency_penalties_give_different_greedy_texts(self):
        more, plain, less = (unspeculated(SamplingParams(frequency_penalty=f), 60) for f in (-2.0, 0.0, 2.0))
        assert more != less
        assert plain not in (more, less)
        assert len(set(more)) < len(set(less))
        for f, text in ((-2.0, more), (2.0, less)):
            assert speculated(SamplingParams(frequency_penalty=f), 60, oracle(text, 4)) == text

    def test_three_tokens_accepted_in_a_step_raise_the_penalty_by_three(self):
        edits = LogitEdits.of(SamplingParams(frequency_penalty=0.5), [], [])
        edits.append([6, 6, 6])
        logits = np.full(V, 2.0, np.float32)
        edits.apply(logits)
        assert logits[6] == 2.0 - 3 * 0.5
        assert (np.delete(logits, 6) == 2.0).all()

    @pytest.mark.parametrize("fault", [lambda new: new[:1], lambda new: new[-1:]], ids=["first", "last"])
    def test_counting_one_token_a_step_is_caught(self, fault):
        params = SamplingParams(frequency_penalty=2.0)
        text = unspeculated(params, 60)
        assert speculated(params, 60, oracle(text, 3), committed=fault) != text

    def test_min_tokens_counts_tokens(self):
        """END is always the favourite: it comes as soon as it may, however many tokens a step brings."""
        params = SamplingParams(logit_bias={END: 100.0}, min_tokens=7)
        text = unspeculated(params, 8, [END])
        assert text.index(END) == 7
        for length in (0, 1, 2, 3, 7, 8):
            assert speculated(params, 8, oracle(text, length), [END]) == text
        by_steps = speculated(params, 12, oracle(text, 1), [END], committed=lambda new: new[:1])
        assert by_steps.index(END) > 7


class TestCase9:
    """min_p and logit_bias act on every verified row, not only on the bonus row."""

    params = SamplingParams(temperature=1.3, min_p=0.3, logit_bias={4: 3.0, 9: -100.0})

    def test_every_row_is_biased_and_cut(self):
        text = unspeculated(self.params, 60)
        assert speculated(self.params, 60, oracle(text, 5)) == text

    @pytest.mark.parametrize("knob", ["edited_rows", "min_p"])
    def test_acting_on_the_bonus_row_alone_is_caught(self, knob):
        text = unspeculated(self.params, 60)
        assert speculated(self.params, 60, oracle(text, 5), **{knob: on_the_bonus_row}) != text


class TestCase14:
    """Log-probabilities are the model's own: never all zero, and each position has its own alternatives."""

    def test_logprobs_of_an_accepted_block_equal_teacher_forced_scores(self):
        params = SamplingParams(repetition_penalty=1.7, frequency_penalty=1.0, logit_bias={4: 2.0})
        text = unspeculated(params, 4)
        edits = LogitEdits.of(params, PROMPT, [])
        raw = np.stack([scores(token) for token in (PROMPT[-1], *text[:3])])
        logits = raw.copy()
        saved = [edits.apply(row, text[:i]) for i, row in enumerate(logits)]
        assert choose(logits, range(4), params, range(3, 7)) == text
        chosen = np.array(text, np.int32)
        every = np.arange(4, dtype=np.int32)
        _, _, of_edited = _native.top_logprobs(logits, every, 5, chosen)
        for note, row in zip(saved, logits, strict=True):
            note.restore(row)
        ids, logprobs, of_chosen = _native.top_logprobs(logits, every, 5, chosen)

        exact = [reference.log_softmax(row) for row in raw]
        np.testing.assert_allclose(of_chosen, [row[t] for row, t in zip(exact, text, strict=True)], atol=1e-6)
        assert np.abs(of_edited - of_chosen).max() > 0.1
        assert (of_chosen < -0.01).all()
        for row in range(4):
            best = sorted(range(V), key=lambda token, row=row: (-raw[row, token], token))[:5]
            assert ids[row].tolist() == best
            np.testing.assert_allclose(logprobs[row], exact[row][best], atol=1e-6)
        assert len({tuple(row) for row in ids.tolist()}) == 4
