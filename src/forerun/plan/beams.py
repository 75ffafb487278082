"""What beams keep in the KV cache, each for itself and in blocks that they share (PagedAttention, arXiv 2309.06180)."""

from __future__ import annotations

import math
from typing import NamedTuple

from forerun.errors import PlanError


class BeamMemory(NamedTuple):
    """KV of one request's beams at its end.

    apart_bytes: each beam keeps all of its tokens. shared_bytes: beams share the blocks whose tokens they have in
    common. blocks: of these, distinct.
    """

    apart_bytes: float
    shared_bytes: float
    blocks: int


def beam_bytes(
    token_bytes: float, *, beams: int, prompt: int, generated: int, parted_at: int | None = None, block: int = 16
) -> BeamMemory:
    """KV of `beams` beams after a prompt of `prompt` tokens and `generated` more.

    token_bytes: of a token, all layers together (`forerun.plan.memory.kv_token_bytes`). parted_at: tokens that the
    beams have in common, prompt included; None: all but the last, the best case. A block is shared if all of its tokens
    are common; the one in which the beams part is there once for each, and so are those after it.

    Raises:
        PlanError: no beam, no token, a block of none, or a common beginning that is longer than the text.
    """
    for name, value, least in (("beams", beams, 1), ("prompt", prompt, 0), ("generated", generated, 0)):
        if value < least:
            raise PlanError(name, f"{value} is not allowed; expected at least {least}")
    if block < 1:
        raise PlanError("block", f"{block} is not allowed; expected at least 1 token")
    tokens = prompt + generated
    if not tokens:
        raise PlanError("prompt", "no token at all; expected prompt + generated to be at least 1")
    common = tokens - 1 if parted_at is None else parted_at
    if not 0 <= common <= tokens:
        raise PlanError("parted_at", f"{common} is not allowed; expected 0 to the {tokens} tokens that there are")
    shared = common // block
    each = math.ceil(tokens / block) - shared
    blocks = shared + beams * each if common < tokens else math.ceil(tokens / block)
    return BeamMemory(beams * tokens * token_bytes, blocks * block * token_bytes, blocks)
