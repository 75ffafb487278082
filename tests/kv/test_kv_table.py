from __future__ import annotations

import pytest

from forerun.kv import BlockCopy, BlockPool, BlockTable, KVIntegrityError, PoolExhausted


def test_append_and_truncate_hold_exactly_the_blocks_needed() -> None:
    pool = BlockPool(8, block_size=4)
    with BlockTable(pool) as table:
        for n_tokens, n_blocks in ((0, 0), (1, 1), (4, 1), (5, 2), (17, 5)):
            assert table.append_slots(n_tokens - table.n_tokens) is None
            assert (table.n_tokens, len(table.blocks)) == (n_tokens, n_blocks)
        for n_tokens, n_blocks in ((17, 5), (16, 4), (13, 4), (12, 3), (1, 1), (0, 0)):
            table.truncate(n_tokens)
            assert (table.n_tokens, len(table.blocks)) == (n_tokens, n_blocks)
            assert pool.n_free == 8 - n_blocks
    pool.check_integrity([])


def test_exhausted_pool_leaves_the_table_unchanged() -> None:
    pool = BlockPool(2, block_size=4)
    with BlockTable(pool) as table, BlockTable(pool) as other:
        table.append_slots(3)
        assert table.room(100) == 5
        assert table.room(2) == 2
        with pytest.raises(PoolExhausted):
            table.append_slots(6)
        assert (table.n_tokens, len(table.blocks), pool.n_free) == (3, 1, 1)
        other.append_slots(1)
        assert table.room(100) == 1
        table.append_slots(1)
        assert table.room(100) == 0


def test_bad_counts_are_refused() -> None:
    with BlockTable(BlockPool(2)) as table:
        table.append_slots(3)
        with pytest.raises(ValueError, match="got -1"):
            table.append_slots(-1)
        with pytest.raises(ValueError, match="table of 3 tokens to 4"):
            table.truncate(4)
        with pytest.raises(ValueError, match="to -1"):
            table.truncate(-1)


def test_fork_copies_the_shared_partial_block_on_the_first_write_only() -> None:
    pool = BlockPool(8, block_size=4)
    with BlockTable(pool) as table:
        table.append_slots(6)
        with table.fork() as twin:
            assert twin.blocks == table.blocks
            assert pool.n_free == 6
            shared = table.blocks[1]
            copy = twin.append_slots(1)
            assert copy == BlockCopy(shared, twin.blocks[1], 2)
            assert twin.blocks[0] == table.blocks[0]
            assert twin.blocks[1] != shared == table.blocks[1]
            # Both now own their last block, so neither copies again.
            assert twin.append_slots(1) is None
            assert table.append_slots(1) is None
            pool.check_integrity([table, twin])
        pool.check_integrity([table])
    pool.check_integrity([])


def test_fork_at_a_block_boundary_needs_no_copy() -> None:
    pool = BlockPool(8, block_size=4)
    with BlockTable(pool) as table:
        table.append_slots(8)
        with table.fork() as twin:
            assert twin.append_slots(1) is None
            assert table.append_slots(1) is None
            assert twin.blocks[:2] == table.blocks[:2]
            assert twin.blocks[2] != table.blocks[2]


def test_copy_on_write_without_a_free_block_leaves_everything_unchanged() -> None:
    pool = BlockPool(1, block_size=4)
    with BlockTable(pool) as table:
        table.append_slots(2)
        with table.fork() as twin:
            assert table.room(2) == 0
            with pytest.raises(PoolExhausted):
                table.append_slots(1)
            assert table.blocks == twin.blocks
            pool.check_integrity([table, twin])
        assert table.room(9) == 2
        assert table.append_slots(1) is None


def test_truncating_a_fork_never_touches_the_other() -> None:
    pool = BlockPool(4, block_size=4)
    with BlockTable(pool) as table:
        table.append_slots(10)
        before = table.blocks.copy()
        twin = table.fork()
        twin.truncate(5)
        copy = twin.append_slots(1)
        assert copy is not None
        assert (copy.src_block, copy.n_tokens) == (before[1], 1)
        twin.free()
        twin.free()
        assert table.blocks == before
        pool.check_integrity([table])


def test_scope_frees_even_on_an_error() -> None:
    pool = BlockPool(4)
    table = BlockTable(pool)

    def fail_midway() -> None:
        with table:
            table.append_slots(40)
            assert pool.n_free == 1
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fail_midway()
    assert pool.n_free == 4


def test_adopt_only_starts_an_empty_table() -> None:
    pool = BlockPool(4, block_size=2)
    with BlockTable(pool) as table, BlockTable(pool) as other:
        table.append_slots(4)
        other.adopt(table.blocks)
        assert (other.n_tokens, other.blocks) == (4, table.blocks)
        with pytest.raises(KVIntegrityError, match="free it first"):
            other.adopt(table.blocks)


def test_dirty_mark_covers_every_changed_entry() -> None:
    pool = BlockPool(16, block_size=2)
    with BlockTable(pool) as table:
        table.append_slots(6)
        assert table.take_dirty() == 0
        table.append_slots(1)
        assert table.take_dirty() == 3
        assert table.take_dirty() == 4
        table.truncate(5)
        table.append_slots(3)
        assert table.take_dirty() == 3
        table.truncate(5)
        with table.fork() as twin:
            assert twin.take_dirty() == 0
            table.append_slots(1)
            assert table.take_dirty() == 2
        assert [table.slot(t) for t in (0, 1, 4)] == [
            table.blocks[0] * 2,
            table.blocks[0] * 2 + 1,
            table.blocks[2] * 2,
        ]
