"""The native kernel, called node by node as the engine does, emits the target's distribution.

World, drafts, sample size and threshold are those of test_verify_lossless.py, where the test's power is computed.
"""

from __future__ import annotations

import numpy as np
import pytest

from forerun import _native
from forerun.sample.masks import Masks
from forerun.sample.transforms import exp32
from forerun.verify import node, own_tokens, rejection, seeded_draws, token_noise
from reference import chi_square, native
from reference.verification import (
    CHAIN,
    RAGGED,
    TREE,
    Batch,
    CutByToken,
    Rule,
    Shape,
    World,
    drafts,
    fill,
)

ROWS = 20_000
ALPHA = 2e-5
"""False-alarm rate of each test, so that all of this page together stay below 0.001."""
SHAPES = {"none": Shape((-1,), lengths=(0,)), "chain": CHAIN, "ragged": RAGGED, "tree": TREE}
JUNK = World(101)
POSITION = 1000
OFF = {"temperature": 0.6, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
KNOBS = [
    OFF,
    {**OFF, "top_k": 3},
    {**OFF, "top_p": 0.8},
    {**OFF, "min_p": 0.4, "temperature": 0.9},
    {**OFF, "typical_p": 0.6, "temperature": 0.9},
]

by_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def world_of(seed: int = 1, *, zeros: float = 0.0, **knobs: float) -> World:
    """A world whose target goes through these transforms."""
    world = World(seed, temperature=knobs["temperature"], zeros=zeros)
    weights = [np.stack([exp32(node.scores(row, **knobs)) for row in table]) for table in world.tables]
    world.__dict__["p"] = [w.astype(np.float64) / w.sum(axis=1, keepdims=True, dtype=np.float64) for w in weights]
    return world


def walk(
    batch: Batch, knobs: dict[str, float], *, q: np.ndarray | None, stale_leaves: bool = False, still: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """(mask, next_token) by rounds: each handles the node where every walk stands. Row r has seed r.

    stale_leaves, still: faults. Leaves read the row before their own; every position has the first one's noise.
    """
    tokens, parents, lengths = batch.trees
    n_rows, n = tokens.shape
    logits = np.ascontiguousarray(batch.logits.reshape(-1, batch.logits.shape[2]))
    q_rows = np.empty((0, logits.shape[1]), np.float32) if q is None else q.reshape(-1, q.shape[2]).astype(np.float32)
    column = np.zeros(n_rows, dtype=np.int64)
    mask = np.zeros((n_rows, n), dtype=bool)
    next_token = np.full(n_rows, -9)
    walking = np.arange(n_rows)
    depth = 0
    while len(walking):
        nodes = np.arange(n)[None, :]
        children = (nodes < lengths[walking, None]) & (parents[walking] == column[walking, None] - 1)
        counts = children.sum(axis=1)
        at = walking * (n + 1) + column[walking]
        if stale_leaves:
            at -= (counts == 0) & (column[walking] > 0)
        names = (walking[:, None] * n + nodes)[children] if q is not None else np.full(counts.sum(), -1)
        choice, token = _native.reject(
            logits,
            at.astype(np.int32),
            *native.spec(len(walking), seed=walking, position=POSITION + (0 if still else depth), **knobs),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            tokens[walking][children].astype(np.int32),
            q_rows,
            names.astype(np.int32),
            *Masks.none(len(walking)),
        )
        ended, going = choice < 0, choice >= 0
        next_token[walking[ended]] = token[ended]
        ordinal = np.cumsum(children, axis=1) - 1
        entered = np.argmax(children & (ordinal == choice[:, None]), axis=1)[going]
        walking = walking[going]
        assert np.array_equal(tokens[walking, entered], token[going])
        mask[walking, entered] = True
        column[walking] = entered + 1
        depth += 1
    return mask, next_token


def score(world: World, knobs: dict[str, float], batch: Batch, mask: np.ndarray, next_token: np.ndarray) -> float:
    """Pearson's statistic of the first tokens, where plain seeded sampling goes on after the step."""
    rows = np.arange(len(mask))
    column = np.where(mask.any(axis=1), mask.shape[1] - mask[:, ::-1].argmax(axis=1), 0)
    code = batch.codes[rows, column] * world.V + next_token
    level = mask.sum(axis=1) + 1
    for n in range(1, world.length):
        grows = rows[level == n]
        if len(grows):
            logits = np.ascontiguousarray(world.tables[n][code[grows]])
            own = native.sample(logits, range(len(grows)), seed=grows, position=POSITION + n, **knobs)
            code[grows] = code[grows] * world.V + own
            level[grows] += 1
    return chi_square.statistic(np.bincount(code, minlength=world.V**world.length), world.joint)


def threshold(world: World) -> float:
    return chi_square.critical(ALPHA, chi_square.degrees(world.joint))


def assert_enough_draws(world: World) -> None:
    assert ROWS * world.joint[world.joint > 0].min() > 5


@by_shape
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_drawn_drafts_have_the_targets_distribution(shape, knobs):
    world, rng = world_of(**knobs), np.random.default_rng(1)
    assert_enough_draws(world)
    batch = drafts(world, Rule(), shape, JUNK, rng, ROWS)
    assert score(world, knobs, batch, *walk(batch, knobs, q=batch.q)) < threshold(world)


@by_shape
def test_drafts_with_zeros_have_the_targets_distribution(shape):
    world, rng = world_of(8, zeros=0.3, **OFF), np.random.default_rng(2)
    batch = drafts(world, Rule(), shape, JUNK, rng, ROWS)
    assert score(world, OFF, batch, *walk(batch, OFF, q=batch.q)) < threshold(world)


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_chosen_drafts_have_the_targets_distribution(knobs):
    world = world_of(**knobs)
    tokens = np.zeros((ROWS, 5), dtype=np.int64)
    tokens[:, 1], tokens[:, 3], tokens[:, 4] = 1, 2, 3
    batch = fill(world, TREE, tokens)
    assert score(world, knobs, batch, *walk(batch, knobs, q=None)) < threshold(world)
    assert score(world, knobs, batch, *walk(batch, knobs, q=batch.q)) > threshold(world)


@by_shape
@pytest.mark.parametrize("q", ["drawn", "chosen"])
def test_rounds_of_the_kernel_decide_as_the_pure_function_does(shape, q):
    """With the engine's numbers: `seeded_draws`, and the target's samples for the bonus."""
    world, rng, n_rows = world_of(**OFF), np.random.default_rng(5), 1500
    batch = drafts(world, Rule(), shape, JUNK, rng, n_rows)
    q_of = batch.q.astype(np.float32) if q == "drawn" else None
    seeds, positions = list(range(n_rows)), [POSITION] * n_rows
    z = (batch.logits - batch.logits.max(axis=-1, keepdims=True)) / np.float32(OFF["temperature"])
    numbers = seeded_draws(batch.trees, seeds, positions)
    own = own_tokens(z, token_noise(batch.trees, seeds, positions, world.V))
    expected = rejection(batch.trees, exp32(z), q_of, accept=numbers.accept, final=numbers.final, own=own)
    mask, next_token = walk(batch, OFF, q=q_of)
    assert np.array_equal(mask, expected.mask)
    assert np.array_equal(next_token, expected.next_token)


def test_planted_faults_of_the_call_are_caught():
    world, rng = world_of(**OFF), np.random.default_rng(3)
    chain = drafts(world, Rule(), CHAIN, JUNK, rng, ROWS)
    ragged = drafts(world, Rule(), RAGGED, JUNK, rng, ROWS)
    padded = ragged._replace(trees=ragged.trees._replace(lengths=np.full(ROWS, 2)))
    cut = drafts(world, CutByToken(), CHAIN, JUNK, rng, ROWS)
    pair = Shape((-1, -1))
    tokens = drafts(world, Rule(), pair, JUNK, rng, ROWS).trees.tokens
    likely_first = np.take_along_axis(tokens, np.argsort(-world.q[0][0][tokens], axis=1), axis=1)
    by_q = fill(world, pair, likely_first)
    faulty = {
        "q of the wrong position": walk(chain, OFF, q=np.roll(chain.q, 1, axis=1)),
        "p/q un-tempered": walk(chain, {**OFF, "temperature": 1.0}, q=chain.raw_q),
        "bonus token from the wrong row": walk(chain, OFF, q=chain.q, stale_leaves=True),
        "short rows reading the padding": walk(padded, OFF, q=padded.q),
        "one noise for all positions": walk(chain, OFF, q=chain.q, still=True),
        "a draft cut where the drawn token looks bad": walk(cut, OFF, q=cut.q),
        "siblings in the order of their q": walk(by_q, OFF, q=by_q.q),
    }
    batches = {
        "short rows reading the padding": padded,
        "a draft cut where the drawn token looks bad": cut,
        "siblings in the order of their q": by_q,
    }
    for name, walked in faulty.items():
        assert score(world, OFF, batches.get(name, chain), *walked) > threshold(world), name


@pytest.mark.parametrize(
    ("knobs", "missing"), [(KNOBS[1], "top_k"), (KNOBS[2], "top_p"), (KNOBS[3], "min_p"), (KNOBS[4], "typical_p")]
)
def test_a_transform_that_the_target_misses_is_caught(knobs, missing):
    world, rng = world_of(**knobs), np.random.default_rng(4)
    batch = drafts(world, Rule(), CHAIN, JUNK, rng, ROWS)
    without = {**knobs, missing: OFF[missing]}
    assert score(world, knobs, batch, *walk(batch, without, q=batch.q)) > threshold(world)
