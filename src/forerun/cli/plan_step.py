"""`forerun plan step`: the time of a step by phase."""

from __future__ import annotations

from collections.abc import Sequence

import typer

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

HELP = """The time of one step, phase by phase, and its limit.

--json prints command, setup, batch, queries, context, seconds, forward_seconds, bound, tokens_per_s (of each sequence),
throughput_tokens_per_s (of all; both null where each has more than one new token), experts_touched, beyond_measured
(phrases: what lies outside of the step times behind a measured efficiency), parts (name, bound, seconds,
memory_seconds, compute_seconds, weight_bytes, kv_bytes, activation_bytes, flops, link_bytes), and with --explain
derivation (symbol, value, unit, formula, source)."""


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("step", help=HELP)(planned(step))


def step(
    setup: PlanSetup,
    batch: int = typer.Option(1, "--batch", "--batches", "-b", help="Sequences that share the step."),
    queries: int = typer.Option(1, "--queries", "-q", help="New tokens of each: 1 plain, 1 + drafts to verify."),
    context: int = typer.Option(1000, "--context", "--contexts", "-c", help="Cached tokens of each."),
    explain: bool = EXPLAIN,
    as_json: bool = JSON,
) -> None:
    """The command."""
    from forerun.plan.explain import explain_step
    from forerun.plan.memory import check_context, check_fits
    from forerun.plan.steptime import Load, forward_time

    network, where = setup.model.network, setup.deployment
    load = Load(batch, queries, context)
    forward = forward_time(network, where, load)
    check_context(setup.model, context)
    check_fits(network, where, batch=batch, context=context + queries)
    seconds = forward.seconds + where.eff.step_us * 1e-6
    each = 1 / seconds if queries == 1 else None
    derivation = explain_step(forward, generating=queries == 1) if explain else None
    if as_json:
        body = {
            **load._asdict(),
            "seconds": seconds,
            "forward_seconds": forward.seconds,
            "bound": forward.bound,
            "tokens_per_s": each,
            "throughput_tokens_per_s": batch * each if each else None,
            "experts_touched": forward.experts_touched,
            "beyond_measured": forward.beyond_measured,
            "parts": [part._asdict() for part in forward.parts],
        }
        body.pop("scored")
        print_json("step", setup, {**body, "derivation": derivation_json(derivation)} if derivation else body)
        return
    print_setup(setup)
    typer.echo(f"{batch} sequences, {queries} new tokens each after {context} cached ones")
    rows: list[Sequence[str]] = []
    for part in forward.parts:
        rows.append((
            part.name, f"{part.seconds * 1e3:.3f}", f"{part.seconds / seconds:.0%}", part.bound,
            quantity(part.bytes, "B") if part.bytes else "-", quantity(part.flops, "") if part.flops else "-",
            quantity(part.link_bytes, "B") if part.link_bytes else "-",
        ))  # fmt: skip
    besides = where.eff.step_us * 1e-6
    rows.append(("beside the forward", f"{besides * 1e3:.3f}", f"{besides / seconds:.0%}", "overhead", "-", "-", "-"))
    print_table(("phase", "ms", "share", "limit", "bytes", "FLOP", "sent"), rows)
    typer.echo(f"{milliseconds(seconds)} a step, mostly {forward.bound}")
    if each:
        typer.echo(f"{each:.4g} tokens/s each, {batch * each:.5g} tokens/s all")
    if forward.beyond_measured:
        typer.echo(f"beyond what was measured, so extrapolated: {'; '.join(forward.beyond_measured)}")
    if forward.experts_touched:
        typer.echo(f"experts touched in a layer: {forward.experts_touched:.1f}, expected")
    if derivation is not None:
        print_derivation(derivation)
