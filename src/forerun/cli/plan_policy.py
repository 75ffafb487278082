"""`forerun plan policy`: draft lengths fixed, by class and adaptive, on a mix of workloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from forerun.cli.plan_drafters import default_drafters
from forerun.cli.plan_setup import EXPLAIN, JSON, PlanSetup, planned
from forerun.cli.plan_view import derivation_json, numbers, print_derivation, print_json, print_setup, print_table
from forerun.errors import PlanError

if TYPE_CHECKING:
    from forerun.plan.derivation import Derivation
    from forerun.plan.policy import Comparison, Outcome
    from forerun.plan.policy_cost import StepCost
    from forerun.plan.workload import Workload

_COSTS = "0.007,0.05,0.2"
_CONTEXT = 1000

HELP = """What policies of draft length do to a mix of requests.

Shown are the mean, the slow ones, and throughput.

By simulation. Times are for each token of a request, in plain steps: 1 is what it takes in a batch of that size without
speculation. Without a model a step over n rows takes max(1, n / ridge-rows) and a draft token --cost plain steps; with
one both are from its step model, the drafter's from its shape.

--json prints command, setup (null without a model), context, ridge_rows (both null where they play no part), requests,
seed, floor, classes (name, share, acceptance, spread, swing, dwell, tokens; spread null: all alike), comparisons
(drafter, batch, requests, plain_seconds, alone (class, length, tokens_per_step, cost, speedup), best_fixed, policies,
fixed, steadiest), and with --explain derivations (title, lines (symbol, value, unit, formula, source)). best_fixed and
steadiest are one policy each, policies and fixed are lists (fixed: every length): policy, lengths, mean, p50, p99,
slower, throughput_ratio, gain, gain_error, drafted, mean_seconds. mean, p50, p99: over requests; slower: share that
takes longer than without speculation; throughput_ratio: tokens over time in those of plain decoding; gain: of it over
best_fixed; gain_error: its standard error, null in best_fixed and fixed; drafted: for each token; mean_seconds: for
each token, null without a model; steadiest: the smallest p99 of what an engine can do with --floor of the largest
throughput.

