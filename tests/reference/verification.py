"""A small world in which verification can be judged exactly, the rule as textbooks write it, and its planted faults.

`World` holds a target and a drafter over a few tokens, both depending on all tokens before. `Shape` is the form of the
drafts. `Rule` is rejection sampling in float64 probabilities; subclasses have one fault each. From them follow `emit`,
which runs a rule on a batch with given random numbers, and `law`, the exact distribution of the first `World.length`
tokens that a step and plain sampling after it emit: an enumeration of all drafts, without any sampling.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.verify import Trees

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def softmax(logits: npt.NDArray[np.floating]) -> Floats:
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


class World:
    """Target and drafter over V tokens, for `length` tokens in all.

    tables: by number of tokens before, float32[V ** n, V] logits of the target; drafts: of the drafter. zeros: the
    share of logits that are -inf, different ones in both.
    """

    def __init__(
        self, seed: int, V: int = 4, length: int = 3, temperature: float = 0.6, apart: float = 0.8, zeros: float = 0.0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.V, self.length, self.temperature = V, length, temperature
        shapes = [(V**n, V) for n in range(length + 1)]
        self.tables = [(0.6 * rng.standard_normal(shape)).astype(np.float32) for shape in shapes]
        self.drafts = [t + (apart * rng.standard_normal(t.shape)).astype(np.float32) for t in self.tables]
        if zeros:
            for table in itertools.chain(self.tables, self.drafts):
                gone = rng.random(table.shape) < zeros
                gone[np.arange(len(table)), rng.integers(0, V, len(table))] = False
                table[gone] = -np.inf

    @cached_property
    def p(self) -> list[Floats]:
        """By number of tokens before: the target's probabilities."""
        return [softmax(table / np.float32(self.temperature)) for table in self.tables]

    @cached_property
    def q(self) -> list[Floats]:
        """By number of tokens before: the drafter's probabilities."""
        return [softmax(table / np.float32(self.temperature)) for table in self.drafts]

    @cached_property
    def joint(self) -> Floats:
        """float64[V ** length]: the target's distribution of the first tokens; the first token is the highest digit."""
        joint = np.ones(1)
        for n in range(self.length):
            joint = (joint[:, None] * self.p[n]).ravel()
        return joint

    def rest(self, n: int) -> Floats:
        """float64[V ** n, V ** (length - n)]: the target's distribution of what follows n tokens."""
        joint = self.joint.reshape(self.V**n, -1)
        whole = joint.sum(axis=1, keepdims=True)
        return np.divide(joint, whole, out=np.zeros_like(joint), where=whole > 0)


@dataclass(frozen=True)
class Shape:
    """Forms of drafts: parents of the nodes, and lengths that the rows take in turn (empty: all whole)."""

    parents: tuple[int, ...]
    lengths: tuple[int, ...] = ()

    @property
    def depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    def lengths_of(self, n_rows: int) -> Ints:
        lengths = self.lengths or (len(self.parents),)
        return np.resize(np.array(lengths, dtype=np.int64), n_rows)


CHAIN = Shape((-1, 0))
RAGGED = Shape((-1, 0), lengths=(0, 1, 2))
TREE = Shape((-1, -1, 0, 0, 1))


class Batch(NamedTuple):
    """Drafts with everything that a rule may look at; padding is filled with what looks real.

    p, q, raw_p, raw_q: float64 [R, N + 1, V] and [R, N, V], the latter at temperature 1. codes: int64[R, N + 1], the
    tokens up to each column as a number. logits, q as in `World.tables`: float32 [R, N + 1, V].
    """

    trees: Trees
    p: Floats
    q: Floats
    raw_p: Floats
    raw_q: Floats
    codes: Ints
    logits: npt.NDArray[np.float32]


def codes_of(world: World, shape: Shape, tokens: Ints) -> Ints:
    codes = np.zeros((len(tokens), len(shape.parents) + 1), dtype=np.int64)
    for node, parent in enumerate(shape.parents):
        codes[:, node + 1] = codes[:, parent + 1] * world.V + tokens[:, node]
    return codes


