"""What a drafter wins on a target at one batch and context: tokens a step against the time of draft and verify.

speedup = E / (K c + v): E expected tokens of a step, K the draft length, c a draft token and v the verifying step in
plain steps; with v = 1 it is theorem 3.8 of Leviathan et al. (arXiv 2211.17192). docs/plan-speculate.md has the
equations and what comes of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forerun.errors import PlanError
from forerun.plan.acceptance import Acceptance, rate_for, speedup
from forerun.plan.deployment import Deployment
from forerun.plan.drafters import PricedDrafter
from forerun.plan.memory import UTILIZATION, sequence_bytes, usable_bytes
from forerun.plan.network import Network
from forerun.plan.shapes import Model, as_network
from forerun.plan.steptime import Load
from forerun.plan.steptime_fast import ForwardSeconds

LONGEST = 16
"""Draft tokens that are tried, unless told otherwise."""

MOST = 4096
"""Batches that are tried at most, unless told otherwise."""


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

    @property
    def throughput(self) -> float:
        """Tokens/s of all sequences together."""
        return self.batch * self.tokens_per_second


class Bucket(NamedTuple):
    """Batches from `lo` to `hi`, both included, and the draft length for them."""

    lo: int
    hi: int
    length: int


class Overtake(NamedTuple):
    """From `batch` on the drafter `ahead` is faster than `behind`, which was the faster one before."""

    batch: int
    ahead: str
    behind: str


class TargetSteps:
    """A target's steps, each worked out once: what all drafters on it share."""

    def __init__(self, target: Model, deployment: Deployment) -> None:
        self.deployment = deployment
        self._seconds = ForwardSeconds(target, deployment)
        self._besides = deployment.eff.step_us * 1e-6
        self._known: dict[tuple[int, int, float], float] = {}

    def seconds(self, batch: int, queries: int, context: float) -> float:
        """An engine's step: the forward and what is done besides."""
        key = batch, queries, context
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._seconds(batch, queries, context) + self._besides
        return found


