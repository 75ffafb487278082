"""What a step of a policy costs, in plain steps: a step without speculation in the same batch takes 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from forerun.errors import PlanError
from forerun.plan.workload import LONGEST, Floats

if TYPE_CHECKING:
    from forerun.plan.deployment import Deployment
    from forerun.plan.drafters import PricedDrafter
    from forerun.plan.shapes import Model

RIDGE_ROWS = 295.0
"""Rows at which a step turns from bytes to arithmetic: the ridge of an H100 SXM in 16 bits, 989 TFLOP/s over 3.35 TB/s;
2 FLOP for each weight and row over 2 bytes a weight make a row one FLOP per byte (docs/step-time.md)."""


class StepCost(NamedTuple):
    """name: of the drafter. batch: sequences. verify[rows]: the target's step over so many rows, at least one for each
    sequence. draft[length]: drafting so many tokens, for all who draft at once; shorter than 17 where the drafter can't
    go on. plain_seconds: of a plain step, where a model says so."""

    name: str
    batch: int
    verify: Floats
    draft: Floats
    plain_seconds: float | None = None

    @property
    def longest(self) -> int:
        """Draft tokens that can be had."""
        return len(self.draft) - 1

    def alike(self, longest: int | None = None) -> Floats:
        """Of a step in which every sequence drafts the same, by length from 0: v + the draft."""
        lengths = np.arange((self.longest if longest is None else longest) + 1)
        cost: Floats = self.verify[self.batch * (1 + lengths)] + self.draft[lengths]
        return cost


_MOST = 1e6
"""Of a draft token's cost and of the ridge: beyond it nothing is compared any more."""


def roofline_cost(draft_cost: float, batch: int, *, ridge_rows: float = RIDGE_ROWS) -> StepCost:
    """Without a model: v = max(1, rows / ridge) over the same for a plain step, and c for each draft token.

    Raises:
        PlanError: cost, batch or ridge out of range.
    """
    if not 0 <= draft_cost <= _MOST:
        raise PlanError("cost", f"{draft_cost} is not allowed; expected plain steps a draft token, 0 to {_MOST:g}")
    if not 1 <= ridge_rows <= _MOST:
        raise PlanError("ridge-rows", f"{ridge_rows} is not allowed; expected 1 to {_MOST:g} rows")
    check_batch(batch)
    rows = np.arange(batch * (LONGEST + 1) + 1)
    verify: Floats = np.maximum(1, rows / ridge_rows) / max(1, batch / ridge_rows)
    return StepCost(f"c = {draft_cost:g}", batch, verify, draft_cost * np.arange(LONGEST + 1, dtype=np.float64))


def modelled_cost(
    target: Model,
    deployment: Deployment,
    batch: int,
    context: float,
    *,
    drafter: PricedDrafter | None = None,
    draft_cost: float = 0.0,
) -> StepCost:
    """From the step model, linear between the steps in which all sequences verify equally many tokens; the drafter
    priced by its shape, or `draft_cost` plain steps for each token."""
    from forerun.plan.acceptance import Acceptance
    from forerun.plan.drafters import ngram
    from forerun.plan.speculate import Proposal, price

    check_batch(batch)
    proposal = Proposal(drafter or ngram(), Acceptance.of(0.0))
    lengths = np.arange(min(LONGEST, proposal.drafter.longest) + 1)
    points = [price(target, deployment, proposal, batch=batch, context=context, length=int(k)) for k in lengths]
    ratios = [point.verify_ratio for point in points]
    verify = np.interp(np.arange(batch * len(lengths) + 1), batch * (1 + lengths), ratios)
    if drafter is None:
        given = roofline_cost(draft_cost, batch)
        return StepCost(given.name, batch, verify, given.draft, points[0].plain_seconds)
    draft = np.array([point.draft_seconds / point.plain_seconds for point in points])
    return StepCost(drafter.name, batch, verify, draft, points[0].plain_seconds)


def stacked(costs: Sequence[StepCost]) -> tuple[Floats, Floats]:
    """Verify [costs, rows] and draft [costs, LONGEST + 1] of costs for one batch; what can't be drafted takes for ever.

    Raises:
        ValueError: the batches differ.
    """
    batch = costs[0].batch
    if any(cost.batch != batch for cost in costs):
        raise ValueError("costs of different batches")
    verify = np.full((len(costs), batch * (LONGEST + 1) + 1), np.inf)
    draft = np.full((len(costs), LONGEST + 1), np.inf)
    for index, cost in enumerate(costs):
        verify[index, : len(cost.verify)] = cost.verify
        draft[index, : len(cost.draft)] = cost.draft
    return verify, draft


def check_batch(batch: int) -> None:
    """Raises PlanError unless it is from 1 to 1024."""
    if not 1 <= batch <= 1024:
        raise PlanError("batch", f"{batch} is not allowed; expected 1 to 1024 sequences")