def fill(world: World, shape: Shape, tokens: Ints) -> Batch:
    """The batch of drafts int64[R, N]."""
    n_rows = len(tokens)
    codes = codes_of(world, shape, tokens)
    levels = [0] + [depth + 1 for depth in shape.depths]

    def columns(tables: list[Floats]) -> Floats:
        return np.stack([tables[level][codes[:, c]] for c, level in enumerate(levels)], axis=1)

    def nodes(tables: list[Floats]) -> Floats:
        parts = [tables[levels[p + 1]][codes[:, p + 1]] for p in shape.parents]
        return np.stack(parts, axis=1)

    trees = Trees(tokens, np.tile(np.array(shape.parents), (n_rows, 1)), shape.lengths_of(n_rows))
    raw_p, raw_q = [softmax(t) for t in world.tables], [softmax(t) for t in world.drafts]
    logits = np.stack([world.tables[level][codes[:, c]] for c, level in enumerate(levels)], axis=1)
    return Batch(trees, columns(world.p), nodes(world.q), columns(raw_p), nodes(raw_q), codes, logits)


def earlier_siblings(shape: Shape, node: int) -> list[int]:
    return [i for i in range(node) if shape.parents[i] == shape.parents[node]]


class Rule:
    """Rejection sampling, right. Arrays have one row a draft: w and q are float64[R, V], tokens int64[R]."""

    name = "right"
    shape = CHAIN

    def there(self, lengths: Ints, node: int) -> npt.NDArray[np.bool_]:
        return node < lengths

    def q_of(self, batch: Batch, node: int) -> Floats:
        return batch.q[:, node]

    def without(self, q: Floats, tokens: list[Ints]) -> Floats:
        q = q.copy()
        for token in tokens:
            q[np.arange(len(q)), token] = 0
        total = q.sum(axis=1, keepdims=True)
        return np.divide(q, total, out=np.zeros_like(q), where=total > 0)

    def acceptance(self, batch: Batch, node: int, w: Floats, q: Floats) -> Floats:
        return ratio(w, q, batch.trees.tokens[:, node])

    def residual(self, w: Floats, q: Floats) -> Floats:
        positive = np.maximum(w - q, 0)
        total = positive.sum(axis=1, keepdims=True)
        return np.where(total > 0, np.divide(positive, total, out=np.zeros_like(w), where=total > 0), w)

    def bonus(self, batch: Batch, column: int) -> Floats:
        return batch.p[:, column]

    def draw_sibling(self, q: Floats, earlier: list[Ints]) -> Floats:
        """What the drafter draws from."""
        return self.without(q, earlier)

    def cut(self, batch: Batch) -> Batch:
        """What the drafter keeps of its drafts."""
        return batch


def ratio(p: Floats, q: Floats, token: Ints) -> Floats:
    rows = np.arange(len(p))
    q_token = q[rows, token]
    return np.where(q_token > 0, np.minimum(1, p[rows, token] / np.where(q_token > 0, q_token, 1)), 0)


class NotClipped(Rule):
    name = "residual not clipped"

    def residual(self, w: Floats, q: Floats) -> Floats:
        return (w - q) / np.maximum(np.maximum(w - q, 0).sum(axis=1, keepdims=True), 1e-300)


class AbsoluteResidual(Rule):
    name = "residual of absolute values"

    def residual(self, w: Floats, q: Floats) -> Floats:
        apart = np.abs(w - q)
        return apart / np.maximum(apart.sum(axis=1, keepdims=True), 1e-300)


class NotRenormalised(Rule):
    name = "residual not renormalised"

    def residual(self, w: Floats, q: Floats) -> Floats:
        return np.maximum(w - q, 0)


class NotRenormalisedTree(NotRenormalised):
    name = "residual not renormalised, tree"
    shape = TREE


class BonusRow(Rule):
    name = "bonus token from the wrong row"

    def bonus(self, batch: Batch, column: int) -> Floats:
        return batch.p[:, max(column - 1, 0)]


class WrongQ(Rule):
    name = "q of the wrong position"

    def q_of(self, batch: Batch, node: int) -> Floats:
        return batch.q[:, node - 1]


class Untempered(Rule):
    name = "acceptance with p/q un-tempered"

    def acceptance(self, batch: Batch, node: int, w: Floats, q: Floats) -> Floats:  # noqa: ARG002
        column = CHAIN.parents[node] + 1
        return ratio(batch.raw_p[:, column], batch.raw_q[:, node], batch.trees.tokens[:, node])


