from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest

from forerun.draft.base import DraftTree
from forerun.engine import acceptance
from forerun.engine.acceptance import Acceptance, RequestAcceptance, cells_of


def survival(record: Acceptance, request: RequestAcceptance, tree: DraftTree) -> list[float]:
    return record.survival(request, tree, cells_of(tree))


def estimate(record: Acceptance, confidence: float | None, depth: int) -> float:
    return record.estimate(cells_of(chain(depth + 1, confidence))[depth])


def learn(record: Acceptance, request: RequestAcceptance, tree: DraftTree, accepted: list[int]) -> None:
    record.learn(request, tree, cells_of(tree), accepted)


def chain(n: int, confidence: float | None = None) -> DraftTree:
    return DraftTree.chain(range(n), () if confidence is None else [confidence] * n)


def run(record: Acceptance, tree: DraftTree, accepted: list[int], steps: int) -> RequestAcceptance:
    request = record.begin()
    for _ in range(steps):
        learn(record, request, tree, accepted)
    record.end(request)
    return request


def random_tree(draw: random.Random, n: int) -> DraftTree:
    parents = [draw.randint(-1, i - 1) for i in range(n)]
    return DraftTree(range(n), parents, [draw.random() for _ in range(n)])


def test_without_a_record_a_drafter_is_taken_at_its_word() -> None:
    record = Acceptance()
    for confidence in (0.1, 0.3, 0.5, 0.7, 0.9, 0.98):
        assert estimate(record, confidence, 0) == pytest.approx(confidence, abs=0.07)  # half the widest range
    first = [survival(record, record.begin(), chain(1, c))[0] for c in (0.05, 0.3, 0.6, 0.8, 0.95, 1.0)]
    assert first == sorted(first)
    assert first[0] < 0.25
    assert first[-1] > 0.75


def test_the_record_outweighs_the_word() -> None:
    record = Acceptance()
    for _ in range(6):
        run(record, chain(4, 0.93), [], 20)
    assert estimate(record, 0.93, 0) < 0.06
    assert survival(record, record.begin(), chain(4, 0.93))[0] < 0.1
    # Only what was tried: other ranges keep their word.
    assert estimate(record, 0.3, 0) == pytest.approx(0.3, abs=0.07)


def test_a_depth_that_was_not_tried_shows_nothing() -> None:
    record = Acceptance()
    before = [estimate(record, None, depth) for depth in range(6)]
    run(record, chain(6), [0, 1], 30)
    after = [estimate(record, None, depth) for depth in range(6)]
    assert after[0] > 0.9
    assert after[1] > 0.9
    assert after[2] < 0.1
    assert after[3:] == before[3:]


def test_the_estimate_doesnt_depend_on_the_length_that_was_drafted() -> None:
    """Accepted over proposed falls with the length by arithmetic alone; a trial needs an accepted parent."""
    estimates, rates = [], []
    for length in (2, 12):
        record = Acceptance()
        draw = random.Random(3)
        accepted = proposed = 0
        for _ in range(30):
            request = record.begin()
            for _ in range(20):
                n = next((i for i in range(length) if draw.random() >= 0.7), length)
                learn(record, request, chain(length, 0.7), list(range(n)))
                accepted += n
                proposed += length
            record.end(request)
        estimates.append(estimate(record, 0.7, 0))
        rates.append(accepted / proposed)
    assert estimates == pytest.approx([0.7, 0.7], abs=0.12)
    assert rates[0] > 2 * rates[1]


def test_survival_never_rises_along_a_path_and_siblings_share_their_parents() -> None:
    draw = random.Random(11)
    record = Acceptance()
    for _ in range(200):
        tree = random_tree(draw, draw.randint(1, 20))
        request = record.begin()
        for _ in range(draw.randint(0, 3)):
            path: list[int] = []
            node = -1
            while True:
                children = [i for i, parent in enumerate(tree.parents) if parent == node]
                if not children or draw.random() < 0.3:
                    break
                node = draw.choice(children)
                path.append(node)
            learn(record, request, tree, path)
        values = survival(record, request, tree)
        for parent in range(-1, len(tree)):
            above = 1.0 if parent < 0 else values[parent]
            below = [values[i] for i, p in enumerate(tree.parents) if p == parent]
            assert all(0 <= value <= above for value in below)
            assert sum(below) <= above + 1e-9
        record.end(request)


def test_a_tree_without_branches_is_worth_what_the_chain_is() -> None:
    record = Acceptance()
    run(record, chain(5, 0.8), [0, 1], 10)
    request = record.begin()
    learn(record, request, chain(5, 0.8), [0, 1, 2])
    line = chain(6, 0.8)
    same = DraftTree(line.tokens, list(line.parents), line.confidence)
    fork = DraftTree([*range(7)], [-1, 0, 1, 2, 3, 4, -1], [0.8] * 7)
    assert survival(record, request, same) == survival(record, request, line)
    assert survival(record, request, fork)[:6] == pytest.approx(survival(record, request, line))