class Speculation:
    """One drafter on one target: the functions of this module for many batches, contexts and lengths.

    draft_deployment: where the drafter runs, if not like the target. longest: draft tokens that are tried; no more than
    the drafter can.

    Raises:
        PlanError: `longest` is negative.
    """

    def __init__(
        self,
        steps: TargetSteps,
        proposal: Proposal,
        *,
        longest: int = LONGEST,
        draft_deployment: Deployment | None = None,
    ) -> None:
        if longest < 0:
            raise PlanError("longest", f"{longest} is not allowed; expected at least 0")
        self.drafter, self.acceptance = proposal
        self.longest = min(longest, self.drafter.longest)
        self._steps = steps
        self.where = draft_deployment or steps.deployment
        self._forwards: dict[int, list[tuple[ForwardSeconds, int, int, int]]] = {}
        self._one = ForwardSeconds(self.drafter.network, self.where) if self.drafter.network else None
        self._best: dict[tuple[int, float], Point] = {}

    def price(self, batch: int, context: float, length: int) -> Point:
        """One draft length. Raises PlanError if the drafter can't draft that far, or a number is out of range."""
        self._forwards_of(length)
        Load(batch, length + 1, context).check()
        return Point(
            self.drafter.name,
            batch,
            context,
            length,
            self.acceptance.expected_tokens(length),
            self._steps.seconds(batch, 1, context),
            self._draft_seconds(batch, context, length, {}),
            self._steps.seconds(batch, length + 1, context),
        )

    def best(self, batch: int, context: float) -> Point:
        """The draft length with the largest speedup, the shortest of those that are equal; 0 where none pays."""
        found = self._best.get((batch, context))
        if found is None:
            gains = self.speedups(batch, context)
            found = self.price(batch, context, max(range(len(gains)), key=lambda length: (gains[length], -length)))
            self._best[batch, context] = found
        return found

    def speedups(self, batch: int, context: float) -> list[float]:
        """Of every draft length, from 0 to the longest."""
        return [
            speedup(self.acceptance.expected_tokens(length), *cost)
            for length, cost in enumerate(self._costs(batch, context))
        ]

    def acceptance_needed(self, batch: int, context: float, length: int | None = None) -> float | None:
        """The constant acceptance at which `length` has a speedup of 1; without one the smallest of all lengths, below
        which none pays. None: not even drafts that are always accepted pay."""
        costs = self._costs(batch, context)
        needed: float | None = None
        for tried in range(1, self.longest + 1) if length is None else (length,):
            total = sum(costs[tried])
            if tried + 1 < total:
                continue
            # A length that doesn't pay at the rate of another one needs a larger rate.
            if needed is None or Acceptance.of(needed).expected_tokens(tried) > total:
                needed = rate_for(total, tried)
        return needed

    def _costs(self, batch: int, context: float) -> list[tuple[float, float]]:
        """Draft and verifying step in plain steps, of every draft length."""
        Load(batch, 1, context).check()
        plain = self._steps.seconds(batch, 1, context)
        known: dict[tuple[int, int, int], float] = {}
        return [
            (
                self._draft_seconds(batch, context, length, known) / plain,
                self._steps.seconds(batch, length + 1, context) / plain,
            )
            for length in range(self.longest + 1)
        ]

    def at(self, batch: int, context: float, length: int | None) -> Point:
        """That length, or the best one for None."""
        return self.best(batch, context) if length is None else self.price(batch, context, length)

    def runs(self, context: float, *, length: int | None = None, most: int = MOST) -> list[tuple[int, int]]:
        """Batches at which speculation pays, as first and last of each run of them, up to `most`.

        With `length`, that length; without, the best one at each batch. With experts there may be several runs: it pays
        at batch 1, loses while more tokens touch more experts, and pays again once all are read anyway.
        """
        found = _runs(lambda batch: self.at(batch, context, length).speedup > 1, most)
        return [(first, last) for first, last, state in found if state]

    def schedule(self, context: float, most: int) -> list[Bucket]:
        """The best draft length of every batch from 1 to `most`, batches alike taken together."""
        buckets: list[Bucket] = []
        for batch in range(1, most + 1):
            length = self.best(batch, context).length
            if buckets and buckets[-1].length == length:
                buckets[-1] = buckets[-1]._replace(hi=batch)
            else:
                buckets.append(Bucket(batch, batch, length))
        return buckets

    def bucket(self, context: float, lo: int, hi: int) -> tuple[Bucket, float]:
        """One draft length for the batches from `lo` to `hi`, and the share of speed that it loses at worst.

        It is the one that loses least against the best at the worse of both ends.
        """
        ends = [self.speedups(batch, context) for batch in {lo, hi}]
        losses = [max(1 - gains[length] / max(gains) for gains in ends) for length in range(self.longest + 1)]
        length = min(range(len(losses)), key=losses.__getitem__)
        return Bucket(lo, hi, length), losses[length]

    def _draft_seconds(
        self, batch: int, context: float, length: int, known: dict[tuple[int, int, int], float]
    ) -> float:
        """`PricedDrafter.seconds`; `known`: forwards of this batch and context by network, queries and scored."""
        forwards = self._forwards_of(length)
        if not length:
            return 0.0
        parts: list[float] = []
        for seconds, queries, scored, repeats in forwards:
            key = id(seconds), queries, scored
            one = known.get(key)
            if one is None:
                one = known[key] = seconds(batch, queries, context, scored)
            parts.append(one * repeats)
        return self.drafter.host_us * 1e-6 + sum(parts)

    def _forwards_of(self, length: int) -> list[tuple[ForwardSeconds, int, int, int]]:
        """Network, queries, scored tokens and repeats. Raises PlanError if the drafter can't draft that far."""
        forwards = self._forwards.get(length)
        if forwards is None:
            forwards = self._forwards[length] = [
                (self._of(forward.network), forward.queries, forward.scored, forward.repeats)
                for forward in self.drafter.forwards(length)
            ]
        return forwards

    def _of(self, network: Network) -> ForwardSeconds:
        """One for all lengths where the drafter runs the same network for each (all but Medusa)."""
        if network is self.drafter.network and self._one is not None:
            return self._one
        return ForwardSeconds(network, self.where)


def price(
    target: Model,
    deployment: Deployment,
    proposal: Proposal,
    *,
    batch: int,
    context: float,
    length: int,
    draft_deployment: Deployment | None = None,
) -> Point:
    """One draft length. `draft_deployment`: where the drafter runs, if not like the target.

    Raises:
        PlanError: the drafter can't draft that far, or a number is out of range.
    """
    steps = TargetSteps(target, deployment)
    return Speculation(steps, proposal, draft_deployment=draft_deployment).price(batch, context, length)


def best(
    target: Model,
    deployment: Deployment,
    proposal: Proposal,
    *,
    batch: int,
    context: float,
    longest: int = LONGEST,
    draft_deployment: Deployment | None = None,
) -> Point:
    """The draft length with the largest speedup, the shortest of those that are equal; 0 where none pays."""
    steps = TargetSteps(target, deployment)
    return Speculation(steps, proposal, longest=longest, draft_deployment=draft_deployment).best(batch, context)


