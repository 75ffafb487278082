"""Policies of draft length on a mix of workloads: what they do to the mean, to the slow ones, and to throughput.

docs/plan-policy.md has the model, its equations and its worked example.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.errors import PlanError
from forerun.plan.policy_control import Adaptive, ByClass, Controller, Oracle
from forerun.plan.policy_cost import StepCost
from forerun.plan.policy_sim import fixed_steps, simulate_all
from forerun.plan.workload import Floats, Ints, Texts, Workload, draw

MOST_TOKENS = 1 << 22
"""Of all drawn requests, in memory at once."""

REQUESTS = 160
"""That are measured where nobody says how many: it takes a fraction of a second, and gains have a standard error of
about a point."""


class Outcome(NamedTuple):
    """What a policy does to the requests, relative to a batch of the same size without speculation.

    policy: "none", "fixed", "per class", "adaptive", "oracle per request", "oracle per moment"; the oracles know what
    nobody can know. lengths: draft tokens, of all or of each class; None where they change. mean, p50, p99: over
    requests, of the time for each token in plain steps. slower: share of the requests that take longer than without
    speculation. throughput: tokens over time in those of plain decoding. drafted: draft tokens for each token emitted.
    """

    policy: str
    lengths: tuple[int, ...] | None
    mean: float
    p50: float
    p99: float
    slower: float
    throughput: float
    drafted: float

    @property
    def can_be_had(self) -> bool:
        """Whether an engine can do it."""
        return not self.policy.startswith("oracle")


class Requests(NamedTuple):
    """What each request took, requests of a batch side by side.

    tokens: emitted [n]. steps: with each fixed length [lengths, n]. seconds: by policy that isn't one length for all,
    in plain steps [n].
    """

    tokens: Ints
    steps: Ints
    seconds: Mapping[str, Floats]


class Comparison(NamedTuple):
    """All policies at one cost. fixed: every length for all requests. others: what isn't one length for all."""

    cost: StepCost
    fixed: tuple[Outcome, ...]
    others: tuple[Outcome, ...]
    requests: Requests

    @property
    def best_fixed(self) -> Outcome:
        """The length with the largest throughput, the shortest of those that are equal."""
        return max(self.fixed, key=lambda outcome: round(outcome.throughput, 9))

    def of(self, policy: str) -> Outcome:
        """The outcome of that name. KeyError if there is none."""
        for outcome in (self.fixed[0], self.best_fixed, *self.others):
            if outcome.policy == policy:
                return outcome
        raise KeyError(policy)

    def gain(self, policy: str) -> float:
        """Throughput over that of the best fixed length, less 1."""
        return self.of(policy).throughput / self.best_fixed.throughput - 1

    def seconds(self, outcome: Outcome) -> Floats:
        """Of each request with the policy, in plain steps."""
        if outcome in self.others:
            return self.requests.seconds[outcome.policy]
        length = self.fixed.index(outcome)
        found: Floats = self.requests.steps[length] * self.cost.alike()[length]
        return found

    def gain_squares(self, policy: str) -> Floats:
        """Of each batch: the square of its time with the best fixed length, less that with the policy times the ratio
        of both over all batches."""
        batches = [
            self.seconds(each).reshape(-1, self.cost.batch).sum(1) for each in (self.best_fixed, self.of(policy))
        ]
        found: Floats = (batches[0] - batches[0].sum() / batches[1].sum() * batches[1]) ** 2
        return found

    def gain_error(self, policy: str) -> float:
        """Standard error of `gain`, as that of a ratio of two sums over batches, which are taken as independent
        (Cochran, Sampling Techniques). NaN for a single batch."""
        squares, time = self.gain_squares(policy), float(self.seconds(self.of(policy)).sum())
        n = len(squares)
        return math.sqrt(n / (n - 1) * float(squares.sum())) / time if n > 1 else math.nan

    def steadiest(self, floor: float) -> Outcome:
        """Of what an engine can do with at least `floor` of the largest throughput: the one with the smallest p99.

        Raises:
            PlanError: the floor isn't a share.
        """
        if not 0 <= floor <= 1:
            raise PlanError("floor", f"{floor} is not allowed; expected a share from 0 to 1")
        had = [outcome for outcome in (*self.fixed, *self.others) if outcome.can_be_had]
        least = floor * max(outcome.throughput for outcome in had)
        # Rounded, so that of two that do the same the plainer one, which comes first, is taken.
        return min(
            (outcome for outcome in had if outcome.throughput >= least),
            key=lambda outcome: (round(outcome.p99, 9), -round(outcome.throughput, 9)),
        )