def test_beliefs_are_those_of_bayes_rule() -> None:
    """The filter written out with arrays: likelihood, normalise, let a share return to the start."""
    record = Acceptance()
    request = record.begin()
    draw = random.Random(2)
    weights = np.array(request.weights)
    start = weights.copy()
    for _ in range(40):
        confidence = draw.random()
        p = estimate(record, confidence, 0)
        odds = p / (1 - p) * np.array(acceptance._STATES)
        good = odds / (1 + odds)
        hit = draw.random() < 0.6
        weights = weights * (good if hit else 1 - good)
        weights = (1 - acceptance._SHARE) * weights / weights.sum() + acceptance._SHARE * start
        learn(record, request, chain(1, confidence), [0] if hit else [])
        assert request.weights == pytest.approx(weights)
        assert sum(request.weights) == pytest.approx(1.0)


def test_all_or_nothing_is_not_multiplied_away() -> None:
    record = Acceptance()
    for i in range(12):
        run(record, chain(8), list(range(8)) if i % 2 else [], 20 if i % 2 else 40)
    values = survival(record, record.begin(), chain(8))
    assert values[0] < 0.85
    # Independent guesses at that rate would leave next to nothing of the eighth.
    assert values[7] > 2 * values[0] ** 8


def test_a_request_that_changes_is_followed() -> None:
    record = Acceptance()
    for _ in range(4):
        run(record, chain(4), [0, 1, 2, 3], 5)
        run(record, chain(4), [], 20)
    request = record.begin()
    for _ in range(8):
        learn(record, request, chain(4), [0, 1, 2, 3])
    assert survival(record, request, chain(4))[0] > 0.85
    for _ in range(4):
        learn(record, request, chain(4), [])
    assert survival(record, request, chain(4))[0] < 0.3
    for _ in range(3):
        learn(record, request, chain(4), [0, 1, 2, 3])
    assert survival(record, request, chain(4))[0] > 0.7


def test_a_request_has_positions_of_its_own() -> None:
    record = Acceptance()
    for _ in range(4):
        run(record, chain(3, 0.8), [0, 1, 2], 5)
    request = record.begin()
    for _ in range(25):
        learn(record, request, chain(3, 0.8), [0])
    other = record.begin()
    values, usual = survival(record, request, chain(3, 0.8)), survival(record, other, chain(3, 0.8))
    assert values[1] / values[0] < 0.6 * usual[1] / usual[0]


def test_evidence_of_what_was_not_verified_counts_the_same() -> None:
    a, b = Acceptance(), Acceptance()
    x, y = a.begin(), b.begin()
    tree = DraftTree(range(3), [-1, -1, 0], [0.6, 0.3, 0.5])
    cells = cells_of(tree)
    for hit in (0, None, 1):
        learn(a, x, tree.first(2), [] if hit is None else [hit])
        b.learn_next(y, cells, 0, [0, 1], hit)
    assert x.weights == pytest.approx(y.weights)
    for confidence in (0.6, 0.3, 0.5):
        assert estimate(a, confidence, 0) == pytest.approx(estimate(b, confidence, 0))


@pytest.mark.parametrize("word", [math.nan, math.inf, -0.1, 1.5])
def test_a_word_that_is_no_probability_is_not_heard(word: float) -> None:
    odd = DraftTree.chain([1, 2, 3], [0.9, word, 0.9])
    assert cells_of(odd) == cells_of(chain(3))
    assert cells_of(DraftTree([1, 2, 3], [-1, -1, 0], [0.9, word, 0.9])) == cells_of(DraftTree([1, 2, 3], [-1, -1, 0]))


def test_deep_and_long_drafts_have_a_place() -> None:
    record = Acceptance()
    request = record.begin()
    deep = chain(63)
    for _ in range(3):
        learn(record, request, deep, list(range(63)))
    values = survival(record, request, deep)
    assert len(values) == 63
    assert all(a >= b for a, b in pairwise(values))
    assert values == pytest.approx(record.survival_by_depth(request, 63))


def test_depths_are_known_of_a_drafter_with_an_opinion_too() -> None:
    record = Acceptance()
    run(record, chain(4, 0.9), [0], 40)
    values = record.survival_by_depth(record.begin(), 4)
    assert values[0] > 0.6
    assert values[1] < 0.25


def test_requests_begin_where_requests_have_been() -> None:
    record = Acceptance()
    fresh = record.begin().weights
    record.end(record.begin())  # without a trial it shows nothing
    assert record.begin().weights == fresh
    for _ in range(6):
        run(record, chain(4, 0.5), [], 20)
    assert record.begin().weights[0] > fresh[0]
    assert min(record.begin().weights) > 0.01
    assert sum(record.begin().weights) == pytest.approx(1.0)


def test_a_copy_goes_its_own_way() -> None:
    record = Acceptance()
    request = record.begin()
    learn(record, request, chain(4), [0])
    copy = request.copy()
    assert copy.weights == request.weights
    assert copy.factors == request.factors
    before = (request.weights, list(request.factors), list(request.totals), request.trials)
    for _ in range(5):
        learn(record, copy, chain(4), [])
    assert (request.weights, request.factors, request.totals, request.trials) == before
    untouched = record.begin().copy()
    learn(record, untouched, chain(4), [0, 1])
    assert record.begin().factors is None
