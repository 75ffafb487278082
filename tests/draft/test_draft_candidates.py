"""Tokens to propose: drawn ones follow the q that is handed on, coupled ones are what the target's noise picks."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import numpy.typing as npt
import pytest

from forerun import SamplingParams, _native
from forerun.draft import candidates as module
from forerun.draft.candidates import Place, candidates, draw, draws
from forerun.sample.transforms import sample
from reference import native
from reference import sampling as reference

FIT = 4.0
"""Standard deviations of the chi-square score that a right drawing stays below at these seeds."""
DRAWS = 6000
SMALL = (np.random.default_rng(7).standard_normal(6) * 1.2).astype(np.float32)

KNOBS: list[dict[str, float]] = [
    {}, {"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 3}, {"top_k": 1}, {"top_p": 0.6}, {"top_p": 0.0},
    {"min_p": 0.2}, {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
]  # fmt: skip


def rejecting(**knobs: float) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0} | knobs), verify="rejection")  # type: ignore[arg-type]


def drawn(width: int, **knobs: float) -> npt.NDArray[np.int64]:
    """int64[DRAWS, width] of SMALL, one seed each."""
    params = rejecting(**knobs)
    return np.array([draw(SMALL, Place(0, 5, params, seed), width, 6).tokens for seed in range(DRAWS)])


@pytest.mark.parametrize("size", [1, 5, 300, 1500, 9000])
@pytest.mark.parametrize(
    "knobs", [*KNOBS, {"top_k": 1200, "top_p": 0.999}, {"temperature": 5.0, "top_p": 0.999}], ids=str
)
def test_q_is_what_the_parameters_make_of_the_scores(size: int, knobs: dict[str, float]) -> None:
    logits = (np.random.default_rng(size).standard_normal(size) * 2).astype(np.float32)
    found = draw(logits, Place(0, 3, rejecting(**knobs), 11), 4, size + 9)
    expected = reference.probabilities(logits, **knobs)[0]
    assert found.q is not None
    assert found.q.shape == (size + 9,)
    assert found.q.dtype == np.float32
    np.testing.assert_allclose(found.q[:size], expected, rtol=1e-5, atol=1e-12)
    assert not found.q[size:].any()
    assert len(set(found.tokens)) == len(found.tokens) == min(4, np.count_nonzero(expected))
    assert all(expected[token] > 0 for token in found.tokens)


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_drawn_tokens_follow_q(knobs: dict[str, float]) -> None:
    q = reference.probabilities(SMALL, **knobs)[0]
    assert reference.chi_square_score(drawn(1, **knobs)[:, 0], q) < FIT


def pair_probabilities(q: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of (first, second) drawn without replacement, float64[V * V]."""
    table = np.zeros((len(q), len(q)))
    for a, b in permutations(range(len(q)), 2):
        table[a, b] = q[a] * q[b] / (1 - q[a])
    return table.ravel()


def test_siblings_are_drawn_without_replacement() -> None:
    q = reference.probabilities(SMALL)[0]
    pairs = drawn(3)
    assert reference.chi_square_score(pairs[:, 0] * 6 + pairs[:, 1], pair_probabilities(q)) < FIT


def test_siblings_in_another_order_are_caught() -> None:
    """Planted: the right tokens in order of their ids, and a rejection sampler looks at the first one first."""
    q = reference.probabilities(SMALL)[0]
    pairs = np.sort(drawn(2), axis=1)
    assert reference.chi_square_score(pairs[:, 0] * 6 + pairs[:, 1], pair_probabilities(q)) > 20


def joint_with_target() -> float:
    """Chi-square score of (the target's own token, the draft) against independence, both being of SMALL."""
    q = reference.probabilities(SMALL)[0]
    own = native.sample(SMALL[None], np.zeros(DRAWS), seed=np.arange(DRAWS), position=5)
    return reference.chi_square_score(own * 6 + drawn(1)[:, 0], np.outer(q, q).ravel())


def test_drawn_tokens_are_independent_of_the_targets_noise() -> None:
    assert joint_with_target() < FIT


