"""Policies as controllers of a simulated batch: what length to draft, and what is learnt from the outcome."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from forerun.plan.policy_choice import JointChoice
from forerun.plan.policy_cost import StepCost
from forerun.plan.workload import LONGEST, Floats, Ints, Texts, Workload, WorkloadClass

_LEVELS = 32
"""Of acceptance, as the policies tell it apart."""


class Controller(Protocol):
    """Decides for sequences that stand at `place` of `request`, each [batches, batch]; those of the first cost that it
    was made for come first."""

    def lengths(self, request: Ints, place: Ints) -> Ints:
        """Draft tokens of each."""

    def observe(self, length: Ints, accepted: Ints) -> None:
        """What came of it."""

    def joined(self, slots: npt.NDArray[np.bool_]) -> None:
        """New requests sit in these slots."""


class ByClass:
    """One length for each class. by_class: of each cost."""

    def __init__(self, texts: Texts, by_class: Sequence[Sequence[int]]) -> None:
        self._length = np.array(by_class, np.int64)[:, texts.kind]
        self._first = np.arange(len(self._length))[:, None] * self._length.shape[1]

    def lengths(self, request: Ints, place: Ints) -> Ints:  # noqa: ARG002
        by_cost = request.reshape(len(self._first), -1)
        lengths: Ints = self._length.take(by_cost + self._first).reshape(request.shape)
        return lengths

    def observe(self, length: Ints, accepted: Ints) -> None:
        pass

    def joined(self, slots: npt.NDArray[np.bool_]) -> None:
        pass


class Oracle:
    """Knows every request's own acceptance, and with `by_moment` also in which sort of moment it stands."""

    def __init__(self, workload: Workload, texts: Texts, costs: Sequence[StepCost], *, by_moment: bool) -> None:
        grid = (np.arange(_LEVELS) + 0.5) / _LEVELS
        tables = []
        for each in workload.classes:
            survival = each.survival(grid)
            tables.append(survival.reshape(2 * _LEVELS, -1) if by_moment else _average(each, grid))
        self._choice = JointChoice(np.concatenate(tables), costs)
        level = np.minimum((texts.mean * _LEVELS).astype(np.int64), _LEVELS - 1) + _LEVELS * texts.kind
        self._category = level[:, None] * 2 + texts.hard if by_moment else level[:, None]
        self._by_moment = by_moment

    def lengths(self, request: Ints, place: Ints) -> Ints:
        width = self._category.shape[1]
        return self._choice.lengths(self._category.take(request * width + place if self._by_moment else request))

    def observe(self, length: Ints, accepted: Ints) -> None:
        pass

    def joined(self, slots: npt.NDArray[np.bool_]) -> None:
        pass


def _average(each: WorkloadClass, means: Floats) -> Floats:
    """What a draft's tokens are worth to a request in the long run: gains of its tokens a step."""
    tokens = each.tokens_per_step(means)
    return np.diff(tokens, axis=1, prepend=0.0)


class Adaptive:
    """Learns every request's acceptance as it goes, from what its drafts show.

    The estimate is a Beta posterior with a memory: accepted and rejected draft tokens are counted, older ones count for
    less (by a factor for each newer trial), and a prior counts for one trial. A trial is a draft token whose
    predecessors were all accepted: a draft of three that is wholly accepted is three successes and says nothing about
    the fourth, so its end is no failure (`censored=False` makes it one, which is the mistake of comparing mean accepted
    lengths). A request whose best length is 0 learns nothing more, so it probes one token at distances that double from
    2 steps to 64 as long as probes fail.

    prior: acceptance of a new request, as an engine knows it from those before. weight: trials that it counts for.
    memory: trials after which a count has fallen to 1/e. goodput: see `JointChoice`.
    """

    def __init__(
        self,
        texts: Texts,
        costs: Sequence[StepCost],
        prior: float,
        *,
        weight: float = 1.0,
        memory: float = 10.0,
        censored: bool = True,
        goodput: bool = False,
    ) -> None:
        grid = 1 / (1 + np.exp(-np.linspace(-4, 4, _LEVELS)))
        self._choice = JointChoice(grid[:, None] ** np.arange(LONGEST + 1), costs, goodput=goodput)
        borders = (grid[1:] + grid[:-1]) / 2
        self._level = np.searchsorted(borders, (np.arange(1024) + 0.5) / 1024)
        self._prior, self._weight, self._censored = prior, weight, censored
        self._fade = np.exp(-np.arange(LONGEST + 2) / memory)
        shape = len(costs) * len(texts.kind) // costs[0].batch, costs[0].batch
        self.right, self.wrong = np.zeros(shape), np.zeros(shape)
        self._since, self._gap = np.zeros(shape, np.int64), np.full(shape, 2, np.int64)

    @property
    def estimate(self) -> Floats:
        """Of each slot's acceptance."""
        told = self.right + self._weight * self._prior
        estimate: Floats = told / (self.right + self.wrong + self._weight)
        return estimate

    def lengths(self, request: Ints, place: Ints) -> Ints:  # noqa: ARG002
        chosen = self._choice.lengths(self._level.take((self.estimate * 1023).astype(np.int64)))
        return np.maximum(chosen, self._since >= self._gap)

    def observe(self, length: Ints, accepted: Ints) -> None:
        rejected = accepted < length if self._censored else length > 0
        fade = self._fade.take(accepted + rejected)
        self.right = self.right * fade + accepted
        self.wrong = self.wrong * fade + rejected
        failed_probe = rejected & (length == 1)
        if failed_probe.any():
            self._gap[failed_probe] = np.minimum(2 * self._gap[failed_probe], 64)
        self._gap[accepted > 0] = 2
        self._since = (self._since + 1) * (length == 0)

    def joined(self, slots: npt.NDArray[np.bool_]) -> None:
        self.right[slots] = self.wrong[slots] = 0
        self._since[slots] = 0
        self._gap[slots] = 2
