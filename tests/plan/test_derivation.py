"""Derivations: formulas that give their values."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest

from forerun.plan.derivation import Derivation, Line, evaluate, symbols
from reference.derivations import evaluated


def test_lines_follow_from_lines_before() -> None:
    d = Derivation("the hypotenuse")
    d.given("a", 3, "m", "measured")
    d.given("b", 4, "m", "measured")
    d.given("a", 3, "m", "measured")
    assert d.derived("c", "sqrt(a**2 + b**2)", "m") == 5
    assert [line.symbol for line in d.lines] == ["a", "b", "c"]
    assert d.value == 5
    with pytest.raises(ValueError, match=r"needs d"):
        d.derived("e", "c + d", "m")


def test_an_input_has_one_value() -> None:
    d = Derivation("x")
    d.given("a", 3, "", "")
    with pytest.raises(ValueError, match="a"):
        d.given("a", 4, "", "")


def test_joining_takes_what_is_new() -> None:
    one, other = Derivation("one"), Derivation("other")
    one.given("a", 1, "", "")
    other.given("a", 1, "", "")
    other.given("b", 2, "", "")
    one.extend(other.lines)
    assert [line.symbol for line in one.lines] == ["a", "b"]
    other.given("c", 3, "", "")
    conflicting = Derivation("conflicting")
    conflicting.given("a", 2, "", "")
    with pytest.raises(ValueError, match="a"):
        one.extend(conflicting.lines)


@pytest.mark.parametrize(
    ("formula", "value"),
    [("1e3 / 2", 500), ("max(a, 2) * min(a, 2)", 6), ("(a**2 + 1)**(1/2)", math.sqrt(10)), ("floor(a / 2)", 1)],
)
def test_formulas(formula: str, value: float) -> None:
    assert evaluate(formula, {"a": 3.0}) == pytest.approx(value)


@pytest.mark.parametrize("formula", ["b", "__import__('os')", "a.__class__", "print(a)", "a if a else 1", "[a]"])
def test_nothing_but_arithmetic(formula: str) -> None:
    with pytest.raises(ValueError, match=r"needs|more than arithmetic"):
        evaluate(formula, {"a": 3.0})


def test_the_symbols_of_a_formula() -> None:
    assert symbols("max(a_1, 2) * b + a_1 / 1e3") == {"a_1", "b"}
    assert symbols("3 * 4") == symbols("") == set()


def test_the_check_of_derivations_sees_a_number_that_does_not_follow() -> None:
    """In a derivation, in its JSON, by as little as a bit."""
    lines = [Line("a", 3.0, "", "", "measured"), Line("b", 9.0, "", "a * a")]
    assert evaluated(lines) == evaluated([asdict(line) for line in lines]) == {"a": 3.0, "b": 9.0}
    for wrong in (
        replace(lines[1], value=math.nextafter(9.0, 10.0)),
        replace(lines[1], symbol="a"),
        replace(lines[1], formula=""),
    ):
        for form in (wrong, {**asdict(wrong), "formula": wrong.formula or None}):
            with pytest.raises(AssertionError):
                evaluated([lines[0], form])
