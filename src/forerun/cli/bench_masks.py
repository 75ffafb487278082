"""`forerun bench masks`: whether grammars mean what their JSON schemas say, and what compiling and masks cost."""

from __future__ import annotations

import dataclasses
import json
import shlex
import textwrap
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import forerun
from forerun import ops
from forerun.cli.bench_setup import JSON, MODEL, file_hash, print_table, progress_shown
from forerun.cli.models import pull_progress
from forerun.measure import masks as measure
from forerun.measure.speed import model_sha256
from forerun.models.catalog import Catalog
from forerun.models.checks import check_tokenizer
from forerun.models.download import resolve
from forerun.models.source import open_model

if TYPE_CHECKING:
    from forerun.constrain.schema import Whitespace
    from forerun.constrain.spec import Constraint

HELP = """Feed JSON instances through the masks of their schemas, token by token.

FILE has one JSON object a line: id, schema, and tests with valid and data (MaskBench's form). Every schema is compiled
for the model's tokenizer; its weights aren't read. Each instance is written as compact JSON (with --whitespace flexible
indented, too) and must be accepted or refused as its test says. The exit code is 1 if one isn't; schemas that don't
compile are listed with their reasons and are no error.

--json prints setup, date, cases_file, cases_sha256, whitespace, rows (by category: schemas, compiled, refused, reasons,
valid_accepted, valid_refused, invalid_accepted, invalid_refused, and compile and mask, each with count, p50_ms, p99_ms
and max_ms), refused (case_id, keyword, path, message), notices (by case), sound, and false_accepts, false_rejects and
disagreements (each with case_id, test, description, form, token, before, after, reason)."""

_WIDTH = 100
_COUNTS = (
    "SCHEMAS", "COMPILED", "REFUSED", "VALID: ACCEPTED", "REFUSED", "INVALID: REFUSED", "ACCEPTED"
)  # fmt: skip
_TIMES = ("COMPILES", "P50 MS", "P99 MS", "MAX MS", "MASKS", "P50 MS", "P99 MS", "MAX MS")
_LEGEND = (
    "valid, invalid = instances of the schemas that compiled; times = from the schema to a grammar that can start, and "
    "of one mask over the vocabulary"
)


def masks(
    cases_file: Path = typer.Argument(..., metavar="FILE.jsonl", help="The schemas with their instances."),
    model: str | None = MODEL,
    whitespace: str = typer.Option(
        "compact", "--whitespace", metavar="compact|flexible", help="The whitespace that grammars allow."
    ),
    limit: int | None = typer.Option(None, "--limit", min=1, help="Only the first so many schemas of each category."),
    as_json: bool = JSON,
) -> None:
    """The command."""
    from forerun.constrain.compiler import GrammarCompiler

    if whitespace not in ("compact", "flexible"):
        raise typer.BadParameter(f"{whitespace!r} is not compact or flexible", param_hint="--whitespace")
    chosen: Whitespace = "flexible" if whitespace == "flexible" else "compact"
    cases = measure.read_cases(cases_file, limit)
    name = model if model is not None else Catalog.load().default
    path = resolve(name, progress=pull_progress())
    with open_model(path) as source:
        tokenizer = source.tokenizer()
        check_tokenizer(tokenizer, source.config)
    command = ["masks", str(cases_file), "-m", name, "--whitespace", chosen]
    command += ["--limit", str(limit)] if limit is not None else []
    setup = measure.MaskSetup(
        model=name,
        sha256=file_hash(name, path),
        vocab_size=tokenizer.vocab_size,
        cpu=ops.cpu_name(),
        physical_cores=ops.physical_cores(),
        forerun=forerun.__version__,
        llguidance=metadata.version("llguidance"),
        command=shlex.join(["forerun", "bench", *command]),
    )
    date = datetime.now(UTC).isoformat(timespec="seconds")
    results: list[measure.CaseResult] = []
    compiler = GrammarCompiler(tokenizer)
    try:
        with progress_shown() as show:
            show("preparing the vocabulary")
            compiler.prepare().result()
            for n, case in enumerate(cases, 1):
                show(f"schema {n} of {len(cases)}: {case.case_id}")
                results.append(measure.check(case, tokenizer, compiler, constraint_maker(chosen), chosen))
    finally:
        compiler.close()
    report = measure.MaskReport(
        setup=setup,
        date=date,
        cases_file=str(cases_file),
        cases_sha256=model_sha256(cases_file),
        whitespace=chosen,
        rows=measure.rows_of(results),
        refused=tuple(result.refusal for result in results if result.refusal is not None),
        notices={result.case_id: tuple(result.notices) for result in results if result.notices},
        false_accepts=tuple(found for result in results for found in result.false_accepts),
        false_rejects=tuple(found for result in results for found in result.false_rejects),
        disagreements=tuple(found for result in results for found in result.disagreements),
    )
    if as_json:
        typer.echo(json.dumps({**dataclasses.asdict(report), "sound": report.sound}, indent=2))
    else:
        _print(report)
    if not report.sound:
        raise typer.Exit(1)


