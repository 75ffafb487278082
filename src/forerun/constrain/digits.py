"""Endless digits: where a JSON text stands, as far as the limit on digits in a row must know.

JSON Schema bounds a number's value but not how many digits it is written with, and a model in a loop could go on
with 0.3333 until its budget ends. So `MAX_DIGITS` digits in a row, outside of strings, are followed by something else
unless the grammar leaves only digits. A double needs 17.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

MAX_DIGITS: Final = 64
"""Digits in a row after which tokens that begin with a digit are masked out."""


class JsonPlace(NamedTuple):
    """A place in a JSON text."""

    inside: bool
    """Within a string."""
    escaped: bool
    """Right after a backslash within a string."""
    digits: int
    """Digits in a row just before, outside of strings."""


START: Final = JsonPlace(False, False, 0)

_TAIL: Final = re.compile(rb"[0-9]*\Z")


def after(place: JsonPlace, text: bytes) -> JsonPlace:
    """The place after `text` was added at `place`."""
    inside, escaped, digits = place
    if not inside and b'"' not in text:
        tail = len(_TAIL.search(text)[0])  # type: ignore[index]
        return JsonPlace(False, False, digits + tail if tail == len(text) else tail)
    for byte in text:
        if escaped:
            escaped = False
        elif byte == 0x22:
            inside = not inside
            digits = 0
        elif inside:
            escaped = byte == 0x5C
        else:
            digits = digits + 1 if 0x30 <= byte <= 0x39 else 0
    return JsonPlace(inside, escaped, digits)
