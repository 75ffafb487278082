"""Numbers with the way to them: each line names its equation, and evaluating it gives the number again."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import CodeType, MappingProxyType

_FUNCTIONS = MappingProxyType(
    {"min": min, "max": max, "sqrt": math.sqrt, "log": math.log, "ceil": math.ceil, "floor": math.floor}
)
_ALLOWED = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.Call,
    ast.Name,
    ast.Load,
    ast.Constant,
)


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
        """Adds an input, once. Raises ValueError if the symbol stands for another number already."""
        self._add(Line(symbol, value, unit, "", source))
        return value

    def derived(self, symbol: str, formula: str, unit: str, source: str = "") -> float:
        """Adds a number computed by its formula, and returns it.

        Raises ValueError if a symbol of the formula has no line yet, or the new one stands for another number.
        """
        value = evaluate(formula, {line.symbol: line.value for line in self.lines})
        self._add(Line(symbol, value, unit, formula, source))
        return value

    def extend(self, lines: Iterable[Line]) -> None:
        """Adds the lines of another derivation that this one doesn't have. Raises ValueError if both have a symbol for
        different numbers; a prefix keeps them apart."""
        for line in lines:
            self._add(line)

    def _add(self, line: Line) -> None:
        for known in self.lines:
            if known.symbol == line.symbol:
                if known.value != line.value:
                    raise ValueError(f"{line.symbol} is {known.value:g} already, not {line.value:g}")
                return
        self.lines.append(line)

    @property
    def value(self) -> float:
        """The last number."""
        return self.lines[-1].value


def evaluate(formula: str, values: Mapping[str, float]) -> float:
    """The value of a formula: numbers, symbols, + - * / **, and the functions min, max, sqrt, log, ceil and floor.

    Raises ValueError if it is anything else, or names a symbol that has no value.
    """
    code = _compiled(formula)
    unknown = set(code.co_names) - values.keys() - _FUNCTIONS.keys()
    if unknown:
        raise ValueError(f"{formula!r} needs {', '.join(sorted(unknown))}")
    return float(eval(code, {"__builtins__": {}}, {**_FUNCTIONS, **values}))


def symbols(formula: str) -> set[str]:
    """The symbols that a formula needs; none for the empty one of an input."""
    return set(_compiled(formula).co_names) - _FUNCTIONS.keys() if formula else set()


@functools.cache
def _compiled(formula: str) -> CodeType:
    tree = ast.parse(formula, mode="eval")
    for node in ast.walk(tree):
        called = not isinstance(node, ast.Call) or isinstance(node.func, ast.Name)
        if not isinstance(node, _ALLOWED) or not called:
            raise ValueError(f"{formula!r} is more than arithmetic")
    return compile(tree, formula, "eval")
