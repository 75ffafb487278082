"""Tokens, speed and operations of speculation: against simulation, the paper's tables, and brute force."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from forerun.errors import PlanError
from forerun.plan.acceptance import Acceptance, extra_operations, rate_for, rates_from_counts, speedup

STEPS = 200_000
SIGMAS = 5


def accepted_tokens(rates: Acceptance, length: int, steps: int, seed: int) -> np.ndarray:
    """Draft tokens accepted in each of `steps` steps, drawn one by one until one is rejected. int64[steps]."""
    draws = np.random.default_rng(seed).random((steps, length))
    accepted = draws < np.array([rates.rate(depth) for depth in range(length)])
    return np.where(accepted.all(axis=1), length, np.argmin(accepted, axis=1)) if length else np.zeros(steps, np.int64)


def within(samples: np.ndarray, expected: float) -> bool:
    """Whether the mean of independent samples is as expected, at `SIGMAS` standard errors."""
    return abs(samples.mean() - expected) <= SIGMAS * samples.std() / math.sqrt(len(samples)) + 1e-12


SETTINGS = [
    (Acceptance((0.6,)), 2),
    (Acceptance((0.75,)), 7),
    (Acceptance((0.9,)), 10),
    (Acceptance((0.65, 0.55, 0.5, 0.45)), 4),
    (Acceptance((0.87, 0.3)), 5),
    (Acceptance((0.0,)), 3),
    (Acceptance((1.0,)), 3),
    (Acceptance((0.5,)), 0),
]


@pytest.mark.parametrize(("rates", "length"), SETTINGS, ids=str)
def test_expected_tokens_against_simulation(rates: Acceptance, length: int) -> None:
    tokens = accepted_tokens(rates, length, STEPS, seed=1) + 1
    assert within(tokens, rates.expected_tokens(length))
    for depth, survived in enumerate(rates.survival(length)):
        assert within((tokens > depth + 1).astype(float), survived)


def test_the_simulation_notices_a_wrong_formula() -> None:
    """One token too many in the sum is many standard errors away."""
    rates = Acceptance((0.75,))
    tokens = accepted_tokens(rates, 7, STEPS, seed=1) + 1
    assert not within(tokens, rates.expected_tokens(6))
    assert not within(tokens, rates.expected_tokens(8))
    assert not within(tokens, sum(rates.survival(7)))


@pytest.mark.parametrize(("rates", "length"), SETTINGS, ids=str)
def test_speedup_and_operations_against_simulation(rates: Acceptance, length: int) -> None:
    """A long text, step by step: time and operations are counted, then divided by what plain decoding takes."""
    c, v, operations = 0.07, 1.3, 0.05
    tokens = accepted_tokens(rates, length, STEPS, seed=2) + 1
    emitted, error = tokens.mean(), SIGMAS * tokens.std() / math.sqrt(STEPS)
    time = length * c + v
    assert abs(emitted / time - speedup(rates.expected_tokens(length), length * c, v)) <= error / time + 1e-12
    work = length * operations + length + 1
    expected = extra_operations(rates, length, operations)
    assert work / (emitted + error) - 1e-12 <= expected <= work / max(emitted - error, 1) + 1e-12


def test_acceptance_is_the_overlap_of_two_distributions() -> None:
    """The algorithm itself over fixed distributions: x ~ q is kept with min(1, p/q), so a rate is sum min(p, q)."""
    rng = np.random.default_rng(3)
    p, q = rng.dirichlet(np.ones(12)), rng.dirichlet(np.ones(12))
    rates, length = Acceptance((float(np.minimum(p, q).sum()),)), 5
    drawn = rng.choice(12, size=(STEPS, length), p=q)
    kept = rng.random((STEPS, length)) < np.minimum(1, p[drawn] / q[drawn])
    tokens = np.where(kept.all(axis=1), length, np.argmin(kept, axis=1)) + 1
    assert within(tokens, rates.expected_tokens(length))


@pytest.mark.parametrize(
    ("alpha", "gamma", "operations", "speed"),
    [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_the_papers_table_of_operations_and_speed(alpha: float, gamma: int, operations: float, speed: float) -> None:
    """arXiv 2211.17192, operations and speed for a drafter that costs nothing."""
    rates = Acceptance.of(alpha)
    assert round(extra_operations(rates, gamma), 2) == operations
    assert round(speedup(rates.expected_tokens(gamma), 0.0), 2) == speed


@pytest.mark.parametrize(
    ("alpha", "gamma", "expected", "measured"),
    [(0.75, 7, 3.2, 3.4), (0.65, 5, 2.4, 3.1), (0.53, 5, 1.9, 2.3)],
    ids=["EnDe T=0", "CNN/DM T=0", "CNN/DM T=1"],
)
def test_the_papers_expectation_for_t5_small(alpha: float, gamma: int, expected: float, measured: float) -> None:
    """T5-XXL with T5-small at c = .02. All three were measured above what the formula allows for; see the page."""
    predicted = speedup(Acceptance.of(alpha).expected_tokens(gamma), gamma * 0.02)
    assert round(predicted, 1) == expected
    assert predicted < measured


def test_a_constant_rate_has_the_closed_form() -> None:
    for alpha in np.linspace(0, 0.99, 34):
        for length in range(12):
            closed = (1 - alpha ** (length + 1)) / (1 - alpha)
            assert Acceptance((float(alpha),)).expected_tokens(length) == pytest.approx(closed, rel=1e-12)


def best_speedup(alpha: float, c: float, verify: Callable[[int], float]) -> float:
    """Over draft lengths of 1 to 60."""
    rates = Acceptance((alpha,))
    return max(speedup(rates.expected_tokens(n), n * c, verify(n)) for n in range(1, 61))


GRID = [round(float(x), 2) for x in np.arange(0.0, 0.96, 0.05)]


def test_some_draft_pays_exactly_if_acceptance_exceeds_cost() -> None:
    """Corollary 3.9 of the paper: iff alpha > c, and then by at least (1 + alpha) / (1 + c), with verification free."""
    for alpha in GRID:
        for c in GRID:
            gain = best_speedup(alpha, c, lambda _: 1.0)
            assert (gain > 1 + 1e-12) == (alpha > c), (alpha, c)
            if alpha > c:
                assert gain >= (1 + alpha) / (1 + c) - 1e-12


@pytest.mark.parametrize("c", [0.1, 0.4, 0.7])
def test_break_even_against_simulation(c: float) -> None:
    """One draft token a step: counted time against plain decoding, on both sides of a = c and at it."""
    for alpha, sign in ((c - 0.05, -1), (c, 0), (c + 0.05, 1)):
        tokens = accepted_tokens(Acceptance((alpha,)), 1, STEPS, seed=5) + 1
        gain, error = tokens.mean() / (1 + c), SIGMAS * tokens.std() / math.sqrt(STEPS) / (1 + c)
        assert (gain - error > 1) == (sign > 0)
        assert (gain + error < 1) == (sign < 0)


def test_a_verification_that_grows_is_a_dearer_draft() -> None:
    """With v(n) = 1 + s n a draft token costs c + s: the same corollary with that in the place of c."""
    for alpha in GRID:
        for c in (0.0, 0.05, 0.2, 0.5):
            for s in (0.0, 0.03, 0.1, 0.4):
                gain = best_speedup(alpha, c, lambda n, s=s: 1 + s * n)
                assert (gain > 1 + 1e-12) == (alpha > c + s + 1e-12), (alpha, c, s)


def test_one_step_of_verification_cannot_be_outdrafted() -> None:
    """If verifying costs a jump before any draft pays for it, a longer draft may pay where one token doesn't."""
    rates, c = Acceptance((0.8,)), 0.05

    def gain(length: int) -> float:
        return speedup(rates.expected_tokens(length), length * c, 1.9)

    assert gain(1) < 1 < gain(2) < gain(4)


