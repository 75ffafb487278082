"""`forerun plan speculate`: what drafters win at each batch and context, how far to draft, where it stops paying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from forerun.cli.plan_drafters import DRAFTERS, drafter_lines, drafters_json, proposals_of
from forerun.cli.plan_setup import EXPLAIN, JSON, PlanSetup, planned
from forerun.cli.plan_speculate_explain import print_explained
from forerun.cli.plan_speculate_view import print_speculation, row_json, summary_json
from forerun.cli.plan_view import derivation_json, numbers, print_json, print_setup
from forerun.errors import PlanError

if TYPE_CHECKING:
    from forerun.plan.deployment import Deployment
    from forerun.plan.derivation import Derivation
    from forerun.plan.speculate import Point, Proposal
    from forerun.plan.speculate_table import Speculations, SpeculationTable

HELP = """What drafters win at each batch and context.

speedup = E / (K c + v), for each drafter, batch and context.
E: expected tokens of a step; K: draft tokens; c: one of them, v: the verifying step, both in plain steps. Without
--length each row has the K that is best there. Acceptance is taken as the same at every batch and context.

--json prints command, setup, drafters (drafter, kind, acceptance, assumed, weight_bytes), batches, contexts, length,
longest, draft_tensor, rows (drafter, batch, context, fits, length, tokens_per_step, draft_cost, verify_ratio, speedup,
tokens_per_s, throughput_tokens_per_s, plain_tokens_per_s, acceptance_needed, best_length, loss, low_load_length,
low_load_speedup, low_load_loss), summaries (drafter, context, fit_sequences, searched, pays, break_even, buckets,
peak), overtakes (context, batch, ahead, behind), beyond_measured (phrases: what lies outside of the step times behind a
measured efficiency), and with --explain derivation (symbol, value, unit, formula, source).