def test_drawing_with_the_targets_noise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "stream_seed", lambda seed, _stream: seed)
    assert joint_with_target() > 20


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_the_first_coupled_candidate_is_the_seeds_token(knobs: dict[str, float]) -> None:
    logits = (np.random.default_rng(1).standard_normal((40, 500)) * 2).astype(np.float32)
    full = {"temperature": 1.0} | knobs
    params = SamplingParams(**full)  # type: ignore[arg-type]
    places = [Place(row, 10 + row, params, 3 * row) for row in range(40)]
    for place, found in zip(places, candidates(logits, places, 4, 500), strict=True):
        assert found.tokens[0] == sample(logits[place.row], seed=place.seed, position=place.position, **full)  # type: ignore[arg-type]
        assert found.q is None
        assert len(set(found.tokens)) == len(found.tokens) == len(found.confidence)
        assert found.confidence == sorted(found.confidence, reverse=True)
        assert sum(found.confidence) <= 1 + 1e-9
        probabilities = reference.probabilities(logits[place.row], **knobs)[0]
        assert (probabilities[found.tokens] > 0).sum() >= min(len(found.tokens), 1)


def test_coupled_candidates_come_by_their_noisy_scores() -> None:
    logits = (np.random.default_rng(2).standard_normal((1, 60)) * 2).astype(np.float32)
    place = Place(0, 4, SamplingParams(temperature=0.7), 21)
    scores = logits[0] / 0.7 + _native.gumbel(21, 4, np.arange(60, dtype=np.int32))
    found = candidates(logits, [place], 5, 60)[0]
    assert found.tokens == np.argsort(-scores)[:5].tolist()
    share = np.exp(scores - scores.max())
    np.testing.assert_allclose(found.confidence, share[found.tokens] / share.sum(), rtol=1e-4)


def test_a_close_draft_agrees_more_often_with_the_same_noise() -> None:
    """Daliri et al.: at least (1 - TV) / (1 + TV) of the draws agree."""
    rng = np.random.default_rng(3)
    target = (rng.standard_normal(50) * 2).astype(np.float32)
    draft = target + rng.normal(0, 0.3, 50).astype(np.float32)
    p, q = reference.probabilities(target)[0], reference.probabilities(draft)[0]
    distance = 0.5 * np.abs(p - q).sum()
    params = SamplingParams(temperature=1.0)
    agreed = 0
    for seed in range(1500):
        guess = candidates(draft[None], [Place(0, 7, params, seed)], 1, 50)[0].tokens[0]
        agreed += guess == sample(target, temperature=1.0, seed=seed, position=7)
    assert agreed / 1500 > (1 - distance) / (1 + distance)


def test_rows_of_all_kinds_in_one_call() -> None:
    logits = (np.random.default_rng(4).standard_normal((6, 40)) * 2).astype(np.float32)
    kinds = [SamplingParams(), SamplingParams(temperature=1.0), rejecting()] * 2
    places = [Place(5 - i, i, params, i) for i, params in enumerate(kinds)]
    together = candidates(logits, places, 2, 40)
    for place, found in zip(places, together, strict=True):
        alone = candidates(logits, [place], 2, 40)[0]
        assert (found.tokens, found.confidence) == (alone.tokens, alone.confidence)
        assert (found.q is None) == (not draws(place.params))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0), rejecting()])
def test_scores_that_are_not_numbers_give_no_candidates(bad: float, params: SamplingParams) -> None:
    logits = np.zeros((2, 40), dtype=np.float32)
    logits[0, 3] = bad
    found = candidates(logits, [Place(0, 1, params, 0), Place(1, 1, params, 0)], 2, 40)
    assert [len(f.tokens) for f in found] == [0, 2]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0), rejecting()])
def test_tokens_that_are_ruled_out_are_never_candidates(params: SamplingParams) -> None:
    logits = np.full((2, 40), -np.inf, dtype=np.float32)
    logits[0, 5] = 1.0
    found = candidates(logits, [Place(0, 1, params, 0), Place(1, 1, params, 0)], 3, 40)
    assert [f.tokens for f in found] == [[5], []]


def test_a_tiny_temperature() -> None:
    logits = (np.random.default_rng(5).standard_normal((1, 300))).astype(np.float32)
    best = int(np.argmax(logits))
    for params in (SamplingParams(temperature=2e-38), rejecting(temperature=2e-38)):
        assert candidates(logits, [Place(0, 1, params, 0)], 3, 300)[0].tokens[0] == best
