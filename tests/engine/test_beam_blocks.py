"""Beams share KV blocks: what a search held is what the formula says, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from forerun import Engine
from forerun.engine.beams import BeamSearch
from forerun.kv import BlockTable
from forerun.ops import BLOCK
from reference.speculation import emptied
from reference.tiny import TinySpec, write_tiny_gguf

PROMPT = tuple((7 * n * n + 3 * n + 1) % 290 for n in range(1000))


def predicted(sequences: Sequence[Sequence[int]]) -> int:
    """Blocks that sequences need together: one for each different beginning that ends with a block, or with the text.

    What two beams have in common they have from a common ancestor, whose full blocks they share. The block in which
    they part is copied by whoever writes into it first.
    """
    return len({tuple(tokens[: i + BLOCK]) for tokens in sequences for i in range(0, len(tokens), BLOCK)})


def bounds(n_prompt: int, n_output: int, beams: int) -> tuple[int, int]:
    """Fewest and most blocks of `beams` beams with so many tokens: all but the last block shared, or only the prompt's
    full ones."""
    each = -(-(n_prompt + n_output) // BLOCK)
    shared = n_prompt // BLOCK
    return each + beams - 1, shared + beams * (each - shared)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    spec = TinySpec("llama", layers=1, context=2048)
    path = write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", spec)
    return Engine(path, kv_tokens=8192, threads=1, cache_weights=False, draft="none")


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[list[int]], int]]:
    """For each time that beams went on: the blocks in their tables, their tokens, and the blocks that the pool lent."""
    seen: list[tuple[int, list[list[int]], int]] = []

    def spy(self: BeamSearch, loop: Any, now: float) -> None:
        blocks = {block for beam in self.beams for block in beam.request.table.blocks}  # type: ignore[union-attr]
        pool = loop.scheduler.pool
        seen.append((len(blocks), [list(beam.request.tokens) for beam in self.beams], pool.n_blocks - pool.n_free))
        advance(self, loop, now)

    advance = BeamSearch._advance
    monkeypatch.setattr(BeamSearch, "_advance", spy)
    return seen


def check(engine: Engine, held: list[tuple[int, list[list[int]], int]], prompt: Sequence[int], n: int) -> list[int]:
    """Runs a search of four beams, compares every step with the formula, and returns what it held in each."""
    held.clear()
    output = engine.beam_search(prompt, 4, max_tokens=n, ignore_eos=True)
    for blocks, sequences, lent in held:
        assert blocks == lent == predicted(sequences)
    most = [blocks for blocks, _, _ in held]
    assert output.blocks.most == max(most)
    assert output.blocks.separate == 4 * -(-(len(prompt) + n - 1) // BLOCK)
    assert output.steps == len(held) == n
    fewest, worst = bounds(len(prompt), n - 1, 4)
    assert fewest <= most[-1] <= max(most) <= worst
    emptied(engine)
    return most


def test_four_beams_over_a_thousand_tokens(engine: Engine, held: list[tuple[int, list[list[int]], int]]) -> None:
    """1,200 tokens are 75 blocks, the last of which each beam has for itself: not four times 75."""
    most = check(engine, held, PROMPT, 200)
    assert bounds(1000, 199, 4) == (75 + 3, 62 + 4 * 13)
    assert 78 <= max(most) <= 114 < 4 * 75
    print(f"four beams, 1,000 + 200 tokens: {max(most)} blocks at most, {most[-1]} at the end, 300 separately")


@pytest.mark.parametrize("n_prompt", [1, 15, 16, 17, 40])
def test_short_prompts_and_block_ends(
    engine: Engine, held: list[tuple[int, list[list[int]], int]], n_prompt: int
) -> None:
    check(engine, held, PROMPT[:n_prompt], 50)


def _copy_everything(self: BlockTable) -> BlockTable:
    twin = BlockTable(self._pool)
    twin.append_slots(self.n_tokens)
    return twin


def _share_only_the_first_block(self: BlockTable) -> BlockTable:
    twin, n = _fork(self), self.n_tokens
    twin.truncate(min(n, BLOCK))
    twin.append_slots(n - twin.n_tokens)
    return twin


_fork = BlockTable.fork


@pytest.mark.parametrize("planted", [_copy_everything, _share_only_the_first_block])
def test_a_fork_that_copies_is_caught(
    engine: Engine, held: list[tuple[int, list[list[int]], int]], planted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockTable, "fork", planted)
    with pytest.raises(AssertionError):
        check(engine, held, PROMPT[:100], 40)


def test_the_numbers_of_the_documentation() -> None:
    """Llama 3 8B: 32 layers, 8 KV heads of 128, two bytes; four beams, a prompt of 1,000 tokens, 200 generated."""
    per_block = 2 * 32 * 8 * 128 * 2 * BLOCK
    mebi = 1 << 20
    fewest, most = bounds(1000, 200, 4)
    assert per_block == 2 * mebi
    assert 4 * -(-1200 // BLOCK) * per_block == 600 * mebi
    assert (fewest, fewest * per_block) == (78, 156 * mebi)
    assert (most, most * per_block) == (114, 228 * mebi)
