"""The keywords about numbers, strings and constants: checked, and written as llguidance enforces them exactly.

llguidance holds bounds as 64-bit floats and crashes or rounds beyond what those hold, so such values are
tightened where that only leaves out a few huge numbers, and refused elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from typing import Any, Final

from forerun.constrain import formats, keywords, patterns
from forerun.constrain.document import child, fail, shown

MAX_LEAST: Final = 10_000
"""Highest minLength, minItems or minProperties."""

MAX_COUNT: Final = 1_000_000
"""A maxLength, maxItems or maxProperties above it is no limit, as no text gets there."""

MAX_MULTIPLE: Final = 10_000
"""Highest multipleOf, without its decimal point; the time of the first masks grows with it."""

_EXACT: Final = 2**53
_HUGE: Final = 2.0**63
_SMALL: Final = 1e-12
_DIGITS: Final = 15
_CONTROL: Final = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


def count(node: Mapping[str, Any], keyword: str, path: str) -> int | None:
    """The value of a keyword that counts; None where it says nothing."""
    value = node[keyword]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
        fail(keyword, path, f"must be a whole number from 0, got {shown(value)}.")
    value = int(value)
    if keyword.startswith("max"):
        return value if value <= MAX_COUNT else None
    if value > MAX_LEAST:
        fail(keyword, path, f"is {shown(value)}; the limit is {MAX_LEAST}.")
    return value


def numbers(node: Mapping[str, Any], path: str, notes: list[str], *, merged: bool = False) -> dict[str, Any]:
    """The keywords about numbers; `merged` if other schemas may bound the same number."""
    out: dict[str, Any] = {}
    for keyword, side in (("minimum", -1), ("maximum", 1)):
        exclusive = "exclusive" + keyword.capitalize()
        if keyword in node:
            out[keyword] = _bound(node, keyword, side, path, notes)
        if exclusive not in node:
            continue
        if isinstance(node[exclusive], bool):
            if node[exclusive] and keyword in out:
                out[exclusive] = out.pop(keyword)
        else:
            out[exclusive] = _bound(node, exclusive, side, path, notes)
    if "number" in node.get("type", "number"):
        _open_at_whole_numbers(out, path, notes, merged=merged)
    if "multipleOf" in node:
        out["multipleOf"] = _multiple(node["multipleOf"], path)
    return out


def _open_at_whole_numbers(out: dict[str, Any], path: str, notes: list[str], *, merged: bool) -> None:
    """Moves exclusive bounds that llguidance takes for inclusive ones to the next decimal.

    It lets 3 pass above 3 and up to 3.5: where a bound is whole and the other isn't, but begins with the same digits.
    """
    for side, opposite in (("Minimum", "Maximum"), ("Maximum", "Minimum")):
        keyword, inclusive = "exclusive" + side, side.lower()
        bound = out.get(keyword)
        if bound is None or bound != int(bound):
            continue
        others = [out[other] for other in (opposite.lower(), "exclusive" + opposite) if other in out]
        if not merged and not any(other != int(other) and int(other) == bound for other in others):
            continue
        places = min(12, _DIGITS - len(str(abs(int(bound)))))
        if places < 1:
            fail(keyword, path, f"is {shown(bound)}; next to other bounds, such are enforced up to 14 digits only.")
        step = Decimal(1).scaleb(-places)
        inner = float(Decimal(int(bound)) + (step if side == "Minimum" else -step))
        del out[keyword]
        given = out.get(inclusive, inner)
        out[inclusive] = max(given, inner) if side == "Minimum" else min(given, inner)
        notes.append(
            f"{child(path, keyword)} is enforced as {inclusive} {inner}, the nearest that can be enforced exactly"
        )


def integer_range(name: str, out: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """The bounds of a format of integers, where they are tighter than those in `out`."""
    low, high = formats.INTEGER_RANGES[name]
    bounds = {"minimum": _inside(low, -1), "maximum": _inside(high, 1)}
    if bounds != {"minimum": low, "maximum": high}:
        notes.append(f'the format "{name}" is enforced up to {bounds["maximum"]}')
    tighter: dict[str, Any] = {}
    for keyword, bound in bounds.items():
        given = out.get(keyword)
        choose = max if keyword == "minimum" else min
        tighter[keyword] = bound if given is None else choose(given, bound)
    return tighter


def strings(node: Mapping[str, Any], path: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The keywords about strings, and schemas that hold as well."""
    out: dict[str, Any] = {}
    for keyword in ("minLength", "maxLength"):
        if keyword in node and (value := count(node, keyword, path)) is not None:
            out[keyword] = value
    if "pattern" in node:
        out["pattern"] = anchored(pattern(node["pattern"], "pattern", path))
    also = []
    if "format" in node:
        name = node["format"]
        if not isinstance(name, str):
            fail("format", path, f"must be a text, got {shown(name)}.")
        if name in formats.PATTERNS:
            if name in formats.MAX_LENGTHS:
                out["maxLength"] = min(out.get("maxLength", MAX_COUNT), formats.MAX_LENGTHS[name])
            rule = anchored(formats.PATTERNS[name])
            if "pattern" in out:
                also.append({"pattern": rule})
            else:
                out["pattern"] = rule
        elif name not in formats.INTEGER_RANGES and name not in formats.FREE:
            _refuse_format(name, path)
    return out, also


