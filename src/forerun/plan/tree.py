"""The best draft tree of n nodes for a measured acceptance, by dynamic programming.

The model is that of Sequoia (arXiv 2402.12374), with acceptance that may depend on depth: below an accepted node
exactly one child is accepted, or none, and the child of rank r is the one with a probability that depends on r and the
depth alone. So a node survives with the product of the probabilities along its path, and a step gives
E = 1 + the sum of the survivals, the target's own token included.

With F_d(m) the most accepted nodes expected from m nodes below an accepted one, its children being at depth d:

    F_d(m) = max over m_0 + m_1 + ... <= m of the sum over r with m_r > 0 of p_d(r) (1 + F_{d+1}(m_r - 1))

and E = 1 + F_0(n). A limit of depth D is F_D = 0, as in Sequoia's table for bounded depth; one of branching leaves the
largest p's. The increments F_d(m) - F_d(m - 1) fall: those of one child are p, then p times the increments below it,
none above p; and the best sum of functions whose increments fall takes the largest of all increments first. So the
maximum over all splits is a merge of sorted lists, and a depth's table is the list of its increments. That takes
O(D n log^2 n) however many ranks there are, instead of O(D R n^2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from forerun.errors import PlanError

MOST_NODES = 256
"""Nodes of a tree that is planned, at most."""

MASK_NODES = 63
"""Nodes of a tree whose ancestor masks fit 64 bits, the root's being one of them."""

_ROUNDING = 1e-9


@dataclass(frozen=True)
class RankAcceptance:
    """How often the drafter's candidates are the accepted token, by depth and rank.

    rows: for each depth, the children of the root first, the probability that the child of rank 0, 1, ... is the
    accepted one, given that its parent was accepted. A row sums to at most 1, since at most one child is. The last row
    goes on for ever; a single one is acceptance by rank alone.
    """

    rows: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.rows:
            raise PlanError("accept", "has no rates; expected at least one, such as 0.6,0.15;0.5,0.1")
        for depth, row in enumerate(self.rows):
            if not row:
                raise PlanError("accept", f"has no rates for depth {depth}; expected at least one for every depth")
            if not all(0 <= rate <= 1 for rate in row):
                raise PlanError("accept", f"{list(row)} at depth {depth} is not allowed; expected rates from 0 to 1")
            if sum(row) > 1 + _ROUNDING:
                raise PlanError(
                    "accept",
                    f"the rates at depth {depth} sum to {sum(row):.4g}; expected at most 1, since one child of a node "
                    "is accepted or none (a rate is a share of all tries, not of those that earlier ranks left)",
                )

    @staticmethod
    def by_rank(*rates: float) -> RankAcceptance:
        """The same at every depth."""
        return RankAcceptance((rates,))

    def row(self, depth: int) -> tuple[float, ...]:
        """Rates by rank of the children at `depth`, 0 being those of the root."""
        return self.rows[min(depth, len(self.rows) - 1)]

    def survival(self, path: Sequence[int]) -> float:
        """Probability that the node is accepted whose ancestors and itself have these ranks. A rank without a rate is
        never accepted."""
        product = 1.0
        for depth, rank in enumerate(path):
            row = self.row(depth)
            product *= row[rank] if rank < len(row) else 0.0
        return product


class Growth(NamedTuple):
    """What a tree is once a node is added.

    expected_tokens, levels: of the tree so far. expanded: nodes with children of the level above the new one, if its
    parent is the newest of them; 0 if the parent had a child already, or is the root.
    """

    expected_tokens: float
    levels: int
    expanded: int


