"""`forerun plan export`: a plan as a configuration for the engine that runs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from forerun.cli.plan_drafters import drafters_json
from forerun.cli.plan_setup import EXPLAIN, JSON, PlanSetup, planned
from forerun.cli.plan_speculate_explain import print_explained
from forerun.cli.plan_view import derivation_json, print_json

if TYPE_CHECKING:
    from forerun.plan.export_plan import DraftPlan, Export

HELP = """A plan as flags, YAML or Python for an engine.

The reason of every number is a comment.

The draft lengths are the best ones at every batch up to --most: a schedule where the engine has one (vLLM,
TensorRT-LLM), else the length for --batch. The configuration is checked against what the engine documents before it is
printed; what an engine doesn't run is refused.

--json prints command, setup, engine, version, source, form, drafter (drafter, kind, acceptance, assumed, weight_bytes),
context, most, batch, length, speedup, schedule (lo, hi, length, speedup_lo, speedup_hi), config, argv (of a shell
form, else null), text, notes (key, value, reason), warnings, placeholders, and with --explain derivation (symbol,
value, unit, formula, source)."""


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("export", help=HELP)(planned(export))


def export(
    setup: PlanSetup,
    engine: str = typer.Option(..., "--for", metavar="ENGINE", help="vllm, sglang, tensorrt-llm, llama.cpp, forerun."),
    drafter: str = typer.Option(
        ..., "--drafter", "-d", metavar="SPEC",
        help="KIND[=ARGUMENT][:RATE,RATE,...]: ngram, medusa[=HEADS], model=NAME, eagle, eagle3[=VOCAB|full], mtp; "
        "rates are acceptances by depth, the last one for all deeper.",
    ),
    context: int = typer.Option(1000, "--context", "--contexts", "-c", help="Cached tokens of each sequence."),
    most: int = typer.Option(64, "--most", help="Sequences that run together at most."),
    batch: int | None = typer.Option(
        None, "--batch", "--batches", "-b",
        help="Sequences for which the length is chosen if the engine has only one. [default: --most]",
    ),
    longest: int = typer.Option(16, "--longest", help="Draft tokens that are tried at most."),
    target_model: str | None = typer.Option(
        None, "--target-model", metavar="PATH|REPO", help="The model's checkpoint. [default: a placeholder]"
    ),
    draft_model: str | None = typer.Option(
        None, "--draft-model", metavar="PATH|REPO", help="The drafter's checkpoint. [default: a placeholder]"
    ),
    out: Path | None = typer.Option(None, "--out", "-o", metavar="FILE", help="Write it there instead."),
    force: bool = typer.Option(False, "--force", help="Overwrite the file of --out."),
    explain: bool = EXPLAIN,
    as_json: bool = JSON,
) -> None:  # fmt: skip
    """The command."""
    from forerun.plan.export import check_engine, write_out
    from forerun.plan.export import export as export_plan
    from forerun.plan.export_plan import plan_draft
    from forerun.plan.export_text import written
    from forerun.plan.memory import check_context
    from forerun.plan.spec import proposal_of

    check_engine(engine)
    check_context(setup.model, context)
    proposal = proposal_of(drafter, setup.model, setup.catalog.shape)
    plan = plan_draft(
        setup.model, setup.deployment, proposal,
        context=context, most=most, batch=batch, longest=longest, assumed=":" not in drafter,
    )  # fmt: skip
    made = export_plan(engine, plan, target_model=target_model, draft_model=draft_model)
    text = written(made)
    if out is not None:
        write_out(out, text, force=force)
    if as_json:
        print_json("export", setup, _json(engine, made, text, drafter, explain))
        return
    if out is None:
        typer.echo(text, nl=False)
    else:
        typer.echo(f"{made.schema.engine}: {out} written")
        for warning in made.warnings:
            typer.echo(f"warning: {warning}", err=True)
        if made.placeholders:
            typer.echo(f"still to be filled in: {', '.join(made.placeholders)}", err=True)
    if explain:
        print_explained(_derivation(plan))


def _json(engine: str, made: Export, text: str, drafter: str, explain: bool) -> dict[str, Any]:
    from forerun.plan.export_text import arguments

    plan = made.plan
    body: dict[str, Any] = {
        "engine": engine,
        "version": made.schema.version,
        "source": made.schema.source,
        "form": made.form,
        "drafter": drafters_json([drafter], [plan.proposal])[0],
        "context": plan.context,
        "most": plan.most,
        "batch": plan.batch,
        "length": plan.length,
        "speedup": plan.point(plan.batch).speedup,
        "schedule": [
            {
                **bucket._asdict(),
                "speedup_lo": plan.point(bucket.lo).speedup,
                "speedup_hi": plan.point(bucket.hi).speedup,
            }
            for bucket in plan.buckets
        ],
        "config": made.config,
        "argv": arguments(made) if made.form == "shell" else None,
        "text": text,
        "notes": [note._asdict() for note in made.notes],
        "warnings": made.warnings,
        "placeholders": made.placeholders,
    }
    return {**body, "derivation": derivation_json(_derivation(plan))} if explain else body


def _derivation(plan: DraftPlan) -> Any:
    from forerun.plan.explain_speculate import explain_speedup

    return explain_speedup(
        plan.target.network, plan.deployment, plan.proposal,
        batch=plan.batch, context=plan.context, length=plan.length,
    )  # fmt: skip
