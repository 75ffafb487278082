"""How `forerun plan speculate` shows its table."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from forerun.cli.plan_view import print_table

if TYPE_CHECKING:
    from forerun.plan.speculate import Point
    from forerun.plan.speculate_table import Prices, Row, SpeculationTable, Summary

_PRICES = (
    "length", "tokens_per_step", "draft_cost", "verify_ratio", "speedup",
    "tokens_per_s", "throughput", "plain_tokens_per_s", "best_length", "loss",
    "low_load_length", "low_load_speedup", "low_load_loss",
)  # fmt: skip


def print_speculation(table: SpeculationTable, batches: Sequence[int], length: int | None) -> None:
    """Rows by drafter, lengths by bucket, where each stops paying, and who overtakes whom. `length`: the one that was
    asked for."""
    columns = ("context", "batch", "draft", "tokens/step", "c", "v", "speedup", "tokens/s each", "all")
    last = ("best length", "loss") if length is not None else ("low-load length", "loss")
    for drafter, rows in itertools.groupby(table.rows, lambda row: row.drafter):
        typer.echo(f"\n{drafter}")
        print_table((*columns, *last), [_cells(row, length) for row in rows], words=())
    if length is not None:
        shorter = {row.drafter: row.prices.point.length for row in table.rows if row.prices}
        for drafter, drafted in shorter.items():
            if drafted < length:
                typer.echo(f"{drafter} drafts {drafted} tokens at most")
    if any(row.prices is None for row in table.rows):
        typer.echo("- : the KV of so many sequences doesn't fit beside the weights")
    _print_buckets(table, batches)
    _print_summaries(table.summaries, length)
    for context, (batch, ahead, behind) in table.overtakes:
        typer.echo(f"context {context:.0f}: from batch {batch} on {ahead} is faster than {behind}")
    if not table.overtakes and len({summary.drafter for summary in table.summaries}) > 1:
        typer.echo("no drafter overtakes another")


def row_json(row: Row) -> dict[str, Any]:
    """The keys of a row."""
    return {
        "drafter": row.drafter,
        "batch": row.batch,
        "context": row.context,
        "fits": row.prices is not None,
        **(prices_json(row.prices) if row.prices else dict.fromkeys(_PRICES)),
    }


def prices_json(prices: Prices) -> dict[str, Any]:
    """The numbers of a row."""
    point, best, kept = prices
    values = (
        point.length, point.tokens_per_step, point.draft_cost, point.verify_ratio, point.speedup,
        point.tokens_per_second, point.throughput, 1 / point.plain_seconds, best.length, prices.loss,
        kept.length, kept.speedup, prices.low_load_loss,
    )  # fmt: skip
    return dict(zip(_PRICES, values, strict=True))


def summary_json(summary: Summary) -> dict[str, Any]:
    """The keys of a summary."""
    return {
        "drafter": summary.drafter,
        "context": summary.context,
        "fit": summary.most,
        "searched": summary.searched,
        "pays": summary.pays,
        "break_even": summary.break_even,
        "buckets": [
            {"from": bucket.lo, "to": bucket.hi, "length": bucket.length, "loss": loss}
            for bucket, loss in summary.buckets
        ],
        "peak": {"batch": summary.peak.point.batch, **prices_json(summary.peak)} if summary.peak else None,
    }


def _cells(row: Row, length: int | None) -> Sequence[str]:
    place = f"{row.context:.0f}", str(row.batch)
    if row.prices is None:
        return (*place, *["-"] * 9)
    point, best, kept = row.prices
    other, loss = (best, row.prices.loss) if length is not None else (kept, row.prices.low_load_loss)
    return (
        *place, str(point.length), f"{point.tokens_per_step:.2f}", f"{point.draft_cost:.3f}",
        f"{point.verify_ratio:.2f}", f"{point.speedup:.2f}", f"{point.tokens_per_second:.4g}",
        f"{point.throughput:.5g}", _priced(other), f"{loss:.0%}",
    )  # fmt: skip


def _priced(point: Point) -> str:
    return f"{point.length}: {point.speedup:.2f}"


def _print_buckets(table: SpeculationTable, batches: Sequence[int]) -> None:
    """Draft lengths: a row for each drafter and context, a column for each bucket."""
    starts = [1, *(batch + 1 for batch in batches[:-1])]
    names = [str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in zip(starts, batches, strict=True)]
    rows = []
    for summary in table.summaries:
        lengths = {found.bucket.lo: str(found.bucket.length) for found in summary.buckets}
        rows.append((summary.drafter, f"{summary.context:.0f}", *(lengths.get(lo, "-") for lo in starts)))
    typer.echo("\ndraft length by batch: the one that loses least at the worse of both ends")
    print_table(("drafter", "context", *names), rows)


def _print_summaries(summaries: Sequence[Summary], length: int | None) -> None:
    what = "the length that is best at low load" if length is None else f"{length} draft tokens"
    typer.echo(f"\nwhere it pays, and at peak load {what}")
    rows = []
    for summary in summaries:
        runs = ", ".join(str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in summary.pays) or "nowhere"
        found = (summary.drafter, f"{summary.context:.0f}", str(summary.most), runs)
        if summary.peak is None:
            rows.append((*found, "-", "-", "-", "-", "-"))
            continue
        even = "none" if summary.break_even is None else str(summary.break_even)
        point, best, kept = summary.peak
        left, loss = (kept, summary.peak.low_load_loss) if length is None else (point, summary.peak.loss)
        rows.append((*found, even, str(point.batch), _priced(left), _priced(best), f"{loss:.0%}"))
    left_column = "low-load length" if length is None else "length"
    columns = ("fit", "pays at batches", "break-even", "peak batch", left_column, "best length", "loss")
    print_table(("drafter", "context", *columns), rows)
