"""Fixed-size KV blocks, counted by reference.

The pool hands out block *ids*; the memory behind them belongs to the executor. A block is in
exactly one of three states:

- **free**: no reference, no content worth keeping;
- **referenced**: held by one or more block tables;
- **retained**: no reference, but the prefix cache still knows its content. It counts as free
  capacity and is taken, least recently released first, once the free list is empty.

Paging with reference counts follows PagedAttention (Kwon et al. 2023, arXiv:2309.06180).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from forerun.errors import ConfigurationError, ForerunError


class PoolExhausted(ForerunError):  # noqa: N818 - a condition that the scheduler answers, not a fault
    """No free block is left. Internal: the scheduler waits or preempts; it never reaches a user."""


class KVIntegrityError(ForerunError, AssertionError):
    """The books of the KV pool contradict themselves, or a block was used without being held."""


class HoldsBlocks(Protocol):
    """Anything that holds one reference for each entry of `blocks`, such as a `BlockTable`."""

    @property
    def blocks(self) -> Sequence[int]: ...


class BlockPool:
    """Allocator of `n_blocks` KV blocks of `block_size` token slots each.

    Not thread-safe: one engine loop owns it.

    Raises:
        ConfigurationError: a size is less than 1.
    """

    __slots__ = ("_cached", "_free", "_on_evict", "_refs", "_retained", "block_size", "n_blocks")

    def __init__(self, n_blocks: int, block_size: int = 16) -> None:
        if n_blocks < 1 or block_size < 1:
            raise ConfigurationError(
                f"a KV pool needs at least 1 block of at least 1 token, got {n_blocks} blocks of "
                f"{block_size} tokens; raise kv_tokens"
            )
        self.n_blocks = n_blocks
        self.block_size = block_size
        self._refs = [0] * n_blocks
        # Popped from the end, so that low ids go first and just-freed (cache-warm) blocks are
        # reused.
        self._free = list(range(n_blocks - 1, -1, -1))
        self._retained: OrderedDict[int, None] = OrderedDict()
        self._cached = bytearray(n_blocks)
        self._on_evict: Callable[[int], None] | None = None

    @property
    def n_free(self) -> int:
        """Blocks that can be allocated now: free ones and retained ones."""
        return len(self._free) + len(self._retained)

    @property
    def n_retained(self) -> int:
        """Unreferenced blocks whose content the prefix cache still knows."""
        return len(self._retained)

    @property
    def capacity_tokens(self) -> int:
        """Token slots in the whole pool."""
        return self.n_blocks * self.block_size

    def blocks_for(self, n_tokens: int) -> int:
        """Blocks that `n_tokens` tokens occupy."""
        return -(-n_tokens // self.block_size)

    def refcount(self, block: int) -> int:
        """References held on `block`; 0 for a free or retained one."""
        return self._refs[block]

    def is_cached(self, block: int) -> bool:
        """Whether the prefix cache knows the content of `block`."""
        return bool(self._cached[block])

    def is_writable(self, block: int) -> bool:
        """Whether the one holder of `block` may write into it: nobody else would see the write."""
        return self._refs[block] == 1 and not self._cached[block]

    def allocate(self, n: int = 1) -> list[int]:
        """Take `n` blocks with one reference each, all or none.

        Raises:
            PoolExhausted: fewer than `n` blocks are free; nothing was taken.
        """
        free = self._free
        if n > len(free) + len(self._retained):
            raise PoolExhausted(
                f"{n} KV blocks wanted, {self.n_free} of {self.n_blocks} free; finish or preempt a request"
            )
        taken: list[int] = []
        for _ in range(n):
            block = free.pop() if free else self._evict()
            self._refs[block] = 1
            taken.append(block)
        return taken

    def _evict(self) -> int:
        block, _ = self._retained.popitem(last=False)
        self._cached[block] = 0
        if self._on_evict is not None:
            self._on_evict(block)
        return block

    def incref(self, block: int) -> None:
        """Add a reference to a referenced or retained block.

        Raises:
            KVIntegrityError: the block is free, so its content is undefined.
        """
        refs = self._refs
        if refs[block] == 0:
            if block not in self._retained:
                raise KVIntegrityError(
                    f"block {block} is free and can't be shared; hold a reference before passing it on"
                )
            del self._retained[block]
        refs[block] += 1

    def decref(self, block: int) -> None:
        """Drop a reference; the last one frees the block, or retains it if a cache knows it.

        Raises:
            KVIntegrityError: nobody holds the block (freed twice).
        """
        refs = self._refs
        if refs[block] <= 0:
            raise KVIntegrityError(f"block {block} was released, but nobody holds it (freed twice)")
        refs[block] -= 1
        if refs[block] == 0:
            if self._cached[block]:
                self._retained[block] = None
            else:
                self._free.append(block)

    def attach_cache(self, on_evict: Callable[[int], None]) -> None:
        """Let one prefix cache mark blocks; `on_evict(block)` runs when a retained block is reused.

        Raises:
            ConfigurationError: the pool already has a prefix cache.
        """
        if self._on_evict is not None:
            raise ConfigurationError("this KV pool already has a prefix cache; use that one or another pool")
        self._on_evict = on_evict

    def mark_cached(self, block: int) -> None:
        """Keep the content of a referenced block after its last release (for the prefix cache).

        Raises:
            KVIntegrityError: nobody holds the block.
        """
        if self._refs[block] <= 0:
            raise KVIntegrityError(f"block {block} can't be cached: nobody holds its content")
        self._cached[block] = 1

    def unmark_cached(self, block: int) -> None:
        """Forget that the prefix cache knows `block`; a retained block becomes free."""
        self._cached[block] = 0
        if self._refs[block] == 0 and block in self._retained:
            del self._retained[block]
            self._free.append(block)

    def check_integrity(self, holders: Iterable[HoldsBlocks] | None = None) -> None:
        """Verify that every block is in exactly one state and, given all `holders`, every refcount.

        Raises:
            KVIntegrityError: naming the first block that is wrong.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise KVIntegrityError("the free list names a block twice")
        for block in range(self.n_blocks):
            refs, cached = self._refs[block], self._cached[block]
            states = (block in free) + (block in self._retained) + (refs > 0)
            if states != 1 or refs < 0:
                raise KVIntegrityError(
                    f"block {block} must be free, retained or referenced, and one of them only: "
                    f"free={block in free}, retained={block in self._retained}, refcount={refs}"
                )
            if cached and block in free:
                raise KVIntegrityError(f"block {block} is cached, yet in the free list")
            if block in self._retained and not cached:
                raise KVIntegrityError(f"block {block} is retained, yet no cache knows it")
        if not all(0 <= block < self.n_blocks for block in (*free, *self._retained)):
            raise KVIntegrityError("the free list or the retained set names a block outside the pool")
        if holders is None:
            return
        held = [0] * self.n_blocks
        for holder in holders:
            for block in holder.blocks:
                held[block] += 1
        for block, (refs, expected) in enumerate(zip(self._refs, held, strict=True)):
            if refs != expected:
                raise KVIntegrityError(f"block {block} has refcount {refs}, but {expected} table entries hold it")
