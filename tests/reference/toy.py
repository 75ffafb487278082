"""A toy model whose KV is checked by content.

Its KV at a slot is a hash of all tokens up to it, and its next token is a function of what it reads there, so a wrong
slot, a stale block, a missed copy or a wrong prefix hit changes what it says. Every slot that a row attends to is also
compared with the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forerun.engine.request import Request, RowPlan, StepPlan
from forerun.kv import BlockPool, BlockTable

VOCAB = 4
EOS = 0


@dataclass(frozen=True)
class Params:
    max_tokens: int | None
    stop_at_eos: bool = False


def step_state(state: int, token: int) -> int:
    return hash((state, token))


def next_token(state: int) -> int:
    return (state >> 7) % VOCAB


def states(tokens: Sequence[int], salt: str | None) -> list[int]:
    out = [0 if salt is None else len(salt)]
    for token in tokens:
        out.append(step_state(out[-1], token))
    return out


def alone(prompt: Sequence[int], limit: int, params: Params, salt: str | None) -> list[int]:
    """What the toy model answers to a request that runs alone, token by token."""
    tokens = list(prompt)
    state = states(tokens, salt)[-1]
    while len(tokens) < limit:
        tokens.append(next_token(state))
        if params.stop_at_eos and tokens[-1] == EOS:
            break
        state = step_state(state, tokens[-1])
    return tokens[len(prompt) :]


class ToyExecutor:
    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.memory = [-1] * pool.capacity_tokens
        self.mirrors: dict[Request, tuple[BlockTable, list[int]]] = {}

    def copy(self, plan: StepPlan) -> None:
        size = self.pool.block_size
        for src, dst, n in plan.copies:
            self.memory[dst * size : dst * size + n] = self.memory[src * size : src * size + n]

    def slots(self, request: Request) -> Callable[[int], int]:
        """Slots as the step batch sees them, mirrored through `take_dirty`."""
        table = request.table
        assert table is not None
        known, mirror = self.mirrors.get(request, (None, []))
        if known is not table:
            mirror = []
            self.mirrors[request] = (table, mirror)
        first = table.take_dirty()
        mirror[first:] = table.blocks[first:]
        assert mirror == table.blocks
        size = self.pool.block_size
        return lambda token: mirror[token // size] * size + token % size

    def forward(self, row: RowPlan, drafts: list[int], written: set[int]) -> list[int]:
        """The model's next token after each query token; writes the KV of all of them."""
        request, slot = row.request, self.slots(row.request)
        query = request.tokens[row.start : row.start + row.count] + drafts
        truth = states([*request.tokens[: row.start], *query], request.salt)
        for index in range(row.start):
            assert self.memory[slot(index)] == truth[index + 1], f"stale KV at {index} of {request}"
        out = []
        state = self.memory[slot(row.start - 1)] if row.start else truth[0]
        for index, token in enumerate(query, row.start):
            state = step_state(state, token)
            assert self.pool.is_writable(slot(index) // self.pool.block_size), "write into shared KV"
            assert slot(index) not in written, "two rows write to one slot"
            written.add(slot(index))
            self.memory[slot(index)] = state
            out.append(next_token(state))
        return out
