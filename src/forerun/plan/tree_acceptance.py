"""Acceptance by rank and depth as people write it, on a line or in a file."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from forerun.errors import PlanError
from forerun.plan.tree import RankAcceptance

FORM = "0.6,0.15,0.06;0.55,0.12"
"""An example: ranks between commas, depths between semicolons, the last of them for all deeper."""

_INLINE = re.compile(r"[\s\d.,;+eE-]*|.*[,;].*|\s*(?i:nan|[+-]?inf)\s*", re.DOTALL)


def read_acceptance(text: str) -> RankAcceptance:
    """The rates of `FORM`, or of a JSON or TOML file of that name: a key `accept` with a list of rates by rank, or a
    list of such lists, one a depth. A JSON file may also be the list itself.

    Raises:
        PlanError: the rates can't be read, or aren't any.
    """
    path = Path(text)
    if path.suffix in (".json", ".toml") or not _INLINE.fullmatch(text):
        return _of_file(path)
    try:
        rows = tuple(tuple(float(word) for word in row.split(",")) for row in text.split(";"))
    except ValueError as error:
        raise PlanError("accept", f"{text!r} is not a list of rates such as {FORM}, nor a file") from error
    return RankAcceptance(rows)


def _of_file(path: Path) -> RankAcceptance:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise PlanError("accept", f"{path} can't be read, and is no list of rates such as {FORM}: {error}") from error
    try:
        found = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise PlanError("accept", f"{path} is not {kind}: {error}") from error
    if isinstance(found, dict):
        unknown = found.keys() - {"accept"}
        if unknown or "accept" not in found:
            wrong = f"has an unknown key {min(unknown)}" if unknown else "is empty"
            raise PlanError("accept", f"{path} {wrong}; expected the key accept, a list of rates")
        found = found["accept"]
    rows = found if isinstance(found, list) and found and all(isinstance(row, list) for row in found) else [found]
    return RankAcceptance(tuple(_row(row, path) for row in rows))


def _row(row: object, path: Path) -> tuple[float, ...]:
    if not isinstance(row, list) or not all(
        isinstance(rate, int | float) and not isinstance(rate, bool) for rate in row
    ):
        raise PlanError("accept", f"{path}: {row!r} is not a list of rates; expected numbers by rank, one list a depth")
    try:
        return tuple(float(rate) for rate in row)
    except OverflowError as error:
        raise PlanError("accept", f"{path}: a rate is far too large; expected rates from 0 to 1") from error
