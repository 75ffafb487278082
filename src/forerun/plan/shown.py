"""How a value that somebody wrote stands in a message."""

from __future__ import annotations


def shown(value: object) -> str:
    """The value as Python writes it, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