def test_rates_by_depth() -> None:
    rates = Acceptance.of(0.9, 0.5)
    assert [rates.rate(depth) for depth in (0, 1, 2, 9)] == [0.9, 0.5, 0.5, 0.5]
    assert rates.survival(3) == pytest.approx([0.9, 0.45, 0.225])
    assert rates.expected_tokens(0) == 1


def test_rates_from_an_engines_counters() -> None:
    rates = Acceptance.of(0.8, 0.6, 0.5)
    accepted = accepted_tokens(rates, 3, STEPS, seed=4)
    counted = rates_from_counts([int((accepted > depth).sum()) for depth in range(3)], STEPS)
    assert counted.rates == pytest.approx(rates.rates, abs=0.01)
    assert rates_from_counts([60, 36, 0, 0], 80).rates == (0.75, 0.6, 0.0), "nobody reached the last depth"
    for counts, drafts, text in (
        ([90], 80, "90 drafts accepted at depth 0 of 80 that reached it"),
        ([50, 60], 80, "60 drafts accepted at depth 1 of 50 that reached it"),
        ([-1], 80, "-1 drafts accepted at depth 0"),
        ([], 80, r"\[\] is not allowed; expected rates from 0 to 1"),
        ([0], 0, r"\[\] is not allowed"),
    ):
        with pytest.raises(PlanError, match=f"acceptance: {text}"):
            rates_from_counts(counts, drafts)


@pytest.mark.parametrize("rates", [(), (1.1,), (-0.1,), (0.5, math.nan), (math.inf,)])
def test_what_is_no_probability_is_refused(rates: tuple[float, ...]) -> None:
    with pytest.raises(PlanError, match=r"acceptance: .* is not allowed; expected rates from 0 to 1"):
        Acceptance(rates)


@pytest.mark.parametrize(("rate", "length"), [(0.0, 1), (0.3, 1), (0.5, 3), (0.87, 16), (1.0, 4)])
def test_the_rate_for_so_many_tokens(rate: float, length: int) -> None:
    """By the closed form; what no rate gives is answered with the nearest one."""
    tokens = length + 1 if rate == 1 else (1 - rate ** (length + 1)) / (1 - rate)
    assert rate_for(tokens, length) == pytest.approx(rate, abs=1e-12)
    assert rate_for(0.5, length) == pytest.approx(0, abs=1e-12)
    assert rate_for(length + 2, length) == 1
