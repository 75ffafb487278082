"""`forerun bench constrain`: what a constraint does to the time of each token, and whether texts are valid."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import typer

from forerun.cli.bench_setup import (
    BATCH,
    JSON,
    LIMIT,
    MODEL,
    TASKS,
    THREADS,
    open_engine,
    print_setup,
    print_table,
    progress_shown,
    setup_of,
    slots_for,
)
from forerun.cli.draft_options import DRAFT, DRAFT_LENGTH, draft_warnings, engine_options
from forerun.errors import InvalidRequestError
from forerun.measure import constrain as measure
from forerun.measure.speculate import Run
from forerun.measure.speed import model_sha256
from forerun.measure.tasks import groups, read_tasks

HELP = """Decode answers to tasks with schemas under a constraint, and the same texts without it, and compare.

Every group of --batch tasks of one category is answered with its schemas as constraints, and its texts are decoded
again by an engine without constraint that is made to choose the same tokens; all else of it is real. Both with
speculation, in turns one and the other first, and both without. At the end the model answers by itself, for its texts'
validity. All is greedy.

The task file has lines of JSON with task_id, category, prompt, schema and perhaps max_tokens. The exit code is 1 if a
constrained text that ended breaks its schema, or depends on speculation. After Ctrl-C (exit code 130) the report is
over the groups that were finished.

