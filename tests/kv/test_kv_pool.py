from __future__ import annotations

import pytest

from forerun.errors import ConfigurationError
from forerun.kv import BlockPool, BlockTable, KVIntegrityError, PoolExhausted


def test_allocates_each_block_once_and_takes_all_or_none() -> None:
    pool = BlockPool(5, block_size=4)
    first = pool.allocate(3)
    assert pool.n_free == 2
    with pytest.raises(PoolExhausted, match=r"3 KV blocks wanted, 2 of 5 free"):
        pool.allocate(3)
    assert pool.n_free == 2
    assert sorted(first + pool.allocate(2)) == [0, 1, 2, 3, 4]
    with pytest.raises(PoolExhausted):
        pool.allocate()
    pool.check_integrity()


def test_last_release_frees() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate()
    pool.incref(block)
    pool.decref(block)
    assert (pool.refcount(block), pool.n_free) == (1, 0)
    pool.decref(block)
    assert (pool.refcount(block), pool.n_free) == (0, 1)


def test_misuse_is_refused() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate()
    pool.decref(block)
    with pytest.raises(KVIntegrityError, match="freed twice"):
        pool.decref(block)
    with pytest.raises(KVIntegrityError, match="is free and can't be shared"):
        pool.incref(block)
    with pytest.raises(KVIntegrityError, match="nobody holds"):
        pool.mark_cached(block)
    pool.check_integrity([])


@pytest.mark.parametrize(("n_blocks", "block_size"), [(0, 16), (-1, 16), (4, 0)])
def test_sizes_are_checked(n_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigurationError, match="raise kv_tokens"):
        BlockPool(n_blocks, block_size)


def test_retained_blocks_are_capacity_and_go_least_recent_first() -> None:
    pool = BlockPool(3)
    evicted: list[int] = []
    pool.attach_cache(evicted.append)
    with pytest.raises(ConfigurationError, match="already has a prefix cache"):
        pool.attach_cache(evicted.append)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.mark_cached(block)
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.decref(block)
    assert (pool.n_free, pool.n_retained) == (3, 3)
    pool.incref(blocks[1])
    pool.decref(blocks[1])
    assert pool.allocate(2) == [blocks[0], blocks[2]] == evicted
    pool.unmark_cached(blocks[1])
    assert (pool.n_free, pool.n_retained) == (1, 0)
    pool.check_integrity()


def test_check_integrity_sees_wrong_books() -> None:
    pool = BlockPool(4)
    with BlockTable(pool) as table, BlockTable(pool) as other:
        table.append_slots(20)
        other.append_slots(1)
        pool.check_integrity([table, other])
        with pytest.raises(KVIntegrityError, match="refcount 1, but 0 table entries"):
            pool.check_integrity([table])
        pool.incref(table.blocks[0])
        with pytest.raises(KVIntegrityError, match="refcount 2, but 1"):
            pool.check_integrity([table, other])
        pool.decref(table.blocks[0])
        pool._free.append(table.blocks[0])
        with pytest.raises(KVIntegrityError, match="one of them only"):
            pool.check_integrity()
        pool._free.append(pool._free[-1])
        with pytest.raises(KVIntegrityError, match="names a block twice"):
            pool.check_integrity()
        del pool._free[-2:]
        pool._free.append(99)
        with pytest.raises(KVIntegrityError, match="outside the pool"):
            pool.check_integrity()
        pool._free.remove(99)
        lost = pool._free.pop()
        with pytest.raises(KVIntegrityError, match=f"block {lost} must be free"):
            pool.check_integrity()
        pool._free.append(lost)
    pool.check_integrity([])
