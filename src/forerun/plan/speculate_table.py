"""Drafters against batches and contexts: every price, where each drafter stops paying, and which is ahead."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forerun.errors import PlanError
from forerun.plan.deployment import Deployment
from forerun.plan.memory import UTILIZATION
from forerun.plan.shapes import Model, as_network
from forerun.plan.speculate import (
    LONGEST,
    MOST,
    Bucket,
    Overtake,
    Point,
    Proposal,
    Speculation,
    TargetSteps,
    first_loss,
    most_that_fit,
    overtakes,
)
from forerun.plan.steptime import Load, forward_time


class Prices(NamedTuple):
    """One drafter at one batch and context.

    point: its best draft length, or the one that was asked for. best: its best. low_load: the length that is best at
    batch 1, kept here. acceptance_needed: the constant acceptance at which the best length breaks even, or the one that
    was asked for; None: no acceptance does.
    """

    point: Point
    best: Point
    low_load: Point
    acceptance_needed: float | None

    @property
    def loss(self) -> float:
        """Share of speed that `point` loses against the best length."""
        return 1 - self.point.speedup / self.best.speedup

    @property
    def low_load_loss(self) -> float:
        """The same of the length that is kept."""
        return 1 - self.low_load.speedup / self.best.speedup


class Row(NamedTuple):
    """One drafter at one batch and context; no prices where the sequences don't fit the memory."""

    drafter: str
    batch: int
    context: float
    prices: Prices | None


class BucketLength(NamedTuple):
    """A draft length for a bucket of batches, and the share of speed that it loses at the worse of both ends."""

    bucket: Bucket
    loss: float


@dataclass(frozen=True)
class Summary:
    """One drafter at one context, over all batches that fit.

    most: sequences that fit at once; 0: none. searched: batches up to which the following was looked for. pays: first
    and last batch of each run of batches at which it pays. break_even: the smallest at which it doesn't; None: it
    always does. buckets: a draft length for each bucket of batches. peak: the largest batch of the table or, if fewer
    fit, those; None: no sequence fits.
    """

    drafter: str
    context: float
    most: int
    searched: int
    pays: tuple[tuple[int, int], ...]
    break_even: int | None
    buckets: tuple[BucketLength, ...]
    peak: Prices | None


class Lead(NamedTuple):
    """Where drafters change places at one context."""

    context: float
    overtake: Overtake


@dataclass(frozen=True)
class SpeculationTable:
    """All of it. rows: by drafter, then context, then batch."""

    rows: tuple[Row, ...]
    summaries: tuple[Summary, ...]
    overtakes: tuple[Lead, ...]

    def beyond_measured(self, target: Model, deployment: Deployment) -> list[str]:
        """What of the verifying steps lies outside of what a measured efficiency was fitted to, one phrase each."""
        points = [row.prices.point for row in self.rows if row.prices is not None]
        if not points:
            return []
        found: dict[str, None] = {}
        for end in (min, max):
            load = Load(
                end(point.batch for point in points),
                end(point.length for point in points) + 1,
                end(point.context for point in points),
            )
            found |= dict.fromkeys(forward_time(target, deployment, load).beyond_measured)
        return list(found)


class Speculations:
    """Drafters on one target.

    length: draft tokens, or the most that a drafter can if those are fewer; None: the best at each batch. longest:
    draft tokens that are tried. draft_deployment: where draft models run, if not like the target; heads run where it
    does.

    Raises:
        PlanError: a number is out of range.
    """

    def __init__(
        self,
        target: Model,
        deployment: Deployment,
        proposals: Sequence[Proposal],
        *,
        length: int | None = None,
        longest: int = LONGEST,
        draft_deployment: Deployment | None = None,
        utilization: float = UTILIZATION,
    ) -> None:
        if length is not None and length < 1:
            raise PlanError("length", f"{length} is not allowed; expected at least 1")
        self.target, self.deployment, self.length = as_network(target), deployment, length
        self._draft_deployment, self._utilization = draft_deployment, utilization
        steps = TargetSteps(target, deployment)
        self._of = {
            proposal.drafter.name: Speculation(
                steps, proposal, longest=max(longest, length or 0), draft_deployment=self.drafts_on(proposal)
            )
            for proposal in proposals
        }

    def of(self, drafter: str) -> Speculation:
        """By the drafter's name. KeyError if there is none."""
        return self._of[drafter]

    def drafts_on(self, proposal: Proposal) -> Deployment | None:
        """Where it runs, if not like the target."""
        return self._draft_deployment if proposal.drafter.kind == "model" else None

    def fixed(self, drafter: str) -> int | None:
        """The length that was asked for, as far as the drafter can; None: the best."""
        return None if self.length is None else min(self.length, self._of[drafter].longest)

    def prices(self, drafter: str, batch: int, context: float) -> Prices:
        """At one batch and context."""
        speculation, fixed = self._of[drafter], self.fixed(drafter)
        kept = speculation.best(1, context).length
        return Prices(
            speculation.at(batch, context, fixed),
            speculation.best(batch, context),
            speculation.price(batch, context, kept),
            speculation.acceptance_needed(batch, context, fixed),
        )

    def most(self, drafter: str, context: float) -> int:
        """Sequences that fit while they draft as far as is tried."""
        speculation = self._of[drafter]
        return most_that_fit(
            self.target, self.deployment, speculation.drafter, context + speculation.longest + 1,
            draft_deployment=speculation.where, utilization=self._utilization,
        )  # fmt: skip

    def summary(self, drafter: str, context: float, batches: Sequence[int]) -> Summary:
        """One drafter at one context. batches: of the table, ascending."""
        speculation, most = self._of[drafter], self.most(drafter, context)
        searched = min(most, MOST)
        if not most:
            return Summary(drafter, context, 0, 0, (), None, (), None)
        pays = speculation.runs(context, length=self.fixed(drafter), most=searched)
        buckets = []
        for before, last in itertools.pairwise((0, *batches)):
            if before < most:
                buckets.append(BucketLength(*speculation.bucket(context, before + 1, min(last, most))))
        peak = self.prices(drafter, min(batches[-1], most), context)
        return Summary(drafter, context, most, searched, tuple(pays), first_loss(pays, searched), tuple(buckets), peak)

    def table(self, batches: Sequence[int], contexts: Sequence[float]) -> SpeculationTable:
        """All drafters at `batches` and `contexts`, both ascending."""
        rows: list[Row] = []
        summaries: list[Summary] = []
        for drafter, context in itertools.product(self._of, contexts):
            summary = self.summary(drafter, context, batches)
            summaries.append(summary)
            for batch in batches:
                fits = batch <= summary.most
                prices = self.prices(drafter, batch, context) if fits else None
                rows.append(Row(drafter, batch, context, prices))
        fit = {(summary.drafter, summary.context): summary.searched for summary in summaries}
        leads = [
            Lead(context, found)
            for context in contexts
            for one, other in itertools.combinations(self._of, 2)
            for found in overtakes(
                self._of[one], self._of[other], context,
                lengths=(self.fixed(one), self.fixed(other)), most=min(fit[one, context], fit[other, context]),
            )
        ]  # fmt: skip
        leads.sort(key=lambda lead: (lead.context, lead.overtake.batch))
        return SpeculationTable(tuple(rows), tuple(summaries), tuple(leads))
