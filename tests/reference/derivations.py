"""Derivations of the planner, evaluated once more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from forerun.plan.derivation import Line, evaluate


def evaluated(lines: Iterable[Line | Mapping[str, Any]]) -> dict[str, float]:
    """Values by symbol, of a derivation or of its JSON, in order.

    Raises AssertionError unless every formula, evaluated over the lines before it, gives its value to the last bit,
    every input has a source, and no symbol stands twice.
    """
    values: dict[str, float] = {}
    for each in lines:
        line = each if isinstance(each, Line) else Line(**{**each, "formula": each["formula"] or ""})
        assert line.symbol not in values, f"{line.symbol} stands twice"
        if line.formula:
            assert evaluate(line.formula, values) == line.value, line.symbol
        else:
            assert line.source, f"{line.symbol} has no source"
        values[line.symbol] = line.value
    return values