def break_even(
    target: Model,
    deployment: Deployment,
    proposal: Proposal,
    *,
    context: float,
    length: int | None = None,
    longest: int = LONGEST,
    most: int = MOST,
    draft_deployment: Deployment | None = None,
) -> int | None:
    """The smallest batch at which speculation doesn't pay, or None if it does up to `most`.

    With `length`, that length; without, the best length at each batch. With experts it may pay again at larger ones
    (`Speculation.runs`).
    """
    steps = TargetSteps(target, deployment)
    speculation = Speculation(steps, proposal, longest=longest, draft_deployment=draft_deployment)
    return first_loss(speculation.runs(context, length=length, most=most), most)


def first_loss(runs: Sequence[tuple[int, int]], most: int) -> int | None:
    """The smallest batch that is in none of the `runs` (in order), or None if they reach from 1 to `most`."""
    first = runs[0][1] + 1 if runs and runs[0][0] == 1 else 1
    return first if first <= most else None


def schedule(
    target: Model,
    deployment: Deployment,
    proposal: Proposal,
    *,
    context: float,
    most: int,
    longest: int = LONGEST,
    draft_deployment: Deployment | None = None,
) -> list[Bucket]:
    """The best draft length of every batch from 1 to `most`: contiguous buckets, no two neighbours alike.

    Raises:
        PlanError: `most` is below 1.
    """
    if most < 1:
        raise PlanError("most", f"{most} is not allowed; expected at least 1")
    steps = TargetSteps(target, deployment)
    return Speculation(steps, proposal, longest=longest, draft_deployment=draft_deployment).schedule(context, most)


def overtakes(
    one: Speculation,
    other: Speculation,
    context: float,
    *,
    lengths: tuple[int | None, int | None] = (None, None),
    most: int = MOST,
) -> list[Overtake]:
    """Where two drafters change places up to `most`, each at its length, or at its best one for None. Where both are as
    fast (neither pays), neither leads."""

    def lead(batch: int) -> int:
        speeds = [item.at(batch, context, n).speedup for item, n in zip((one, other), lengths, strict=True)]
        return (speeds[0] > speeds[1]) - (speeds[0] < speeds[1])

    led = [(first, state) for first, _, state in _runs(lead, most) if state]
    names = {1: one.drafter.name, -1: other.drafter.name}
    return [
        Overtake(first, names[state], names[-state])
        for (_, before), (first, state) in itertools.pairwise(led)
        if state != before
    ]


def most_that_fit(
    target: Model,
    deployment: Deployment,
    drafter: PricedDrafter,
    tokens: float,
    *,
    draft_deployment: Deployment | None = None,
    utilization: float = UTILIZATION,
) -> int:
    """Sequences of `tokens` tokens whose KV fits beside the weights, the drafter's included; 0 if not even those fit.

    A drafter on fewer accelerators than the target fills these first, so it counts as if all held as much.
    """
    where = draft_deployment or deployment
    held = deployment.gpus / where.gpus
    pool = usable_bytes(deployment, utilization) - as_network(target).weight_bytes - held * drafter.weight_bytes
    each = sequence_bytes(target, deployment, tokens) + held * sequence_bytes(drafter, where, tokens)
    if pool < 0:
        return 0
    return int(pool // each) if each else MOST


def batches_up_to(most: int) -> Iterable[int]:
    """1, 2, 4, ... up to `most`."""
    batch = 1
    while batch <= most:
        yield batch
        batch *= 2


def walked(most: int) -> list[int]:
    """All batches up to 16, then four for each doubling, and `most`."""
    found = list(range(1, min(most, 16) + 1))
    while found and found[-1] < most:
        octave = 1 << (found[-1].bit_length() - 1)
        found.append(min(found[-1] + octave // 4, most))
    return found


def _runs(state: Callable[[int], int], most: int) -> list[tuple[int, int, int]]:
    """Runs of batches alike as (first, last, state), from 1 to `most`.

    Batches of `walked` are looked at, and between two of them that differ the change is found by halving: a state that
    comes and goes between two neighbours of these isn't seen.
    """
    runs: list[tuple[int, int, int]] = []
    for batch in walked(most):
        now = state(batch)
        while runs and runs[-1][2] != now and runs[-1][1] < batch - 1:
            low, high = runs[-1][1], batch
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if state(middle) == runs[-1][2] else (low, middle)
            runs[-1] = (runs[-1][0], low, runs[-1][2])
            if state(high) == now:
                runs.append((high, batch, now))
            else:
                runs.append((high, high, state(high)))
        if runs and runs[-1][2] == now:
            runs[-1] = (runs[-1][0], batch, now)
        else:
            runs.append((batch, batch, now))
    return runs
