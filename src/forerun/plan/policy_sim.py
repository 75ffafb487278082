"""Batches in lockstep: every sequence waits for the longest draft and shares the step; requests join as others end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forerun.plan.policy_control import Controller
from forerun.plan.policy_cost import StepCost, stacked
from forerun.plan.workload import LONGEST, Floats, Ints, Texts

_STRIDE = 7919


class Run(NamedTuple):
    """What happened to each measured request at each cost, [costs, requests], requests in the order of the texts.

    time: in plain steps; without speculation it is the reply's length. steps: its own. drafted, accepted: draft tokens;
    those accepted past the reply's end are among them.
    """

    time: Floats
    steps: Ints
    drafted: Ints
    accepted: Ints


def simulate(texts: Texts, costs: Sequence[StepCost], controller: Controller, *, seed: int = 0) -> Run:
    """`simulate_all` with one controller."""
    return simulate_all(texts, costs, [controller], seed=seed)[0]


def simulate_all(
    texts: Texts, costs: Sequence[StepCost], controllers: Sequence[Controller], *, seed: int = 0
) -> list[Run]:
    """Every text once for each controller and cost, a slot each, in batches that are always full.

    Slot i first serves the rest of a request, up to half of it, so that requests join at different times; then request
    i, which is measured; then others until all that are measured have ended.

    Raises:
        ValueError: the texts don't fill whole batches, or the costs are of different ones.
    """
    verify, draft = stacked(costs)
    n, batch = len(texts.kind), costs[0].batch
    if n % batch:
        raise ValueError(f"{n} requests don't fill batches of {batch}")
    batches = n // batch
    rows = len(costs) * batches
    shape = len(controllers) * rows, batch
    served = [(controller, slice(i * rows, (i + 1) * rows)) for i, controller in enumerate(controllers)]
    rng = np.random.default_rng(seed)
    before = rng.permutation(n)
    started = texts.tokens[before] - 1
    if batch > 1:
        started = started - (rng.random(n) / 2 * started).astype(np.int64)
    own, request, place = (
        np.tile(part.reshape(batches, batch), (shape[0] // batches, 1)) for part in (np.arange(n), before, started)
    )
    cost = np.tile(np.repeat(np.arange(len(costs)), batches), len(controllers))
    first_verify, first_draft = cost * verify.shape[1] + batch, cost * draft.shape[1]
    width = texts.run.shape[1]
    run, row, end = texts.run.ravel(), request * width, texts.tokens[request]
    clock, step = np.zeros(len(cost)), 0
    drafted, accepted = (np.zeros(shape, np.int64) for _ in range(2))
    phase = np.zeros(shape, np.int8)
    time = np.zeros(shape)
    counts = np.zeros((3, *shape), np.int64)
    while True:
        length = np.concatenate([each.lengths(request[part], place[part]) for each, part in served])
        kept = np.minimum(length, run.take(row + place))
        for controller, part in served:
            controller.observe(length[part], kept[part])
        clock += verify.take(first_verify + length.sum(1)) + draft.take(first_draft + length.max(1))
        step += 1
        drafted += length
        accepted += kept
        place += kept
        place += 1
        ended = place >= end
        if not ended.any():
            continue
        where = np.nonzero(ended)
        now = np.array([np.full(len(where[0]), step), drafted[where], accepted[where]])
        begins, ends = phase[where] == 0, phase[where] == 1
        # A measured request's account: what the counters show at its end, less what they showed at its beginning.
        sign = ends.astype(np.int64) - begins
        time[where] += sign * clock[where[0]]
        counts[:, where[0], where[1]] += sign * now
        phase[where] = np.minimum(phase[where] + 1, 2)
        if phase.min() == 2:
            shown = len(controllers), len(costs), n
            return [Run(*found) for found in zip(time.reshape(shown), *counts.reshape(3, *shown), strict=True)]
        request[where] = np.where(begins, own[where], (request[where] + _STRIDE) % n)
        row[where], end[where], place[where] = request[where] * width, texts.tokens[request[where]], 0
        for controller, part in served:
            controller.joined(ended[part])


def fixed_steps(texts: Texts, longest: int = LONGEST) -> Ints:
    """Steps of every request with each fixed draft length: [longest + 1, n].

    With one length for all, steps take equally long, and nobody's depend on the others.
    """
    lengths = np.arange(longest + 1)[:, None]
    width = texts.run.shape[1]
    row = np.arange(len(texts.kind)) * width
    run = texts.run.ravel()
    place = np.zeros((longest + 1, len(texts.kind)), np.int64)
    steps = np.zeros_like(place)
    end = texts.tokens
    while True:
        going = place < end
        if not going.any():
            return steps
        steps += going
        place = np.where(going, np.minimum(place + 1 + np.minimum(run[row + place], lengths), end), place)