class CorrectionFromP(Rule):
    name = "correction drawn from p"

    def residual(self, w: Floats, q: Floats) -> Floats:  # noqa: ARG002
        return w


class CorrectionFromPTree(CorrectionFromP):
    name = "later siblings judged by p"
    shape = TREE


class WithReplacement(Rule):
    name = "siblings drawn with replacement"
    shape = TREE

    def draw_sibling(self, q: Floats, earlier: list[Ints]) -> Floats:  # noqa: ARG002
        return q


class NotReduced(Rule):
    name = "siblings judged as if drawn with replacement"
    shape = TREE

    def without(self, q: Floats, tokens: list[Ints]) -> Floats:  # noqa: ARG002
        return q

    def draw_sibling(self, q: Floats, earlier: list[Ints]) -> Floats:
        return Rule().without(q, earlier)


class ReadsPadding(Rule):
    name = "short rows reading the padding"
    shape = RAGGED

    def there(self, lengths: Ints, node: int) -> npt.NDArray[np.bool_]:  # noqa: ARG002
        return np.ones(lengths.shape, dtype=np.bool_)


class CutByToken(Rule):
    name = "drafts cut where the drawn token looks bad"

    def cut(self, batch: Batch) -> Batch:
        rows = np.arange(len(batch.q))
        good = np.stack([batch.q[rows, node, batch.trees.tokens[:, node]] >= 0.3 for node in range(2)], axis=1)
        lengths = np.cumprod(good, axis=1).sum(axis=1)
        return batch._replace(trees=batch.trees._replace(lengths=lengths))


FAULTS: list[Rule] = [
    NotClipped(), AbsoluteResidual(), NotRenormalised(), NotRenormalisedTree(), BonusRow(), WrongQ(), Untempered(),
    CorrectionFromP(), CorrectionFromPTree(), WithReplacement(), NotReduced(), ReadsPadding(), CutByToken(),
]  # fmt: skip


def with_junk(batch: Batch, shape: Shape, junk: World) -> Batch:
    """Padding as an engine that reuses its buffers would leave it: the same tokens with another text's scores."""
    if not shape.lengths:
        return batch
    other = fill(junk, shape, batch.trees.tokens)
    there = np.arange(len(shape.parents)) < batch.trees.lengths[:, None]
    columns = np.concatenate([np.ones((len(there), 1), dtype=np.bool_), there], axis=1)

    def mixed(right: Floats, wrong: Floats) -> Floats:
        return np.where((there if right.shape[1] == there.shape[1] else columns)[:, :, None], right, wrong)

    return batch._replace(
        p=mixed(batch.p, other.p), q=mixed(batch.q, other.q), logits=mixed(batch.logits, other.logits)
    )


def drafts(world: World, rule: Rule, shape: Shape, junk: World, rng: np.random.Generator, n_rows: int) -> Batch:
    """Random drafts, each node drawn in turn."""
    tokens = np.zeros((n_rows, len(shape.parents)), dtype=np.int64)
    for node in range(tokens.shape[1]):
        q = world.q[shape.depths[node]][codes_of(world, shape, tokens)[:, shape.parents[node] + 1]]
        law = rule.draw_sibling(q, [tokens[:, i] for i in earlier_siblings(shape, node)])
        tokens[:, node] = pick(law, rng.random(n_rows))
    return rule.cut(with_junk(fill(world, shape, tokens), shape, junk))


def all_drafts(world: World, rule: Rule, shape: Shape, junk: World) -> tuple[Batch, Floats]:
    """Every draft for every length, and its probability."""
    n, turns = len(shape.parents), max(1, len(shape.lengths))
    tokens = np.array(list(itertools.product(range(world.V), repeat=n)), dtype=np.int64).repeat(turns, axis=0)
    batch = fill(world, shape, tokens)
    probability = np.full(len(tokens), 1 / turns)
    for node in range(n):
        law = rule.draw_sibling(batch.q[:, node], [tokens[:, i] for i in earlier_siblings(shape, node)])
        probability = probability * law[np.arange(len(tokens)), tokens[:, node]]
    return rule.cut(with_junk(batch, shape, junk)), probability


def pick(weights: Floats, uniform: Floats) -> Ints:
    """The first token at which the running sum passes `uniform`; the last one if none does."""
    passed = np.maximum.accumulate(np.cumsum(weights, axis=1), axis=1) <= uniform[:, None]
    return np.minimum(passed.sum(axis=1), weights.shape[1] - 1)


