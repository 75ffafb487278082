"""`forerun bench serve`: load against an OpenAI-compatible endpoint, and what its clients see."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import platform
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import typer

import forerun
from forerun.cli.bench_setup import JSON, LIMIT, TASKS, print_table
from forerun.errors import ConfigurationError, InvalidRequestError
from forerun.measure import load as measure
from forerun.measure.load_compare import Comparison, Earlier
from forerun.measure.speed import model_sha256
from forerun.measure.tasks import Task, read_tasks

if TYPE_CHECKING:
    from forerun.measure.load_client import LoadClient

KEY_VARIABLE = "FORERUN_API_KEY"

HELP = """Put load on an OpenAI-compatible server and measure what its clients see.

URL is the server's address; /v1 is added where it has no path. --rate R sends R requests a second at random times
(Poisson), whether or not earlier ones were answered, and counts latencies from when a request was due. --concurrency N
keeps N requests running. Answers are streamed; tokens are counted by the server's usage.

Tasks go in an order drawn with --seed, over and over; task files are those of bench speculate. --compare refuses a run
with another load. After Ctrl-C (exit code 130) the report is over the requests that were finished. The exit code is 1
if no request was answered.

The API key comes from an environment variable, so that it stands in no process list and no report."""

_WIDTH = 100


def serve(
    url: str = typer.Argument(..., metavar="URL", help="Such as http://127.0.0.1:8000."),
    tasks_file: Path = TASKS,
    rate: float | None = typer.Option(None, "--rate", metavar="R", help="Requests per second of an open loop."),
    concurrency: int | None = typer.Option(
        None, "--concurrency", metavar="N", min=1, max=4096, help="Requests at a time of a closed loop."
    ),
    requests: int | None = typer.Option(
        None, "--requests", "-n", min=1, max=1_000_000, help="Measured requests. [default: one per task]"
    ),
    warmup: int | None = typer.Option(
        None, "--warmup", min=0, max=10_000, help="Requests before them that don't count. [default: N, or 1]"
    ),
    api: str = typer.Option("chat", "--api", help="Endpoint: chat or completions."),
    model: str | None = typer.Option(None, "--model", "-m", help="Its name there. [default: the only one listed]"),
    max_tokens: int = typer.Option(
        256, "--max-tokens", min=1, max=1 << 20, help="Cap of every answer; a task's own counts where it is smaller."
    ),
    temperature: float = typer.Option(0.0, "--temperature", "-t", min=0.0, help="0 is greedy."),
    seed: int = typer.Option(0, "--seed", min=0, help="Of the order, the times and, above temperature 0, the answers."),
    limit: int | None = LIMIT,
    extra_body: str = typer.Option(
        "{}", "--extra-body", metavar="JSON", help='Further fields of each request, such as {"ignore_eos": true}.'
    ),
    target_ttft_ms: float | None = typer.Option(
        None, "--target-ttft-ms", min=0.001, help="Goodput: most to the first token."
    ),
    target_tpot_ms: float | None = typer.Option(
        None, "--target-tpot-ms", min=0.001, help="Goodput: most per token after it, of each answer."
    ),
    timeout: float = typer.Option(600.0, "--timeout", min=0.001, help="Seconds after which a request has failed."),
    api_key_env: str = typer.Option(KEY_VARIABLE, "--api-key-env", metavar="NAME", help="Variable with the API key."),
    compare: Path | None = typer.Option(
        None, "--compare", metavar="FILE.json", help="Print ratios to an earlier run's --json."
    ),
    as_json: bool = JSON,
) -> None:
    """The command."""
    try:
        from forerun.measure.load_client import LoadClient, base_url
    except ImportError as error:
        raise ConfigurationError("load needs httpx: pip install 'forerun[bench]'") from error
    if (rate is None) == (concurrency is None):
        raise typer.BadParameter("give either --rate (open loop) or --concurrency (closed loop)")
    if rate is not None and not 0 < rate <= 1e6:
        raise typer.BadParameter(f"{rate} is not allowed; expected requests per second above 0", param_hint="--rate")
    if api not in get_args(measure.Api):
        raise typer.BadParameter(f"{api!r} is unknown; expected chat or completions", param_hint="--api")
    base, extra = base_url(url), _extra(extra_body)
    tasks = read_tasks(tasks_file, limit)
    load = measure.Load(
        tasks_sha256=model_sha256(tasks_file),
        limit=limit,
        api="chat" if api == "chat" else "completions",
        mode="closed" if rate is None else "open",
        rate=rate,
        concurrency=concurrency,
        requests=len(tasks) if requests is None else requests,
        warmup=(concurrency or 1) if warmup is None else warmup,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        extra=extra,
    )
    earlier = None if compare is None else Earlier.read(compare)
    if earlier is not None:
        earlier.check(load)
    targets = None
    if target_ttft_ms is not None or target_tpot_ms is not None:
        targets = measure.Targets(target_ttft_ms, target_tpot_ms)
    client = LoadClient(base, load.api, key=os.environ.get(api_key_env) or None, timeout=timeout)
    run = _Run(load, tasks, model)
    try:
        with _progress(load.requests) as show:
            run.show = show
            asyncio.run(run.drive(client))
    except KeyboardInterrupt:
        if not run.exchanges:
            raise
    setup = measure.LoadSetup(
        url=base,
        model=run.model or "",
        server=next((each.server for each in run.exchanges if each.server), None),
        hardware="unknown",
        client=_client_version(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        tasks_file=str(tasks_file),
        command=_command(base, run.model or "", tasks_file, load, targets, timeout, api_key_env),
    )
    complete = len(run.exchanges) == load.requests
    report = measure.report_of(run.exchanges, setup, load, targets=targets, complete=complete)
    comparison = earlier.compare(report) if earlier is not None and complete else None
    if as_json:
        shown = dataclasses.asdict(report)
        if comparison is not None:
            shown["comparison"] = dataclasses.asdict(comparison)
        typer.echo(json.dumps(shown, indent=2))
    else:
        _print(report)
        if comparison is not None:
            _print_comparison(comparison)
    if not complete:
        raise typer.Exit(130)
    if not report.answered:
        raise typer.Exit(1)


class _Run:
    """A load on its way.

    Attributes:
        exchanges: the measured ones that are over.
        model: as it is called there; found out if it wasn't given.
        show: is told of every measured exchange.
    """

    def __init__(self, load: measure.Load, tasks: Sequence[Task], model: str | None) -> None:
        self._load = load
        self._tasks = tasks
        self.exchanges: list[measure.Exchange] = []
        self.model = model
        self.show: Callable[[measure.Exchange], None] = lambda _: None

    async def drive(self, client: LoadClient) -> None:
        """Warms up, then sends what is measured."""
        from forerun.measure.load_client import CLOCK, Order
        from forerun.measure.load_run import chosen_tasks, poisson_times, run_closed, run_open

        load = self._load
        async with client:
            model = self.model = self.model or await client.only_model()
            warmup, measured = (
                [
                    Order.of(
                        task, load.api, model, max_tokens=load.max_tokens, temperature=load.temperature,
                        seed=load.seed + n, extra=load.extra,
                    )
                    for n, task in enumerate(tasks)
                ]
                for tasks in chosen_tasks(self._tasks, load.requests, load.warmup, load.seed)
            )  # fmt: skip
            await run_closed(warmup, load.concurrency or 1, client.ask, lambda _: None)
            if load.rate is None:
                await run_closed(measured, load.concurrency or 1, client.ask, self._over)
            else:
                times = poisson_times(load.requests, load.rate, load.seed)
                await run_open(measured, times, client.ask, self._over, clock=CLOCK)

    def _over(self, exchange: measure.Exchange) -> None:
        self.exchanges.append(exchange)
        self.show(exchange)


def _extra(text: str) -> dict[str, Any]:
    from forerun.measure.load_client import OWN_FIELDS

    try:
        extra = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{text[:60]!r} is no JSON: {error}", param_hint="--extra-body") from None
    if not isinstance(extra, dict):
        raise typer.BadParameter("expected a JSON object", param_hint="--extra-body")
    taken = sorted(extra.keys() & OWN_FIELDS)
    if taken:
        raise InvalidRequestError(f"--extra-body can't set {taken[0]}: the benchmark does; use its options")
    return extra


def _client_version() -> str:
    import httpx

    return f"forerun {forerun.__version__}, httpx {httpx.__version__}, Python {platform.python_version()}"


def _command(
    base: str,
    model: str,
    tasks_file: Path,
    load: measure.Load,
    targets: measure.Targets | None,
    timeout: float,
    api_key_env: str,
) -> str:
    """What gives these numbers again, with every default spelt out."""
    words = ["forerun", "bench", "serve", base, "--tasks", str(tasks_file), "--api", load.api, "-m", model]
    words += ["--concurrency", str(load.concurrency)] if load.rate is None else ["--rate", f"{load.rate:g}"]
    words += ["--requests", str(load.requests), "--warmup", str(load.warmup), "--max-tokens", str(load.max_tokens)]
    words += ["--temperature", f"{load.temperature:g}", "--seed", str(load.seed)]
    words += [] if load.limit is None else ["--limit", str(load.limit)]
    words += ["--extra-body", json.dumps(load.extra)] if load.extra else []
    if targets is not None:
        words += [] if targets.ttft_ms is None else ["--target-ttft-ms", f"{targets.ttft_ms:g}"]
        words += [] if targets.tpot_ms is None else ["--target-tpot-ms", f"{targets.tpot_ms:g}"]
    words += ["--timeout", f"{timeout:g}"]
    words += [] if api_key_env == KEY_VARIABLE else ["--api-key-env", api_key_env]
    return shlex.join(words)


@contextmanager
def _progress(requests: int) -> Iterator[Callable[[measure.Exchange], None]]:
    """A bar on a terminal's standard error; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=requests, failed="")
        failed = 0

        def show(exchange: measure.Exchange) -> None:
            nonlocal failed
            failed += exchange.error is not None
            bar.update(task, advance=1, failed=f"{failed} failed" if failed else "")

        yield show


