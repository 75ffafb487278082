"""The derivations of a class's best draft length, and of a policy's times and gain, for `--explain`."""

from __future__ import annotations

import itertools

import numpy as np

from forerun.plan.derivation import Derivation
from forerun.plan.policy import Comparison, alone
from forerun.plan.policy_cost import StepCost
from forerun.plan.workload import Workload, WorkloadClass

_PAGE = "docs/plan-policy.md, {}"
_BORDERS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Of acceptance, between the parts in which an integral over requests is shown."""


def explain_length(
    workload: Workload, cost: StepCost, index: int, *, draft_cost: float, ridge_rows: float | None
) -> Derivation:
    """Why class `index` drafts as far as it does: the speedups of its best length and of both beside it. The last line
    is the best one's, which is `alone(...)[index].speedup`.

    draft_cost, ridge_rows: what `cost` was made from; with a model `ridge_rows` is None, and its seconds are given.
    """
    each, best = workload.classes[index], alone(workload, cost)[index].length
    d = Derivation(f"speedup of {each.name} by itself at its best length, {best}, and at those beside it")
    tokens = each.mean_tokens_per_step
    _plain(d, cost, draft_cost, ridge_rows)
    closed = each.all_alike and not each.swing and each.acceptance < 1
    if closed:
        d.given("a", each.acceptance, "", f"acceptance of {each.name}, everywhere")
    for length in [*sorted({max(best - 1, 0), min(best + 1, cost.longest)} - {best}), best]:
        if closed:
            sum_ = f"the sum of a**i, i = 0 to {length}: arXiv 2211.17192, (1)"
            d.derived(f"tokens_{length}", f"(1 - a**{length + 1}) / (1 - a)", "tokens a step", sum_)
        elif length == best:
            _integral(d, each, length)
        else:
            d.given(f"tokens_{length}", float(tokens[length]), "tokens a step", f"by the integral shown for {best}")
        _cost(d, cost, length, ridge_rows)
        d.derived(f"speedup_{length}", f"tokens_{length} / cost_{length}", "", "the best" if length == best else "")
    return d


def explain_times(found: Comparison, policy: str, seed: int) -> Derivation:
    """How the mean and, in the last line, the p99 of a policy come out of the simulated requests."""
    each = np.sort(found.seconds(found.of(policy)) / found.requests.tokens)
    n = len(each)
    d = Derivation(f"{policy}, {found.cost.name}, batch {found.cost.batch}: mean and p99 of the time for each token")
    simulated = f"simulated, --seed {seed}: " + _PAGE.format("a mix of workloads")
    d.given("requests", n, "", "setting, in whole batches")
    d.given("times", float(each.sum()), "plain steps", f"for each token, summed over requests; {simulated}")
    d.derived("mean", "times / requests", "plain steps", "for each token")
    d.derived("rank", "0.99 * (requests - 1)", "", "of the p99 among the requests by time, from 0")
    low = min(int(d.value), max(n - 2, 0))
    d.given("below", float(each[low]), "plain steps", f"for each token, of request {low} by time")
    d.given("above", float(each[min(low + 1, n - 1)]), "plain steps", "of the next one")
    d.derived("p99", "below + (rank - floor(rank)) * (above - below)", "plain steps", "for each token")
    return d


def explain_gain(
    found: Comparison, policy: str, seed: int, *, draft_cost: float, ridge_rows: float | None
) -> Derivation:
    """How `found.gain(policy)`, which is the last line, comes out of the simulated requests, and how sure it is.

    draft_cost, ridge_rows: as `explain_length` takes them.
    """
    cost, length = found.cost, found.fixed.index(found.best_fixed)
    d = Derivation(f"{policy}, {cost.name}, batch {cost.batch}: gain over {length} drafts for all")
    _plain(d, cost, draft_cost, ridge_rows)
    simulated = f"simulated, --seed {seed}: " + _PAGE.format("a mix of workloads")
    d.given("tokens", float(found.requests.tokens.sum()), "tokens", f"of all {len(found.requests.tokens)} requests")
    d.given(f"steps_{length}", float(found.requests.steps[length].sum()), "steps", f"of all requests; {simulated}")
    _cost(d, cost, length, ridge_rows)
    d.derived("throughput_fixed", f"tokens / (steps_{length} * cost_{length})", "", "1: without speculation")
    chosen = found.of(policy)
    d.given("time", float(found.seconds(chosen).sum()), "plain steps", f"of all requests; {simulated}")
    d.derived("throughput", "tokens / time", "", "1: without speculation")
    squares = found.gain_squares(policy)
    if len(squares) > 1:
        d.given("batches", len(squares), "", "measured, taken as independent")
        d.given("squares", float(squares.sum()), "", "sum over them of (time with fixed - ratio * time)**2")
        how = "sqrt(batches / (batches - 1) * squares) / time"
        d.derived("gain_error", how, "", "standard error of the gain, as of a ratio of sums")
    d.derived("gain", "throughput / throughput_fixed - 1", "", _PAGE.format("what adapting is worth"))
    return d


def _plain(d: Derivation, cost: StepCost, draft_cost: float, ridge_rows: float | None) -> None:
    """The lines that `_cost` needs."""
    d.given("batch", cost.batch, "sequences", "setting")
    if ridge_rows is not None:
        d.given("ridge_rows", ridge_rows, "rows", "setting: from where arithmetic is the limit")
        d.given("c", draft_cost, "plain steps", "setting: of a draft token")
        d.derived("plain", "max(1, batch / ridge_rows)", "", _PAGE.format("what a step costs"))
    else:
        assert cost.plain_seconds is not None
        d.given("plain_seconds", cost.plain_seconds, "s", f"forerun plan step --batch {cost.batch} --queries 1")


def _cost(d: Derivation, cost: StepCost, length: int, ridge_rows: float | None) -> None:
    """`cost_K`: of a step with so many drafts each."""
    if ridge_rows is not None:
        seconds = f"max(1, batch * {length + 1} / ridge_rows) / plain + {length} * c"
    else:
        assert cost.plain_seconds is not None
        v, draft = cost.verify[cost.batch * (length + 1)], cost.draft[length]
        d.given(
            f"verify_{length}",
            float(v * cost.plain_seconds),
            "s",
            f"forerun plan step --batch {cost.batch} --queries {length + 1}",
        )
        d.given(f"draft_{length}", float(draft * cost.plain_seconds), "s", f"{cost.name}: forerun plan speculate")
        seconds = f"(verify_{length} + draft_{length}) / plain_seconds"
    d.derived(f"cost_{length}", seconds, "plain steps", _PAGE.format("what a step costs"))


def _integral(d: Derivation, each: WorkloadClass, length: int) -> None:
    """`tokens_K` of a class whose requests or moments differ: the harmonic mean over its requests, in parts."""
    means, weights = each.means()
    steps = weights / each.tokens_per_step(means)[:, length]
    drawn = "all alike" if each.all_alike else (
        f"Beta({each.acceptance * each.spread:.3g}, {(1 - each.acceptance) * each.spread:.3g})"
    )  # fmt: skip
    terms = []
    for part, (low, high) in enumerate(itertools.pairwise(_BORDERS), 1):
        inside = (means >= low) & ((means < high) | (high == _BORDERS[-1]))
        share = float(weights[inside].sum())
        if share:
            d.given(f"share_{part}", share, "", f"of the requests: acceptance {low:g} to {high:g}; {drawn}")
            sum_ = f"their 1 + r(1) + ... + r({length}), " + _PAGE.format("what a step wins")
            d.given(f"part_{part}", share / float(steps[inside].sum()), "tokens a step", sum_)
            terms.append(f"share_{part} / part_{part}")
    d.derived(f"tokens_{length}", f"1 / ({' + '.join(terms)})", "tokens a step", "the harmonic mean over requests")