def compare(
    workload: Workload, costs: Sequence[StepCost], *, requests: int = REQUESTS, seed: int = 0
) -> list[Comparison]:
    """Every policy at every cost, all on the same texts; the costs are of one batch.

    `requests` is rounded up to whole batches.

    Raises:
        PlanError: `requests` or `seed` out of range.
    """
    if not 1 <= requests <= 1 << 20:
        raise PlanError("requests", f"{requests} is not allowed; expected 1 to {1 << 20}")
    if seed < 0:
        raise PlanError("seed", f"{seed} is not allowed; expected at least 0")
    batch = costs[0].batch
    requests = math.ceil(requests / batch) * batch
    longest = max(each.tokens for each in workload.classes)
    if requests * longest > MOST_TOKENS:
        raise PlanError("requests", f"{requests} of up to {longest} tokens are more than {MOST_TOKENS} tokens in all")
    texts, steps = _drawn(workload, requests, seed)
    prior = float(workload.token_shares @ [each.acceptance for each in workload.classes])
    by_class = [class_lengths(workload, cost) for cost in costs]
    controllers: dict[str, Controller] = {
        "per class": ByClass(texts, by_class),
        "adaptive": Adaptive(texts, costs, prior),
        "oracle per request": Oracle(workload, texts, costs, by_moment=False),
        "oracle per moment": Oracle(workload, texts, costs, by_moment=True),
    }
    runs = dict(zip(controllers, simulate_all(texts, costs, list(controllers.values()), seed=seed), strict=True))
    compared = []
    for index, cost in enumerate(costs):
        fixed = [
            _outcome("fixed" if k else "none", (k,), texts, steps[k] * seconds, k * steps[k])
            for k, seconds in enumerate(cost.alike())
        ]
        others = [
            _outcome(
                policy, by_class[index] if policy == "per class" else None, texts, run.time[index], run.drafted[index]
            )
            for policy, run in runs.items()
        ]
        by_policy = {policy: run.time[index] for policy, run in runs.items()}
        each = Requests(texts.tokens, steps[: len(fixed)], by_policy)
        compared.append(Comparison(cost, tuple(fixed), tuple(others), each))
    return compared


@lru_cache(maxsize=1)
def _drawn(workload: Workload, requests: int, seed: int) -> tuple[Texts, Ints]:
    """Requests, and their steps with each fixed length: the same for every batch."""
    texts = draw(workload, requests, seed)
    return texts, fixed_steps(texts)


def _outcome(policy: str, lengths: tuple[int, ...] | None, texts: Texts, time: Floats, drafted: Floats) -> Outcome:
    each = time / texts.tokens
    p50, p99 = np.quantile(each, (0.5, 0.99))
    tokens = texts.tokens.sum()
    return Outcome(
        policy, lengths, float(each.mean()), float(p50), float(p99), float((each > 1 + 1e-9).mean()),
        float(tokens / time.sum()), float(drafted.sum() / tokens),
    )  # fmt: skip


class Alone(NamedTuple):
    """A class by itself at its best fixed length, by integration.

    tokens_per_step: in the long run. cost: of the step, in plain steps.
    """

    name: str
    length: int
    tokens_per_step: float
    cost: float

    @property
    def speedup(self) -> float:
        """Time without speculation over time with it."""
        return self.tokens_per_step / self.cost


def alone(workload: Workload, cost: StepCost) -> list[Alone]:
    """Each class in batches of its own."""
    found = []
    for each in workload.classes:
        tokens, seconds = each.mean_tokens_per_step[: cost.longest + 1], cost.alike()
        length = int(np.argmax(tokens / seconds))
        found.append(Alone(each.name, length, float(tokens[length]), float(seconds[length])))
    return found


def class_lengths(workload: Workload, cost: StepCost) -> tuple[int, ...]:
    """The best length of each class in mixed batches: of all combinations that of the largest `expected_throughput`."""
    lengths = range(cost.longest + 1)
    combinations = np.array(list(itertools.product(lengths, repeat=len(workload.classes))))
    best = combinations[np.argmax(expected_throughput(workload, cost, combinations))]
    return tuple(int(length) for length in best)


def expected_throughput(workload: Workload, cost: StepCost, lengths: npt.ArrayLike) -> Floats:
    """Of lengths by class, [..., classes], over that of plain decoding: by integration, without noise.

    A slot holds a class for a share of the steps that goes with its tokens over its tokens a step; the slots of a batch
    are taken as independent. The draft takes as long as the longest one, expected; the rows are taken as their mean.
    Exact where all lengths are equal, and at batch 1.
    """
    lengths = np.asarray(lengths, np.int64)
    tokens = np.stack([each.mean_tokens_per_step for each in workload.classes])
    steps = workload.token_shares / tokens[np.arange(len(tokens)), lengths]
    steps_of_all = steps.sum(-1)
    held = steps / steps_of_all[..., None]
    if cost.batch == 1:
        seconds = (held * cost.alike()[lengths]).sum(-1)
    else:
        rows = cost.batch * (1 + (held * lengths).sum(-1))
        seconds = np.interp(rows, np.arange(len(cost.verify)), cost.verify)
        shorter = 1.0
        for length in range(1, cost.longest + 1):
            # All slots draft less than that with the probability `shorter`.
            shorter = (held * (lengths < length)).sum(-1) ** cost.batch
            seconds = seconds + (1 - shorter) * (cost.draft[length] - cost.draft[length - 1])
    throughput: Floats = 1 / (steps_of_all * seconds)
    return throughput
