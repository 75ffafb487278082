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
    "tokens_per_s", "throughput_tokens_per_s", "plain_tokens_per_s", "acceptance_needed", "best_length", "loss",
    "low_load_length", "low_load_speedup", "low_load_loss",
)  # fmt: skip

_FEW = 3
"""Batches below which a question is about these, and not about a schedule."""


def print_speculation(table: SpeculationTable, batches: Sequence[int], length: int | None) -> None:
    """Rows by drafter, lengths by bucket, where each stops paying, and who overtakes whom. `length`: the one that was
    asked for."""
    columns = (
        "context", "batch", "drafts", "tokens/step", "c", "v", "speedup", "tokens/s each", "tokens/s all", "a to pay",
    )  # fmt: skip
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
    typer.echo("a to pay: acceptance, the same at every depth, from which speculation is worth it")
    if len(batches) >= _FEW:
        _print_buckets(table, batches)
    _print_summaries(table.summaries, length)
    for context, (batch, ahead, behind) in table.overtakes:
        typer.echo(f"context {context:.0f}: from batch {batch} on {ahead} is faster than {behind}")
    if not table.overtakes and len({summary.drafter for summary in table.summaries}) > 1:
        typer.echo("no drafter overtakes another")
    if len(batches) < _FEW:
        typer.echo()
        summaries = {(summary.drafter, summary.context): summary for summary in table.summaries}
        for row in table.rows:
            typer.echo(_sentence(row, summaries[row.drafter, row.context], length))


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
    point, best, kept, needed = prices
    values = (
        point.length, point.tokens_per_step, point.draft_cost, point.verify_ratio, point.speedup,
        point.tokens_per_second, point.throughput, 1 / point.plain_seconds, needed, best.length, prices.loss,
        kept.length, kept.speedup, prices.low_load_loss,
    )  # fmt: skip
    return dict(zip(_PRICES, values, strict=True))


def summary_json(summary: Summary) -> dict[str, Any]:
    """The keys of a summary."""
    return {
        "drafter": summary.drafter,
        "context": summary.context,
        "fit_sequences": summary.most,
        "searched": summary.searched,
        "pays": summary.pays,
        "break_even": summary.break_even,
        "buckets": [{**bucket._asdict(), "loss": loss} for bucket, loss in summary.buckets],
        "peak": {"batch": summary.peak.point.batch, **prices_json(summary.peak)} if summary.peak else None,
    }


def _cells(row: Row, length: int | None) -> Sequence[str]:
    place = f"{row.context:.0f}", str(row.batch)
    if row.prices is None:
        return (*place, *["-"] * 10)
    point, best, kept, needed = row.prices
    other, loss = (best, row.prices.loss) if length is not None else (kept, row.prices.low_load_loss)
    return (
        *place, str(point.length), f"{point.tokens_per_step:.2f}", f"{point.draft_cost:.3f}",
        f"{point.verify_ratio:.2f}", f"{point.speedup:.2f}", f"{point.tokens_per_second:.4g}",
        f"{point.throughput:.5g}", "-" if needed is None else f"{needed:.2f}", _priced(other), f"{loss:.0%}",
    )  # fmt: skip


def _sentence(row: Row, summary: Summary, length: int | None) -> str:
    """The answer to a question about one batch and context."""
    place = f"batch {row.batch}, context {row.context:.0f}: {row.drafter}"
    if row.prices is None:
        return f"{place} doesn't fit; {summary.most} sequences do"
    point = row.prices.point
    if not point.length:
        return f"{place} doesn't pay at any draft length; {_where_it_pays(summary, length)}"
    drafts = "1 draft" if point.length == 1 else f"{point.length} drafts"
    return f"{place} with {drafts}, {point.speedup:.2f} times as fast; {_where_it_pays(summary, length)}"


def _where_it_pays(summary: Summary, length: int | None) -> str:
    if not summary.pays:
        return "it pays at no batch"
    how = "the best length of each batch" if length is None else "that length"
    if summary.break_even is None:
        return f"with {how} it pays at every batch up to {summary.searched}"
    if summary.pays == ((1, summary.break_even - 1),):
        return f"with {how} it pays up to batch {summary.break_even - 1}"
    return f"with {how} it pays at batches {_runs(summary)}"


def _runs(summary: Summary) -> str:
    return ", ".join(str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in summary.pays)


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
    where = "with the best length of each batch" if length is None else f"with {length} draft tokens"
    typer.echo(f"\nwhere it pays ({where}), and at peak load {what}")
    rows = []
    for summary in summaries:
        found = (summary.drafter, f"{summary.context:.0f}", str(summary.most), _runs(summary) or "nowhere")
        if summary.peak is None:
            rows.append((*found, "-", "-", "-", "-", "-"))
            continue
        even = "none" if summary.break_even is None else str(summary.break_even)
        point, best, kept, _ = summary.peak
        left, loss = (kept, summary.peak.low_load_loss) if length is None else (point, summary.peak.loss)
        rows.append((*found, even, str(point.batch), _priced(left), _priced(best), f"{loss:.0%}"))
    left_column = "low-load length" if length is None else "length"
    columns = ("fit", "pays at batches", "break-even", "peak batch", left_column, "best length", "loss")
    print_table(("drafter", "context", *columns), rows)
