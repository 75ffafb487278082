"""Workloads: requests whose drafts are accepted more or less often, from one to another and from place to place.

Whether the drafter would guess a token, given the text before it, is a property of that place of the text. So a text is
a row of zeros and ones, and a draft from any place is accepted up to the next zero: what a step emits depends on where
it starts and how long its draft is, and on nothing else. All policies are compared on the same texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.errors import PlanError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LONGEST = 16
"""Draft tokens of a step at most."""

MOST_CLASSES = 4
"""Their best lengths are found by trying all combinations."""

_LEAST_PARAMETER = 0.05

_POINTS = 128
"""Of the integral over a class's requests."""


@dataclass(frozen=True, kw_only=True)
class WorkloadClass:
    """Requests of one kind.

    share: of the requests, relative to the other classes. acceptance: mean probability that a draft token is accepted,
    given that all before it were. spread: how far requests differ: their own means are drawn from a Beta distribution
    with parameters acceptance * spread and (1 - acceptance) * spread; inf: all alike. swing: how far places of one text
    differ, 0 to 1: it alternates between easy and hard moments, in which a request of mean m has m +- swing * min(m, 1
    - m). dwell: tokens of a moment in the mean (geometric). tokens: length of every reply.
    """

    name: str
    share: float = 1.0
    acceptance: float
    spread: float = 4.0
    swing: float = 0.95
    dwell: float = 100.0
    tokens: int = 256

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise PlanError("class", "expected a name before the colon")
        for name, right, expected in (
            ("share", 1e-6 <= self.share <= 1e6, "a number from 1e-6 to 1e6"),
            ("acceptance", 0 <= self.acceptance <= 1, "a probability from 0 to 1"),
            ("spread", 0.1 <= self.spread <= 1000 or self.spread == math.inf, "0.1 to 1000, or inf for requests alike"),
            ("swing", 0 <= self.swing <= 1, "0 to 1"),
            ("dwell", 1 <= self.dwell < math.inf, "at least 1 token"),
            ("tokens", 1 <= self.tokens <= 1 << 16, f"1 to {1 << 16}"),
        ):
            if not right:
                raise PlanError(
                    f"class {self.name}: {name}", f"{getattr(self, name)} is not allowed; expected {expected}"
                )
        if not self.all_alike and min(self.acceptance, 1 - self.acceptance) * self.spread < _LEAST_PARAMETER:
            raise PlanError(
                f"class {self.name}: spread",
                f"{self.spread} is too small for an acceptance of {self.acceptance}; expected both parameters of the "
                f"Beta distribution, acceptance * spread and (1 - acceptance) * spread, of at least {_LEAST_PARAMETER}",
            )

    def means(self, points: int = _POINTS) -> tuple[Floats, Floats]:
        """Nodes and weights of the integral over its requests: their own acceptance, and how many have it."""
        a, b = self.acceptance * self.spread, (1 - self.acceptance) * self.spread
        if self.all_alike:
            return np.array([self.acceptance]), np.ones(1)
        # Midpoints in u, x = u^p / (u^p + (1 - u)^p): without the density's poles at 0 and 1, and fine for its peak.
        points = max(points, int(16 * math.sqrt(self.spread)))
        u = (np.arange(points) + 0.5) / points
        power = max(2.0, 2 / min(a, b))
        up, down = power * np.log(u), power * np.log1p(-u)
        both = np.logaddexp(up, down)
        log = a * (up - both) + b * (down - both) - np.log(u * (1 - u))
        weights = np.exp(log - log.max())
        return np.exp(up - both), weights / weights.sum()

    @property
    def all_alike(self) -> bool:
        """Whether its requests have one acceptance."""
        return math.isinf(self.spread) or self.acceptance in (0, 1)

    def moments(self, means: npt.ArrayLike) -> Floats:
        """Acceptance in easy and in hard moments of requests with these means: [..., 2]."""
        m = np.asarray(means, np.float64)
        away = self.swing * np.minimum(m, 1 - m)
        return np.stack([m + away, m - away], axis=-1)

    def survival(self, means: npt.ArrayLike, longest: int = LONGEST) -> Floats:
        """Probability that a draft's first d tokens are accepted if it starts in an easy or a hard moment.

        [..., 2, longest + 1]: r_s(0) = 1, r_s(d) = a_s (stay r_s(d - 1) + (1 - stay) r_other(d - 1)).
        """
        a = self.moments(means)
        change = self.change
        r = [np.ones_like(a)]
        for _ in range(longest):
            r.append(a * ((1 - change) * r[-1] + change * r[-1][..., ::-1]))
        return np.stack(r, axis=-1)

    @property
    def change(self) -> float:
        """Probability that the next token is in the other sort of moment."""
        return 1 / self.dwell if self.swing else 0.0

    def tokens_per_step(self, means: npt.ArrayLike, longest: int = LONGEST) -> Floats:
        """Of requests with these means at each draft length, in the long run: [..., longest + 1].

        Steps start more often in hard moments, since those advance less. Where they start is a chain of two states,
        whose transitions come from the same recursion as the survival; tokens a step are its stationary mean.
        """
        a = self.moments(means)
        survival = self.survival(means, longest)
        if not self.change:
            expected: Floats = np.cumsum(survival, axis=-1)[..., 0, :]
            return expected
        change = self.change
        # alive[..., s, t]: from s, all so far accepted, and the next place is in moment t. Easy is 0.
        step = np.array([[1 - change, change], [change, 1 - change]])
        alive = np.broadcast_to(np.eye(2), (*a.shape, 2))
        ended = np.zeros((*a.shape, 2))
        tokens = np.ones(a.shape)
        means_by_length = []
        for length in range(longest + 1):
            onward = ended + alive @ step
            leaves_easy, leaves_hard = onward[..., 0, 1], onward[..., 1, 0]
            easy = leaves_hard / (leaves_easy + leaves_hard)
            means_by_length.append(easy * tokens[..., 0] + (1 - easy) * tokens[..., 1])
            if length < longest:
                ended = ended + (alive * (1 - a)[..., None, :]) @ step
                alive = (alive * a[..., None, :]) @ step
                tokens = tokens + alive.sum(-1)
        return np.stack(means_by_length, axis=-1)

    @cached_property
    def mean_tokens_per_step(self) -> Floats:
        """Of the class at each draft length: its tokens over its steps, the harmonic mean over its requests."""
        means, weights = self.means()
        harmonic: Floats = 1 / (weights @ (1 / self.tokens_per_step(means)))
        return harmonic


