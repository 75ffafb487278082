"""KV of beams, against counting the blocks one by one."""

from __future__ import annotations

import random

import pytest

from forerun.errors import PlanError
from forerun.plan.beams import beam_bytes


def distinct_blocks(beams: int, prompt: int, generated: int, parted_at: int, block: int) -> int:
    """Blocks with different contents, over the texts themselves: each beam's own tokens have its number."""
    tokens = prompt + generated
    found = set()
    for beam in range(beams):
        text = [-1 if position < parted_at else beam for position in range(tokens)]
        for start in range(0, tokens, block):
            # Keys and values depend on all tokens before, too.
            found.add((start, tuple(text[: start + block])))
    return len(found)


def test_against_counting() -> None:
    rng = random.Random(1)
    for _ in range(500):
        prompt, generated = rng.randrange(0, 60), rng.randrange(1, 60)
        beams, block = rng.randrange(1, 6), rng.randrange(1, 20)
        parted_at = rng.randrange(prompt + generated + 1)
        memory = beam_bytes(
            10, beams=beams, prompt=prompt, generated=generated, parted_at=parted_at, block=block
        )  # fmt: skip
        expected = distinct_blocks(beams, prompt, generated, parted_at, block)
        assert memory.blocks == expected
        assert memory.shared_bytes == expected * block * 10
        assert memory.apart_bytes == beams * (prompt + generated) * 10


def test_without_a_parting_point_all_but_the_last_token_is_common() -> None:
    best = beam_bytes(1, beams=4, prompt=1000, generated=200)
    assert best == beam_bytes(1, beams=4, prompt=1000, generated=200, parted_at=1199)
    assert all(
        best.blocks <= beam_bytes(1, beams=4, prompt=1000, generated=200, parted_at=at).blocks for at in range(1200)
    )


def test_blocks_of_one_token_waste_none() -> None:
    memory = beam_bytes(1, beams=3, prompt=7, generated=5, parted_at=7, block=1)
    assert memory.shared_bytes == 7 + 3 * 5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"beams": 0}, "beams: 0 is not allowed; expected at least 1"),
        ({"prompt": -1}, "prompt: -1 is not allowed"),
        ({"generated": -1}, "generated: -1 is not allowed"),
        ({"prompt": 0, "generated": 0}, "prompt: no token at all"),
        ({"block": 0}, "block: 0 is not allowed"),
        ({"parted_at": 13}, "parted_at: 13 is not allowed; expected 0 to the 12 tokens"),
        ({"parted_at": -1}, "parted_at: -1 is not allowed"),
    ],
)
def test_what_cannot_be_is_refused(changed: dict[str, int], message: str) -> None:
    with pytest.raises(PlanError) as raised:
        beam_bytes(1, **{"beams": 2, "prompt": 7, "generated": 5, **changed})
    assert message in str(raised.value)