@dataclass(frozen=True)
class PlannedTree:
    """A tree of places for draft tokens, the root (the last committed token) not counted.

    Nodes are in order of falling survival, parents before children, so that the first n are a tree again, and the best
    one of n nodes if all are the best of theirs.

    parents: index of each node's parent, smaller than its own; -1 is the root. ranks: which of the drafter's candidates
    after its parent it is, 0 the most likely. survivals: probability that it is accepted with all before it.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    survivals: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def expected_tokens(self) -> float:
        """Tokens of a step, the target's own included."""
        return sum(self.survivals, 1.0)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Of each node; a child of the root has depth 0."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Each node as the ranks on the way to it: the form of Medusa's choices and TensorRT-LLM's `eagle_choices`."""
        paths: list[tuple[int, ...]] = []
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), rank))
        return tuple(paths)

    @property
    def levels(self) -> int:
        """Nodes on its longest path: as many forwards a drafter needs that drafts level by level."""
        return max(self.depths, default=-1) + 1

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Nodes of each level."""
        count = Counter(self.depths)
        return tuple(count[depth] for depth in range(self.levels))

    @cached_property
    def expanded(self) -> tuple[int, ...]:
        """Nodes of each level that have children: what the drafter reads to propose the next level. The last is 0."""
        count = Counter(self.depths[parent] for parent in set(self.parents) if parent >= 0)
        return tuple(count[depth] for depth in range(self.levels))

    @property
    def branching(self) -> int:
        """Children of a node, at most."""
        return max(Counter(self.parents).values(), default=0)

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return self.branching <= 1

    @cached_property
    def growth(self) -> tuple[Growth, ...]:
        """What each node makes of the tree of those before it."""
        grown: list[Growth] = []
        tokens, levels, widths = 1.0, 0, [0] * self.levels
        expanded = {-1}
        for parent, survival, depth in zip(self.parents, self.survivals, self.depths, strict=True):
            tokens, levels, width = tokens + survival, max(levels, depth + 1), 0
            if parent not in expanded:
                expanded.add(parent)
                width = widths[depth] = widths[depth] + 1
            grown.append(Growth(tokens, levels, width))
        return tuple(grown)

    def first(self, n: int) -> PlannedTree:
        """The tree of the first `n` nodes."""
        return PlannedTree(self.parents[:n], self.ranks[:n], self.survivals[:n])

    def ancestors(self) -> tuple[int, ...]:
        """Mask of each node, as Forerun's engine has it: bit 0 is the root, bit i + 1 node i, its own bit is set.

        Raises:
            PlanError: more than 63 nodes; the mask wouldn't fit 64 bits.
        """
        if len(self) > MASK_NODES:
            raise PlanError(
                "nodes", f"{len(self)} nodes and the root need more than 64 bits; expected at most 63 nodes"
            )
        masks: list[int] = []
        for node, parent in enumerate(self.parents):
            masks.append((1 if parent < 0 else masks[parent]) | 1 << (node + 1))
        return tuple(masks)

    def visible(self) -> list[list[bool]]:
        """The ancestor matrix: [i][j] says whether query i attends to query j, query 0 being the root and i + 1 node
        i. All of them see the committed keys besides."""
        n = len(self) + 1
        rows = [[True] + [False] * (n - 1)]
        for node, parent in enumerate(self.parents):
            row = rows[parent + 1].copy()
            row[node + 1] = True
            rows.append(row)
        return rows


def tree_of(paths: Iterable[Sequence[int]], acceptance: RankAcceptance) -> PlannedTree:
    """The tree with these nodes, each a list of ranks from the root.

    Raises:
        PlanError: a node is there twice, or its parent isn't.
    """
    nodes = [tuple(path) for path in paths]
    survivals = {path: acceptance.survival(path) for path in nodes}
    if len(survivals) < len(nodes):
        raise PlanError("tree", "has a node twice; expected each path once")
    for path in nodes:
        if not path or (path[:-1] and path[:-1] not in survivals):
            raise PlanError("tree", f"has {list(path)} but not its parent; expected every beginning of a path, too")
    return _ordered(survivals)


def best_tree(
    acceptance: RankAcceptance, nodes: int, *, depth: int | None = None, branching: int | None = None
) -> PlannedTree:
    """The tree of `nodes` nodes with the most expected tokens; fewer nodes where more are never accepted or don't fit.

    depth: levels at most. branching: children of a node at most; 1 gives the best chain. Among equal trees, nodes near
    the root and of low rank.

    Raises:
        PlanError: a limit is out of range.
    """
    return TreeTable(acceptance, nodes, branching=branching).best(depth)


_Added = tuple[float, int, int]
"""One more node below an accepted one: minus what it adds to the expectation, how many levels further down than a child
it is, and the rank of the child that it is or is below. Sorted, the best come first, and those near the root before
others that are as good."""


class TreeTable:
    """The table of the dynamic program, for any limit of depth: F_d depends on the rates at depth d and on the levels
    that are left, so what one limit needs serves others."""

    def __init__(self, acceptance: RankAcceptance, nodes: int, *, branching: int | None = None) -> None:
        """Raises PlanError if a limit is out of range."""
        if not 0 <= nodes <= MOST_NODES:
            raise PlanError("nodes", f"{nodes} is not allowed; expected 0 to {MOST_NODES}")
        if branching is not None and branching < 1:
            raise PlanError("branching", f"{branching} is not allowed; expected at least 1")
        self._acceptance, self._nodes = acceptance, nodes
        self._ranked = [sorted(enumerate(row), key=lambda item: -item[1])[:branching] for row in acceptance.rows]
        self._known: dict[tuple[int, int], list[_Added]] = {}

    def best(self, depth: int | None = None) -> PlannedTree:
        """The tree with the most expected tokens of at most `depth` levels. Raises PlanError if there is no level."""
        if depth is not None and depth < 1:
            raise PlanError("depth", f"{depth} is not allowed; expected at least 1")
        levels = self._nodes if depth is None else min(depth, self._nodes)
        table = self._increments(levels)
        found: dict[tuple[int, ...], float] = {}
        todo: list[tuple[tuple[int, ...], float, int]] = [((), 1.0, self._nodes)]
        while todo:
            path, survival, below = todo.pop()
            if not below or len(path) == levels:
                continue
            row = self._acceptance.row(len(path))
            for rank, size in Counter(rank for _, _, rank in table[len(path)][:below]).items():
                child = (*path, rank)
                found[child] = survival * row[rank]
                todo.append((child, found[child], size - 1))
        return _ordered(found)

    def _increments(self, levels: int) -> list[list[_Added]]:
        """For each depth above `levels` the increments of F, best first."""
        table: list[list[_Added]] = []
        below: list[_Added] = []
        for depth in reversed(range(levels)):
            row = min(depth, len(self._ranked) - 1)
            key = row, levels - depth
            if key not in self._known:
                self._known[key] = self._merged(self._ranked[row], below)
            below = self._known[key]
            table.append(below)
        table.reverse()
        return table

    def _merged(self, ranked: Sequence[tuple[int, float]], below: Sequence[_Added]) -> list[_Added]:
        """The increments of all children. They are sorted runs, which is what the sort merges.

        The k-th of a child comes after the k-th of every child with a larger rate, so of the i-th child n / i suffice.
        """
        added = [
            (rate * loss, further, rank)
            for i, (rank, rate) in enumerate(ranked[: self._nodes], 1)
            for loss, further in (
                (-1.0, 0),
                *((loss, further + 1) for loss, further, _ in below[: self._nodes // i - 1]),
            )
            if rate * loss < 0
        ]
        added.sort()
        return added[: self._nodes]


def _ordered(survivals: Mapping[tuple[int, ...], float]) -> PlannedTree:
    order = sorted(survivals, key=lambda path: (-survivals[path], len(path), path))
    index = {path: i for i, path in enumerate(order)} | {(): -1}
    return PlannedTree(
        tuple(index[path[:-1]] for path in order),
        tuple(path[-1] for path in order),
        tuple(survivals[path] for path in order),
    )
