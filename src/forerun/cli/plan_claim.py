"""`forerun plan claim`: is a claimed speed physics, possible under unstated conditions, or marketing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from forerun.cli.plan_drafters import drafters_json, proposals_of
from forerun.cli.plan_setup import EXPLAIN, JSON, PlanSetup, planned
from forerun.cli.plan_view import (
    derivation_json,
    milliseconds,
    print_derivation,
    print_json,
    print_setup,
    print_table,
    quantity,
)
from forerun.errors import PlanError

if TYPE_CHECKING:
    from forerun.plan.claim import Assessment
    from forerun.plan.claim_conditions import Condition
    from forerun.plan.claim_setting import Setting
    from forerun.plan.claim_speedup import SpeedupAssessment
    from forerun.plan.speculate import Proposal

HELP = """Check a claimed speed against the hardware.

One division, then what would have to be true besides, then what to ask.

The ceiling is bandwidth over the bytes that a step reads. The verdict is "physics" (the peaks suffice under the stated
conditions), "possible if" (one plausible condition that the claim doesn't state, or two together, make it true) or
"marketing".

--json prints command, setup, claim (tokens_per_s, speedup, batch, context, tokens_per_step, aggregate, stated),
verdict, summary, questions, ratio (claim over ceiling, or over the limit), memory (weight_bytes, kv_bytes,
usable_bytes, fits), drafters (drafter, kind, acceptance, assumed, weight_bytes), and with --explain derivation
(symbol, value, unit, formula, source). For a claimed speed also: ceiling_tokens_per_s, step_bytes (weights, kv),
ideal_tokens_per_s, ideal_bound, ideal_parts (seconds by phase), usual_tokens_per_s, conditions (kind, needed, unit,
real, reached, sufficient, plausible, settled, note, counts) and pairs (kinds, text, reached). For a claimed speedup:
limit, needed_tokens_per_step, verified, verify_ratio, acceptance_needed and best (length, tokens_per_step, speedup;
with --drafter)."""


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("claim", help=HELP)(planned(claim))


def claim(
    setup: PlanSetup,
    tokens_per_s: float | None = typer.Option(None, "--tokens-per-s", help="Claimed tokens/s."),
    latency_ms: float | None = typer.Option(None, "--latency-ms", help="Claimed milliseconds a token instead."),
    speedup: float | None = typer.Option(None, "--speedup", help="Claimed times faster by speculation instead."),
    batch: int | None = typer.Option(
        None, "--batch", "--batches", "-b", help="Sequences that share a step. [default: 1; needed with --aggregate]"
    ),
    context: int = typer.Option(1000, "--context", "--contexts", "-c", help="Cached tokens of each."),
    aggregate: bool = typer.Option(False, "--aggregate", help="The claim counts the tokens of all sequences."),
    tokens_per_step: float = typer.Option(1.0, "--tokens-per-step", help="That speculation gives, if it is stated."),
    drafter: str | None = typer.Option(
        None, "--drafter", "-d", metavar="SPEC", help="A drafter to price: KIND[=ARGUMENT][:RATE,RATE,...]."
    ),
    stated: str | None = typer.Option(
        None, "--stated", metavar="LIST",
        help="Conditions that the claim settles, so that they can't be otherwise: some of weights, kv, gpus, hardware, "
        "batch, acceptance. On one card: gpus,hardware; for one user: batch; without speculation: acceptance.",
    ),
    utilization: float = typer.Option(0.9, "--utilization", help="Share of the memory that is used."),
    explain: bool = EXPLAIN,
    as_json: bool = JSON,
) -> None:  # fmt: skip
    """The command."""
    from forerun.plan.claim_setting import Setting
    from forerun.plan.memory import check_context

    check_context(setup.model, context)
    given = [tokens_per_s is not None, latency_ms is not None, speedup is not None]
    if sum(given) != 1:
        raise PlanError("tokens-per-s", "expected exactly one of --tokens-per-s, --latency-ms and --speedup")
    if aggregate and tokens_per_s is None:
        raise PlanError("aggregate", "goes with --tokens-per-s only")
    if aggregate and batch is None:
        raise PlanError("batch", "missing; expected --batch with --aggregate, which counts the tokens of that many")
    batch = 1 if batch is None else batch
    settled = frozenset(word.strip() for word in stated.split(",")) if stated is not None else frozenset()
    if drafter is not None and tokens_per_step > 1:
        raise PlanError("tokens-per-step", "follows from the drafter and its acceptance; give only one of them")
    setting = Setting(
        model=setup.model, deployment=setup.deployment, batch=batch, context=context,
        tokens_per_step=tokens_per_step, aggregate=aggregate, utilization=utilization,
    )  # fmt: skip
    proposals = proposals_of([drafter], setup) if drafter is not None else []
    proposal = proposals[0] if proposals else None
    body: dict[str, Any] = {
        "claim": {
            "tokens_per_s": None, "speedup": speedup, "batch": batch, "context": context,
            "tokens_per_step": tokens_per_step, "aggregate": aggregate, "stated": sorted(settled),
        },
        "drafters": drafters_json([drafter] if drafter else [], proposals) if proposals else [],
    }  # fmt: skip
    if speedup is not None:
        if settled:
            raise PlanError("stated", "goes with --tokens-per-s and --latency-ms only")
        _speedup(setup, setting, speedup, proposal, body, explain=explain, as_json=as_json)
        return
    if latency_ms is not None and not 1e-6 <= latency_ms <= 1e9:
        raise PlanError("latency-ms", f"{latency_ms} is not allowed; expected 1e-6 to 1e9 milliseconds")
    claimed = tokens_per_s if tokens_per_s is not None else 1e3 / (latency_ms or 1)
    _speed(setup, setting, claimed, settled, proposal, body, explain=explain, as_json=as_json)


def _speed(
    setup: PlanSetup,
    setting: Setting,
    claimed: float,
    stated: frozenset[str],
    proposal: Proposal | None,
    body: dict[str, Any],
    *,
    explain: bool,
    as_json: bool,
) -> None:
    from forerun.plan.claim import assess
    from forerun.plan.claim_explain import explain_claim

    found = assess(setting, claimed, setup.catalog, stated=stated, proposal=proposal)
    derivation = explain_claim(setting, claimed) if explain else None
    read = setting.step_bytes
    if as_json:
        body["claim"]["tokens_per_s"] = claimed
        body |= {
            **_outcome(found),
            "ceiling_tokens_per_s": found.ceiling,
            "step_bytes": read._asdict(),
            "ideal_tokens_per_s": found.ideal,
            "ideal_bound": found.forward.bound,
            "ideal_parts": {part.name: part.seconds for part in found.forward.parts},
            "usual_tokens_per_s": found.usual,
            "conditions": [{**asdict(each), "counts": each.counts} for each in found.conditions],
            "pairs": [asdict(pair) for pair in found.pairs],
        }
        print_json("claim", setup, {**body, "derivation": derivation_json(derivation)} if derivation else body)
        return
    print_setup(setup)
    users = "of all together" if setting.aggregate else "of each user"
    typer.echo(
        f"claimed: {speed(claimed)} tokens/s {users}, batch {setting.batch}, context {setting.context:g}"
        + (f", {setting.tokens_per_step:g} tokens a step" if setting.tokens_per_step > 1 else "")
    )
    factor = setting.users * setting.tokens_per_step
    times = f"{factor:g} x " if factor > 1 else ""
    typer.echo(
        f"\none division: {times}{quantity(setting.bandwidth, 'B/s')} / ({quantity(read.weights, 'B')} of weights + "
        f"{quantity(read.kv, 'B')} of KV) = {speed(found.ceiling)} tokens/s"
    )
    typer.echo(f"the claim is {found.ratio:.3g} times the ceiling")
    phases = ", ".join(f"{part.name} {part.seconds * 1e3:.3g}" for part in found.forward.parts)
    typer.echo(f"full model: a step takes {milliseconds(found.forward.seconds)} at peaks ({phases})")
    typer.echo(f"that is {speed(found.ideal)} tokens/s, and {speed(found.usual)} at the shares of the peaks above")
    typer.echo(f"memory: {found.room}" + ("" if found.room.fits else "; it doesn't fit"))
    if found.conditions:
        typer.echo("\nwhat would have to be, everything else as stated:")
        print_table(
            ("condition (in --stated)", "needed", "in reality", "tokens/s", "enough", "plausible", "note"),
            [_row(each) for each in found.conditions],
            words=(0, 1, 2, 6),
        )
        if stated:
            typer.echo("settled: the claim itself says otherwise, so it doesn't count")
        else:
            typer.echo('what the claim settles goes into --stated; "on one card": --stated gpus,hardware')
    elif proposal is not None:
        typer.echo(f"it needs no speculation, so {proposal.drafter.name} is not priced")
    if found.pairs:
        typer.echo("two conditions together:")
        rows = [(pair.text, speed(pair.reached)) for pair in found.pairs]
        print_table(("conditions", "tokens/s"), rows)
    _close(found)
    if derivation is not None:
        print_derivation(derivation)


_NAMES = {
    "weights": "weight precision (weights)", "kv": "KV precision (kv)", "gpus": "number of GPUs (gpus)",
    "hardware": "other hardware (hardware)", "batch": "tokens of many users (batch)",
    "acceptance": "speculation (acceptance)", "drafter": "the drafter", "active": "active parameters",
}  # fmt: skip


def speed(tokens_per_s: float) -> str:
    """Four digits, and all before the point."""
    return f"{tokens_per_s:,.0f}" if 1000 <= tokens_per_s < 1e12 else f"{tokens_per_s:.4g}"


def _row(each: Condition) -> Sequence[str]:
    needed = "none would do" if each.needed is None else f"{each.needed:.3g} {each.unit}"
    return (
        _NAMES[each.kind], needed, each.real, "-" if each.reached is None else speed(each.reached),
        "yes" if each.sufficient else "no", "settled" if each.settled else "yes" if each.plausible else "no", each.note,
    )  # fmt: skip


def _speedup(
    setup: PlanSetup,
    setting: Setting,
    claimed: float,
    proposal: Proposal | None,
    body: dict[str, Any],
    *,
    explain: bool,
    as_json: bool,
) -> None:
    from forerun.plan.claim_speedup import assess_speedup, explain_speedup

    found = assess_speedup(setting, claimed, setup.catalog, proposal)
    derivation = explain_speedup(found) if explain else None
    point = found.point
    if as_json:
        chosen = None
        if point is not None:
            names = ("length", "tokens_per_step", "speedup")
            chosen = {name: getattr(point, name) for name in names}
        body |= {
            **_outcome(found),
            "limit": found.limit,
            "needed_tokens_per_step": found.needed,
            "verified": found.verified,
            "verify_ratio": found.verify_ratio,
            "acceptance_needed": found.rate,
            "best": chosen,
        }
        print_json("claim", setup, {**body, "derivation": derivation_json(derivation)} if derivation else body)
        return
    print_setup(setup)
    typer.echo(f"claimed: {claimed:g} times faster by speculation, batch {setting.batch}, context {setting.context:g}")
    if found.needed is None:
        typer.echo("\nneeded: no number of tokens a step does; the work of verifying grows with them")
    else:
        typer.echo(
            f"\nneeded: {found.needed:.3f} tokens a step; verifying {found.verified} takes {found.verify_ratio:.3f} "
            "plain steps at peaks, drafts taken as free"
        )
    if point is not None:
        typer.echo(
            f"{point.drafter} at its best ({point.length} drafts): {point.tokens_per_step:.3f} tokens a step, "
            f"{found.limit:.3f} times faster"
        )
    elif setting.tokens_per_step > 1:
        typer.echo(f"the stated {setting.tokens_per_step:g} tokens a step allow {found.limit:.3f} times")
    else:
        typer.echo(f"nothing is stated about speculation; what is plausible allows {found.limit:.3f} times")
    typer.echo(f"the claim is {found.ratio:.3g} times that limit")
    typer.echo(f"memory: {found.room}" + ("" if found.room.fits else "; it doesn't fit"))
    _close(found)
    if derivation is not None:
        print_derivation(derivation)


def _outcome(found: Assessment | SpeedupAssessment) -> dict[str, Any]:
    room = found.room
    return {
        "verdict": found.verdict,
        "summary": found.summary,
        "questions": found.questions,
        "ratio": found.ratio,
        "memory": {
            "weight_bytes": room.weights, "kv_bytes": room.kv, "usable_bytes": room.usable, "fits": room.fits,
        },
    }  # fmt: skip


def _close(found: Assessment | SpeedupAssessment) -> None:
    typer.echo(f"\nverdict: {found.verdict}: {found.summary}")
    typer.echo("ask:")
    for question in found.questions:
        typer.echo(f"- {question}")