--explain derives, for the first drafter at the first batch, the speedup of each class, and the adaptive policy's mean,
p99 and gain. Gains have a standard error of about a point with 160 requests (gain_error); 2048 take seconds."""


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("policy", help=HELP)(planned(policy, model_required=False))


class _Priced(NamedTuple):
    """All costs of one batch. given: plain steps of a draft token, of each; 0 where a drafter is priced."""

    costs: list[StepCost]
    given: list[float]


def policy(
    setup: PlanSetup | None,
    kinds: list[str] = typer.Option(
        [], "--class", metavar="SPEC",
        help="A sort of requests, repeatable: NAME:acceptance=A[,share=S,spread=N,swing=X,dwell=N,tokens=N]. "
        "[default: code and chat]",
    ),
    cost: str | None = typer.Option(
        None, "--cost", metavar="C,C,...", help=f"Plain steps of a draft token. [default: {_COSTS}]"
    ),
    drafter: list[str] = typer.Option(
        [], "--drafter", "-d", metavar="KIND",
        help="With a model, repeatable: ngram, medusa[=HEADS], model=NAME, eagle, eagle3[=VOCAB|full], mtp. "
        "[default: those that go with it]",
    ),
    batches: str = typer.Option(
        "1,8", "--batches", "--batch", "-b", metavar="N,N,...", help="Sequences that share a step."
    ),
    context: int | None = typer.Option(
        None, "--context", "--contexts", "-c", help=f"With a model: cached tokens of each. [default: {_CONTEXT}]"
    ),
    ridge_rows: float | None = typer.Option(
        None, "--ridge-rows", help="Without a model: rows from which arithmetic is the limit. [default: 295]"
    ),
    floor: float = typer.Option(0.95, "--floor", help="Share of the largest throughput that has to be kept."),
    requests: int = typer.Option(
        160, "--requests", "-n", help="Requests that are measured, at each cost and batch; 2048 take seconds."
    ),
    seed: int = typer.Option(0, "--seed", help="Of everything that is drawn."),
    explain: bool = EXPLAIN,
    as_json: bool = JSON,
) -> None:  # fmt: skip
    """The command."""
    from forerun.plan.policy import compare
    from forerun.plan.policy_cost import RIDGE_ROWS, check_batch
    from forerun.plan.workload import CODE_AND_CHAT, Workload, class_of

    if not 0 <= floor <= 1:
        raise PlanError("floor", f"{floor} is not allowed; expected a share from 0 to 1")
    sizes = numbers(batches, "batches")
    for size in sizes:
        check_batch(size)
    workload = Workload.of([class_of(text) for text in kinds]) if kinds else CODE_AND_CHAT
    ridge = RIDGE_ROWS if ridge_rows is None else ridge_rows
    if setup is None:
        for option, given in (("drafter", drafter), ("context", context)):
            if given:
                raise PlanError("model", f"missing; expected --model, since --{option} is about its step")
        priced = [_roofline(_costs(_COSTS if cost is None else cost), size, ridge) for size in sizes]
    else:
        if ridge_rows is not None:
            raise PlanError("ridge-rows", "not allowed with --model, whose step model says what rows cost")
        priced = _modelled(setup, cost, drafter, sizes, _CONTEXT if context is None else context)
    compared = [found for each in priced for found in compare(workload, each.costs, requests=requests, seed=seed)]
    derivations = _explained(workload, priced[0], compared[0], None if setup else ridge, seed) if explain else []
    if as_json:
        body: dict[str, Any] = {
            **({} if setup else {"setup": None}),
            "context": (_CONTEXT if context is None else context) if setup else None,
            "ridge_rows": None if setup else ridge,
            "requests": requests,
            "seed": seed,
            "floor": floor,
            "classes": [asdict(each) for each in workload.classes],
            "comparisons": [_comparison_json(workload, each, floor, requests) for each in compared],
        }
        if derivations:
            body["derivations"] = [{"title": each.title, "lines": derivation_json(each)} for each in derivations]
        print_json("policy", setup, body)
        return
    if setup:
        print_setup(setup)
    else:
        typer.echo(f"no model: a step over n rows takes max(1, n / {ridge:g}), a draft token c of a plain step")
    _print_classes(workload)
    _print_alone(workload, priced[0].costs)
    _print_outcomes(compared)
    _print_steadiest(compared, floor)
    for derivation in derivations:
        print_derivation(derivation)


def _costs(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError as error:
        raise PlanError("cost", f"{text!r} is not a list of costs such as 0.02,0.2") from error
    if len(set(found)) < len(found):
        raise PlanError("cost", f"{text!r} has one of them twice")
    return found


def _roofline(costs: Sequence[float], batch: int, ridge: float) -> _Priced:
    from forerun.plan.policy_cost import roofline_cost

    return _Priced([roofline_cost(each, batch, ridge_rows=ridge) for each in costs], list(costs))


def _modelled(
    setup: PlanSetup, cost: str | None, texts: Sequence[str], batches: Sequence[int], context: int
) -> list[_Priced]:
    """Raises PlanError if cost and drafter are both given, a drafter has rates, or something doesn't fit."""
    from forerun.plan.memory import check_context, check_fits
    from forerun.plan.policy_cost import modelled_cost
    from forerun.plan.spec import proposal_of
    from forerun.plan.workload import LONGEST

    network, where = setup.model.network, setup.deployment
    check_context(setup.model, context)
    if cost is not None:
        if texts:
            raise PlanError("drafter", "not allowed with --cost, which says what a draft token costs")
        check_fits(network, where, batch=max(batches), context=context + LONGEST + 1)
        given = _costs(cost)
        return [
            _Priced([modelled_cost(network, where, batch, context, draft_cost=each) for each in given], given)
            for batch in batches
        ]
    for text in texts:
        if ":" in text:
            raise PlanError("drafter", f"{text!r}: rates are those of --class here; leave them out")
    wanted = list(texts) or default_drafters(setup.model, setup.catalog)
    drafters = [proposal_of(text, setup.model, setup.catalog.shape).drafter for text in wanted]
    names = [each.name for each in drafters]
    for name in names:
        if names.count(name) > 1:
            raise PlanError("drafter", f"{name} is given twice")
    for each in drafters:
        check_fits(network, where, batch=max(batches), context=context + LONGEST + 1, drafter=each)
    return [
        _Priced(
            [modelled_cost(network, where, batch, context, drafter=each) for each in drafters], [0.0] * len(drafters)
        )
        for batch in batches
    ]


def _explained(
    workload: Workload, priced: _Priced, found: Comparison, ridge: float | None, seed: int
) -> list[Derivation]:
    """Of the first drafter at the first batch."""
    from forerun.plan.policy_explain import explain_gain, explain_length, explain_times

    return [
        *(
            explain_length(workload, priced.costs[0], index, draft_cost=priced.given[0], ridge_rows=ridge)
            for index in range(len(workload.classes))
        ),
        explain_times(found, "adaptive", seed),
        explain_gain(found, "adaptive", seed, draft_cost=priced.given[0], ridge_rows=ridge),
    ]


