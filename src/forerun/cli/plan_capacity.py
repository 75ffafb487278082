"""`forerun plan capacity`: sequences that fit, when the KV pool is full, and what then happens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from forerun.cli.plan_drafters import drafter_lines, drafters_json, proposals_of
from forerun.cli.plan_setup import EXPLAIN, JSON, PlanSetup, planned
from forerun.cli.plan_view import (
    derivation_json,
    milliseconds,
    numbers,
    print_derivation,
    print_json,
    print_setup,
    print_table,
    quantity,
)
from forerun.errors import PlanError

if TYPE_CHECKING:
    from forerun.plan.capacity import Capacity, Preemption, Row
    from forerun.plan.derivation import Derivation

HELP = """How many requests a machine holds, and how fast.

KV a token, the pool, when it is full, what a preemption costs, and the speed of each user against that of all.

All requests have --prompt and --reply tokens, and those of a batch start together. A row's times are half-way from the
prompt to the end, or to a full pool.

--json prints command, setup, prompt, reply, utilization, block, chunk, drafters, weights_bytes, drafter_bytes,
pool_bytes, token_bytes, long_token_bytes (beyond all windows), pool_tokens, sequence_bytes (at_start, mean, at_end),
fitting (at_start, on_average, to_the_end), preemptions (tokens, recompute_seconds, swap_bytes, swap_seconds), rows
(batch, length, context, tokens_per_step, step_seconds, tokens_per_s, throughput_tokens_per_s, pool_start, pool_end,
fills_at, fills_tokens), and with --explain derivations (title, lines (symbol, value, unit, formula, source)). drafters:
drafter, kind, acceptance, assumed, weight_bytes. tokens_per_s is each request's, throughput_tokens_per_s that of all;
pool_start, pool_end: shares of the pool that are wanted, above 1 if it fills.