def constraint_maker(whitespace: Whitespace) -> Callable[[Any], Constraint]:
    """What makes a constraint of a schema."""
    from forerun.constrain.schema import JsonSchema

    return partial(JsonSchema, whitespace=whitespace)


def _say(text: str, indent: str = "") -> None:
    """A paragraph of lines that fit beside the table."""
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    typer.echo(textwrap.fill(shown, _WIDTH, subsequent_indent=indent))


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _print(report: measure.MaskReport) -> None:
    setup = report.setup
    typer.echo(f"{setup.model}, {setup.vocab_size} tokens in its vocabulary")
    typer.echo(f"sha256 {setup.sha256}")
    typer.echo(f"{setup.cpu}, {setup.physical_cores} cores, forerun {setup.forerun}, llguidance {setup.llguidance}")
    typer.echo(setup.command)
    typer.echo(f"{report.cases_file}, sha256 {report.cases_sha256}")
    typer.echo()
    counts: list[Sequence[str]] = [("CATEGORY", *_COUNTS)]
    times: list[Sequence[str]] = [("CATEGORY", *_TIMES)]
    for row in report.rows:
        numbers = (
            row.schemas, row.compiled, row.refused, row.valid_accepted, row.valid_refused, row.invalid_refused,
            row.invalid_accepted,
        )  # fmt: skip
        counts.append((row.category, *map(str, numbers)))
        cells = [row.category]
        for took in (row.compile, row.mask):
            cells += [str(took.count), _ms(took.p50_ms), _ms(took.p99_ms), _ms(took.max_ms)]
        times.append(cells)
    print_table(counts)
    typer.echo()
    print_table(times)
    _say(_LEGEND)
    _print_refused(report)
    for title, findings in (
        ("FALSE ACCEPTS", report.false_accepts),
        ("FALSE REJECTS", report.false_rejects),
        ("MASKS THAT CONTRADICT THEIR GRAMMAR", report.disagreements),
    ):
        if findings:
            typer.echo()
            typer.echo(f"{title}: {len(findings)}")
        for one in findings:
            place = "accepted to its end" if one.token is None else f"stopped at token {one.token}"
            reason = f" ({one.reason})" if one.reason else ""
            _say(
                f"  {one.case_id} test {one.test}, {one.form}, {place}{reason}: ...{one.before[-40:]!r} | "
                f"{one.after[:40]!r}...",
                indent="    ",
            )
    typer.echo()
    if report.sound:
        typer.echo("every valid instance is accepted, every invalid one is refused")
    else:
        typer.echo("SOME INSTANCES WENT THE WRONG WAY (--json has more of their texts)")


def _print_refused(report: measure.MaskReport) -> None:
    if not report.refused:
        return
    typer.echo()
    reasons = report.rows[-1].reasons
    _say("refused: " + ", ".join(f"{count} for {reason}" for reason, count in reasons.items()))
    for one in report.refused:
        where = f"{measure.reason_of(one)}{'' if one.path is None else f' at {one.path}'}: "
        told = one.keyword is not None and f'"{one.keyword}"' in one.message
        _say(f"  {one.case_id}: {'' if told else where}{one.message}", indent="    ")
