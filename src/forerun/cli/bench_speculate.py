"""`forerun bench speculate`: what drafting gains, by kind of task, and that it changes no text."""

from __future__ import annotations

import dataclasses
import itertools
import json
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.cells import cell_len, set_cell_size

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
from forerun.cli.draft_options import DEFAULT_DRAFT, DRAFT, DRAFT_LENGTH, draft_warnings, engine_options
from forerun.draft.base import Drafter, DraftRow, DraftTree
from forerun.errors import InvalidRequestError
from forerun.measure import speculate as measure
from forerun.measure.speed import model_sha256
from forerun.measure.tasks import Task, groups, read_tasks
from forerun.sample.params import SamplingParams

if TYPE_CHECKING:
    from forerun.engine.engine import Engine
    from forerun.engine.output import RequestOutput

HELP = """Answer tasks with speculation off and on, and compare.

Every group of --batch tasks of one category is answered twice in a row, in turns off first and on first, by one engine
and from nothing: without prefix cache, and with drafters that know nothing of other runs. Times are from submission to
the end, prompts included; DECODE is the ratio of the times after the first token.

Task files are lines of JSON with task_id, category, prompt and perhaps max_tokens, or Spec-Bench's with question_id,
category and turns (the first turn is asked). The exit code is 1 if any answer differs. After Ctrl-C (exit code 130)
the report is over the groups that were finished.

Beside the drafters of other commands, --draft always-wrong proposes only tokens that no answer has: what drafting
costs at worst."""

_WARM_TOKENS = 16
_TEMPLATE_BYTES = 512
"""Allowance for what a chat template puts around a message."""
_SHOWN_POSITIONS = 12
_WIDTH = 100
_CATEGORY_WIDTH = 22
"""Columns of a terminal: of a report, its command and file names aside, and of a category in its tables."""


def speculate(
    tasks_file: Path = TASKS,
    model: str | None = MODEL,
    draft: str = DRAFT,
    draft_len: str = DRAFT_LENGTH,
    limit: int | None = LIMIT,
    max_tokens: int = typer.Option(
        256, "--max-tokens", min=1, max=1 << 20, help="Cap of every answer; a task's own counts where it is smaller."
    ),
    temperature: float = typer.Option(
        0.0, "--temperature", "-t", help="0 is greedy; otherwise each task has a fixed seed."
    ),
    batch: int = BATCH,
    repeats: int = typer.Option(1, "--repeats", min=1, max=1000, help="Rounds over all tasks."),
    threads: int | None = THREADS,
    as_json: bool = JSON,
) -> None:
    """The command."""
    if draft == "none":
        raise typer.BadParameter("none drafts nothing, so there is nothing to compare", param_hint="--draft")
    wrong = AlwaysWrong()
    settings = engine_options(DEFAULT_DRAFT if draft == wrong.name else draft, draft_len)
    if draft == wrong.name:
        settings["draft"] = wrong
    try:
        params = SamplingParams(temperature=temperature)
    except InvalidRequestError as error:
        raise typer.BadParameter(str(error)) from None
    tasks = [_capped(task, max_tokens) for task in read_tasks(tasks_file, limit)]
    longest = max(len(task.prompt.encode(errors="replace")) + _TEMPLATE_BYTES + _most(task) for task in tasks)
    engine, name, path = open_engine(
        model, batch * slots_for(longest), threads, rows=batch, prefix_cache=False, **settings
    )
    wrong.token = engine.config.vocab_size - 1
    bench = TaskRunner(engine, params)
    fitting = [task for task in tasks if bench.fits(task)]
    if not fitting:
        raise InvalidRequestError(f"no task fits the model's context of {engine.max_model_len} tokens with its answer")
    command = ["speculate", "-m", name, "--tasks", str(tasks_file), "--draft", draft, "--draft-len", draft_len]
    command += ["--limit", str(limit)] if limit is not None else []
    command += ["--max-tokens", str(max_tokens), "--temperature", f"{temperature:g}", "--batch", str(batch)]
    command += ["--repeats", str(repeats), "--threads", str(engine.executor.tape.threads)]
    date = datetime.now(UTC).isoformat(timespec="seconds")
    pairs: list[measure.Pair] = []
    complete = True
    # A drafter that fails ends the benchmark with the reason; no warning is needed before.
    with progress_shown() as show, draft_warnings(lambda _text: None):
        show("warming up")
        bench.warm_up(groups(fitting, batch)[0])
        try:
            for pair in measure.measure_pairs(
                fitting,
                batch=batch,
                repeats=repeats,
                trial=bench.trial,
                on_run=lambda run, runs, on: show(f"run {run} of {runs}, speculation {'on' if on else 'off'}"),
            ):
                pairs.append(pair)
        except KeyboardInterrupt:
            if not pairs:
                raise
            complete = False
    report = measure.SpeculationReport(
        setup=setup_of(engine, name, path, command),
        date=date,
        draft=draft,
        draft_len=draft_len,
        tasks_file=str(tasks_file),
        tasks_sha256=model_sha256(tasks_file),
        temperature=temperature,
        max_tokens=max_tokens,
        batch=batch,
        rounds=repeats,
        isolation=measure.ISOLATION,
        left_out=tuple(task.task_id for task in tasks if task not in fitting),
        complete=complete,
        rows=measure.rows_of(pairs),
        results=measure.results_of(pairs),
        differences=measure.differences_of(pairs),
        differing=measure.differing_of(pairs),
    )
    if as_json:
        typer.echo(json.dumps({**dataclasses.asdict(report), "identical": report.identical}, indent=2))
    else:
        _print(report)
    if not complete:
        raise typer.Exit(130)
    if not report.identical:
        raise typer.Exit(1)