def _print_classes(workload: Workload) -> None:
    rows = [
        (
            each.name, f"{share:.0%}", f"{each.acceptance:g}", f"{each.spread:g}", f"{each.swing:g}", f"{each.dwell:g}",
            str(each.tokens),
        )
        for each, share in zip(workload.classes, workload.shares, strict=True)
    ]  # fmt: skip
    print_table(("class", "requests", "acceptance", "spread", "swing", "dwell", "tokens"), rows)


def _print_alone(workload: Workload, costs: Sequence[StepCost]) -> None:
    from forerun.plan.policy import alone

    typer.echo(f"\neach class by itself at batch {costs[0].batch}, at its best fixed length, by integration")
    rows = [
        (
            cost.name, found.name, str(found.length), f"{found.tokens_per_step:.3f}", f"{found.cost:.3f}",
            f"{found.speedup:.3f}",
        )
        for cost in costs
        for found in alone(workload, cost)
    ]  # fmt: skip
    print_table(("drafter", "class", "drafts", "tokens/step", "step", "speedup"), rows, words=(0, 1))


def _print_outcomes(compared: Sequence[Comparison]) -> None:
    typer.echo("\nthe mix: time for each token in plain steps over requests, throughput in that of plain decoding")
    timed = compared[0].cost.plain_seconds is not None
    rows = []
    for found in compared:
        for outcome in (found.best_fixed, *found.others):
            cells = [
                found.cost.name, str(found.cost.batch), outcome.policy, _lengths(outcome), f"{outcome.mean:.3f}",
                f"{outcome.p50:.3f}", f"{outcome.p99:.3f}", f"{outcome.slower:.0%}", f"{outcome.throughput:.3f}",
                _gain(outcome, found.best_fixed),
            ]  # fmt: skip
            if timed:
                cells.append(f"{outcome.mean * (found.cost.plain_seconds or 0) * 1e3:.3g}")
            rows.append(cells)
    columns = ["drafter", "batch", "policy", "drafts", "mean", "p50", "p99", "slower", "throughput", "gain"]
    print_table([*columns, "ms/token"] if timed else columns, rows, words=(0, 2))


def _print_steadiest(compared: Sequence[Comparison], floor: float) -> None:
    typer.echo(f"\nsmallest p99 of what an engine can do with at least {floor:.0%} of the largest throughput")
    rows = []
    for found in compared:
        best = found.steadiest(floor)
        rows.append((
            found.cost.name, str(found.cost.batch), best.policy, _lengths(best), f"{best.p99:.3f}",
            f"{best.slower:.0%}", f"{best.throughput:.3f}",
        ))  # fmt: skip
    print_table(("drafter", "batch", "policy", "drafts", "p99", "slower", "throughput"), rows, words=(0, 2))


def _gain(outcome: Outcome, best_fixed: Outcome) -> str:
    # Rounded to what is shown, so that a small loss isn't -0.0%.
    return f"{round(outcome.throughput / best_fixed.throughput - 1, 3) + 0.0:+.1%}"


def _lengths(outcome: Outcome) -> str:
    return "varies" if outcome.lengths is None else ", ".join(map(str, outcome.lengths))


def _comparison_json(workload: Workload, found: Comparison, floor: float, requests: int) -> dict[str, Any]:
    from forerun.plan.policy import alone

    cost, best = found.cost, found.best_fixed

    def outcome(each: Outcome) -> dict[str, Any]:
        seconds = None if cost.plain_seconds is None else each.mean * cost.plain_seconds
        return {
            "policy": each.policy, "lengths": each.lengths, "mean": each.mean, "p50": each.p50, "p99": each.p99,
            "slower": each.slower, "throughput_ratio": each.throughput,
            "gain": each.throughput / best.throughput - 1,
            "gain_error": found.gain_error(each.policy) if each in found.others else None,
            "drafted": each.drafted, "mean_seconds": seconds,
        }  # fmt: skip

    return {
        "drafter": cost.name,
        "batch": cost.batch,
        "requests": -(-requests // cost.batch) * cost.batch,
        "plain_seconds": cost.plain_seconds,
        "alone": [
            {
                "class": each.name, "length": each.length, "tokens_per_step": each.tokens_per_step,
                "cost": each.cost, "speedup": each.speedup,
            }
            for each in alone(workload, cost)
        ],
        "best_fixed": outcome(best),
        "policies": [outcome(each) for each in found.others],
        "fixed": [outcome(each) for each in found.fixed],
        "steadiest": outcome(found.steadiest(floor)),
    }  # fmt: skip
