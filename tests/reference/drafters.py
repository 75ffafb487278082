"""Drafters for tests: always right, always wrong, random trees, scripted; and a guard that checks their caller.

What they propose is deterministic: a function of the request's tokens and of their own settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from forerun.draft.base import NO_DRAFT, Drafter, DraftRow, DraftTree
from forerun.sample.params import SamplingParams
from reference.tiny import VOCAB_SIZE

Truth: TypeAlias = Callable[[DraftRow], Sequence[int]]
"""The tokens that the target model will write after `row.tokens`; may be shorter than the row's budget."""

MOST_NODES = 63
"""What an ancestor mask of 64 bits can name beside the root."""


class Recorded:
    """Answers known in advance, told apart by prompt and parameters; a `Truth`.

    Where an answer is over, `filler` follows, so that drafts run past its end.
    """

    def __init__(self, filler: int = 7) -> None:
        self.filler = filler
        self._sequences: dict[SamplingParams, list[list[int]]] = {}

    def add(self, params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Records what follows a prompt under these parameters; may go on past where a stop would cut the answer."""
        self._sequences.setdefault(params, []).append([*prompt, *answer])

    def __call__(self, row: DraftRow) -> list[int]:
        n = len(row.tokens)
        known = next(
            (s for s in self._sequences.get(row.params, ()) if s[: min(n, len(s))] == list(row.tokens[: len(s)])), None
        )
        if known is None:
            return []
        return [*known[n:], *(self.filler,) * MOST_NODES]


class Oracle(Drafter):
    """Always right, as far as the truth is known: a chain of `length` tokens (None: as many as the budget allows)."""

    def __init__(self, truth: Truth, *, length: int | None = None, name: str = "oracle") -> None:
        self.name = name
        self._truth = truth
        self._length = length

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """The truth, cut to the budget."""
        lengths = [row.budget if self._length is None else min(self._length, row.budget) for row in rows]
        return [DraftTree.chain(self._truth(row)[:n]) for row, n in zip(rows, lengths, strict=True)]


class Adversary(Drafter):
    """Always wrong: `right` true tokens, then one that is not, then the truth again, which must not be believed."""

    def __init__(self, truth: Truth, *, right: int = 0, name: str = "adversary") -> None:
        self.name = name
        self._truth = truth
        self._right = right

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """Chains as long as the budget."""
        trees: list[DraftTree] = []
        for row in rows:
            tokens = list(self._truth(row)[: row.budget])
            if self._right < len(tokens):
                tokens[self._right] = (tokens[self._right] + 1 + len(row.tokens) % (VOCAB_SIZE - 1)) % VOCAB_SIZE
            trees.append(DraftTree.chain(tokens))
        return trees


class RandomTrees(Drafter):
    """Trees of any shape: chains, stars and all between, of 0 nodes up to the budget.

    A child of the true path continues it with probability `right`, unless a sibling does. Others are random tokens,
    copies of a sibling (`copies`), or tokens that are true elsewhere. About half of the trees have confidences.
    """

    def __init__(
        self, truth: Truth, seed: int, *, right: float = 0.7, copies: float = 0.1, name: str = "random"
    ) -> None:
        self.name = name
        self._truth = truth
        self._seed = seed
        self._right = right
        self._copies = copies

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """One random tree a row; a row's tree doesn't depend on the other rows."""
        return [self._tree(row) for row in rows]

    def _tree(self, row: DraftRow) -> DraftTree:
        rng = np.random.default_rng([self._seed, len(row.tokens), *row.tokens[-3:]])
        n = int(rng.integers(0, min(row.budget, MOST_NODES) + 1)) if rng.random() < 0.3 else row.budget
        deep = rng.random()
        truth = self._truth(row)
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        on_path = [-1]  # the nodes, root included, up to which everything is true
        for node in range(min(n, MOST_NODES)):
            parent = node - 1 if rng.random() < deep else int(rng.integers(-1, node))
            if rng.random() < 0.3:
                parent = on_path[-1]
            depth = 0 if parent < 0 else depths[parent] + 1
            siblings = [tokens[i] for i, p in enumerate(parents) if p == parent]
            may_continue = parent == on_path[-1] and depth < len(truth)
            if may_continue and rng.random() < self._right:
                token = truth[depth]
            elif siblings and rng.random() < self._copies:
                token = siblings[int(rng.integers(len(siblings)))]
            elif truth and rng.random() < 0.3:
                token = truth[int(rng.integers(min(len(truth), 8)))]
            else:
                token = int(rng.integers(VOCAB_SIZE))
            if may_continue and token == truth[depth]:
                on_path.append(node)
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
        confidence = rng.random(len(tokens)).tolist() if rng.random() < 0.5 else ()
        return DraftTree(tokens, parents, confidence)


class Scripted(Drafter):
    """Proposes what a function says, cut to the budget."""

    def __init__(self, script: Callable[[DraftRow], DraftTree | Sequence[int]], *, name: str = "scripted") -> None:
        self.name = name
        self._script = script

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """The function's trees; a sequence of tokens stands for a chain."""
        trees = (self._script(row) for row in rows)
        return [
            (tree if isinstance(tree, DraftTree) else DraftTree.chain(tree)).first(row.budget)
            for tree, row in zip(trees, rows, strict=True)
        ]


class Watched(Drafter):
    """Any drafter, and a record of how it was called; breaches of the protocol by the caller are AssertionErrors.

    Attributes:
        inner: the drafter that does the work.
        live: keys between `begin` and `free`, each with the tokens last seen.
        ended: tokens that each freed key ended with.
        scopes: scope of each key that began.
        rows: rows that were asked about.
        nodes: nodes proposed.
        calls: calls of `propose`.
        observed: trees verified, with the accepted nodes, in order.
    """

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.name = inner.name
        self.live: dict[int, list[int]] = {}
        self.ended: dict[int, list[int]] = {}
        self.scopes: dict[int, str | None] = {}
        self.observed: list[tuple[int, DraftTree, tuple[int, ...]]] = []
        self.rows = self.nodes = self.calls = 0
        self.closed = False

    def begin(self, key: int, scope: str | None) -> None:
        """A key is never used twice."""
        assert key not in self.scopes, f"key {key} began twice"
        self.scopes[key] = scope
        self.live[key] = []
        self.inner.begin(key, scope)

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[DraftTree]:
        """Rows are live, different, have a budget, and their tokens only grow."""
        assert rows, "propose was called without rows"
        assert len({row.key for row in rows}) == len(rows), "a request has two rows"
        for row in rows:
            seen = self.live[row.key]
            assert list(row.tokens[: len(seen)]) == seen, "committed tokens have changed"
            assert row.budget >= 1
            self.live[row.key] = list(row.tokens)
        trees = self.inner.propose(rows)
        self.setup_seconds = self.inner.setup_seconds
        self.calls += 1
        self.rows += len(rows)
        self.nodes += sum(len(tree) for tree in trees)
        return trees

    def observe(self, key: int, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Accepted nodes are a path from the root."""
        assert key in self.live, f"key {key} isn't live"
        assert len(tree), "an empty tree was verified"
        at = -1
        for node in accepted:
            assert tree.parents[node] == at, "the accepted nodes are no path"
            at = node
        self.observed.append((key, tree, tuple(accepted)))
        self.inner.observe(key, tree, accepted)

    def truncate(self, key: int, n_tokens: int) -> None:
        """Back to fewer tokens."""
        self.live[key] = self.live[key][:n_tokens]
        self.inner.truncate(key, n_tokens)

    def fork(self, key: int, child: int) -> None:
        """A new key that continues like a live one."""
        assert child not in self.scopes, f"key {child} began twice"
        self.scopes[child] = self.scopes[key]
        self.live[child] = list(self.live[key])
        self.inner.fork(key, child)

    def free(self, key: int, tokens: Sequence[int]) -> None:
        """Once for each key, with the tokens that it had and what came since."""
        seen = self.live.pop(key)
        assert list(tokens[: len(seen)]) == seen, "the tokens at the end are not those of before"
        self.ended[key] = list(tokens)
        self.inner.free(key, tokens)

    def close(self) -> None:
        """Once."""
        assert not self.closed
        self.closed = True
        self.inner.close()

    def balanced(self) -> bool:
        """Whether every key that began was freed."""
        return not self.live and self.ended.keys() == self.scopes.keys()


class Silent(Drafter):
    """Never proposes anything."""

    name = "silent"

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """Empty trees."""
        return [NO_DRAFT] * len(rows)
