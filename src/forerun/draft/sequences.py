"""The key-value memory of a draft model: for each request the tokens whose keys and values it holds.

A request's memory is a committed part, the same for all, and branches: one for each path of the last draft tree that
was run through the model. Which path was accepted shows at the next draft, by comparing tokens; the others are given
back then. Nothing here has to be told what was accepted, and whatever was, a of n drafted tokens, a + 1 entries after
the last draft's root stay valid at most: the root's own and those of the accepted tokens that were run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from forerun.kv import BlockPool, BlockTable, KVIntegrityError, PoolExhausted, PrefixCache
from forerun.ops import KvCache


class Branch:
    """One path: a block table whose last `len(tail)` tokens are drafts.

    Attributes:
        table: where the keys and values lie.
        tail: the drafted tokens that it holds after the committed ones.
    """

    __slots__ = ("_mirror", "table", "tail")

    def __init__(self, table: BlockTable, tail: list[int]) -> None:
        self.table = table
        self.tail = tail
        self._mirror = np.empty(16, dtype=np.int32)

    def fork(self) -> Branch:
        """A second branch over the same blocks."""
        return Branch(self.table.fork(), self.tail.copy())

    def block_ids(self) -> npt.NDArray[np.int32]:
        """int32[blocks], the table's blocks; only what changed since the last call is copied."""
        blocks, first = self.table.blocks, self.table.take_dirty()
        if len(blocks) > len(self._mirror):
            grown = np.empty(max(len(blocks), 2 * len(self._mirror)), dtype=np.int32)
            grown[: len(self._mirror)] = self._mirror
            self._mirror = grown
        if first < len(blocks):
            self._mirror[first : len(blocks)] = blocks[first:]
        return self._mirror[: len(blocks)]


class SequenceState:
    """What is held for one request.

    Attributes:
        scope: who may share its cached prefixes.
        agreed: tokens, from the first on, that are committed and held by all branches.
        branches: empty, or at least one.
    """

    __slots__ = ("agreed", "branches", "scope")

    def __init__(self, scope: str | None = None) -> None:
        self.scope = scope
        self.agreed = 0
        self.branches: list[Branch] = []

    @property
    def n_blocks(self) -> int:
        """Table entries held, shared blocks counted each time."""
        return sum(len(branch.table.blocks) for branch in self.branches)

    def release(self) -> None:
        """Gives all blocks back; the request can be caught up again from its tokens."""
        for branch in self.branches:
            branch.table.free()
        self.branches = []
        self.agreed = 0


