"""`forerun bench`: how fast a model runs on this machine, step by step, in batches, and with drafts."""

from __future__ import annotations

import dataclasses
import json
from functools import partial

import typer

from forerun import ops
from forerun.cli import bench_constrain, bench_masks, bench_serve, bench_speculate
from forerun.cli.bench_setup import (
    JSON,
    MODEL,
    THREADS,
    check_room,
    open_engine,
    print_setup,
    print_table,
    progress_shown,
    setup_of,
    slots_for,
)
from forerun.measure import passage, speed

_DECODE_STEPS = 4
_MAX_ROWS = 1024
_MAX_BATCH = 256


def register(app: typer.Typer) -> None:
    """Add the group `bench` to the application."""
    group = typer.Typer(help="Measure speed on this machine.", rich_markup_mode=None)
    group.callback(invoke_without_command=True)(_root)
    group.command(
        "step",
        help="Time one forward of M tokens of one request, as a verify step has them, against the "
        "memory bandwidth measured in the same rounds.",
        short_help="Time one forward of M tokens of one request.",
    )(_step)
    group.command(
        "decode",
        help="Time prefill and generation of equal requests that start together, by batch size.",
        short_help="Time prefill and generation by batch size.",
    )(_decode)
    group.command("speculate", help=bench_speculate.HELP)(bench_speculate.speculate)
    group.command("constrain", help=bench_constrain.HELP, short_help="Answer tasks with and without a constraint.")(
        bench_constrain.constrain
    )
    group.command("masks", help=bench_masks.HELP, short_help="Feed JSON instances through schemas' masks.")(
        bench_masks.masks
    )
    group.command("serve", help=bench_serve.HELP, short_help="Put load on a server, see what clients see.")(
        bench_serve.serve
    )
    app.add_typer(group, name="bench")


def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _step(
    model: str | None = MODEL,
    rows: str = typer.Option("1,2,4,5,8,16,32", "--rows", metavar="M,M,...", help="Tokens per forward."),
    context: int = typer.Option(128, "--context", min=1, max=1 << 20, help="Tokens in the cache before them."),
    repeats: int = typer.Option(20, "--repeats", min=1, max=10_000, help="Rounds; each times every M once."),
    threads: int | None = THREADS,
    as_json: bool = JSON,
) -> None:
    from forerun.cli.bench_probe import ForwardProbe, run_decode_steps

    widths = _numbers(rows, "--rows", _MAX_ROWS)
    # For the forwards, and for a request that decodes behind as long a context.
    slots = slots_for(context + max(widths)) + slots_for(context + _DECODE_STEPS + 1)
    engine, name, path = open_engine(model, slots, threads, rows=max(widths), prefix_cache=True, draft="none")
    check_room(engine, max(context + max(widths), context + _DECODE_STEPS + 1))
    ids = engine.tokenizer.encode(passage.PASSAGE)
    tokens = passage.excerpt(ids, 0, context + max(widths))
    used = engine.executor.tape.threads
    command = ["step", "-m", name, "--rows", ",".join(map(str, widths))]
    command += ["--context", str(context), "--repeats", str(repeats), "--threads", str(used)]
    with ForwardProbe(engine, tokens, context) as probe, progress_shown() as show:
        report = speed.measure_steps(
            setup_of(engine, name, path, command),
            context=context,
            rows=widths,
            repeats=repeats,
            forward=probe.forward,
            decode_steps=partial(run_decode_steps, engine, tokens[:context], _DECODE_STEPS),
            n_decode_steps=_DECODE_STEPS,
            read_bandwidth=partial(ops.read_bandwidth, used, repeats=2),
            on_round=lambda turn, turns: show(f"round {turn} of {turns}"),
        )
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        _print_steps(report)