def pattern(text: object, keyword: str, path: str, *, exact: bool = False, wide: bool = False) -> str:
    """An expression of whole strings for a pattern (`exact`, `wide`: see patterns.whole)."""
    if not isinstance(text, str):
        fail(keyword, path, f"must be a regular expression, got {shown(text)}.")
    try:
        return patterns.whole(text, exact=exact, wide=wide)
    except patterns.PatternError as error:
        fail(keyword, path, f"is {shown(text)}, which can't be enforced: {error}.")


def anchored(expression: str) -> str:
    """An expression of whole strings as a pattern."""
    return f"^(?:{expression})$"


def has_control(value: Any) -> bool:
    """Whether a constant has a character in it that JSON can only write with \\u."""
    if isinstance(value, dict):
        return any(has_control(inner) for inner in value.values())
    if isinstance(value, list):
        return any(map(has_control, value))
    return isinstance(value, str) and _CONTROL.search(value) is not None


def check_constant(value: Any, keyword: str, path: str) -> None:
    """Refuses constants that would be rounded."""
    if isinstance(value, dict):
        for key, inner in value.items():
            check_constant(inner, keyword, child(path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            check_constant(inner, keyword, child(path, index))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        whole = value == int(value)
        if whole and not _holds(value):
            fail(keyword, path, f"has the number {shown(value)}; constants are exact up to 2^53 only. Use a text.")
        if not whole and (abs(value) < _SMALL or _digits(value) > _DIGITS):
            fail(
                keyword,
                path,
                f"has the number {shown(value)}; fractions are exact up to {_DIGITS} digits, from 1e-12 on.",
            )


def check_types(value: object, path: str) -> list[str]:
    """The names of `type`."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        fail("type", path, f"must be one of {', '.join(keywords.TYPES)}, or a list of them, got {shown(value)}.")
    for name in names:
        if name not in keywords.TYPES:
            fail("type", path, f"is {shown(name)}; expected {', '.join(keywords.TYPES)}.")
    if len(set(names)) != len(names):
        fail("type", path, f"names a type twice: {shown(value)}.")
    return names


def _bound(node: Mapping[str, Any], keyword: str, side: int, path: str, notes: list[str]) -> int | float:
    value = node[keyword]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        fail(keyword, path, f"must be a number, got {shown(value)}.")
    short = _digits(value) <= _DIGITS or (value == int(value) and abs(value) <= _EXACT)
    if short and _holds(value):
        return value if isinstance(value, int) or value != int(value) else int(value)
    if value == int(value):
        if value * side < 0:
            fail(keyword, path, f"is {shown(value)}; bounds are exact up to 2^53 only.")
        inner: int | float = _inside(int(value), side)
    elif abs(value) < _SMALL:
        fail(keyword, path, f"is {shown(value)}; bounds other than 0 start from 1e-12.")
    else:
        context = Context(prec=_DIGITS, rounding=ROUND_FLOOR if side > 0 else ROUND_CEILING)
        inner = float(context.create_decimal(repr(value)))
    notes.append(f"{child(path, keyword)} is enforced as {inner}, the nearest bound that can be enforced exactly")
    return inner


def _holds(value: int | float) -> bool:
    """Whether a 64-bit float, and where that is whole a 64-bit integer, is exactly this number."""
    if isinstance(value, int):
        return abs(value) <= _EXACT or (abs(value) < _HUGE and int(float(value)) == value)
    return abs(value) < _HUGE and (value == 0 or abs(value) >= _SMALL)


def _digits(value: int | float) -> int:
    """The digits of a number as it is written, without the zeros around them."""
    number = Decimal(value) if isinstance(value, int) or value == int(value) else Decimal(repr(value))
    return len(number.normalize().as_tuple().digits)


def _inside(value: int, side: int) -> int:
    """A bound near `value` that can be enforced and lets nothing pass that `value` refuses."""
    magnitude = min(abs(value), int(_HUGE))
    unit: int = 10 ** max(0, len(str(magnitude)) - _DIGITS)
    inner = magnitude // unit * unit
    while inner >= _HUGE or int(float(inner)) != inner:
        inner -= unit
    return side * inner


def _multiple(value: Any, path: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        fail("multipleOf", path, f"must be a number above 0, got {shown(value)}.")
    digits = Fraction(repr(value))
    scale = 0
    while digits.denominator != 1 and scale <= 12:
        digits *= 10
        scale += 1
    if digits.denominator != 1 or digits > MAX_MULTIPLE:
        fail("multipleOf", path, f"is {shown(value)}; only numbers of up to four digits can be enforced.")
    return value if isinstance(value, int) or value != int(value) else int(value)


def _refuse_format(name: str, path: str) -> None:
    known = sorted({*formats.PATTERNS, *formats.INTEGER_RANGES, *formats.FREE})
    close = next((other for other in known if name.replace("_", "-").lower() == other), None)
    if close is None:
        close = next((other for other in known if name.lower().replace("-", "") == other.replace("-", "")), None)
    hint = f'did you mean "{close}"?' if close else f"enforced are {', '.join(known)}. Leave it out, or use pattern."
    fail("format", path, f"is {shown(name)}, which can't be enforced; {hint}")
