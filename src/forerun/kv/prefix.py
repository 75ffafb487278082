"""Prefix cache: finds the KV of a prompt's beginning that an earlier request has already computed.

Every full block of committed tokens is known by a chained hash: of its parent's hash and its own
token ids, starting from a salt that the caller supplies (the scheme of vLLM's automatic prefix
caching). The hash only finds a candidate. A hit also needs the same parent entry and the same token
ids, so by induction from the salt a collision can cost a hit, but never return the wrong block.

Two requests that compute the same prefix side by side end up sharing one copy: the second
registration replaces its block by the one already known. This is allowed because the KV bits are a
function of the tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from forerun.kv.pool import BlockPool, KVIntegrityError
from forerun.kv.table import BlockTable

ChainHash = Callable[[int, tuple[int, ...]], int]


class PrefixMatch(NamedTuple):
    """Cached blocks that begin a prompt, in order; valid until the pool next allocates."""

    blocks: list[int]
    n_tokens: int


class PrefixStats(NamedTuple):
    """Counts since the cache was made.

    Attributes:
        lookup_tokens: tokens of all sequences that were looked up on admission.
        hit_tokens: those of them whose KV was found.
        evictions: blocks forgotten because the pool needed them.
    """

    lookup_tokens: int
    hit_tokens: int
    evictions: int


def chain_hash(parent: int, tokens: tuple[int, ...]) -> int:
    """64-bit hash of a block: its parent's hash and its token ids."""
    return hash((parent, tokens))


class _Entry:
    """One cached block. `parent` is None for the first block of a sequence."""

    __slots__ = ("block", "children", "key", "parent", "salt", "tokens")

    def __init__(self, key: int, block: int, tokens: tuple[int, ...], parent: _Entry | None, salt: str | None) -> None:
        self.key = key
        self.block = block
        self.tokens = tokens
        self.parent = parent
        self.salt = salt
        self.children: set[_Entry] = set()


