"""Workloads: what drafts win on them, against enumeration, closed forms and walks over drawn texts."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from forerun.errors import PlanError
from forerun.plan.workload import CODE_AND_CHAT, LONGEST, MOST_CLASSES, Workload, WorkloadClass, class_of, draw

STEADY = WorkloadClass(name="steady", acceptance=0.6, spread=math.inf, swing=0)
MOODY = WorkloadClass(name="moody", acceptance=0.6, spread=math.inf, swing=0.9, dwell=5, tokens=3000)


def enumerated(each: WorkloadClass, length: int) -> tuple[list[float], list[list[float]]]:
    """Tokens of a step that starts in an easy (0) or hard (1) moment, and where the next one starts: by enumerating all
    moments and outcomes of `length` + 2 places."""
    easy, hard = each.moments(each.acceptance)
    change = each.change
    expected, onward = [0.0, 0.0], [[0.0, 0.0], [0.0, 0.0]]
    for first in (0, 1):
        for moods in itertools.product((0, 1), repeat=length + 1):
            path = (first, *moods)
            p = math.prod(change if a != b else 1 - change for a, b in itertools.pairwise(path))
            for guessed in itertools.product((True, False), repeat=length):
                q = p
                for mood, right in zip(path, guessed, strict=False):
                    a = hard if mood else easy
                    q *= a if right else 1 - a
                accepted = guessed.index(False) if False in guessed else length
                expected[first] += q * (accepted + 1)
                onward[first][path[accepted + 1]] += q
    return expected, onward


@pytest.mark.parametrize("a", [0.0, 0.35, 0.8, 1.0])
def test_constant_acceptance_gives_the_closed_form(a: float) -> None:
    each = replace(STEADY, acceptance=a)
    for length, tokens in enumerate(each.mean_tokens_per_step):
        closed = length + 1 if a == 1 else (1 - a ** (length + 1)) / (1 - a)
        assert tokens == pytest.approx(closed, rel=1e-12)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("dwell", [1.0, 1.5, 5.0, 100.0])
def test_tokens_of_a_step_against_enumeration(length: int, dwell: float) -> None:
    each = replace(MOODY, dwell=dwell)
    expected, onward = enumerated(each, length)
    survival = each.survival(each.acceptance)
    assert survival[:, : length + 1].sum(1) == pytest.approx(expected, rel=1e-12)
    chain = np.array(onward)
    at = (
        np.linalg.matrix_power(chain, 1 << 14)[0]
        if dwell > 1
        else np.linalg.matrix_power((chain + np.eye(2)) / 2, 64)[0]
    )
    assert each.tokens_per_step(each.acceptance)[length] == pytest.approx(at @ expected, rel=1e-9)


def test_steps_start_more_often_in_hard_moments() -> None:
    """Averaging over places instead is wrong by far."""
    each = replace(MOODY, dwell=100)
    by_place = each.survival(each.acceptance).mean(0).cumsum()
    assert by_place[8] > 1.2 * each.tokens_per_step(each.acceptance)[8]


@pytest.mark.parametrize("length", [1, 4, 12])
def test_a_walk_over_texts_makes_as_many_steps(length: int) -> None:
    texts = draw(Workload((MOODY,)), 200, 3)
    per_text = []
    for run in texts.run:
        place = steps = 0
        while place < MOODY.tokens:
            place += min(int(run[place]), length) + 1
            steps += 1
        per_text.append(place / steps)
    error = np.std(per_text) / math.sqrt(len(per_text))
    assert abs(np.mean(per_text) - MOODY.mean_tokens_per_step[length]) < 4 * error


@pytest.mark.parametrize(
    ("acceptance", "spread"), [(0.8, 4), (0.35, 4), (0.5, 0.1), (0.5, 1000), (0.05, 1), (0.98, 4), (0.7, 30)]
)
def test_the_integral_over_requests_has_the_moments_of_a_beta(acceptance: float, spread: float) -> None:
    x, weights = WorkloadClass(name="x", acceptance=acceptance, spread=spread).means()
    assert weights.sum() == pytest.approx(1)
    assert weights @ x == pytest.approx(acceptance, rel=1e-4)
    variance = acceptance * (1 - acceptance) / (spread + 1)
    assert weights @ (x - acceptance) ** 2 == pytest.approx(variance, rel=5e-3)


def test_the_mean_of_a_class_is_harmonic_over_its_requests() -> None:
    """Against requests drawn by the standard library."""
    each = WorkloadClass(name="x", acceptance=0.7, spread=3, swing=0)
    rng = random.Random(1)
    steps = []
    for _ in range(40_000):
        a = rng.betavariate(2.1, 0.9)
        steps.append(1 / sum(a**depth for depth in range(6)))
    error = np.std(steps) / math.sqrt(len(steps))
    assert abs(1 / each.mean_tokens_per_step[5] - np.mean(steps)) < 4 * error


def test_texts_are_what_was_asked_for() -> None:
    workload = Workload((
        WorkloadClass(name="a", share=3, acceptance=0.8, spread=5, swing=0.5, dwell=20, tokens=400),
        WorkloadClass(name="b", share=1, acceptance=0.3, spread=20, swing=1, dwell=7, tokens=100),
    ))  # fmt: skip
    texts = draw(workload, 2000, 0)
    assert np.bincount(texts.kind).tolist() == [1500, 500]
    assert set(texts.tokens[texts.kind == 0]) == {400}
    assert texts.run.shape == (2000, 400 + LONGEST)
    guessed = texts.run > 0
    for index, each in enumerate(workload.classes):
        mine = texts.kind == index
        sd = math.sqrt(each.acceptance * (1 - each.acceptance) / (each.spread + 1))
        assert abs(texts.mean[mine].mean() - each.acceptance) < 4 * sd / math.sqrt(mine.sum())
        assert texts.mean[mine].std() == pytest.approx(sd, rel=0.1)
        moments = each.moments(texts.mean[mine])
        assert moments.mean(-1) == pytest.approx(texts.mean[mine])
        hard = texts.hard[mine]
        for mood, wanted in ((hard, moments[:, 1]), (~hard, moments[:, 0])):
            places = mood.sum(1)
            assert abs((guessed[mine] & mood).sum() - (places * wanted).sum()) < 4 * math.sqrt(places.sum() / 4)
        changes = (hard[:, 1:] != hard[:, :-1]).mean()
        assert changes == pytest.approx(1 / each.dwell, rel=0.05)


def test_a_run_ends_at_the_first_miss() -> None:
    run = draw(CODE_AND_CHAT, 50, 5).run.astype(int)
    follows = np.where(run[:, :-1] > 0, np.minimum(1 + run[:, 1:], LONGEST), 0)
    inside = run[:, : -LONGEST - 1]
    assert (inside == follows[:, :-LONGEST]).all()
    assert run.max() == LONGEST


def test_texts_are_a_function_of_the_seed() -> None:
    first, again, other = (draw(CODE_AND_CHAT, 20, seed) for seed in (4, 4, 5))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert (first.run != other.run).any()


def test_shares() -> None:
    workload = Workload((replace(STEADY, share=1, tokens=300), replace(STEADY, name="b", share=3, tokens=100)))
    assert workload.shares.tolist() == [0.25, 0.75]
    assert workload.token_shares.tolist() == [0.5, 0.5]


def test_a_class_as_people_write_it() -> None:
    assert class_of("code:acceptance=0.8") == WorkloadClass(name="code", acceptance=0.8)
    assert class_of(" x : share=2 , acceptance=.5,spread=inf,swing=0,dwell=1,tokens=7") == WorkloadClass(
        name="x", share=2, acceptance=0.5, spread=math.inf, swing=0, dwell=1, tokens=7
    )


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ("", "class", "lacks acceptance"),
        ("code", "class", "lacks acceptance"),
        ("code:", "class", "'' is not allowed"),
        (":acceptance=0.5", "class", "name"),
        ("code:acceptance", "class", "'acceptance' is not allowed"),
        ("code:acceptance=x", "class", "a number"),
        ("code:acceptance=0.5,acceptance=0.6", "class", "twice"),
        ("code:acceptance=0.5,temper=1", "class", "temper"),
        ("code:acceptance=0.5,tokens=1.5", "class", "a whole number"),
        ("code:acceptance=1.5", "class code: acceptance", "0 to 1"),
        ("code:acceptance=nan", "class code: acceptance", "0 to 1"),
        ("code:acceptance=-0.1", "class code: acceptance", "0 to 1"),
        ("code:acceptance=0.5,share=0", "class code: share", "1e-6 to 1e6"),
        ("code:acceptance=0.5,share=inf", "class code: share", "1e-6 to 1e6"),
        ("code:acceptance=0.5,spread=0", "class code: spread", "0.1 to 1000"),
        ("code:acceptance=0.5,spread=nan", "class code: spread", "0.1 to 1000"),
        ("code:acceptance=0.99,spread=1", "class code: spread", "too small"),
        ("code:acceptance=0.5,swing=1.1", "class code: swing", "0 to 1"),
        ("code:acceptance=0.5,dwell=0.5", "class code: dwell", "at least 1"),
        ("code:acceptance=0.5,dwell=inf", "class code: dwell", "at least 1"),
        ("code:acceptance=0.5,tokens=0", "class code: tokens", "1 to 65536"),
        ("code:acceptance=0.5,tokens=1000000", "class code: tokens", "1 to 65536"),
    ],
)  # fmt: skip
def test_bad_classes_are_named(text: str, field: str, said: str) -> None:
    with pytest.raises(PlanError, match=said) as caught:
        class_of(text)
    assert caught.value.field == field


def test_bad_mixes_are_named() -> None:
    for classes, said in (
        ([], "at least one"),
        ([STEADY, STEADY], "more than once"),
        ([replace(STEADY, name=str(i)) for i in range(MOST_CLASSES + 1)], "at most"),
    ):
        with pytest.raises(PlanError, match=said):
            Workload.of(classes)
