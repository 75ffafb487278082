from __future__ import annotations

from collections.abc import Sequence

import pytest

from forerun.kv import BlockPool, BlockTable, KVIntegrityError, PrefixCache


def filled(cache: PrefixCache, tokens: Sequence[int], salt: str | None = None) -> BlockTable:
    """A table that went through a whole prefill of `tokens`."""
    table = BlockTable(cache._pool)
    start = cache.attach(table, tokens, salt)
    table.append_slots(len(tokens) - start)
    cache.register(table, tokens, salt)
    return table


def test_longest_prefix_but_never_the_whole_prompt() -> None:
    pool = BlockPool(16, block_size=4)
    cache = PrefixCache(pool)
    tokens = list(range(14))
    blocks = filled(cache, tokens).blocks
    for n, expected in ((0, 0), (3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (14, 3)):
        match = cache.lookup(tokens[:n])
        assert (match.blocks, match.n_tokens) == (blocks[:expected], 4 * expected)
    assert cache.lookup([*tokens[:8], 99, 99, 99, 99, 5]).blocks == blocks[:2]
    assert cache.lookup([99, *tokens[1:]]).blocks == []
    # The last block isn't full, and the same tokens at another place are another block.
    assert cache.lookup(tokens[4:12]).blocks == []
    assert cache.n_blocks == 3


def test_salts_do_not_meet() -> None:
    cache = PrefixCache(BlockPool(16, block_size=2))
    tokens = [1, 2, 3, 4, 5]
    common, mine = filled(cache, tokens), filled(cache, tokens, "mine")
    assert not set(common.blocks) & set(mine.blocks)
    assert cache.lookup(tokens, "mine").blocks == mine.blocks[:2]
    assert cache.lookup(tokens).blocks == common.blocks[:2]
    assert cache.lookup(tokens, "other").blocks == []


@pytest.mark.parametrize("salt", [None, "s"])
def test_a_collision_costs_a_hit_but_never_returns_the_wrong_block(salt: str | None) -> None:
    cache = PrefixCache(BlockPool(16, block_size=2), hasher=lambda _parent, _tokens: 7)
    table = filled(cache, [1, 2, 3, 4, 5])
    assert cache.lookup([1, 2, 9]).blocks == table.blocks[:1]
    assert cache.lookup([8, 8, 9]).blocks == []
    assert cache.lookup([1, 2, 9], "x").blocks == []
    other = filled(cache, [8, 8, 3, 4, 5], salt)
    assert (cache.n_blocks, other.n_cached) == (1, 0)
    cache.check_integrity()


def test_a_collision_of_the_parent_is_seen_in_the_child() -> None:
    # Only the tokens of a chunk count, not its history: [1, 2] and [8, 8] as a parent look alike.
    cache = PrefixCache(BlockPool(16, block_size=2), hasher=lambda _parent, tokens: tokens[-1] // 4)
    filled(cache, [1, 2, 4, 5, 9])
    assert cache.lookup([0, 1, 4, 5, 9]).blocks == []
    assert cache.lookup([1, 2, 4, 5, 9]).n_tokens == 4


def test_blocks_survive_release_and_end_is_evicted_before_beginning() -> None:
    pool = BlockPool(4, block_size=2)
    cache = PrefixCache(pool)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    table = filled(cache, tokens)
    blocks = table.blocks.copy()
    table.free()
    assert (pool.n_free, pool.n_retained) == (4, 3)
    with BlockTable(pool) as taker:
        taker.append_slots(4)
        assert cache.lookup(tokens).blocks == blocks[:2]
        taker.append_slots(2)
        assert cache.lookup(tokens).blocks == blocks[:1]
        with BlockTable(pool) as reader:
            assert cache.attach(reader, tokens) == 2
            assert pool.n_free == 0
    assert cache.stats.evictions == 2
    cache.check_integrity()
    pool.check_integrity([])


def test_a_hit_makes_a_prefix_recent() -> None:
    pool = BlockPool(3, block_size=2)
    cache = PrefixCache(pool)
    for tokens in ([1, 1, 0], [2, 2, 0]):
        filled(cache, tokens).free()
    filled(cache, [1, 1, 5]).free()
    with BlockTable(pool) as taker:
        taker.append_slots(4)
        assert cache.lookup([1, 1, 0]).n_tokens == 2
        assert cache.lookup([2, 2, 0]).n_tokens == 0


def test_the_second_of_two_equal_blocks_gives_way_to_the_first() -> None:
    pool = BlockPool(8, block_size=2)
    cache = PrefixCache(pool)
    tokens = [1, 2, 3, 4, 5]
    with BlockTable(pool) as a, BlockTable(pool) as b:
        for table in (a, b):
            table.append_slots(5)
            table.take_dirty()
        cache.register(a, tokens)
        cache.register(b, tokens)
        assert b.blocks[:2] == a.blocks[:2]
        assert b.blocks[2] != a.blocks[2]
        assert b.take_dirty() == 0
        assert pool.n_free == 4
        pool.check_integrity([a, b])
    pool.check_integrity([])


def test_counters_are_in_tokens() -> None:
    cache = PrefixCache(BlockPool(16, block_size=4))
    filled(cache, range(10))
    filled(cache, range(9))
    assert cache.stats == (19, 8, 0)
    assert cache.stats._fields == ("lookup_tokens", "hit_tokens", "evictions")


def test_registration_is_incremental() -> None:
    hashed: list[tuple[int, ...]] = []

    def hasher(parent: int, tokens: tuple[int, ...]) -> int:
        hashed.append(tokens)
        return hash((parent, tokens))

    pool = BlockPool(64, block_size=4)
    cache = PrefixCache(pool, hasher=hasher)
    tokens: list[int] = []
    with BlockTable(pool) as table:
        for token in range(100):
            tokens.append(token)
            table.append_slots(1)
            cache.register(table, tokens)
    assert hashed == [tuple(range(start, start + 4)) for start in range(0, 100, 4)]


def test_writing_behind_a_truncation_into_a_cached_block_copies_it() -> None:
    pool = BlockPool(8, block_size=4)
    cache = PrefixCache(pool)
    table = filled(cache, list(range(8)))
    blocks = table.blocks.copy()
    table.truncate(6)
    assert table.n_cached == 1
    copy = table.append_slots(2)
    assert copy is not None
    assert (copy.src_block, copy.n_tokens) == (blocks[1], 2)
    cache.register(table, [0, 1, 2, 3, 4, 5, 60, 70])
    assert cache.lookup([*range(8), 0]).blocks == blocks
    assert cache.lookup([0, 1, 2, 3, 4, 5, 60, 70, 0]).blocks == [blocks[0], copy.dst_block]
    pool.check_integrity([table])


def test_a_full_block_that_was_rewritten_is_noticed() -> None:
    pool = BlockPool(8, block_size=2)
    cache = PrefixCache(pool)
    table = filled(cache, [1, 2, 3])
    table.n_cached = 0
    with pytest.raises(KVIntegrityError, match="written after it became full"):
        cache.register(table, [1, 7, 3])


def test_eviction_drops_what_only_it_could_reach() -> None:
    pool = BlockPool(6, block_size=2)
    cache = PrefixCache(pool)
    tokens = [1, 2, 3, 4, 5]
    first, twin = BlockTable(pool), BlockTable(pool)
    first.append_slots(4)
    other = first.fork()
    twin.append_slots(2)
    cache.register(twin, tokens)
    cache.register(first, tokens)
    # `other` still has its own first block and the second that `first` has registered.
    first.free()
    twin.free()
    with BlockTable(pool) as taker:
        taker.append_slots(2 * pool.n_free)
        assert cache.n_blocks == 0
        cache.check_integrity()
        pool.check_integrity([taker, other])
        cache.register(other, tokens)
        assert cache.lookup(tokens).blocks == other.blocks


def test_clear_forgets_what_nobody_holds() -> None:
    pool = BlockPool(8, block_size=2)
    cache = PrefixCache(pool)
    held = filled(cache, [1, 2, 3, 4, 5])
    filled(cache, [1, 2, 9, 9, 9]).free()
    filled(cache, [8, 8, 8]).free()
    cache.clear()
    assert cache.n_blocks == 2
    assert cache.lookup([1, 2, 9, 9, 9]).blocks == held.blocks[:1]
    assert pool.n_retained == 0
    held.free()
    cache.clear()
    assert cache.n_blocks == 0
    cache.check_integrity()
    pool.check_integrity([])


def test_check_integrity_sees_wrong_books() -> None:
    pool = BlockPool(8, block_size=2)
    cache = PrefixCache(pool)
    table = filled(cache, [1, 2, 3, 4, 5])
    entry = cache._by_block[table.blocks[1]]
    entry.tokens = (3, 5)
    with pytest.raises(KVIntegrityError, match="hash of block"):
        cache.check_integrity()
    entry.tokens = (3, 4)
    pool.unmark_cached(table.blocks[1])
    with pytest.raises(KVIntegrityError, match="the pool disagrees"):
        cache.check_integrity()
    pool.mark_cached(table.blocks[1])
    pool.mark_cached(table.blocks[2])
    with pytest.raises(KVIntegrityError, match="doesn't know it"):
        cache.check_integrity()
