"""What a drafter wins on a target at one batch and context: tokens a step against the time of draft and verify."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from forerun.errors import PlanError
from forerun.plan.acceptance import Acceptance, speedup
from forerun.plan.deployment import Deployment
from forerun.plan.drafters import PricedDrafter
from forerun.plan.network import Network
from forerun.plan.steptime import Load, forward_time

LONGEST = 16
"""Draft tokens that are tried, unless told otherwise."""


class Proposal(NamedTuple):
    """A drafter with the acceptance that it is assumed to have."""

    drafter: PricedDrafter
    acceptance: Acceptance


@dataclass(frozen=True)
class Point:
    """One draft length of one drafter at one batch and context.

    length: draft tokens of each sequence; 0: plain decoding. tokens_per_step: expected, of each sequence, the target's
    own included. plain_seconds: a step without speculation. draft_seconds, verify_seconds: of a step with it; all with
    what the engine does besides (`Efficiency.step_us`, once a step).
    """

    drafter: str
    batch: int
    context: float
    length: int
    tokens_per_step: float
    plain_seconds: float
    draft_seconds: float
    verify_seconds: float

    @property
    def draft_cost(self) -> float:
        """c: time of one draft token in plain steps; 0 without drafts."""
        return self.draft_seconds / self.length / self.plain_seconds if self.length else 0.0

    @property
    def verify_ratio(self) -> float:
        """v: the verifying step in plain steps."""
        return self.verify_seconds / self.plain_seconds

    @property
    def speedup(self) -> float:
        """Time without speculation over time with it, for each token."""
        return speedup(self.tokens_per_step, self.draft_seconds / self.plain_seconds, self.verify_ratio)

    @property
    def tokens_per_second(self) -> float:
        """Of each sequence."""
        return self.tokens_per_step / (self.draft_seconds + self.verify_seconds)


def step_seconds(target: Network, deployment: Deployment, batch: int, queries: int, context: float) -> float:
    """An engine's step: the forward and what is done besides."""
    forward = forward_time(target, deployment, Load(batch, queries, context))
    return forward.seconds + deployment.eff.step_us * 1e-6


def price(
    target: Network,
    deployment: Deployment,
    proposal: Proposal,
    *,
    batch: int,
    context: float,
    length: int,
    draft_deployment: Deployment | None = None,
) -> Point:
    """One draft length. `draft_deployment`: where the drafter runs, if not like the target."""
    drafter, acceptance = proposal
    return Point(
        drafter.name,
        batch,
        context,
        length,
        acceptance.expected_tokens(length),
        step_seconds(target, deployment, batch, 1, context),
        drafter.seconds(draft_deployment or deployment, batch, context, length),
        step_seconds(target, deployment, batch, length + 1, context),
    )


def best(
    target: Network,
    deployment: Deployment,
    proposal: Proposal,
    *,
    batch: int,
    context: float,
    longest: int = LONGEST,
    draft_deployment: Deployment | None = None,
) -> Point:
    """The draft length with the largest speedup, the shortest of those that are equal; 0 where none pays."""
    if longest < 0:
        raise PlanError("longest", f"{longest} is not allowed; expected at least 0")
    lengths = range(min(longest, proposal.drafter.longest) + 1)
    points = [
        price(
            target, deployment, proposal,
            batch=batch, context=context, length=length, draft_deployment=draft_deployment,
        )
        for length in lengths
    ]  # fmt: skip
    return max(points, key=lambda point: (point.speedup, -point.length))


def break_even(
    target: Network,
    deployment: Deployment,
    proposal: Proposal,
    *,
    context: float,
    length: int | None = None,
    longest: int = LONGEST,
    most: int = 4096,
    draft_deployment: Deployment | None = None,
) -> int | None:
    """The smallest batch at which speculation no longer pays, or None if it does up to `most`.

    With `length`, that length; without, the best length at each batch, so that from there on it is 0. The gain needn't
    fall all the way (experts, rounding of the batch), so batches are walked: doubling, then the gap is bisected.
    """

    def pays(batch: int) -> bool:
        if length is not None:
            point = price(
                target, deployment, proposal,
                batch=batch, context=context, length=length, draft_deployment=draft_deployment,
            )  # fmt: skip
            return point.speedup > 1
        return (
            best(
                target, deployment, proposal,
                batch=batch, context=context, longest=longest, draft_deployment=draft_deployment,
            ).length
            > 0
        )  # fmt: skip

    good, bad = 0, 1
    while pays(bad):
        good, bad = bad, bad * 2
        if bad > most:
            return None
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if pays(middle) else (good, middle)
    return bad


def batches_up_to(most: int) -> Iterable[int]:
    """1, 2, 4, ... up to `most`."""
    batch = 1
    while batch <= most:
        yield batch
        batch *= 2
