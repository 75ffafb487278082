"""The draft lengths with the most expected tokens per second: nodes ranked by survival, and the best prefix of them.

Times are in any unit, those of the arguments of one call in the same. The rule is described in `forerun.engine.auto`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

MARGIN = 0.015
"""A draft must promise this much more than none."""
HOPELESS = 0.02
"""Nodes of less survival are not ranked."""


def rank(survivals: Sequence[Sequence[float]]) -> list[tuple[float, int, float]]:
    """All nodes of all rows, best first: what ranks each (never above the node before it), its row, its survival."""
    ranked: list[tuple[float, int, float]] = []
    for row, survival in enumerate(survivals):
        worst = 1.0
        for s in survival:
            if s < worst:
                worst = s
                if worst < HOPELESS:
                    break
            ranked.append((worst, row, s))
    if len(survivals) > 1:
        ranked.sort(key=operator.itemgetter(0), reverse=True)
    return ranked


def best_alone(
    survival: Sequence[float], times: Sequence[float], spent: float, price: tuple[float, float] | None
) -> int:
    """Of one request with a step of its own; the arguments are those of `best_length`."""
    best = (1.0 + MARGIN) / (times[0] + spent)
    per_row, per_node = price or (0.0, 0.0)
    spent += per_row
    chosen = 0
    expected = 1.0
    for k, s in enumerate(survival, 1):
        expected += s
        spent += per_node
        rate = expected / (times[k] + spent)
        if rate > best:
            best, chosen = rate, k
    return chosen


def best_length(
    ranked: Sequence[tuple[float, int, float]],
    times: Sequence[float],
    plain: Sequence[float],
    base: int,
    *,
    accounts: Sequence[float] | None,
    least: float,
    longest: float,
    spent: float,
    price: tuple[float, float] | None,
) -> int:
    """How many of the ranked nodes to take.

    Args:
        ranked: of `rank`.
        times: of the whole step with 0, 1, ... of them.
        plain: of the step without prompts, likewise; its first is the unit of accounts.
        base: tokens that the step emits without drafts.
        accounts: of each row; no choice may leave one below zero, by expectation. None: nobody's account is looked at.
        least: of the accounts of requests that can't win anything.
        longest: time by which the step may become longer.
        spent: time spent on drafting already.
        price: time still to be spent on a row's first node, and on each node.
    """
    slack = list(accounts or ())
    poorest = min(least, *slack) if slack else least
    expected = float(base)
    best = worth = base / (plain[0] + spent)  # the latter: tokens that a unit of time is worth without drafts
    allowed: list[tuple[int, float, float]] = []  # length, tokens won, time added
    chosen: tuple[int, float, float] | None = None
    begun: set[int] = set()
    extra = 0.0
    for k, (_, row, s) in enumerate(ranked, 1):
        expected += s
        if price is not None:
            if row not in begun:
                extra += price[0]
                begun.add(row)
            extra += price[1]
        added = times[k] - times[0]
        if slack:
            before = slack[row]
            slack[row] = before + s
            if before <= poorest:
                poorest = min(least, *slack)
            if added + extra > poorest * plain[0] or added > longest:
                continue
        option = (k, expected - base, added + extra)
        allowed.append(option)
        rate = expected / (plain[k] + spent + extra)
        if rate > best:
            best = rate
            chosen = option
    if chosen is not None and plain[0] != times[0]:
        # A prompt's tokens are in the step: a node pays its own part of the step's time, at the rate without them.
        chosen = max(allowed, key=lambda option: option[1] - best * option[2])
    if chosen is None or chosen[1] < worth * chosen[2] + MARGIN * (base + worth * chosen[2]):
        return 0
    return chosen[0]
