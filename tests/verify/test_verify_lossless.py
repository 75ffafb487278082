"""`rejection` emits the target's distribution, by exact enumeration and by a test that sees every planted fault.

The test is Pearson's over the first three tokens (a step, then plain sampling): 64 cells, 20,000 drafts, threshold at a
false-alarm rate of 2e-5, so that all tests of this page together stay below 0.001. Its power against each fault follows
from the fault's exact distribution.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from forerun.verify import Trees, Verdicts, rejection
from reference import chi_square
from reference.verification import (
    CHAIN,
    FAULTS,
    RAGGED,
    TREE,
    Batch,
    CutByToken,
    Rule,
    Shape,
    WithReplacement,
    World,
    completed,
    drafts,
    emit,
    fill,
    law,
    pick,
)

ROWS = 20_000
ALPHA = 2e-5
SHAPES = {"chain": CHAIN, "ragged": RAGGED, "tree": TREE, "bush": Shape((-1, -1, -1, 1, 1))}
WORLDS = {"dense": World(1), "zeros": World(8, zeros=0.3), "five tokens": World(10, V=5, temperature=0.9)}
JUNK = {name: World(101, V=world.V) for name, world in WORLDS.items()}

by_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
by_world = pytest.mark.parametrize("world", WORLDS)
by_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda rule: rule.name)


@functools.cache
def threshold(world: World) -> float:
    return chi_square.critical(ALPHA, chi_square.degrees(world.joint))


def uniforms(rng: np.random.Generator, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    n_rows, n = batch.trees.tokens.shape
    return rng.random((n_rows, n)), rng.random((n_rows, n + 1))


def decided(batch: Batch, rng: np.random.Generator, **options: np.ndarray) -> Verdicts:
    accept, final = uniforms(rng, batch)
    arguments = {"q": batch.q, **options}
    return rejection(batch.trees, batch.p, accept=accept, final=final, **arguments)


def score(world: World, batch: Batch, verdicts, rng: np.random.Generator) -> float:
    counts = completed(world, batch, verdicts.mask, verdicts.next_token, rng)
    assert counts.sum() == len(verdicts.mask)
    return chi_square.statistic(counts, world.joint)


# -- the test itself


@by_world
@by_shape
def test_the_rule_is_lossless_by_enumeration(shape, world):
    found = law(WORLDS[world], Rule(), shape, JUNK[world])
    assert np.abs(found - WORLDS[world].joint).max() < 1e-14


@by_fault
def test_the_power_against_a_fault_is_at_least_099(fault):
    world = WORLDS["dense"]
    found = law(world, fault, fault.shape, JUNK["dense"])
    assert found.sum() == pytest.approx(1)
    noncentral = ROWS * chi_square.noncentrality(found, world.joint)
    assert chi_square.power(noncentral, chi_square.degrees(world.joint), threshold(world)) > 0.9999


@by_world
def test_the_false_alarm_rate_is_at_most_0001(world):
    """The threshold holds for counts, too, not only for the limit of many: 20,000 tests of right samples."""
    joint, rng = WORLDS[world].joint, np.random.default_rng(0)
    joint = joint[joint > 0]
    assert ROWS * joint.min() > 10
    counts = rng.multinomial(ROWS, joint / joint.sum(), 20_000)
    scores = (np.square(counts - ROWS * joint) / (ROWS * joint)).sum(axis=1)
    assert np.mean(scores > threshold(WORLDS[world])) < 5e-4  # 0.4 expected


# -- what is tested


@by_world
@by_shape
def test_rejection_decides_as_the_rule_does(shape, world):
    rng = np.random.default_rng(1)
    batch = drafts(WORLDS[world], Rule(), shape, JUNK[world], rng, ROWS)
    accept, final = uniforms(rng, batch)
    expected = emit(Rule(), batch, accept, final)
    found = rejection(batch.trees, batch.p, batch.q, accept=accept, final=final)
    assert np.array_equal(found.mask, expected.mask)
    assert np.array_equal(found.next_token, expected.next_token)


@by_fault
def test_a_fault_decides_otherwise(fault):
    """The comparison above would see each fault of the rule (those of the drafter are not the rule's)."""
    if isinstance(fault, WithReplacement | CutByToken):
        fault = Rule()  # the comparison has nothing to see then, and says so
    rng = np.random.default_rng(2)
    batch = drafts(WORLDS["dense"], Rule(), fault.shape, JUNK["dense"], rng, 2000)
    accept, final = uniforms(rng, batch)
    wrong = emit(fault, batch, accept, final)
    found = rejection(batch.trees, batch.p, batch.q, accept=accept, final=final)
    same = np.array_equal(found.mask, wrong.mask) and np.array_equal(found.next_token, wrong.next_token)
    assert same == (type(fault) is Rule)


@by_world
@by_shape
def test_rejection_has_the_targets_distribution(shape, world):
    rng = np.random.default_rng(3)
    batch = drafts(WORLDS[world], Rule(), shape, JUNK[world], rng, ROWS)
    assert score(WORLDS[world], batch, decided(batch, rng), rng) < threshold(WORLDS[world])


@by_shape
def test_rejection_with_samples_for_the_bonus_has_the_targets_distribution(shape):
    rng = np.random.default_rng(4)
    world = WORLDS["dense"]
    batch = drafts(world, Rule(), shape, JUNK["dense"], rng, ROWS)
    own = np.stack([pick(batch.p[:, column], rng.random(ROWS)) for column in range(batch.p.shape[1])], axis=1)
    assert score(world, batch, decided(batch, rng, own=own), rng) < threshold(world)


def chosen(world: World, shape: Shape, n_rows: int) -> Batch:
    """Deterministic drafts: siblings are the drafter's most probable tokens, in order."""
    tokens = np.zeros((n_rows, len(shape.parents)), dtype=np.int64)
    for node, parent in enumerate(shape.parents):
        rank = sum(p == parent for p in shape.parents[:node])
        q = fill(world, shape, tokens).q[:, node]
        tokens[:, node] = np.argsort(-q, axis=1, kind="stable")[:, rank]
    return fill(world, shape, tokens)


@by_shape
@pytest.mark.parametrize("world", ["dense", "five tokens"])
def test_chosen_drafts_have_the_targets_distribution(shape, world):
    rng = np.random.default_rng(5)
    batch = chosen(WORLDS[world], shape, ROWS)
    assert score(WORLDS[world], batch, decided(batch, rng, q=None), rng) < threshold(WORLDS[world])


def test_chosen_drafts_judged_as_if_drawn_are_caught():
    """Case 11: the drafter took its most probable token, so its q is one-hot and not a softmax."""
    rng = np.random.default_rng(6)
    batch = chosen(WORLDS["dense"], CHAIN, ROWS)
    assert score(WORLDS["dense"], batch, decided(batch, rng), rng) > threshold(WORLDS["dense"])


def test_a_chosen_sibling_before_drawn_ones_has_the_targets_distribution():
    """The first child is the drafter's favourite, the others are drawn from what is left."""
    world, rng, shape = WORLDS["dense"], np.random.default_rng(7), SHAPES["bush"]
    tokens = np.zeros((ROWS, 5), dtype=np.int64)
    tokens[:, 0] = world.q[0][0].argmax()
    rule = Rule()
    for node in range(1, 5):
        q = fill(world, shape, tokens).q[:, node]
        earlier = [tokens[:, i] for i in range(node) if shape.parents[i] == shape.parents[node]]
        tokens[:, node] = pick(rule.without(q, earlier), rng.random(ROWS))
    batch = fill(world, shape, tokens)
    by_draw = np.arange(5)[None, :].repeat(ROWS, axis=0) > 0
    assert score(world, batch, decided(batch, rng, drawn=by_draw), rng) < threshold(world)
    assert score(world, batch, decided(batch, rng), rng) > threshold(world)


@by_fault
def test_a_planted_fault_is_caught(fault):
    rng = np.random.default_rng(8)
    world = WORLDS["dense"]
    batch = drafts(world, fault, fault.shape, JUNK["dense"], rng, ROWS)
    walked = emit(fault, batch, *uniforms(rng, batch))
    assert score(world, batch, walked, rng) > threshold(world)


def test_faults_of_the_caller_are_caught_in_rejection_itself():
    """Where the fault lies in what is handed over, the function under test takes it and is caught, too."""
    rng = np.random.default_rng(9)
    world, limit = WORLDS["dense"], threshold(WORLDS["dense"])
    chain = drafts(world, Rule(), CHAIN, JUNK["dense"], rng, ROWS)
    assert score(world, chain, decided(chain, rng, q=np.roll(chain.q, 1, axis=1)), rng) > limit
    assert score(world, chain, decided(chain._replace(p=chain.raw_p), rng, q=chain.raw_q), rng) > limit
    wrong_row = chain._replace(p=np.roll(chain.p, 1, axis=1))
    assert score(world, chain, decided(wrong_row, rng), rng) > limit
    ragged = drafts(world, Rule(), RAGGED, JUNK["dense"], rng, ROWS)
    padded = ragged.trees._replace(lengths=np.full(ROWS, 2))
    assert score(world, ragged, decided(ragged._replace(trees=padded), rng), rng) > limit
    cut = drafts(world, CutByToken(), CHAIN, JUNK["dense"], rng, ROWS)
    assert score(world, cut, decided(cut, rng), rng) > limit


def test_siblings_drawn_with_replacement_are_harmless_in_rejection_itself():
    """The textbook's rule goes wrong (above). Here a repeated sibling has q = 0 and is passed over, and one that is new
    has just the distribution of a draw without replacement."""
    rng = np.random.default_rng(11)
    batch = drafts(WORLDS["dense"], WithReplacement(), TREE, JUNK["dense"], rng, ROWS)
    assert (batch.trees.tokens[:, 0] == batch.trees.tokens[:, 1]).mean() > 0.1
    assert score(WORLDS["dense"], batch, decided(batch, rng), rng) < threshold(WORLDS["dense"])


@pytest.mark.slow
@by_fault
def test_a_planted_fault_is_caught_under_nearly_every_seed(fault):
    world = WORLDS["dense"]
    caught = 0
    for seed in range(200):
        rng = np.random.default_rng([seed, 1])
        batch = drafts(world, fault, fault.shape, JUNK["dense"], rng, ROWS)
        caught += score(world, batch, emit(fault, batch, *uniforms(rng, batch)), rng) > threshold(world)
    assert caught >= 198


@pytest.mark.slow
@by_shape
def test_rejection_raises_no_alarm_under_nearly_any_seed(shape):
    """At 2e-5 a test, two alarms in 200 have a probability of 1e-5."""
    world = WORLDS["dense"]
    alarms = 0
    for seed in range(200):
        rng = np.random.default_rng([seed, 2])
        batch = drafts(world, Rule(), shape, JUNK["dense"], rng, ROWS)
        alarms += score(world, batch, decided(batch, rng), rng) > threshold(world)
    assert alarms <= 1


def test_padding_is_never_looked_at():
    """Numbers that would poison everything they touch, beyond the length of each row."""
    rng = np.random.default_rng(10)
    batch = drafts(WORLDS["dense"], Rule(), RAGGED, JUNK["dense"], rng, 3000)
    accept, final = uniforms(rng, batch)
    clean = rejection(batch.trees, batch.p, batch.q, accept=accept, final=final)
    beyond = np.arange(2) >= batch.trees.lengths[:, None]
    columns = np.concatenate([np.zeros((3000, 1), dtype=bool), beyond], axis=1)
    for poison in (np.nan, np.inf, -1.0, 1e30):
        spoilt = rejection(
            Trees(
                np.where(beyond, 10**9, batch.trees.tokens),
                np.where(beyond, 10**9, batch.trees.parents),
                batch.trees.lengths,
            ),
            np.where(columns[:, :, None], poison, batch.p),
            np.where(beyond[:, :, None], poison, batch.q),
            accept=np.where(beyond, np.nan, accept),
            final=final,
        )
        assert np.array_equal(spoilt.mask, clean.mask)
        assert np.array_equal(spoilt.next_token, clean.next_token)
