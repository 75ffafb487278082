"""Sampled frequencies fit the distribution that the knobs define, and planted faults do not."""

from __future__ import annotations

import numpy as np
import pytest

from reference import native
from reference import sampling as reference

DRAWS = 40_000
FIT = 4.0
"""Standard deviations of the chi-square score that a right sampler stays below at these seeds."""

LOGITS = (np.random.default_rng(42).standard_normal(50) * 1.5).astype(np.float32)

KNOBS = [
    {},
    {"temperature": 0.6},
    {"temperature": 2.5},
    {"top_k": 7},
    {"top_k": 1},
    {"top_p": 0.5},
    {"top_p": 0.92},
    {"min_p": 0.08},
    {"typical_p": 0.6},
    {"typical_p": 0.3, "top_k": 15},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


def draw(logits: np.ndarray, *, positions=None, seeds=None, **knobs: float) -> np.ndarray:
    """int32[DRAWS] tokens at positions 0, 1, ... of one seed, unless told otherwise."""
    return native.sample(
        logits.reshape(1, -1),
        np.zeros(DRAWS, np.int32),
        seed=1234 if seeds is None else seeds,
        position=np.arange(DRAWS) if positions is None else positions,
        **knobs,
    )


def score(tokens: np.ndarray, **knobs: float) -> float:
    return reference.chi_square_score(tokens, reference.probabilities(LOGITS, **knobs)[0])


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_frequencies_over_positions_fit(knobs):
    assert score(draw(LOGITS, **knobs), **knobs) < FIT


def test_frequencies_over_seeds_fit():
    seeds = np.arange(DRAWS, dtype=np.uint64)
    tokens = draw(LOGITS, seeds=seeds, positions=np.zeros(DRAWS, np.int64))
    assert score(tokens) < FIT


def test_large_flat_vocabulary_fits():
    """The bounds that skip blocks must not favour any of them."""
    logits = np.zeros(1000, np.float32)
    tokens = draw(logits)
    assert reference.chi_square_score(tokens, np.full(1000, 1e-3)) < FIT
    assert reference.chi_square_score(tokens // 64, np.bincount(np.arange(1000) // 64) / 1e3) < FIT


def test_rare_tokens_are_drawn_as_often_as_they_should():
    """512 tokens that hold 0.001 together, beside one that holds the rest."""
    logits = np.full(513, np.log(0.001 / 512 / 0.999), np.float32)
    logits[0] = 0
    count = sum(np.count_nonzero(draw(logits, seeds=np.full(DRAWS, s, np.uint64))) for s in range(4))
    expected = 4 * DRAWS * 0.001
    assert abs(count - expected) < 4 * np.sqrt(expected)


def test_successive_positions_are_independent():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    tokens = draw(logits)
    p = reference.softmax(logits)
    pairs = tokens[:-1:2] * 4 + tokens[1::2]
    assert reference.chi_square_score(pairs, np.outer(p, p).ravel()) < FIT


def test_the_same_noise_couples_two_distributions():
    """Coupled verification accepts a draft as often as two close distributions share a draw."""
    other = LOGITS + np.float32(0.05) * np.sin(np.arange(50, dtype=np.float32))
    together = np.mean(draw(LOGITS) == draw(other))
    assert together > 0.95
    apart = np.mean(draw(LOGITS) == draw(other, seeds=np.full(DRAWS, 99, np.uint64)))
    assert apart < 0.2


@pytest.mark.parametrize(
    ("fault", "tokens_of", "knobs"),
    [
        (
            "noise ignores the position",
            lambda: draw(LOGITS, positions=np.zeros(DRAWS, np.int64)),
            {},
        ),
        (
            "noise repeats every 500 positions",
            lambda: draw(LOGITS, positions=np.arange(DRAWS) % 500),
            {},
        ),
        ("top_k is one too many", lambda: draw(LOGITS, top_k=8), {"top_k": 7}),
        ("top_k is one too few", lambda: draw(LOGITS, top_k=6), {"top_k": 7}),
        ("top_p drops the crossing token", lambda: draw(LOGITS, top_p=0.46), {"top_p": 0.5}),
        ("top_p keeps one token more", lambda: draw(LOGITS, top_p=0.55), {"top_p": 0.5}),
        ("min_p is not applied", lambda: draw(LOGITS), {"min_p": 0.08}),
        ("temperature is off by 5%", lambda: draw(LOGITS, temperature=1.05), {}),
        (
            "temperature comes after top_p",
            lambda: draw(LOGITS, top_p=0.92),
            {"temperature": 2.5, "top_p": 0.92},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_planted_fault_is_caught(fault, tokens_of, knobs):
    assert score(tokens_of(), **knobs) > FIT, fault