_TIMES: Mapping[str, str] = {
    "to first token": "first_token_ms",
    "between tokens": "between_tokens_ms",
    "between events": "between_events_ms",
    "per token of an answer": "token_ms",
    "end to end": "end_to_end_ms",
    "sent late by": "late_ms",
}
_LEGEND = (
    "Milliseconds, over answers without error. Between tokens: over tokens, a gap's time over its tokens{how}. Between "
    "events: over gaps between reads that brought text, which may bring several tokens. Per token of an answer: over "
    "answers, from the first text to the last."
)
_SPREAD = (
    "; this server doesn't say how many tokens an event has, so that an answer's tokens are spread evenly over its gaps"
)


def _say(text: str) -> None:
    typer.echo(textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False))


def _print(report: measure.LoadReport) -> None:
    setup, load = report.setup, report.load
    typer.echo(f"{setup.model} at {setup.url}, server {setup.server or 'unknown'}, hardware {setup.hardware}")
    typer.echo(f"{setup.client}, {setup.date}")
    typer.echo(setup.command)
    form = f"{load.rate:g} requests/s, open loop" if load.rate else f"{load.concurrency} at a time, closed loop"
    choice = "greedy" if load.temperature == 0 else f"temperature {load.temperature:g}"
    typer.echo(
        f"{form}, {load.requests} requests after {load.warmup} to warm up, at most {load.max_tokens} tokens an answer, "
        f"{choice}"
    )
    if not report.complete:
        typer.echo(f"INTERRUPTED: {report.unfinished} requests weren't finished and don't count")
    typer.echo()
    typer.echo(
        f"{report.answered} answers in {report.seconds:.2f} s: {report.requests_per_s:.2f} requests/s, "
        f"{report.prompt_tokens} prompt and {report.output_tokens} output tokens in {report.events} events"
    )
    if report.output_tokens_per_s is not None and report.total_tokens_per_s is not None:
        typer.echo(
            f"{report.output_tokens_per_s:.1f} output tokens/s, {report.total_tokens_per_s:.1f} tokens/s with prompts"
        )
    else:
        typer.echo(f"{report.without_usage} answers came without usage, so there are no rates of tokens")
    for kind, count in report.errors.items():
        typer.echo(f"ERRORS: {count} {kind}: {report.examples[kind]}")
    _print_goodput(report.goodput)
    if report.speculation is not None:
        _print_speculation(report.speculation)
    typer.echo()
    rows = [["", "COUNT", "MEAN", "P50", "P90", "P99"]]
    for name, field in _TIMES.items():
        times: measure.Times | None = getattr(report, field)
        if times is not None:
            figures = (times.mean, times.p50, times.p90, times.p99)
            rows.append([name, str(times.count), *(f"{ms:.2f}" for ms in figures)])
    print_table(rows)
    _say(_LEGEND.format(how=_SPREAD if report.gap_tokens in ("spread", "mixed") else ""))


