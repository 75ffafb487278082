"""Pool, tables and prefix cache together, by content, against a model that copies everything.

Each slot of a simulated memory holds a hash of all tokens up to its own, which is what KV is in
effect: a slot that was overwritten, taken away too soon, not copied or found under the wrong prefix
reads wrong.
"""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from forerun.kv import BlockPool, BlockTable, PoolExhausted, PrefixCache, prefix

HASHERS: dict[str, Callable[[int, tuple[int, ...]], int]] = {
    "chained": prefix.chain_hash,
    "constant": lambda _parent, _tokens: 0,
    "weak": lambda parent, tokens: (parent + sum(tokens)) % 3,
}


def contents(tokens: list[int], salt: str | None) -> list[int]:
    """What the slots of a sequence must hold."""
    state = 0 if salt is None else len(salt)
    out = []
    for token in tokens:
        state = hash((state, token))
        out.append(state)
    return out


class Sequence:
    """A table and, as its model, the tokens that it stands for."""

    def __init__(self, table: BlockTable, tokens: list[int], salt: str | None) -> None:
        self.table = table
        self.tokens = tokens
        self.salt = salt
        self.mirror: list[int] = []


class KVMachine(RuleBasedStateMachine):
    @initialize(
        n_blocks=st.sampled_from([1, 2, 4, 6, 8, 12, 16]),
        block_size=st.integers(1, 4),
        hasher=st.sampled_from(sorted(HASHERS)),
    )
    def start(self, n_blocks: int, block_size: int, hasher: str) -> None:
        self.pool = BlockPool(n_blocks, block_size)
        self.cache = PrefixCache(self.pool, hasher=HASHERS[hasher])
        self.hasher = hasher
        self.memory = [0] * (n_blocks * block_size)
        self.sequences: list[Sequence] = []
        self.known: set[tuple[str | None, tuple[int, ...]]] = set()

    def write(self, sequence: Sequence, new: list[int]) -> bool:
        table, size = sequence.table, self.pool.block_size
        before = (table.n_tokens, table.blocks.copy(), self.pool.n_free)
        room = table.room(len(new))
        try:
            copy = table.append_slots(len(new))
        except PoolExhausted:
            assert room < len(new)
            assert (table.n_tokens, table.blocks, self.pool.n_free) == before
            return False
        assert room == len(new)
        if copy is not None:
            src, dst = copy.src_block * size, copy.dst_block * size
            self.memory[dst : dst + copy.n_tokens] = self.memory[src : src + copy.n_tokens]
        start = len(sequence.tokens)
        sequence.tokens = sequence.tokens + new
        values = contents(sequence.tokens, sequence.salt)
        for index in range(start, len(values)):
            self.memory[table.slot(index)] = values[index]
        return True

    def pick(self, data: st.DataObject) -> Sequence:
        return data.draw(st.sampled_from(self.sequences))

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        salt=st.sampled_from([None, None, "salt"]),
        full=st.booleans(),
    )
    def admit(self, tokens: list[int], salt: str | None, full: bool) -> None:
        table = BlockTable(self.pool)
        match = self.cache.lookup(tokens, salt)
        assert match.n_tokens < len(tokens)
        if self.hasher == "chained" and self.cache.stats.evictions == 0:
            size = self.pool.block_size
            n = 0
            while n + size < len(tokens) and (salt, tuple(tokens[: n + size])) in self.known:
                n += size
            assert match.n_tokens == n
        n_free = self.pool.n_free
        assert self.cache.attach(table, tokens, salt) == match.n_tokens == table.n_tokens
        assert self.pool.n_free <= n_free
        sequence = Sequence(table, tokens[: match.n_tokens], salt)
        self.sequences.append(sequence)
        if self.write(sequence, tokens[match.n_tokens :]) and full:
            self.register(sequence)

    def register(self, sequence: Sequence) -> None:
        free, blocks = self.pool.n_free, sequence.table.blocks.copy()
        self.cache.register(sequence.table, sequence.tokens, sequence.salt)
        assert self.pool.n_free >= free - sum(map(int.__ne__, blocks, sequence.table.blocks))
        size = self.pool.block_size
        for end in range(size, len(sequence.tokens) + 1, size):
            self.known.add((sequence.salt, tuple(sequence.tokens[:end])))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), new=st.lists(st.integers(0, 1), max_size=9), full=st.booleans())
    def append(self, data: st.DataObject, new: list[int], full: bool) -> None:
        sequence = self.pick(data)
        if self.write(sequence, new) and full:
            self.register(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), n=st.integers(0, 5), new=st.lists(st.integers(0, 1), max_size=5))
    def roll_back(self, data: st.DataObject, n: int, new: list[int]) -> None:
        sequence = self.pick(data)
        keep = max(0, len(sequence.tokens) - n)
        sequence.table.truncate(keep)
        sequence.tokens = sequence.tokens[:keep]
        self.write(sequence, new)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        n = data.draw(st.integers(0, len(sequence.tokens)))
        sequence.table.truncate(n)
        sequence.tokens = sequence.tokens[:n]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        free = self.pool.n_free
        self.sequences.append(Sequence(sequence.table.fork(), sequence.tokens.copy(), sequence.salt))
        assert self.pool.n_free == free

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        self.sequences.remove(sequence)
        sequence.table.free()

    @rule()
    def clear(self) -> None:
        held = {block for sequence in self.sequences for block in sequence.table.blocks}
        self.cache.clear()
        assert self.pool.n_retained == 0
        assert self.pool.n_free == self.pool.n_blocks - len(held)
        # What tables hold stays known, but not all of it: look it up no more.
        self.hasher = "cleared"

    @invariant()
    def every_slot_reads_right(self) -> None:
        for sequence in self.sequences:
            table = sequence.table
            assert table.n_tokens == len(sequence.tokens)
            values = [self.memory[table.slot(i)] for i in range(table.n_tokens)]
            assert values == contents(sequence.tokens, sequence.salt)
            first = table.take_dirty()
            sequence.mirror[first:] = table.blocks[first:]
            assert sequence.mirror == table.blocks

    @invariant()
    def every_cached_block_reads_right(self) -> None:
        size = self.pool.block_size
        for block, entry in self.cache._by_block.items():
            tokens: list[int] = []
            above: prefix._Entry | None = entry
            while above is not None:
                tokens[:0] = above.tokens
                above = above.parent
            values = self.memory[block * size : (block + 1) * size]
            assert values == contents(tokens, entry.salt)[-size:]

    @invariant()
    def books_agree(self) -> None:
        tables = [sequence.table for sequence in self.sequences]
        held = {block for table in tables for block in table.blocks}
        assert self.pool.n_free == self.pool.n_blocks - len(held)
        self.pool.check_integrity(tables)
        self.cache.check_integrity()

    def teardown(self) -> None:
        for sequence in self.sequences:
            sequence.table.free()
        assert self.pool.n_free == self.pool.n_blocks
        self.pool.check_integrity([])