A row that doesn't fit the memory has null from length on. tokens_per_s is each sequence's, throughput_tokens_per_s that
of all. acceptance_needed ("a to pay"): the constant acceptance, the same at every depth, at which the best length for
it is as fast as no speculation (with --length: that length); below it nothing pays, null if not even drafts that are
always accepted pay. low_load_length is the best length at batch 1, kept at the row's batch; losses are shares of the
speed at the best length. fit_sequences: that fit; searched: all of them, at most 4096; pays: first and last of each run
of batches that gain, each with its own best length; break_even: the smallest batch that doesn't, null if all do.
buckets: lo, hi, length, and the loss at the worse of both ends. peak: batch, and the numbers of a row there; null if
nothing fits."""

CONTEXTS = "1000,8000,32000"


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("speculate", help=HELP)(planned(speculate))


def speculate(
    setup: PlanSetup,
    drafter: list[str] = DRAFTERS,
    batches: str = typer.Option(
        "1,2,4,8,16,32,64,128,256", "--batches", "--batch", "-b", metavar="N,N,...",
        help="Sequences that share a step.",
    ),
    contexts: str | None = typer.Option(
        None, "--contexts", "--context", "-c", metavar="N,N,...",
        help=f"Cached tokens of each. [default: those of {CONTEXTS} that the model can have]",
    ),
    length: int | None = typer.Option(
        None, "--length", "-k", help="Draft tokens, fixed: shows what is lost against the best length."
    ),
    longest: int = typer.Option(16, "--longest", help="Draft tokens that are tried at most."),
    draft_tensor: int | None = typer.Option(
        None, "--draft-tensor", help="Accelerators that a draft model is split over. [default: as the model]"
    ),
    plot: Path | None = typer.Option(
        None, "--plot", metavar="FILE",
        help="Speedup over batch as .svg or .png. Needs forerun[plot], and a second or two to draw.",
    ),
    explain: bool = EXPLAIN,
    explain_at: str | None = typer.Option(
        None, "--explain-at", metavar="DRAFTER,BATCH,CONTEXT", help="Explain that speedup instead of the first row's."
    ),
    as_json: bool = JSON,
) -> None:  # fmt: skip
    """The command."""
    from forerun.plan.memory import check_fits
    from forerun.plan.speculate_table import Speculations

    if plot is not None:
        from forerun.plan.plot import check_target

        check_target(plot)
    all_batches = numbers(batches, "batches")
    all_contexts, left_out = _contexts(setup, contexts)
    if longest < 1:
        raise PlanError("longest", f"{longest} is not allowed; expected at least 1")
    proposals = proposals_of(drafter, setup)
    draft_deployment = _draft_deployment(setup.deployment, draft_tensor)
    check_fits(setup.model.network, setup.deployment)
    speculations = Speculations(
        setup.model.network, setup.deployment, proposals,
        length=length, longest=longest, draft_deployment=draft_deployment,
    )  # fmt: skip
    table = speculations.table(all_batches, all_contexts)
    beyond = table.beyond_measured(setup.model.network, setup.deployment)
    derivation = _derivation(explain_at, proposals, speculations, table) if explain or explain_at else None
    if plot is not None:
        _plot(plot, setup, drafter, proposals, speculations, table)
    if as_json:
        body = {
            "drafters": drafters_json(drafter, proposals),
            "batches": all_batches,
            "contexts": all_contexts,
            "length": length,
            "longest": longest,
            "draft_tensor": draft_tensor,
            "rows": [row_json(row) for row in table.rows],
            "summaries": [summary_json(summary) for summary in table.summaries],
            "overtakes": [{"context": lead.context, **lead.overtake._asdict()} for lead in table.overtakes],
            "beyond_measured": beyond,
        }
        print_json("speculate", setup, {**body, "derivation": derivation_json(derivation)} if derivation else body)
        return
    print_setup(setup)
    for line in drafter_lines(drafter, proposals):
        typer.echo(line)
    if left_out:
        listed = ", ".join(map(str, left_out))
        typer.echo(f"left out: contexts of {listed} tokens; {setup.model.name} has at most {setup.model.max_context}")
    print_speculation(table, all_batches, length)
    if beyond:
        typer.echo(f"beyond what was measured, so extrapolated: {'; '.join(beyond)}")
    if plot is not None:
        typer.echo(f"plotted in {plot}")
    if derivation is not None:
        print_explained(derivation)


def _contexts(setup: PlanSetup, text: str | None) -> tuple[list[int], list[int]]:
    """The contexts asked for; without any, those of the defaults that the model can have, and the others."""
    from forerun.plan.memory import check_context, supports_context

    if text is not None:
        asked = numbers(text, "contexts", 0)
        for context in asked:
            check_context(setup.model, context, "contexts")
        return asked, []
    defaults = numbers(CONTEXTS, "contexts")
    kept = [context for context in defaults if supports_context(setup.model, context)]
    return kept or [0], [context for context in defaults if context not in kept]


def _draft_deployment(where: Deployment, tensor: int | None) -> Deployment | None:
    if tensor is None:
        return None
    if not (1 <= tensor <= where.tensor and where.tensor % tensor == 0):
        raise PlanError("draft-tensor", f"{tensor} is not allowed; expected a divisor of tensor ({where.tensor})")
    return replace(where, tensor=tensor, pipeline=1, expert=1)


def _derivation(
    where: str | None, proposals: Sequence[Proposal], speculations: Speculations, table: SpeculationTable
) -> Derivation:
    from forerun.plan.explain_speculate import explain_speedup

    if where is None:
        point = next((row.prices.point for row in table.rows if row.prices is not None), None)
        if point is None:
            raise PlanError("explain", "there is nothing to explain: no row fits the memory")
    else:
        point = _point_at(where, proposals, speculations)
    proposal = next(proposal for proposal in proposals if proposal.drafter.name == point.drafter)
    return explain_speedup(
        speculations.target, speculations.deployment, proposal,
        batch=point.batch, context=point.context, length=point.length,
        draft_deployment=speculations.drafts_on(proposal),
    )  # fmt: skip


def _point_at(where: str, proposals: Sequence[Proposal], speculations: Speculations) -> Point:
    words = where.rsplit(",", 2)
    if len(words) != 3:
        raise PlanError("explain-at", f"{where!r} is not allowed; expected DRAFTER,BATCH,CONTEXT such as ngram,8,1000")
    names = [proposal.drafter.name for proposal in proposals]
    if words[0] not in names:
        raise PlanError("explain-at", f"no drafter is called {words[0]!r}; there are {', '.join(names)}")
    (batch,), (context,) = numbers(words[1], "explain-at"), numbers(words[2], "explain-at", 0)
    most = speculations.most(words[0], context)
    if batch > most:
        raise PlanError("explain-at", f"{batch} sequences of {context} tokens don't fit the memory; {most} do")
    return speculations.prices(words[0], batch, context).point


def _plot(
    path: Path,
    setup: PlanSetup,
    texts: Sequence[str],
    proposals: Sequence[Proposal],
    speculations: Speculations,
    table: SpeculationTable,
) -> None:
    from forerun.plan.plot import panels, plot_speedup

    o = setup.options
    split = f"{setup.deployment.gpus} x {o['gpu']}"
    title = f"{o['model']} on {split}, weights {o['weights']}, KV {o['kv']}"
    notes = drafter_lines(texts, proposals)
    plot_speedup(path, panels(speculations, table), title=title, notes=notes)
