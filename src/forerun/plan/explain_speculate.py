"""The derivation of a speedup, for `--explain`."""

from __future__ import annotations

from forerun.plan.deployment import Deployment
from forerun.plan.derivation import Derivation
from forerun.plan.explain import explain_forward
from forerun.plan.explain_draft import explain_draft, merged
from forerun.plan.shapes import Model
from forerun.plan.speculate import Proposal
from forerun.plan.steptime import Load, forward_time

_PAGE = "docs/plan-speculate.md, {}"


def explain_speedup(
    target: Model,
    deployment: Deployment,
    proposal: Proposal,
    *,
    batch: int,
    context: float,
    length: int,
    draft_deployment: Deployment | None = None,
) -> Derivation:
    """How `price(...).speedup` comes about: expected tokens, the plain step, the verifying step, the draft, then
    c, v and the speedup.

    Raises:
        PlanError: the drafter can't draft that far, or a number is out of range.
    """
    drafter, acceptance = proposal
    d = Derivation(f"speedup by {drafter.name}, {length} draft tokens, batch {batch}, {context:g} cached tokens each")
    d.given("draft_length", length, "tokens", "K: draft tokens of each sequence")
    rates = [f"rate_{depth + 1}" for depth in range(min(length, len(acceptance.rates)))]
    for depth, symbol in enumerate(rates):
        d.given(symbol, acceptance.rate(depth), "", "acceptance at this depth, if all before it were accepted")
    tokens = "1"
    for depth in reversed(range(length)):
        tokens = f"1 + {rates[min(depth, len(rates) - 1)]}*({tokens})"
    d.derived("tokens_per_step", tokens, "tokens", _PAGE.format("E: one token, and each that is accepted"))
    plain, verify = (
        explain_forward(forward_time(target, deployment, Load(batch, queries, context)), prefix=prefix).lines
        for queries, prefix in ((1, "plain_"), (length + 1, "verify_"))
    )
    d.extend(merged(plain, verify, "plain_", "verify_", "target_"))
    d.given("step_us", deployment.eff.step_us, "us", "setting: of a step beside its forwards")
    for name in ("plain", "verify"):
        forward = f"{name}_forward_seconds" if length else "target_forward_seconds"
        d.derived(f"{name}_seconds", f"{forward} + step_us / 1e6", "s", _PAGE.format("the steps"))
    draft = explain_draft(
        drafter, draft_deployment or deployment,
        batch=batch, context=context, length=length, apart=draft_deployment not in (None, deployment),
    )  # fmt: skip
    d.extend(draft.lines)
    drafted = draft.lines[-1].symbol
    if length:
        d.derived("draft_cost", f"{drafted} / draft_length / plain_seconds", "", _PAGE.format("c: of a draft token"))
    else:
        d.derived("draft_cost", drafted, "", _PAGE.format("c: nothing is drafted"))
    d.derived("verify_ratio", "verify_seconds / plain_seconds", "", _PAGE.format("v"))
    d.derived(
        "speedup", "tokens_per_step / (draft_length * draft_cost + verify_ratio)", "x", _PAGE.format("the speedup")
    )
    return d