def _print_goodput(goodput: measure.Goodput | None) -> None:
    if goodput is None:
        return
    asked = [
        f"{name} within {ms:g} ms"
        for name, ms in (("first token", goodput.targets.ttft_ms), ("each further token", goodput.targets.tpot_ms))
        if ms is not None
    ]
    typer.echo(
        f"goodput: {goodput.requests_per_s:.2f} requests/s, {goodput.share:.1%} of all, had {' and '.join(asked)}"
    )


def _print_speculation(counts: measure.Speculation) -> None:
    acceptance, each = counts.acceptance, counts.tokens_per_decision
    accepted = "" if acceptance is None else f" ({acceptance:.0%})"
    tokens = "" if each is None else f", {each:.2f} tokens per step that chose some"
    typer.echo(f"speculation: {counts.accepted} of {counts.proposed} draft tokens accepted{accepted}{tokens}")


def _print_comparison(comparison: Comparison) -> None:
    then = comparison.then
    typer.echo()
    _say(f"beside {comparison.file}: {then.get('model')} at {then.get('url')}, {then.get('date')}")
    rows = [["", "THEN", "NOW", "NOW / THEN"]]
    for row in comparison.rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        rows.append([row.name, f"{row.then:.2f}", f"{row.now:.2f}", ratio])
    print_table(rows)
    for note in comparison.notes:
        _say(f"note: {note}")
