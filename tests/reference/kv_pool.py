"""A KV pool walked step by step and block by block: what the planner's capacity must agree with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass
class LayerKind:
    """Layers alike: bytes that one token takes in all of them together, and the window of their queries."""

    token_bytes: int
    window: int | None = None


def blocks_touched(tokens: int, window: int | None, block: int) -> int:
    """Blocks with a token that the last query still sees, counted one by one."""
    first = 0 if window is None else max(0, tokens - window)
    return len({position // block for position in range(first, tokens)})


def held_bytes(tokens: int, kinds: list[LayerKind], block: int) -> int:
    """Bytes of one sequence of so many tokens."""
    return sum(blocks_touched(tokens, kind.window, block) * block * kind.token_bytes for kind in kinds)


@dataclass
class Filled:
    """The first step that doesn't fit, and the tokens that each sequence wants slots for then."""

    step: int
    tokens: int


def walk(
    kinds: list[LayerKind],
    pool: float,
    *,
    prompt: int,
    reply: int,
    batch: int,
    tokens_per_step: Fraction = Fraction(1),
    drafts: int = 0,
    block: int = 1,
) -> Filled | None:
    """Decodes `batch` sequences in step until the pool is full or the replies are complete (None)."""
    written, step = Fraction(0), 0
    while written < reply:
        step += 1
        # Slots for the token that is computed and for drafts, which a reply that is nearly done has no use for.
        tokens = prompt + math.ceil(min(written + 1 + drafts, Fraction(reply)))
        if batch * held_bytes(tokens, kinds, block) > pool:
            return Filled(step, tokens)
        written += tokens_per_step
    return None


def mean_bytes(kinds: list[LayerKind], *, prompt: int, reply: int, block: int) -> float:
    """Mean over every token of the reply, one by one."""
    return sum(held_bytes(prompt + n, kinds, block) for n in range(1, reply + 1)) / reply