def _decode(
    model: str | None = MODEL,
    batch: str = typer.Option("1,8", "--batch", metavar="B,B,...", help="Requests at a time."),
    prompt_tokens: int = typer.Option(128, "--prompt-tokens", min=1, max=1 << 20, help="Tokens of each prompt."),
    max_tokens: int = typer.Option(128, "--max-tokens", min=1, max=1 << 20, help="Tokens that each request generates."),
    repeats: int = typer.Option(3, "--repeats", min=1, max=10_000, help="Rounds; each runs every batch size once."),
    threads: int | None = THREADS,
    as_json: bool = JSON,
) -> None:
    from forerun.cli.bench_probe import run_batch

    batches = _numbers(batch, "--batch", _MAX_BATCH)
    slots = max(batches) * slots_for(prompt_tokens + max_tokens)
    engine, name, path = open_engine(model, slots, threads, rows=max(batches), prefix_cache=False, draft="none")
    check_room(engine, prompt_tokens + max_tokens)
    ids = engine.tokenizer.encode(passage.PASSAGE)
    prompts = passage.distinct_prompts(ids, max(batches), prompt_tokens)
    command = ["decode", "-m", name, "--batch", ",".join(map(str, batches))]
    command += ["--prompt-tokens", str(prompt_tokens), "--max-tokens", str(max_tokens)]
    command += ["--repeats", str(repeats), "--threads", str(engine.executor.tape.threads)]
    # The first forward maps weights and starts threads.
    run_batch(engine, [prompts[0][: ops.BLOCK]], 2)
    with progress_shown() as show:
        report = speed.measure_decode(
            setup_of(engine, name, path, command),
            batches=batches,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            repeats=repeats,
            trial=lambda size: run_batch(engine, prompts[:size], max_tokens),
            on_round=lambda turn, turns: show(f"round {turn} of {turns}"),
        )
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        _print_decode(report)


def _numbers(text: str, option: str, most: int) -> list[int]:
    """A list such as "1,2,4", each number once, in order of size."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words):
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 1,2,4", param_hint=option)
    numbers = sorted({int(word) for word in words})
    if numbers[0] < 1 or numbers[-1] > most:
        raise typer.BadParameter(f"{text!r}: each number must be from 1 to {most}", param_hint=option)
    return numbers


def _print_steps(report: speed.StepReport) -> None:
    print_setup(report.setup)
    typer.echo(
        f"read bandwidth {report.read_gb_per_s:.1f} GB/s (best {report.read_gb_per_s_best:.1f}), "
        f"{report.context} tokens in the cache, medians of {report.repeats} rounds"
    )
    rows = [("ROWS", "MS", "BEST MS", "RATIO", "WEIGHTS GB/S", "OF BANDWIDTH")]
    for row in report.rows:
        rows.append(
            (
                str(row.rows),
                f"{row.ms:.2f}",
                f"{row.ms_best:.2f}",
                "-" if row.ratio is None else f"{row.ratio:.2f}",
                f"{row.weight_gb_per_s:.1f}",
                f"{row.bandwidth_share:.0%}",
            )
        )
    print_table(rows)
    typer.echo(
        f"a decode step of the engine: {report.decode_step_ms:.2f} ms, "
        f"{report.outside_native_share:.1%} of it outside native code"
    )


def _print_decode(report: speed.DecodeReport) -> None:
    print_setup(report.setup)
    typer.echo(
        f"{report.prompt_tokens} prompt tokens and {report.max_tokens} output tokens per request, "
        f"medians of {report.repeats} rounds"
    )
    rows = [["BATCH", "PREFILL TOKENS/S", "DECODE TOKENS/S", "PER REQUEST", "MS PER STEP"]]
    for row in report.rows:
        figures = (
            row.decode_tokens_per_s,
            row.decode_tokens_per_s_per_request,
            row.decode_step_ms,
        )
        decode = ["-" if figure is None else f"{figure:.1f}" for figure in figures]
        rows.append([str(row.batch), f"{row.prefill_tokens_per_s:.1f}", *decode])
    print_table(rows)
