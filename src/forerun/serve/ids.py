"""Names for answers and calls."""

from __future__ import annotations

import secrets


def answer_id(kind: str) -> str:
    """A name that no other answer has: "chatcmpl-..." or "cmpl-..."."""
    return f"{kind}-{secrets.token_hex(12)}"


def call_id() -> str:
    """The name of a tool call."""
    return f"call_{secrets.token_hex(12)}"