class AlwaysWrong(Drafter):
    """Proposes one token over and over, as often as it may.

    Attributes:
        token: one that no answer has; the last of a vocabulary is a rare or an unused one.
    """

    name = "always-wrong"

    def __init__(self) -> None:
        self.token = 0

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """A chain of the row's whole budget."""
        return [DraftTree.chain((self.token,) * row.budget) for row in rows]


class TaskRunner:
    """Answers tasks with one engine, each run in a scope of its own."""

    def __init__(self, engine: Engine, params: SamplingParams) -> None:
        self._engine = engine
        self._params = params
        self._ids: dict[str, list[int]] = {}
        self._seeds: dict[str, int] = {}
        self._scopes: Iterator[str] = (f"bench-{n}" for n in itertools.count())

    def prompt(self, task: Task) -> list[int]:
        """A task as prompt tokens: through the chat template, where the model has one."""
        if task.task_id not in self._ids:
            engine = self._engine
            if engine.chat_template is None:
                self._ids[task.task_id] = engine.tokenizer.encode(task.prompt)
            else:
                self._ids[task.task_id] = engine.chat_ids([{"role": "user", "content": task.prompt}])
        return self._ids[task.task_id]

    def fits(self, task: Task) -> bool:
        """Whether prompt and answer fit the engine's context."""
        return len(self.prompt(task)) + _most(task) <= self._engine.max_model_len

    def warm_up(self, tasks: Sequence[Task]) -> None:
        """Maps weights, starts threads and lets the draft length settle: a few tokens, off and on."""
        short = [task._replace(max_tokens=min(_WARM_TOKENS, _most(task))) for task in tasks]
        for speculate in (False, True):
            self.trial(short, speculate)

    def trial(self, tasks: Sequence[Task], speculate: bool) -> measure.Trial:
        """Answers tasks together; times begin with the first submission. Raises what made the drafter fail."""
        prompts = [self.prompt(task) for task in tasks]
        params = [self._params_of(task) for task in tasks]
        handles = []
        before = self._phases()
        began = time.perf_counter()
        try:
            for ids, each in zip(prompts, params, strict=True):
                handles.append(self._engine.submit(ids, each, speculate=speculate, scope=next(self._scopes)))
            outputs = [handle.result() for handle in handles]
        finally:
            for handle in handles:
                handle.cancel()
        seconds = time.perf_counter() - began
        failure = None if self._engine.speculator is None else self._engine.speculator.failure
        if failure is not None:
            raise failure
        spent = (after - at_first for after, at_first in zip(self._phases(), before, strict=True))
        return measure.Trial(seconds, tuple(map(run_of, outputs)), measure.Phases(*spent))

    def _phases(self) -> measure.Phases:
        """Where the time of all steps so far went."""
        now = self._engine.stats().speculation
        return measure.Phases(now.draft_seconds, now.forward_seconds, now.verify_seconds, now.schedule_seconds)

    def _params_of(self, task: Task) -> SamplingParams:
        seed = self._seeds.setdefault(task.task_id, len(self._seeds))
        return dataclasses.replace(self._params, max_tokens=_most(task), seed=seed)


