"""What a drafter is, and the tree of tokens that it proposes."""

# Methods that return None say so: type checkers take a protocol's empty ones for abstract.
# ruff: noqa: ARG002, RET501

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from forerun.sample.params import SamplingParams

MAX_NODES = 63
"""Nodes of a tree at most: its ancestor masks have 64 bits and the root takes one."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """Tokens that may follow the last committed one, as a tree. A chain is a tree without branches.

    Nodes are in order of decreasing worth, parents before children, so that the first n nodes are a tree again: the
    engine cuts a draft by keeping its first nodes.

    Attributes:
        tokens: token id of each node.
        parents: index of each node's parent, smaller than the node's own; -1 is the last committed token.
        confidence: for each node, the drafter's estimate of the probability that it is accepted once its parent is;
            empty when the drafter has no opinion.
        q: float32[n, V], the distribution (after all transforms) that each node's token was drawn from, siblings
            without replacement: the row of a sibling is that of the first one, not yet renormalised. None: the tokens
            were not drawn but chosen, q is one-hot. How many nodes there are and in which order must not depend on
            what was drawn; confidence isn't used for them. The values are taken at their word: rejection keeps the
            target's distribution only if the tokens were drawn from them.
        drafter: whose work it is, for the counts.
        settled: how many nodes, a chain from the root, can't be rejected. For the engine, which knows grammars; what a
            drafter says here is ignored.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    confidence: Sequence[float] = ()
    q: npt.NDArray[np.float32] | None = None
    drafter: str = ""
    settled: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        confidence: Sequence[float] = (),
        q: npt.NDArray[np.float32] | None = None,
        drafter: str = "",
    ) -> DraftTree:
        """A draft without branches."""
        return cls(tokens, range(-1, len(tokens) - 1), confidence, q, drafter)

    @property
    def is_chain(self) -> bool:
        """Whether every node follows the one before it."""
        # Without a Python loop: this runs for every row of every step.
        parents, chain = self.parents, range(-1, len(self.tokens) - 1)
        return parents == chain if isinstance(parents, range) else list(parents) == list(chain)

    def is_leaf(self, node: int) -> bool:
        """Whether no node follows this one."""
        return node not in self.parents

    def first(self, n: int) -> DraftTree:
        """The tree of the first `n` nodes."""
        if n >= len(self.tokens):
            return self
        q = None if self.q is None else self.q[:n]
        return DraftTree(self.tokens[:n], self.parents[:n], self.confidence[:n], q, self.drafter, min(self.settled, n))

    def depths(self) -> list[int]:
        """Depth of each node; a child of the root has depth 0."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    def ancestors(self) -> list[int]:
        """For each node a mask: bit 0 is the root, bit i + 1 is node i; its own bit is set. At most 63 nodes."""
        masks: list[int] = []
        for node, parent in enumerate(self.parents):
            masks.append((1 if parent < 0 else masks[parent]) | 1 << (node + 1))
        return masks


NO_DRAFT = DraftTree((), ())
"""The empty tree: plain decoding."""


class DraftRow(NamedTuple):
    """A request that may draft in this step.

    key: names the request's state inside the drafter; never used twice by an engine.
    tokens: committed tokens, prompt first. Read only; it only ever grows.
    budget: the most nodes that may be proposed, at least 1.
    params, seed: of the request; a drafter may draw with the target's own noise to agree with it more often.
    limits: for a drafter made of several, because they cost differently: by `DraftTree.drafter`, the most nodes of a
        tree of that name, 0 for one that isn't to be asked; "" is for all names that aren't there. None: `budget` for
        all.
    ahead: tokens that come right after `tokens`, though they aren't committed yet (a grammar forces them): the tree is
        to follow these. Only a drafter that `reads_ahead` gets any.
    """

    key: int
    tokens: Sequence[int]
    budget: int
    params: SamplingParams
    seed: int
    limits: Mapping[str, int] | None = None
    ahead: Sequence[int] = ()

    def limited(self, name: str) -> DraftRow | None:
        """The row for the part of that name, with that part's budget; None if it isn't to be asked."""
        if not self.limits:
            return self
        budget = min(self.budget, self.limits.get(name, self.limits.get("", self.budget)))
        return self._replace(budget=budget) if budget > 0 else None


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens. What it proposes can make an answer faster or slower, never different.

    Only `propose` has to be written; subclass this for the rest. A drafter serves one engine. All calls come from its
    loop, one at a time, and none may run the engine. For each request that may draft: `begin`, then any number of
    `propose`, `observe` and `fork`, then `free`; `truncate` is for callers that take tokens back. Third parties
    register a factory (taking a `DraftContext`) as entry point of the group `forerun.drafters`.
    """

    name: str
    """Names its counts; a `DraftTree.drafter` that is empty is filled with it."""
    setup_seconds: float = 0.0
    """Time spent so far on what is done once for a request, such as running its prompt through a model of the drafter's
    own. It is no part of what a draft costs."""
    reads_ahead: bool = False
    """Whether it takes `DraftRow.ahead` into account; one that doesn't isn't asked where there is any."""

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[DraftTree]:
        """One tree for each row, in the same order; empty where there is nothing to propose."""
        ...

    def begin(self, key: int, scope: str | None) -> None:
        """A request starts. Text of one `scope` must never show in the drafts of another; None is a scope, too."""
        return None

    def observe(self, key: int, tree: DraftTree, accepted: Sequence[int]) -> None:
        """What became of the tree that was verified: indices of the accepted nodes, root to leaf."""
        return None

    def truncate(self, key: int, n_tokens: int) -> None:
        """The request goes back to its first `n_tokens` tokens; what was learnt of later ones is forgotten."""
        return None

    def fork(self, key: int, child: int) -> None:
        """A second request continues from the same tokens."""
        return None

    def free(self, key: int, tokens: Sequence[int]) -> None:
        """The request has ended with these tokens; everything kept for it alone is given back."""
        return None

    def close(self) -> None:
        """The engine is gone; memory and threads are given back."""
        return None
