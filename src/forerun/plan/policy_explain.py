"""The derivation of a class's best draft length, for `--explain`."""

from __future__ import annotations

from forerun.plan.derivation import Derivation
from forerun.plan.policy import alone
from forerun.plan.policy_cost import StepCost
from forerun.plan.workload import Workload

_PAGE = "docs/plan-policy.md, {}"


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
    d.given("batch", cost.batch, "sequences", "setting")
    closed = each.all_alike and not each.swing and each.acceptance < 1
    if closed:
        d.given("a", each.acceptance, "", f"acceptance of {each.name}, everywhere")
    if ridge_rows is not None:
        d.given("ridge_rows", ridge_rows, "rows", "setting: from where arithmetic is the limit")
        d.given("c", draft_cost, "plain steps", "setting: of a draft token")
        d.derived("plain", "max(1, batch / ridge_rows)", "", _PAGE.format("what a step costs"))
    else:
        assert cost.plain_seconds is not None
        d.given("plain_seconds", cost.plain_seconds, "s", "forerun plan step --queries 1")
    for length in [*sorted({max(best - 1, 0), min(best + 1, cost.longest)} - {best}), best]:
        rows = f"batch * {length + 1}"
        if closed:
            d.derived(f"tokens_{length}", f"(1 - a**{length + 1}) / (1 - a)", "tokens a step", "arXiv 2211.17192, (1)")
        else:
            where = f"integral over the requests of {each.name}, " + _PAGE.format("what a step wins")
            d.given(f"tokens_{length}", float(tokens[length]), "tokens a step", where)
        if ridge_rows is not None:
            seconds = f"max(1, {rows} / ridge_rows) / plain + {length} * c"
        else:
            assert cost.plain_seconds is not None
            v, draft = cost.verify[cost.batch * (length + 1)], cost.draft[length]
            d.given(f"verify_{length}", float(v * cost.plain_seconds), "s", f"forerun plan step --queries {length + 1}")
            d.given(f"draft_{length}", float(draft * cost.plain_seconds), "s", f"{cost.name}: forerun plan speculate")
            seconds = f"(verify_{length} + draft_{length}) / plain_seconds"
        d.derived(f"cost_{length}", seconds, "plain steps")
        d.derived(f"speedup_{length}", f"tokens_{length} / cost_{length}", "", "the best" if length == best else "")
    return d