def _capped(task: Task, most: int) -> Task:
    return task._replace(max_tokens=most if task.max_tokens is None else min(most, task.max_tokens))


def _most(task: Task) -> int:
    assert task.max_tokens is not None, "tasks are capped when they are read"
    return task.max_tokens


def run_of(output: RequestOutput) -> measure.Run:
    """A finished request as the benchmarks compare it."""
    stats, counts = output.stats, output.stats.speculation
    return measure.Run(
        text=output.text,
        token_ids=output.token_ids,
        finish_reason=output.finish_reason,
        seconds=stats.total_seconds,
        first_token_seconds=stats.total_seconds if stats.first_token_seconds is None else stats.first_token_seconds,
        counts=measure.Counts(**{field: getattr(counts, field) for field in measure.Counts._fields}),
    )


_COLUMNS: Mapping[str, str] = {
    "CATEGORY": "category",
    "TASKS": "tasks",
    "OFF TOKENS/S": "off_tokens_per_s",
    "ON TOKENS/S": "on_tokens_per_s",
    "RATIO": "ratio",
    "DECODE": "decode_ratio",
    "TOKENS/STEP": "tokens_per_step",
    "ACCEPTED": "acceptance",
    "SAME": "identical",
}
_TIMES: Mapping[str, str] = {
    "CATEGORY": "category",
    "REQUESTS": "runs",
    "OFF P50 S": "off_p50_s",
    "ON P50 S": "on_p50_s",
    "OFF P99 S": "off_p99_s",
    "ON P99 S": "on_p99_s",
}
_LEGEND = (
    "ratio = time off / time on, prompts included; decode = the same after the first token; tokens/step = emitted "
    "tokens / steps that chose tokens; accepted = accepted / proposed draft tokens; same = whether off and on gave "
    "the same texts. A category a has the tasks of a/b, too."
)
_TIMES_LEGEND = (
    "p50, p99 = seconds of a request, from its submission to its end; with fewer than 100 requests, p99 is little less "
    "than the slowest"
)


def _cell(field: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        if field == "acceptance":
            return f"{value:.0%}"
        return f"{value:.1f}" if field.endswith("tokens_per_s") else f"{value:.2f}"
    text = str(value)
    return text if cell_len(text) <= _CATEGORY_WIDTH else set_cell_size(text, _CATEGORY_WIDTH - 3) + "..."


def _say(text: str, indent: str = "") -> None:
    """A paragraph of lines that fit beside the table."""
    typer.echo(textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False))


def _print(report: measure.SpeculationReport) -> None:
    print_setup(report.setup)
    choice = "greedy" if report.temperature == 0 else f"temperature {report.temperature:g}"
    rounds = "1 round" if report.rounds == 1 else f"{report.rounds} rounds"
    typer.echo(
        f"draft {report.draft}, length {report.draft_len}, {choice}, batch {report.batch}, at most "
        f"{report.max_tokens} tokens an answer, {rounds}"
    )
    _say(report.isolation)
    if report.left_out:
        _say(f"left out, since the context can't hold them: {', '.join(report.left_out)}")
    if not report.complete:
        typer.echo("INTERRUPTED: only what was finished until then is counted")
    typer.echo()
    for columns, legend in ((_COLUMNS, _LEGEND), (_TIMES, _TIMES_LEGEND)):
        rows = [[_cell(field, getattr(row, field)) for field in columns.values()] for row in report.rows]
        print_table([list(columns), *rows])
        _say(legend)
        typer.echo()
    _say(
        "share of the drafted steps that accepted at least 1, 2, 3, ... draft tokens (accepted_by_position / drafted; "
        "not given that the one before was accepted):"
    )
    for row in report.rows:
        shares = ["-" if place.share is None else f"{place.share:.0%}" for place in row.positions]
        more = f", and {len(shares) - _SHOWN_POSITIONS} more" if len(shares) > _SHOWN_POSITIONS else ""
        found = f"{', '.join(shares[:_SHOWN_POSITIONS])}{more} (of {row.drafted})" if shares else "no drafts"
        _say(f"  {row.category}: {found}", indent="    ")
    typer.echo()
    if report.identical:
        typer.echo("every text is the same with and without speculation")
    else:
        typer.echo(f"TEXTS DIFFER: {', '.join(report.differing)} (--json has both and where they part)")
