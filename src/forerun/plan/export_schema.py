"""What an engine takes: its keys with their types and ranges, small enough to be checked before anything is printed."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from forerun.errors import PlanError

Kind = Literal["int", "float", "str", "bool", "table", "list"]

_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "str": (str,), "bool": (bool,), "table": (Mapping,), "list": (list, tuple),
}  # fmt: skip


@dataclass(frozen=True)
class Key:
    """One key or flag.

    least, most: of a number, both allowed. choices: of a string. keys: of a table; None: its keys are free. needed: the
    engine demands it.
    """

    kind: Kind
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    keys: Mapping[str, Key] | None = None
    needed: bool = False

    def check(self, field: str, value: object) -> None:
        """Raises PlanError naming `field` if `value` is not of this kind or out of range."""
        fits = isinstance(value, _TYPES[self.kind]) and (self.kind == "bool" or not isinstance(value, bool))
        if not fits:
            raise PlanError(field, f"{value!r} is not allowed; expected {self.kind}")
        if self.least is not None or self.most is not None:
            assert isinstance(value, int | float)
            low = self.least if self.least is not None else float("-inf")
            high = self.most if self.most is not None else float("inf")
            if not low <= value <= high:
                raise PlanError(field, f"{value} is not allowed; expected {low:g} to {high:g}")
        if self.choices and value not in self.choices:
            raise PlanError(field, f"{value!r} is not allowed; expected one of {', '.join(self.choices)}")
        if self.keys is not None:
            assert isinstance(value, Mapping)
            check_keys(self.keys, value, f"{field}.")


Rule = Callable[[Mapping[str, Any]], None]
"""What keys have to do with one another: raises PlanError naming the one at fault."""


@dataclass(frozen=True)
class Schema:
    """What one engine takes. version, source: which release, and where in its documentation and code it was read."""

    engine: str
    version: str
    source: str
    keys: Mapping[str, Key]
    rules: tuple[Rule, ...] = ()

    def check(self, config: Mapping[str, Any]) -> None:
        """Raises PlanError naming the first key that is unknown, missing, of the wrong kind, out of range, or at odds
        with another one."""
        check_keys(self.keys, config, "", self.engine)
        for rule in self.rules:
            rule(config)


def check_keys(keys: Mapping[str, Key], config: Mapping[str, Any], where: str, engine: str = "") -> None:
    """Raises PlanError unless `config` has all needed keys, no unknown ones, and each value fits."""
    for name, value in config.items():
        known = keys.get(name)
        if known is None:
            near = difflib.get_close_matches(str(name), list(keys), n=1)
            guess = f"did you mean {near[0]}?" if near else f"expected some of {', '.join(keys)}"
            raise PlanError(f"{where}{name}", f"unknown{' to ' + engine if engine else ''}; {guess}")
        known.check(f"{where}{name}", value)
    for name, key in keys.items():
        if key.needed and name not in config:
            raise PlanError(f"{where}{name}", "missing")


def check_ranges(field: str, entries: object, longest: int) -> None:
    """A schedule of [first batch, last batch, draft length] that leaves no batch out and names none twice.

    Raises:
        PlanError: an entry isn't of that form, the first one doesn't begin at 1, there is a gap or an overlap, or a
            length is negative or beyond `longest`.
    """
    if not isinstance(entries, list | tuple) or not entries:
        raise PlanError(field, f"{entries!r} is not allowed; expected a list of [first batch, last batch, length]")
    following = 1
    for entry in entries:
        whole = isinstance(entry, list | tuple) and all(type(number) is int for number in entry)
        if not whole or len(entry) != 3:
            raise PlanError(field, f"{entry!r} is not allowed; expected [first batch, last batch, length]")
        low, high, length = entry
        if low > high:
            raise PlanError(field, f"{list(entry)} ends before it begins")
        if low != following:
            what = "overlaps the one before" if low < following else f"leaves out batches from {following}"
            raise PlanError(field, f"{list(entry)} {what}; expected it to begin at {following}")
        if not 0 <= length <= longest:
            raise PlanError(field, f"{list(entry)} has a length of {length}; expected 0 to {longest}")
        following = high + 1