--json prints setup, date, draft, draft_len, tasks_file, tasks_sha256, max_tokens, batch, isolation, left_out,
complete, validated, rows (by category), results (by task), differing, invalid, sound."""

_TEMPLATE_BYTES = 512
"""Allowance for what a chat template puts around a message."""
_WIDTH = 100


def constrain(
    tasks_file: Path = TASKS,
    model: str | None = MODEL,
    draft: str = DRAFT,
    draft_len: str = DRAFT_LENGTH,
    limit: int | None = LIMIT,
    max_tokens: int = typer.Option(
        512, "--max-tokens", min=1, max=1 << 20, help="Cap of every answer; a task's own counts where it is smaller."
    ),
    batch: int = BATCH,
    threads: int | None = THREADS,
    as_json: bool = JSON,
) -> None:
    """The command."""
    if draft == "none":
        raise typer.BadParameter(
            "none drafts nothing; the runs without speculation are there anyway", param_hint="--draft"
        )
    settings = engine_options(draft, draft_len)
    tasks = read_tasks(tasks_file, limit)
    if all(task.schema is None for task in tasks):
        raise InvalidRequestError(f"no task of {tasks_file} has a schema; add one to its lines")
    from forerun.cli.bench_arms import ArmRunner

    longest = max(len(task.prompt.encode()) + _TEMPLATE_BYTES for task in tasks) + max_tokens
    slots = batch * slots_for(longest)
    constrained, name, path = open_engine(model, slots, threads, rows=batch, prefix_cache=False, **settings)
    plain, _, _ = open_engine(model, slots, threads, rows=batch, prefix_cache=False, **settings)
    runner = ArmRunner(constrained, plain, max_tokens)
    fitting = [task for task in tasks if runner.fits(task)]
    if not fitting:
        raise InvalidRequestError(
            f"no task with a schema fits the model's context of {plain.max_model_len} tokens with its answer"
        )
    command = ["constrain", "-m", name, "--tasks", str(tasks_file), "--draft", draft, "--draft-len", draft_len]
    command += ["--limit", str(limit)] if limit is not None else []
    command += ["--max-tokens", str(max_tokens), "--batch", str(batch)]
    command += ["--threads", str(plain.executor.tape.threads)]
    date = datetime.now(UTC).isoformat(timespec="seconds")
    together = groups(fitting, batch)
    done: list[measure.Group] = []
    own: dict[str, Run] = {}
    complete = True
    # A drafter that fails ends the benchmark with the reason; no warning is needed before.
    with progress_shown() as show, draft_warnings(lambda _text: None):
        show("warming up")
        runner.warm_up(together[0])
        try:
            for turn, group in enumerate(together):
                show(f"group {turn + 1} of {len(together)}")
                done.append(measure.measure_group(group, turn, runner.trial))
            for turn, group in enumerate(together):
                show(f"group {turn + 1} of {len(together)}, the model by itself")
                own |= runner.own(group)
        except KeyboardInterrupt:
            if not done:
                raise
            complete = False
    check = measure.json_schema_check()
    results = measure.results_of(done, own, runner.forced, check)
    report = measure.ConstrainReport(
        setup=setup_of(plain, name, path, command),
        date=date,
        draft=draft,
        draft_len=draft_len,
        tasks_file=str(tasks_file),
        tasks_sha256=model_sha256(tasks_file),
        max_tokens=max_tokens,
        batch=batch,
        isolation=measure.ISOLATION,
        left_out=tuple(task.task_id for task in tasks if task not in fitting),
        complete=complete,
        validated=check is not None,
        rows=measure.rows_of(done, results),
        results=results,
        differing=measure.differing_of(done),
        invalid=tuple(result.task_id for result in results if result.valid is False),
    )
    if as_json:
        typer.echo(json.dumps({**dataclasses.asdict(report), "sound": report.sound}, indent=2))
    else:
        _print(report)
    if not complete:
        raise typer.Exit(130)
    if not report.sound:
        raise typer.Exit(1)


_TIMES: Mapping[str, str] = {
    "CATEGORY": "category",
    "TASKS": "records",
    "TOKENS": "tokens",
    "MS/TOKEN": "constrained_ms",
    "WITHOUT": "repeated_ms",
    "RATIO": "ratio",
    "MEDIAN": "ratio_median",
    "MEAN": "ratio_mean",
    "P90": "ratio_p90",
    "TOTAL": "total_ratio",
    "OFF": "off_ratio",
}
_COUNTS: Mapping[str, str] = {
    "CATEGORY": "category",
    "TOKENS/STEP": "constrained_tokens_per_step",
    "WITHOUT": "repeated_tokens_per_step",
    "FORCED": "forced_share",
    "MASKS": "mask_share",
    "ENDED": "finished",
    "VALID": "valid",
    "OWN TEXTS": "own",
    "VALID ": "own_valid",
    "IN BLOCK": "own_valid_in_block",
}
_TIMES_LEGEND = (
    "ms/token = milliseconds per emitted token after the first, with the constraint; without = the same text decoded "
    "without it; ratio = the first over the second, of all tokens; median, mean, p90 = of the tasks' own ratios; total "
    "= ratio of the times from submission to the end, prompts included; off = ratio with speculation off in both"
)
_COUNTS_LEGEND = (
    "tokens/step = emitted tokens / steps that chose tokens; forced = emitted tokens about which the grammar left "
    "no choice; masks = time of grammars that no forward hid / time of steps in which the whole group decoded; "
    "ended, valid = constrained texts that ended by themselves, and those of them that obey the schema; own texts = "
    "the model's answers without constraint: valid as they are, and valid in their first code block"
)
_SHARES = ("forced_share", "mask_share")


def _cell(field: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2%}" if field in _SHARES else f"{value:.2f}"
    return str(value)


def _say(text: str) -> None:
    """A paragraph of lines that fit beside the table."""
    typer.echo(textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False))


def _print(report: measure.ConstrainReport) -> None:
    print_setup(report.setup)
    typer.echo(
        f"draft {report.draft}, length {report.draft_len}, greedy, batch {report.batch}, at most {report.max_tokens} "
        "tokens an answer"
    )
    _say(report.isolation)
    if report.left_out:
        _say(f"left out, since they have no schema or the context can't hold them: {', '.join(report.left_out)}")
    if not report.complete:
        typer.echo("INTERRUPTED: only what was finished until then is counted")
    for columns, legend in ((_TIMES, _TIMES_LEGEND), (_COUNTS, _COUNTS_LEGEND)):
        typer.echo()
        rows = [[_cell(field, getattr(row, field)) for field in columns.values()] for row in report.rows]
        print_table([list(columns), *rows])
        _say(legend)
    typer.echo()
    if not report.validated:
        typer.echo("texts weren't validated: that needs the package jsonschema")
    if report.differing:
        _say(f"TEXTS DIFFER between runs: {', '.join(report.differing)}")
    if report.invalid:
        _say(f"TEXTS BREAK THEIR SCHEMA: {', '.join(report.invalid)}")
    if report.sound:
        typer.echo("every constrained text is the same with and without speculation")
