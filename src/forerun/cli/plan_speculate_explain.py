"""How the derivation of a speedup is shown: the answer and its equation first, what goes into it below, by part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from forerun.cli.plan_view import print_table, quantity

if TYPE_CHECKING:
    from forerun.plan.derivation import Derivation, Line

PARTS = (
    ("plain_", "the plain step"),
    ("verify_", "the verifying step"),
    ("draft_", "the draft"),
    ("target_", "the same in the plain and the verifying step"),
    ("", "settings, rates and machine"),
)
"""Beginnings of the symbols of each part."""

_STEPS = 2
"""Equations from the answer down that are shown with it."""


def print_explained(derivation: Derivation) -> None:
    """All lines of a derivation: the last one with the equations that lead to it, then the others by part, each in the
    order in which it is computed."""
    answer = derivation.lines[-1]
    above = _leading(derivation.lines)
    typer.echo(f"\n{derivation.title}")
    typer.echo(f"{answer.symbol} = {answer.formula} = {quantity(answer.value, answer.unit)}")
    _print([line for line in reversed(derivation.lines) if line.symbol in above])
    left = [line for line in derivation.lines if line.symbol not in above]
    for prefix, title in PARTS:
        part = [line for line in left if line.symbol.startswith(prefix)]
        left = [line for line in left if line not in part]
        if part:
            typer.echo(f"\n{title}")
            _print(part)


def _leading(lines: Sequence[Line]) -> set[str]:
    """The answer, and the symbols within a few equations of it."""
    from forerun.plan.derivation import symbols

    by_symbol = {line.symbol: line for line in lines}
    found, last = {lines[-1].symbol}, {lines[-1].symbol}
    for _ in range(_STEPS):
        last = {symbol for name in last for symbol in symbols(by_symbol[name].formula)} - found
        found |= last
    return found


def _print(lines: Sequence[Line]) -> None:
    rows = [(line.symbol, quantity(line.value, line.unit), line.formula or "(given)", line.source) for line in lines]
    print_table(("symbol", "value", "equation", "source"), rows, words=(0, 2, 3))