def pick_law(weights: Floats) -> Floats:
    """The distribution of `pick` for a uniform number in [0, 1)."""
    reached = np.clip(np.maximum.accumulate(np.cumsum(weights, axis=1), axis=1), 0, 1)
    reached[:, -1] = 1
    return np.diff(reached, axis=1, prepend=0)


class Walked(NamedTuple):
    mask: npt.NDArray[np.bool_]
    next_token: Ints


def emit(rule: Rule, batch: Batch, accept: Floats, final: Floats) -> Walked:
    """What the rule makes of a batch, with uniform numbers float64[R, N] and [R, N + 1]."""
    tokens, parents, lengths = batch.trees
    n_rows, n = tokens.shape
    rows = np.arange(n_rows)
    column = np.zeros(n_rows, dtype=np.int64)
    w, tried = batch.p[:, 0], np.zeros(n_rows, dtype=np.bool_)
    mask = np.zeros((n_rows, n), dtype=np.bool_)
    for node in range(n):
        child = rule.there(lengths, node) & (parents[:, node] == column - 1)
        siblings = [i for i in range(node) if parents[0, i] == parents[0, node]]
        q = rule.without(rule.q_of(batch, node), [tokens[:, i] for i in siblings])
        yes = child & (accept[:, node] < rule.acceptance(batch, node, w, q))
        no = child & ~yes
        w = np.where(yes[:, None], batch.p[:, node + 1], np.where(no[:, None], rule.residual(w, q), w))
        tried = (tried | child) & ~yes
        column = np.where(yes, node + 1, column)
        mask[:, node] = yes
    bonus = np.stack([rule.bonus(batch, c) for c in range(n + 1)], axis=1)[rows, column]
    return Walked(mask, pick(np.where(tried[:, None], w, bonus), final[rows, column]))


def law(world: World, rule: Rule, shape: Shape, junk: World) -> Floats:
    """float64[V ** length]: the exact distribution of the first tokens under a rule."""
    batch, probability = all_drafts(world, rule, shape, junk)
    tokens, _, lengths = batch.trees
    n_rows, n = tokens.shape
    alive = np.zeros((n_rows, n + 1))
    alive[:, 0] = probability
    w = batch.p.copy()
    tried = np.zeros((n_rows, n + 1), dtype=np.bool_)
    for node in range(n):
        at = shape.parents[node] + 1
        child = rule.there(lengths, node)
        q = rule.without(rule.q_of(batch, node), [tokens[:, i] for i in earlier_siblings(shape, node)])
        share = np.where(child, np.clip(rule.acceptance(batch, node, w[:, at], q), 0, 1), 0)
        w[:, at] = np.where(child[:, None], rule.residual(w[:, at], q), w[:, at])
        alive[:, node + 1] = alive[:, at] * share
        alive[:, at] *= 1 - share
        tried[:, at] |= child
    joint = np.zeros(world.V**world.length)
    for column, level in enumerate([0] + [depth + 1 for depth in shape.depths]):
        own = pick_law(np.where(tried[:, column, None], w[:, column], rule.bonus(batch, column)))
        emitted = (alive[:, column, None] * own).ravel()
        codes = (batch.codes[:, column, None] * world.V + np.arange(world.V)).ravel()
        prefixes = np.bincount(codes, weights=emitted, minlength=world.V ** (level + 1))
        joint += (prefixes[:, None] * world.rest(level + 1)).ravel()
    return joint


def completed(
    world: World, batch: Batch, mask: npt.NDArray[np.bool_], next_token: Ints, rng: np.random.Generator
) -> Ints:
    """int64[V ** length]: counts of the first tokens, where what a step emitted is followed by plain sampling."""
    rows = np.arange(len(mask))
    column = np.where(mask.any(axis=1), mask.shape[1] - mask[:, ::-1].argmax(axis=1), 0)
    code = batch.codes[rows, column] * world.V + next_token
    level = mask.sum(axis=1) + 1
    for n in range(1, world.length):
        grows = level == n
        code[grows] = code[grows] * world.V + pick(world.p[n][code[grows]], rng.random(int(grows.sum())))
        level[grows] += 1
    return np.bincount(code, minlength=world.V**world.length)
