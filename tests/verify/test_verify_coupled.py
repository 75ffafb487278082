"""`coupled` emits what plain seeded sampling emits, token for token, for every draft."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from forerun.sample import transforms
from forerun.verify import Verdicts, coupled, greedy, own_tokens, token_noise
from forerun.verify.node import scores
from reference import chi_square, native
from reference.verification import CHAIN, RAGGED, TREE, Batch, Shape, World, fill, with_junk

WORLD = World(1)
SHAPES = {"chain": CHAIN, "ragged": RAGGED, "tree": TREE, "long chain": Shape((-1, 0, 1, 2))}
KNOBS = [
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 3, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.3},
]
POSITION = 17

by_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
by_knobs = pytest.mark.parametrize("knobs", KNOBS, ids=str)


def plain(world: World, seed: int, knobs: dict[str, float], n: int, code: int = 0) -> list[int]:
    """The first n tokens of unspeculated decoding, one at a time."""
    tokens: list[int] = []
    for i in range(n):
        tokens.append(transforms.sample(world.tables[i][code], **knobs, seed=seed, position=POSITION + i))
        code = code * world.V + tokens[-1]
    return tokens


def every_draft(world: World, shape: Shape) -> Batch:
    """All drafts of a shape, for each of its lengths."""
    drafts = np.array(list(itertools.product(range(world.V), repeat=len(shape.parents))), dtype=np.int64)
    return with_junk(
        fill(world, shape, drafts.repeat(max(1, len(shape.lengths)), axis=0)), shape, World(101, length=world.length)
    )


def after_transforms(world: World, shape: Shape, knobs: dict[str, float]) -> np.ndarray:
    """Of every draft: logits float32[R, N + 1, V] as `coupled` wants them."""
    transformed, junk = World(1, length=world.length), World(101, length=world.length)
    for tables in (transformed.tables, junk.tables):
        tables[:] = [np.stack([scores(row, **knobs) for row in table]) for table in tables]
    drafts = every_draft(world, shape)
    return with_junk(fill(transformed, shape, drafts.trees.tokens), shape, junk).logits


def differences(
    world: World, batch: Batch, verdicts: Verdicts, seeds: list[int], knobs: dict[str, float]
) -> tuple[int, int]:
    """(rows that plain decoding wouldn't have written, accepted tokens in all)."""
    n = batch.trees.tokens.shape[1] + 1
    text = {seed: plain(world, seed, knobs, min(n, world.length + 1)) for seed in set(seeds)}
    emitted = verdicts.emitted(batch.trees).tolist()
    wrong = 0
    for row, seed, accepted in zip(emitted, seeds, verdicts.accepted.tolist(), strict=True):
        wrong += row[: accepted + 1] != text[seed][: accepted + 1]
    return wrong, int(verdicts.accepted.sum())


@by_knobs
@by_shape
def test_every_draft_emits_what_plain_sampling_does(shape, knobs):
    world = World(1, length=len(set(shape.depths)))
    batch = every_draft(world, shape)
    logits = after_transforms(world, shape, knobs)
    n_rows = len(logits)
    for seed in range(1 if n_rows > 300 else 6):
        verdicts = coupled(batch.trees, logits, [seed] * n_rows, [POSITION] * n_rows)
        wrong, accepted = differences(world, batch, verdicts, [seed] * n_rows, knobs)
        assert wrong == 0
        assert accepted > 0


FAULTS = {  # drafts, scores after transforms, seeds
    "noise of the position before": lambda b, z, s: coupled(b.trees, z, s, [POSITION - 1] * len(s)),
    "noise of the position after": lambda b, z, s: coupled(b.trees, z, s, [POSITION + 1] * len(s)),
    "noise of the root at every node": lambda b, z, s: greedy(
        b.trees, own_tokens(z, np.repeat(token_noise(b.trees, s, [POSITION] * len(s), 4)[:, :1], z.shape[1], axis=1))
    ),
    "scores of the wrong column": lambda b, z, s: coupled(b.trees, np.roll(z, 1, axis=1), s, [POSITION] * len(s)),
    "scores of the wrong row": lambda b, z, s: coupled(b.trees, np.roll(z, 1, axis=0), s, [POSITION] * len(s)),
    "no noise": lambda b, z, _: greedy(b.trees, z.argmax(axis=-1)),
    "another seed": lambda b, z, s: coupled(b.trees, z, [x + 1 for x in s], [POSITION] * len(s)),
    "transforms left out": lambda b, _, s: coupled(b.trees, b.logits, s, [POSITION] * len(s)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_writes_another_text(fault):
    batch = every_draft(WORLD, CHAIN)
    knobs = KNOBS[3]
    logits = after_transforms(WORLD, CHAIN, knobs)
    wrong = sum(
        differences(WORLD, batch, FAULTS[fault](batch, logits, [seed] * len(logits)), [seed] * len(logits), knobs)[0]
        for seed in range(4)
    )
    assert wrong > 0


def test_reading_the_padding_writes_another_text():
    batch = every_draft(WORLD, RAGGED)
    logits = after_transforms(WORLD, RAGGED, KNOBS[0])
    padded = batch._replace(trees=batch.trees._replace(lengths=np.full(len(logits), 2)))
    seeds, positions = [3] * len(logits), [POSITION] * len(logits)
    verdicts = coupled(padded.trees, logits, seeds, positions)
    assert differences(WORLD, padded, verdicts, seeds, KNOBS[0])[0] > 0


@by_shape
def test_the_samples_at_the_nodes_are_those_of_the_native_kernel(shape):
    """The engine samples at the nodes with `_native.sample` and walks along the result."""
    world = World(1, length=4)
    batch = every_draft(world, shape)
    n_rows, n = batch.trees.tokens.shape
    positions = POSITION + np.array([0] + [depth + 1 for depth in shape.depths])
    for knobs in KNOBS:
        own = native.sample(
            np.ascontiguousarray(batch.logits.reshape(-1, 4)),
            range(n_rows * (n + 1)),
            seed=5,
            position=np.tile(positions, n_rows),
            **knobs,
        ).reshape(n_rows, n + 1)
        expected = greedy(batch.trees, own)
        found = coupled(batch.trees, after_transforms(world, shape, knobs), [5] * n_rows, [POSITION] * n_rows)
        assert np.array_equal(found.mask, expected.mask)
        assert np.array_equal(found.next_token, expected.next_token)


ROWS = 20_000
THRESHOLD = chi_square.critical(1e-4, chi_square.degrees(WORLD.joint))


def frequencies(position: int) -> float:
    """Pearson's statistic of the first tokens over seeds: a step at `position`, then plain sampling."""
    batch = fill(WORLD, CHAIN, np.tile([1, 2], (ROWS, 1)))
    seeds = np.arange(ROWS)
    verdicts = coupled(batch.trees, batch.logits / np.float32(WORLD.temperature), range(ROWS), [position] * ROWS)
    emitted = verdicts.emitted(batch.trees)
    code = np.zeros(ROWS, dtype=np.int64)
    for n in range(3):
        plainly = native.sample(
            np.ascontiguousarray(WORLD.tables[n][code]),
            seeds,
            temperature=WORLD.temperature,
            seed=seeds,
            position=POSITION + n,
        )
        code = code * 4 + np.where(emitted[:, n] >= 0, emitted[:, n], plainly)
    return chi_square.statistic(np.bincount(code, minlength=64), WORLD.joint)


def test_coupled_has_the_targets_distribution():
    assert ROWS * WORLD.joint.min() > 10
    assert frequencies(POSITION) < THRESHOLD


def test_noise_used_twice_spoils_the_distribution():
    """Positions off by one in the step alone: the token after it is drawn with the noise of its last one."""
    assert frequencies(POSITION + 1) > THRESHOLD
