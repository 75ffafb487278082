"""The block table: where the KV of one sequence's tokens lies, in order."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

from forerun.kv.pool import BlockPool, KVIntegrityError


class BlockCopy(NamedTuple):
    """Copy the first `n_tokens` slots (all layers, K and V) of `src_block` to `dst_block`.

    Copies are applied in the order in which they were issued, before the forward that follows: a
    source may be reused as the destination of a later copy, or written by that forward.
    """

    src_block: int
    dst_block: int
    n_tokens: int


class BlockTable:
    """Blocks of one sequence: token `t` lies in slot `t % block_size` of `blocks[t // block_size]`.

    Holds one reference for each entry. Usable as a context manager, which frees it; a freed table
    is empty and may be filled again. `blocks` is read by others and changed only here.

    Attributes:
        blocks: block ids, exactly as many as `n_tokens` needs.
        n_tokens: slots in use.
        n_cached: leading blocks that are registered in the prefix cache.
    """

    __slots__ = ("_dirty_from", "_pool", "blocks", "n_cached", "n_tokens")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.blocks: list[int] = []
        self.n_tokens = 0
        self.n_cached = 0
        self._dirty_from = 0

    def __enter__(self) -> BlockTable:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.free()

    def append_slots(self, n: int) -> BlockCopy | None:
        """Add slots for `n` tokens that are about to be written.

        Returns the copy to make first when the partly filled last block is shared (copy-on-write).

        Raises:
            PoolExhausted: the blocks do not suffice; the table is unchanged.
            ValueError: `n` is negative.
        """
        if n < 0:
            raise ValueError(f"append_slots takes a count of 0 or more, got {n}; use truncate")
        pool, blocks, used = self._pool, self.blocks, self.n_tokens
        size = pool.block_size
        end = used + n
        partial = used % size
        shared = partial != 0 and n > 0 and not pool.is_writable(blocks[-1])
        need = -(-end // size) - len(blocks)
        copy = None
        if shared:
            new = pool.allocate(need + 1)
            copy = BlockCopy(blocks[-1], new[0], partial)
            pool.decref(blocks.pop())
            self._dirty_from = min(self._dirty_from, len(blocks))
            blocks += new
        elif need:
            blocks += pool.allocate(need)
        self.n_tokens = end
        return copy

    def room(self, n: int) -> int:
        """How many of `n` slots `append_slots` could add now, with all free blocks of the pool."""
        pool, blocks, used = self._pool, self.blocks, self.n_tokens
        free = pool.n_free
        if used % pool.block_size and not pool.is_writable(blocks[-1]):
            if free == 0:
                return 0
            free -= 1
        return min(n, (len(blocks) + free) * pool.block_size - used)

    def truncate(self, n_tokens: int) -> None:
        """Keep the first `n_tokens` tokens and give back the blocks behind them, last one first.

        Raises:
            ValueError: `n_tokens` is negative or larger than the table.
        """
        if not 0 <= n_tokens <= self.n_tokens:
            raise ValueError(
                f"can't truncate a table of {self.n_tokens} tokens to {n_tokens}; 0 to {self.n_tokens} are possible"
            )
        pool, blocks = self._pool, self.blocks
        size = pool.block_size
        keep = -(-n_tokens // size)
        # Last first: the cache then evicts the end of a prefix before its beginning.
        while len(blocks) > keep:
            pool.decref(blocks.pop())
        self._dirty_from = min(self._dirty_from, keep)
        self.n_cached = min(self.n_cached, n_tokens // size)
        self.n_tokens = n_tokens

    def fork(self) -> BlockTable:
        """A second table over the same blocks; who writes into the shared last one copies it."""
        twin = BlockTable(self._pool)
        for block in self.blocks:
            self._pool.incref(block)
        twin.blocks = self.blocks.copy()
        twin.n_tokens = self.n_tokens
        twin.n_cached = self.n_cached
        return twin

    def free(self) -> None:
        """Give all blocks back. The table is then empty; freeing it again does nothing."""
        self.truncate(0)

    def adopt(self, blocks: Sequence[int]) -> None:
        """Start an empty table with full blocks of the prefix cache, taking a reference on each.

        Raises:
            KVIntegrityError: the table isn't empty.
        """
        if self.blocks:
            raise KVIntegrityError("a cached prefix can only start an empty block table; free it first")
        for block in blocks:
            self._pool.incref(block)
        self.blocks = list(blocks)
        self.n_tokens = len(blocks) * self._pool.block_size
        self.n_cached = len(blocks)
        self._dirty_from = 0

    def replace(self, index: int, block: int) -> None:
        """Let entry `index` name `block` instead, which holds the same content."""
        self._pool.incref(block)
        self._pool.decref(self.blocks[index])
        self.blocks[index] = block
        self._dirty_from = min(self._dirty_from, index)

    def take_dirty(self) -> int:
        """First index of `blocks` that may differ from what the last call has seen.

        For the one consumer that mirrors the table (the step batch): copy `blocks[first:]` and no
        more.
        """
        first = self._dirty_from
        self._dirty_from = len(self.blocks)
        return first

    def slot(self, token: int) -> int:
        """Flat slot of token index `token`: block id times block size plus the offset."""
        size = self._pool.block_size
        return self.blocks[token // size] * size + token % size
