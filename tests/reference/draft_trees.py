"""Draft trees the slow and obvious way: all of them, the table of the dynamic program as it is written down, growth by
the next best node, and the walk of the verifier, drawn at random.

A tree is a collection of paths, each a tuple of ranks; `rows` are acceptances by depth and rank, the last row for all
deeper.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from functools import cache

Path = tuple[int, ...]
Tree = Collection[Path]
Rows = Sequence[Sequence[float]]


def rate(rows: Rows, path: Path) -> float:
    """That the last node of the path is the accepted one once its parent is."""
    row = rows[min(len(path), len(rows)) - 1]
    return row[path[-1]] if path[-1] < len(row) else 0.0


def expected_tokens(tree: Tree, rows: Rows, at: Path = ()) -> float:
    """Tokens of a step from the accepted node `at` on: one that the target chooses itself if none of the children is
    accepted; and if one is, that one and what comes after it."""
    children = [path for path in tree if path[:-1] == at and path != at]
    none = 1.0 - sum(rate(rows, child) for child in children)
    return none + sum(rate(rows, child) * (1 + expected_tokens(tree, rows, child)) for child in children)


def walk(tree: Tree, rows: Rows, rng: random.Random) -> int:
    """Tokens of one step: the rank that the target chooses is drawn at every accepted node until no child has it."""
    at: Path = ()
    while True:
        row = rows[min(len(at), len(rows) - 1)]
        drawn = rng.choices(range(len(row) + 1), [*row, max(0.0, 1 - sum(row))])[0]
        if (*at, drawn) not in tree:
            return len(at) + 1
        at = (*at, drawn)


@cache
def all_trees(nodes: int, ranks: int) -> tuple[Tree, ...]:
    """Every tree of exactly `nodes` nodes whose nodes have children of any of `ranks` ranks."""

    def forests(left: int, rank: int) -> Iterator[tuple[Path, ...]]:
        if rank == ranks:
            if left == 0:
                yield ()
            return
        for size in range(left + 1):
            for others in forests(left - size, rank + 1):
                if size == 0:
                    yield others
                    continue
                for below in all_trees(size - 1, ranks):
                    yield ((rank,), *((rank, *path) for path in below), *others)

    return tuple(forests(nodes, 0))


def dense_trees(nodes: int) -> tuple[Tree, ...]:
    """Every tree of exactly `nodes` nodes whose children have the ranks 0, 1, ... without a gap: all ordered trees."""
    return _dense(nodes, 0)


@cache
def _dense(nodes: int, rank: int) -> tuple[Tree, ...]:
    if nodes == 0:
        return ((),)
    return tuple(
        ((rank,), *((rank, *path) for path in below), *others)
        for size in range(1, nodes + 1)
        for below in _dense(size - 1, 0)
        for others in _dense(nodes - size, rank + 1)
    )


def depth(tree: Tree) -> int:
    return max(map(len, tree), default=0)


def branching(tree: Tree) -> int:
    parents = [path[:-1] for path in tree]
    return max((parents.count(parent) for parent in parents), default=0)


def table_optimum(rows: Rows, nodes: int, levels: int) -> float:
    """Expected tokens of the best tree of at most `nodes` nodes and `levels` levels: the recursion, split by split."""

    @cache
    def most(level: int, left: int) -> float:
        return 0.0 if level == levels else children(level, left, 0)

    @cache
    def children(level: int, left: int, rank: int) -> float:
        row = rows[min(level, len(rows) - 1)]
        if rank == len(row):
            return 0.0
        found = children(level, left, rank + 1)
        for size in range(1, left + 1):
            found = max(found, row[rank] * (1 + most(level + 1, size - 1)) + children(level, left - size, rank + 1))
        return found

    return 1 + most(0, nodes)


def greedy(rows: Rows, nodes: int, levels: int) -> Tree:
    """Grown node by node, always by the one that is accepted most often among the children of those that are there."""
    tree: set[Path] = set()
    survival: dict[Path, float] = {(): 1.0}
    for _ in range(nodes):
        found: list[tuple[float, Path]] = []
        for at in survival:
            if len(at) < levels:
                row = rows[min(len(at), len(rows) - 1)]
                found += [(survival[at] * p, (*at, rank)) for rank, p in enumerate(row) if (*at, rank) not in tree]
        best, path = max(found, default=(0.0, ()))
        if best == 0:
            break
        tree.add(path)
        survival[path] = best
    return frozenset(tree)