--explain derives what fits to the end; the step and tokens/s of a row, and when it fills the pool (--explain-row, by
default the first that fills it, or the last); recompute and swap of the first preemption."""


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("capacity", help=HELP)(planned(capacity))


def capacity(
    setup: PlanSetup,
    prompt: int = typer.Option(1000, "--prompt", help="Tokens of each prompt."),
    reply: int = typer.Option(500, "--reply", help="Tokens of each reply."),
    batches: str | None = typer.Option(
        None, "--batches", "--batch", "-b", metavar="N,N,...",
        help="Requests that start together, such as 1,8,64. [default: 1, 2, 4, ... to those that fit]",
    ),
    drafter: str | None = typer.Option(
        None, "--drafter", "-d", metavar="SPEC", help="Speculate with KIND[=ARGUMENT][:RATE,RATE,...]."
    ),
    length: int | None = typer.Option(
        None, "--length", "-k", help="Draft tokens. [default: the best at each batch]"
    ),
    utilization: float = typer.Option(0.9, "--utilization", help="Share of the memory for weights and KV."),
    block: int = typer.Option(16, "--block", help="Tokens of a block of the pool."),
    chunk: int = typer.Option(2048, "--chunk", help="Tokens of a prompt that one step computes."),
    explain: bool = EXPLAIN,
    explain_row: int | None = typer.Option(None, "--explain-row", metavar="N", help="Explain the row of N requests."),
    as_json: bool = JSON,
) -> None:  # fmt: skip
    """The command."""
    from forerun.plan.capacity import Capacity, Lengths, default_batches
    from forerun.plan.memory import check_context

    wanted = numbers(batches, "batches") if batches is not None else None
    lengths = Lengths(prompt, reply)
    lengths.check()
    check_context(setup.model, prompt, "prompt")
    check_context(setup.model, prompt + reply, "reply")
    texts = [drafter] if drafter is not None else []
    proposals = proposals_of(texts, setup) if texts else []
    found = Capacity(
        network=setup.model.network, deployment=setup.deployment, lengths=lengths, utilization=utilization,
        block=block, chunk=chunk, proposal=proposals[0] if proposals else None,
    )  # fmt: skip
    rows = found.rows(wanted or default_batches(found.fitting), length=length)
    preemptions = [
        found.preemption(tokens) for tokens in sorted({prompt + 1, prompt + (reply + 1) // 2, prompt + reply})
    ]
    derivations = _explained(found, rows, preemptions, explain_row) if explain or explain_row is not None else []
    if as_json:
        body: dict[str, Any] = {
            "prompt": prompt, "reply": reply, "utilization": utilization, "block": block, "chunk": chunk,
            "drafters": drafters_json(texts, proposals) if texts else [],
            **_memory(found),
            "preemptions": [each._asdict() for each in preemptions],
            "rows": [_row_json(row) for row in rows],
        }  # fmt: skip
        if derivations:
            body["derivations"] = [{"title": each.title, "lines": derivation_json(each)} for each in derivations]
        print_json("capacity", setup, body)
        return
    print_setup(setup)
    for line in drafter_lines(texts, proposals) if texts else []:
        typer.echo(line)
    _print_memory(found)
    typer.echo("")
    print_table(
        ("requests", "drafts", "tokens/step", "at tokens", "ms/step", "tokens/s each", "tokens/s all", "pool at start",
         "at the end", "full at step", "tokens each"),
        [_row(row) for row in rows], words=(),
    )  # fmt: skip
    typer.echo("\na preemption, of a request with")
    print_table(
        ("tokens", "recompute", "swap out and in", "cheaper"), [_preempted(each) for each in preemptions], words=()
    )
    for derivation in derivations:
        print_derivation(derivation)


def _explained(
    found: Capacity, rows: Sequence[Row], preemptions: Sequence[Preemption], batch: int | None
) -> list[Derivation]:
    """Of every sort of number in the tables one. Raises PlanError if there is no row of that batch."""
    from forerun.plan import capacity_explain as plan

    if batch is None:
        row = next((row for row in rows if row.fills_at is not None), rows[-1])
    else:
        of_batch = {row.batch: row for row in rows}
        if batch not in of_batch:
            raise PlanError("explain-row", f"{batch} is no row; expected one of {', '.join(map(str, of_batch))}")
        row = of_batch[batch]
    first = preemptions[0]
    return [
        plan.explain_capacity(found),
        plan.explain_row(found, row),
        *([plan.explain_filling(found, row)] if row.fills_at is not None else []),
        plan.explain_recompute(found, first),
        *([plan.explain_swap(found, first)] if first.swap_seconds is not None else []),
    ]


def _memory(found: Capacity) -> dict[str, Any]:
    prompt, reply = found.lengths
    return {
        "weights_bytes": found.network.weight_bytes,
        "drafter_bytes": found.drafter.weight_bytes if found.drafter else 0.0,
        "pool_bytes": found.pool,
        "token_bytes": found.token_bytes,
        "long_token_bytes": found.long_token_bytes,
        "pool_tokens": found.pool / found.token_bytes,
        "sequence_bytes": {
            "at_start": found.held(prompt + 1), "mean": found.mean_held, "at_end": found.held(prompt + reply),
        },
        "fitting": found.fitting._asdict(),
    }  # fmt: skip


def _print_memory(found: Capacity) -> None:
    prompt, reply = found.lengths
    drafter = f" and {quantity(found.drafter.weight_bytes, 'B')} of the drafter" if found.drafter else ""
    typer.echo(
        f"\nKV a token: {binary(found.token_bytes)}"
        + (
            ""
            if found.long_token_bytes == found.token_bytes
            else f", {binary(found.long_token_bytes)} beyond the window"
        )
        + ", copies on all accelerators counted"
    )
    weights = quantity(found.network.weight_bytes, "B")
    memory = f"{found.deployment.gpus} x {quantity(found.deployment.hardware.memory, 'B')}"
    tokens = f"{found.pool / found.token_bytes:,.0f} tokens"
    if found.long_token_bytes != found.token_bytes:
        tokens += " within the window"
    pool = quantity(found.pool, "B")
    typer.echo(f"pool: {found.utilization:.0%} of {memory} - {weights} of weights{drafter} = {pool}, {tokens}")
    fits = found.fitting
    typer.echo(
        f"requests of {prompt} + {reply} tokens that fit: {fits.at_start} at the start "
        f"({binary(found.held(prompt + 1))} each), {fits.on_average} on average ({binary(found.mean_held)}), "
        f"{fits.to_the_end} to the end ({binary(found.held(prompt + reply))})"
    )


def _row(row: Row) -> Sequence[str]:
    point = row.point
    return (
        str(row.batch), str(point.length), f"{point.tokens_per_step:.2f}", f"{point.context:g}",
        f"{row.step_seconds * 1e3:.2f}",
        f"{point.tokens_per_second:.4g}", f"{point.throughput:.5g}", f"{row.pool_start:.1%}", f"{row.pool_end:.1%}",
        "-" if row.fills_at is None else str(row.fills_at), "-" if row.fills_tokens is None else str(row.fills_tokens),
    )  # fmt: skip


def _row_json(row: Row) -> dict[str, Any]:
    point = row.point
    return {
        "batch": row.batch,
        "length": point.length,
        "context": point.context,
        "tokens_per_step": point.tokens_per_step,
        "step_seconds": row.step_seconds,
        "tokens_per_s": point.tokens_per_second,
        "throughput_tokens_per_s": point.throughput,
        "pool_start": row.pool_start,
        "pool_end": row.pool_end,
        "fills_at": row.fills_at,
        "fills_tokens": row.fills_tokens,
    }


def _preempted(each: Preemption) -> Sequence[str]:
    swap = "-" if each.swap_seconds is None else milliseconds(each.swap_seconds)
    cheaper = "recompute" if each.swap_seconds is None or each.recompute_seconds <= each.swap_seconds else "swap"
    return str(each.tokens), milliseconds(each.recompute_seconds), swap, cheaper


def binary(count: float) -> str:
    """Bytes in powers of 1024: 320 KiB."""
    for size, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(count) >= size:
            return f"{count / size:.4g} {name}"
    return f"{count:.4g} B"
