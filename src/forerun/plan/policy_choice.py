"""Who drafts how much in a step: one choice for all sequences of a batch.

Draft tokens are ranked by survival and those above a threshold are taken, as in docs/draft-length.md; of all thresholds
and caps on the longest draft the pair is chosen under which a mix of requests is served soonest, since all sequences
share the step and wait for the longest draft.

Served soonest isn't most tokens a step. Replies have their lengths, so a sequence whose drafts fail keeps its slot for
longer, and slots fill with such: total time is the sum over all tokens of step time over tokens a step. Its logarithm
falls by the mean over slots of d E / E and rises by d T / T, so what is maximised is the sum over the batch of log E,
less batch * log T (proportional fairness; Kelly, Maulloo and Tan 1998). At batch 1 that is E / T, goodput as in
SmartSpec (arXiv 2406.14066); in larger batches `goodput` maximises sum E / T instead, which favours the easy ones.

Sequences of one category are treated alike, so a few rows that are left over are given to all of them or to none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from forerun.plan.policy_cost import StepCost, stacked
from forerun.plan.workload import LONGEST, Floats, Ints

_FREE = 0.05
_THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8)


class JointChoice:
    """For sequences that each belong to one of a few categories with known survival.

    survival: by category, [categories, LONGEST + 1] with 1 in front. costs: all of one batch; the batches to choose for
    are as many for each of them, those of the first cost first.
    """

    def __init__(self, survival: Floats, costs: Sequence[StepCost], *, goodput: bool = False) -> None:
        self._batch, self._goodput = costs[0].batch, goodput
        self._verify, self._draft = stacked(costs)
        expected = np.cumsum(survival, axis=1)
        self._known: tuple[int, Ints, Floats] | None = None
        if self._batch == 1:
            seconds = self._verify[:, 1 : LONGEST + 2] + self._draft
            self._alone: Ints = np.argmax(expected / seconds[:, None], axis=2)
            return
        # Where rows cost next to nothing, none has to be worth its cost.
        flat = all(cost.verify[-1] <= (1 + _FREE) * cost.verify[self._batch] for cost in costs)
        thresholds = _THRESHOLDS[:1] if flat else _THRESHOLDS
        above = [(survival[:, 1:] > threshold).sum(1) for threshold in thresholds]
        self._caps = np.repeat(np.arange(LONGEST + 1), len(thresholds))
        self._drafts = self._draft[:, self._caps]
        self._length: Ints = np.minimum(np.tile(np.array(above).T, LONGEST + 1), self._caps)
        worth = np.take_along_axis(expected, self._length, axis=1)
        self._tables = np.hstack([self._length, worth if goodput else np.log(worth)]).astype(np.float32)

    def lengths(self, categories: npt.NDArray[np.integer]) -> Ints:
        """Draft lengths of sequences [batches, batch] by their categories."""
        cost, drafts = self._of_batches(len(categories))
        if self._batch == 1:
            alone: Ints = self._alone.take(categories + cost * self._alone.shape[1])
            return alone
        plans = len(self._caps)
        totals = np.einsum("ijk->ik", self._tables.take(categories, axis=0))
        seconds = self._verify.take(totals[:, :plans].astype(np.int64) + cost) + drafts
        worth = totals[:, plans:]
        plan = np.argmax(worth / seconds if self._goodput else worth - self._batch * np.log(seconds), axis=1)
        chosen: Ints = self._length.take(categories * plans + plan[:, None])
        return chosen

    def _of_batches(self, count: int) -> tuple[Ints, Floats]:
        """For so many batches: at batch 1 each one's cost, otherwise where rows of that cost begin; and its drafts."""
        if self._known is None or self._known[0] != count:
            costs = len(self._draft)
            cost = np.repeat(np.arange(costs), count // costs)
            first = cost if self._batch == 1 else cost * self._verify.shape[1] + self._batch
            drafts = self._draft if self._batch == 1 else self._drafts.take(cost, axis=0)
            self._known = count, first[:, None], drafts
        return self._known[1:]