class PrefixCache:
    """Trie of full blocks over one `BlockPool`, which evicts unreferenced entries when it is dry.

    Args:
        pool: the pool whose blocks are cached; it accepts one cache.
        hasher: replaces `chain_hash` (tests plant collisions with it).
    """

    def __init__(self, pool: BlockPool, *, hasher: ChainHash = chain_hash) -> None:
        self._pool = pool
        self._hash = hasher
        self._by_key: dict[int, _Entry] = {}
        self._by_block: dict[int, _Entry] = {}
        self._lookup_tokens = 0
        self._hit_tokens = 0
        self._evictions = 0
        self._registrations = 0
        pool.attach_cache(self._evicted)

    @property
    def n_blocks(self) -> int:
        """Blocks in the cache, referenced or not."""
        return len(self._by_key)

    @property
    def registrations(self) -> int:
        """Blocks ever added: while it stands still, no lookup can find more than before."""
        return self._registrations

    @property
    def stats(self) -> PrefixStats:
        """Counters in tokens and blocks; see `PrefixStats`."""
        return PrefixStats(self._lookup_tokens, self._hit_tokens, self._evictions)

    def lookup(self, tokens: Sequence[int], salt: str | None = None) -> PrefixMatch:
        """Longest cached prefix of `tokens` in full blocks, always shorter than `tokens`.

        At least one token stays to be computed, because the logits after it are wanted. Takes no
        reference and counts nothing.
        """
        size = self._pool.block_size
        blocks: list[int] = []
        parent: _Entry | None = None
        for end in range(size, len(tokens), size):
            chunk = tuple(tokens[end - size : end])
            entry = self._by_key.get(self._key(parent, chunk, salt))
            if entry is None or not _same(entry, parent, chunk, salt):
                break
            blocks.append(entry.block)
            parent = entry
        return PrefixMatch(blocks, len(blocks) * size)

    def attach(
        self,
        table: BlockTable,
        tokens: Sequence[int],
        salt: str | None = None,
        *,
        match: PrefixMatch | None = None,
    ) -> int:
        """Start the empty `table` with the longest cached prefix and return its length in tokens.

        `match` saves the lookup when it was made since the last allocation.

        Raises:
            KVIntegrityError: the table isn't empty.
        """
        found = self.lookup(tokens, salt) if match is None else match
        table.adopt(found.blocks)
        self._lookup_tokens += len(tokens)
        self._hit_tokens += found.n_tokens
        return found.n_tokens

    def register(self, table: BlockTable, tokens: Sequence[int], salt: str | None = None) -> None:
        """Make the full blocks of `table` known, from `table.n_cached` on.

        `tokens[:table.n_tokens]` must be what the blocks hold, computed and final. Work is
        proportional to the blocks that are new. A block whose content is already cached is given
        back and the cached one takes its place in the table.
        """
        size = self._pool.block_size
        for index in range(table.n_cached, table.n_tokens // size):
            parent = self._by_block[table.blocks[index - 1]] if index else None
            chunk = tuple(tokens[index * size : (index + 1) * size])
            key = self._key(parent, chunk, salt)
            entry = self._by_key.get(key)
            block = table.blocks[index]
            if entry is not None:
                if not _same(entry, parent, chunk, salt):
                    return
                if entry.block != block:
                    table.replace(index, entry.block)
            elif block in self._by_block:
                raise KVIntegrityError(
                    f"block {block} is cached with tokens {self._by_block[block].tokens}, but a "
                    f"table claims "
                    f"that it holds {chunk}; it was written after it became full"
                )
            else:
                entry = _Entry(key, block, chunk, parent, salt)
                self._by_key[key] = entry
                self._by_block[block] = entry
                self._registrations += 1
                if parent is not None:
                    parent.children.add(entry)
                self._pool.mark_cached(block)
            table.n_cached = index + 1

    def clear(self) -> None:
        """Forget every block that no table holds."""
        for block in list(self._by_block):
            if block in self._by_block and self._pool.refcount(block) == 0:
                self._forget(self._by_block[block])

    def _key(self, parent: _Entry | None, chunk: tuple[int, ...], salt: str | None) -> int:
        return self._hash(hash(salt) if parent is None else parent.key, chunk)

    def _evicted(self, block: int) -> None:
        self._evictions += 1
        self._forget(self._by_block[block])

    def _forget(self, root: _Entry) -> None:
        """Drop an entry and its descendants, which nobody could find without it."""
        if root.parent is not None:
            root.parent.children.discard(root)
        stack = [root]
        while stack:
            entry = stack.pop()
            stack.extend(entry.children)
            del self._by_key[entry.key]
            del self._by_block[entry.block]
            self._pool.unmark_cached(entry.block)

    def check_integrity(self) -> None:
        """Verify that index, trie and pool agree.

        Raises:
            KVIntegrityError: naming the block that is wrong.
        """
        if len(self._by_key) != len(self._by_block):
            raise KVIntegrityError("the prefix cache's two indexes differ in size")
        for key, entry in self._by_key.items():
            block, parent = entry.block, entry.parent
            if self._by_block.get(block) is not entry or entry.key != key:
                raise KVIntegrityError(f"the prefix cache's two indexes disagree about block {block}")
            if key != self._key(parent, entry.tokens, entry.salt):
                raise KVIntegrityError(f"the hash of block {block} doesn't match its tokens")
            if not self._pool.is_cached(block):
                raise KVIntegrityError(f"block {block} is in the prefix cache, but the pool disagrees")
            if len(entry.tokens) != self._pool.block_size:
                raise KVIntegrityError(f"block {block} is cached, but not full")
            if parent is not None and (self._by_key.get(parent.key) is not parent or entry not in parent.children):
                raise KVIntegrityError(f"block {block} is cached, but can't be reached from its parent")
        for block in range(self._pool.n_blocks):
            if self._pool.is_cached(block) and block not in self._by_block:
                raise KVIntegrityError(f"the pool keeps block {block} for a cache that doesn't know it")


def _same(entry: _Entry, parent: _Entry | None, tokens: tuple[int, ...], salt: str | None) -> bool:
    return entry.parent is parent and entry.tokens == tokens and entry.salt == salt