KVMachine.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestKVMachine = KVMachine.TestCase


def _keep_cached_count(self: BlockTable, n_tokens: int) -> None:
    n_cached = self.n_cached
    _truncate(self, n_tokens)
    self.n_cached = n_cached


def _keep_blocks(self: BlockTable, n_tokens: int) -> None:
    self.n_tokens = n_tokens


def _forget_nothing(self: PrefixCache, _block: int) -> None:
    self._evictions += 1


def _free_at_once(self: BlockPool, block: int) -> None:
    self._refs[block] -= 1
    if self._refs[block] == 0:
        self._free.append(block)


def _share_without_reference(self: BlockTable) -> BlockTable:
    twin = BlockTable(self._pool)
    twin.blocks, twin.n_tokens = self.blocks.copy(), self.n_tokens
    return twin


def _copy_everything_but_the_last(self: BlockTable, n: int) -> object:
    copy = _append_slots(self, n)
    return copy and copy._replace(n_tokens=copy.n_tokens - 1)


_truncate = BlockTable.truncate
_append_slots = BlockTable.append_slots

FAULTS: dict[str, tuple[object, str, object]] = {
    "write into shared blocks": (BlockPool, "is_writable", lambda _self, _block: True),
    "write into cached blocks": (BlockPool, "is_writable", lambda s, b: s.refcount(b) == 1),
    "copy one slot too few": (BlockTable, "append_slots", _copy_everything_but_the_last),
    "truncate keeps the cached count": (BlockTable, "truncate", _keep_cached_count),
    "truncate keeps the blocks": (BlockTable, "truncate", _keep_blocks),
    "fork takes no reference": (BlockTable, "fork", _share_without_reference),
    "eviction leaves the entry": (PrefixCache, "_evicted", _forget_nothing),
    "cached blocks are freed": (BlockPool, "decref", _free_at_once),
    "a hit is not verified": (prefix, "_same", lambda *_: True),
    "only the parent is verified": (
        prefix,
        "_same",
        lambda e, p, _t, s: (e.parent, e.salt) == (p, s),
    ),
    "the parent is not verified": (
        prefix,
        "_same",
        lambda e, _p, t, s: (e.tokens, e.salt) == (t, s),
    ),
    "the salt is not verified": (
        prefix,
        "_same",
        lambda e, p, t, _s: (e.parent, e.tokens) == (p, t),
    ),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_the_machine_catches(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, name, planted = FAULTS[fault]
    monkeypatch.setattr(target, name, planted)
    with pytest.raises((AssertionError, KeyError, ValueError, IndexError, ExceptionGroup)):
        run_state_machine_as_test(
            KVMachine,
            # A fault is seen after 250 examples on average at worst, and the search ends there; what is drawn is no
            # function of this file alone (Hypothesis also draws constants of whatever modules are loaded).
            settings=settings(
                max_examples=10_000,
                report_multiple_bugs=False,
                stateful_step_count=30,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            ),
        )
