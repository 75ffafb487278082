"""Numbers with the way to them: each line names its equation, and evaluating it gives the number again."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_FUNCTIONS = MappingProxyType(
    {"min": min, "max": max, "sqrt": math.sqrt, "log": math.log, "ceil": math.ceil, "floor": math.floor}
)
_SYMBOL = re.compile(r"(?<![\w.])[A-Za-z_]\w*")


@dataclass(frozen=True)
class Line:
    """One number.

    symbol: its name in the formulas of later lines. unit: of `value`. formula: a Python expression over earlier symbols
    and numbers; empty for an input. source: of an input, where it is from; of a formula, what it is named or where it
    is explained.
    """

    symbol: str
    value: float
    unit: str
    formula: str = ""
    source: str = ""


@dataclass
class Derivation:
    """Lines in the order in which they are computed. `title` says what the last of them is."""

    title: str
    lines: list[Line] = field(default_factory=list)

    def given(self, symbol: str, value: float, unit: str, source: str) -> float:
        """Adds an input, once."""
        if any(line.symbol == symbol for line in self.lines):
            return value
        self.lines.append(Line(symbol, value, unit, "", source))
        return value

    def derived(self, symbol: str, formula: str, unit: str, source: str = "") -> float:
        """Adds a number computed by its formula, and returns it. Raises ValueError if a symbol has no line yet."""
        value = evaluate(formula, {line.symbol: line.value for line in self.lines})
        self.lines.append(Line(symbol, value, unit, formula, source))
        return value

    def extend(self, lines: Iterable[Line]) -> None:
        """Adds the lines of another derivation whose symbols this one doesn't have."""
        known = {line.symbol for line in self.lines}
        self.lines += [line for line in lines if line.symbol not in known]

    @property
    def value(self) -> float:
        """The last number."""
        return self.lines[-1].value


def evaluate(formula: str, values: Mapping[str, float]) -> float:
    """The value of a formula. Raises ValueError if it names a symbol that has no value."""
    unknown = set(_SYMBOL.findall(formula)) - values.keys() - _FUNCTIONS.keys()
    if unknown:
        raise ValueError(f"{formula!r} needs {', '.join(sorted(unknown))}")
    return float(eval(formula, {"__builtins__": {}}, {**_FUNCTIONS, **values}))
