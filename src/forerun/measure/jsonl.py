"""Files of JSON lines: tasks, and schemas with their instances."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from forerun.errors import InvalidRequestError

T = TypeVar("T")


class Named(NamedTuple):
    """What an entry is known by, and what it counts for."""

    name: str
    category: str


def read_entries(
    path: Path,
    noun: str,
    parse: Callable[[object], T],
    named: Callable[[T], Named],
    limit: int | None,
    *,
    expected: str | None = None,
) -> list[T]:
    """The entries of a .jsonl file, in its order; with `limit` the first so many of each category.

    noun: what an entry is called. parse: makes one of a line's JSON, or raises ValueError. expected: what a line should
    have been (None: `noun`). Raises `InvalidRequestError`, which names the line, for a file that can't be read, holds
    anything else, has a name twice or has no entries.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidRequestError(f"the {noun} file {path} can't be read: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"the {noun} file {path} isn't UTF-8 (byte {error.start}); convert it first"
        ) from error
    entries: dict[str, T] = {}
    taken: Counter[str] = Counter()
    # Not splitlines(): a JSON string may hold U+2028.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = parse(json.loads(line))
        except json.JSONDecodeError as error:
            # Its own text counts lines within this line.
            raise InvalidRequestError(
                f"line {number} of {path} is no JSON: {error.msg} (column {error.colno})"
            ) from error
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"line {number} of {path} is no {expected or noun}: {error}") from error
        name, category = named(entry)
        if name in entries:
            raise InvalidRequestError(f"line {number} of {path}: the {noun} {name!r} is there twice")
        taken[category] += 1
        if limit is None or taken[category] <= limit:
            entries[name] = entry
    if not entries:
        raise InvalidRequestError(f"the {noun} file {path} has no {noun}s")
    return list(entries.values())