class Sequences:
    """The states of all requests over one pool, with a prefix cache (by scope) and eviction of whole states.

    Copies (copy-on-write) are applied to `kv` at once. Not thread-safe.
    """

    def __init__(self, n_blocks: int, block_size: int, kv: KvCache) -> None:
        self.pool = BlockPool(n_blocks, block_size)
        self.prefix = PrefixCache(self.pool)
        self._kv = kv
        # Least recently used first.
        self._states: OrderedDict[int, SequenceState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def begin(self, key: int, scope: str | None = None) -> None:
        """A request starts, holding nothing."""
        if key not in self._states:
            self._states[key] = SequenceState(scope)

    def open(self, key: int, tokens: Sequence[int]) -> SequenceState:
        """The state of a request that is used now, cut to what it shares with its committed tokens.

        At least the last token is left to be computed, because the scores after it are wanted. A state that holds
        nothing starts with the longest prefix in the cache. Afterwards there is exactly one branch, without a tail.
        """
        self.begin(key)
        state = self._states[key]
        self._states.move_to_end(key)
        self._settle(state, tokens, max(len(tokens) - 1, 0))
        if not state.branches:
            state.branches = [Branch(BlockTable(self.pool), [])]
        table = state.branches[0].table
        if state.agreed == 0:
            self.prefix.attach(table, tokens, state.scope)
            state.agreed = table.n_tokens
        return state

    def committed(self, state: SequenceState, tokens: Sequence[int]) -> None:
        """All that the state's one branch holds has been computed, and is the beginning of `tokens`."""
        table = state.branches[0].table
        state.agreed = table.n_tokens
        self.prefix.register(table, tokens, state.scope)

    def reserve(self, table: BlockTable, n: int, keep: Collection[int]) -> bool:
        """Slots for `n` more tokens, if necessary by evicting states of requests that are not in `keep`, the least
        recently used first; False: there is no room, and nothing changed."""
        while True:
            try:
                copy = table.append_slots(n)
            except PoolExhausted:
                if not self._evict_one(keep):
                    return False
                continue
            if copy is not None:
                self._kv.copy_block(copy.src_block, copy.dst_block)
            return True

    def can_hold(self, state: SequenceState, n_tokens: int, keep: Collection[int]) -> bool:
        """Whether a sequence of `n_tokens` could have room, all states outside of `keep` being evicted."""
        others = sum(s.n_blocks for key, s in self._states.items() if key not in keep and s is not state)
        return self.pool.blocks_for(n_tokens) - state.n_blocks <= self.pool.n_free + others

    def fork(self, key: int, child: int) -> None:
        """The child starts with what is known to be right of the parent's memory."""
        parent = self._states.get(key)
        self._release(child)
        twin = self._states[child] = SequenceState(parent.scope if parent is not None else None)
        if parent is not None and parent.agreed:
            table = parent.branches[0].table.fork()
            table.truncate(parent.agreed)
            twin.branches = [Branch(table, [])]
            twin.agreed = parent.agreed

    def truncate(self, key: int, n_tokens: int) -> None:
        """The request goes back to its first `n_tokens` tokens."""
        state = self._states.get(key)
        if state is None or state.agreed <= n_tokens:
            return
        first, *others = state.branches
        for branch in others:
            branch.table.free()
        first.table.truncate(n_tokens)
        first.tail.clear()
        state.branches = [first]
        state.agreed = n_tokens

    def free(self, key: int, tokens: Sequence[int]) -> None:
        """The request has ended with these tokens; full blocks of them stay in the prefix cache while there is room."""
        state = self._states.get(key)
        if state is not None and state.branches:
            self._settle(state, tokens, len(tokens))
            self.prefix.register(state.branches[0].table, tokens, state.scope)
        self._release(key)

    def close(self) -> None:
        """Gives everything back."""
        for key in list(self._states):
            self._release(key)
        self.prefix.clear()

    def check_integrity(self) -> None:
        """Verifies pool, prefix cache and states; raises `KVIntegrityError`."""
        branches = [branch for state in self._states.values() for branch in state.branches]
        self.pool.check_integrity([branch.table for branch in branches])
        self.prefix.check_integrity()
        for key, state in self._states.items():
            for branch in state.branches:
                held = branch.table.n_tokens
                if held != state.agreed + len(branch.tail):
                    raise KVIntegrityError(
                        f"draft state {key} holds {held} tokens, but knows {state.agreed} committed and "
                        f"{len(branch.tail)} drafted ones"
                    )
            if state.agreed and not state.branches:
                raise KVIntegrityError(f"draft state {key} claims {state.agreed} tokens, but holds no block")

    def _settle(self, state: SequenceState, tokens: Sequence[int], most: int) -> None:
        """Keeps the branch that agrees longest with `tokens`, cut to where it does and to `most` tokens."""
        if not state.branches:
            return
        best, agreed = state.branches[0], -1
        for branch in state.branches:
            n = state.agreed
            for drafted in branch.tail:
                if n >= len(tokens) or tokens[n] != drafted:
                    break
                n += 1
            if n > agreed:
                best, agreed = branch, n
        for branch in state.branches:
            if branch is not best:
                branch.table.free()
        state.agreed = min(agreed, most)
        best.table.truncate(state.agreed)
        best.tail.clear()
        state.branches = [best]

    def _evict_one(self, keep: Collection[int]) -> bool:
        for key, state in self._states.items():
            if state.branches and key not in keep:
                state.release()
                return True
        return False

    def _release(self, key: int) -> None:
        state = self._states.pop(key, None)
        if state is not None:
            state.release()