class Workload(NamedTuple):
    """A mix of classes."""

    classes: tuple[WorkloadClass, ...]

    @staticmethod
    def of(classes: Sequence[WorkloadClass]) -> Workload:
        """Raises PlanError if there is none, or a name stands twice."""
        names = [each.name for each in classes]
        if not names:
            raise PlanError("class", "expected at least one")
        for name in names:
            if names.count(name) > 1:
                raise PlanError("class", f"{name!r} is there more than once")
        if len(names) > MOST_CLASSES:
            raise PlanError("class", f"{len(names)} classes; expected at most {MOST_CLASSES}")
        return Workload(tuple(classes))

    @property
    def shares(self) -> Floats:
        """Of the requests, summing to 1."""
        shares = np.array([each.share for each in self.classes])
        normed: Floats = shares / shares.sum()
        return normed

    @property
    def token_shares(self) -> Floats:
        """Of the tokens, summing to 1."""
        tokens = self.shares * [each.tokens for each in self.classes]
        normed: Floats = tokens / tokens.sum()
        return normed


CODE_AND_CHAT = Workload((
    WorkloadClass(name="code", acceptance=0.8),
    WorkloadClass(name="chat", acceptance=0.35),
))  # fmt: skip
"""Half of the requests write code, where a drafter is right four times of five, half chat, where it is once of
three.
Round assumptions, to be replaced by what your own engine counts."""

FORM = "NAME:KEY=NUMBER,..."


def class_of(text: str) -> WorkloadClass:
    """A class as people write it: "code:acceptance=0.8,share=0.5,spread=4,swing=0.9,dwell=100,tokens=256".

    Raises:
        PlanError: the text isn't of that form, or a value is out of range.
    """
    name, colon, tail = text.partition(":")
    kinds: dict[str, Callable[[str], float]] = {
        item.name: int if item.type == "int" else float for item in fields(WorkloadClass) if item.name != "name"
    }
    values: dict[str, float] = {}
    for pair in tail.split(",") if colon else ():
        key, equals, value = (word.strip() for word in pair.partition("="))
        if not equals or key not in kinds:
            raise PlanError("class", f"{text!r}: {pair!r} is not allowed; expected {FORM}, KEY of {', '.join(kinds)}")
        if key in values:
            raise PlanError("class", f"{text!r} gives {key} twice")
        try:
            values[key] = kinds[key](value)
        except ValueError as error:
            kind = "a whole number" if kinds[key] is int else "a number"
            raise PlanError("class", f"{text!r}: {key} is {value!r}; expected {kind}") from error
    if "acceptance" not in values:
        raise PlanError("class", f"{text!r} lacks acceptance; expected {FORM}")
    return WorkloadClass(name=name.strip(), **values)  # type: ignore[arg-type]


class Texts(NamedTuple):
    """Drawn requests, one a row.

    kind: index of the class [n]. mean: own acceptance [n]. tokens: length [n]. hard: whether a place is in a hard
    moment [n, width]. run: draft tokens that would be accepted from a place on, at most `LONGEST` [n, width].
    """

    kind: Ints
    mean: Floats
    tokens: Ints
    hard: npt.NDArray[np.bool_]
    run: npt.NDArray[np.int8]


def draw(workload: Workload, n: int, seed: int) -> Texts:
    """`n` requests: each class has its share of them, rounded; everything else is drawn."""
    rng = np.random.default_rng(seed)
    classes = workload.classes
    bounds = np.rint(np.cumsum(workload.shares) * n).astype(np.int64)
    kind = rng.permutation(np.searchsorted(bounds, np.arange(n), side="right").clip(max=len(classes) - 1))
    tokens = np.array([each.tokens for each in classes])[kind]
    width = int(tokens.max()) + LONGEST
    mean = np.empty(n)
    a = np.empty((n, 2))
    for index, each in enumerate(classes):
        mine = kind == index
        alpha, beta = each.acceptance * each.spread, (1 - each.acceptance) * each.spread
        mean[mine] = each.acceptance if each.all_alike else rng.beta(alpha, beta, mine.sum())
        a[mine] = each.moments(mean[mine])
    changes = rng.random((n, width), np.float32) < np.array([each.change for each in classes])[kind, None]
    changes[:, 0] = rng.random(n) < 0.5
    hard = np.logical_xor.accumulate(changes, axis=1)
    guessed = rng.random((n, width), np.float32) < np.where(hard, a[:, 1:], a[:, :1])
    places = np.arange(width, dtype=np.int32)
    misses = np.where(guessed, np.int32(width), places)
    next_miss = np.minimum.accumulate(misses[:, ::-1], axis=1)[:, ::-1]
    return Texts(kind, mean, tokens, hard, np.minimum(next_miss - places, LONGEST).astype(np.int8))
