"""What a draft tree costs, and the batch from which on a chain is better.

A step with a tree of n nodes is a draft, a forward per level, and a verifying forward of n + 1 queries for each
sequence. Attention is priced as for a chain of so many queries: kernels with a tree mask do the masked products, too.
To choose size and depth by speedup, not by expected tokens alone, is Sequoia's "hardware-aware" choice
(arXiv 2402.12374).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

from forerun.plan.deployment import Deployment
from forerun.plan.drafters import DraftForward, PricedDrafter
from forerun.plan.network import Network
from forerun.plan.speculate import MOST, Point, TargetSteps, walked
from forerun.plan.steptime import Load
from forerun.plan.steptime_fast import ForwardSeconds
from forerun.plan.tree import PlannedTree, RankAcceptance, TreeTable, best_tree


def tree_forwards(drafter: PricedDrafter, tree: PlannedTree) -> list[DraftForward]:
    """The forwards behind a draft of that tree.

    The first one reads the root, and whatever the drafter has to catch up with (at most a path of the tree). Each
    further level is proposed from those nodes above it that have children. Heads on the target's hidden state (Medusa)
    need no more for a tree than for its longest path.

    Raises:
        PlanError: the drafter can't draft that far.
    """
    forwards = drafter.forwards(tree.levels)
    if not forwards or drafter.parallel or drafter.network is None:
        return forwards
    widths = Counter(tree.expanded[:-1])
    return [forwards[0], *(DraftForward(drafter.network, n, n, count) for n, count in sorted(widths.items()))]


class TreePricer:
    """Trees of one drafter on one target, at many batches. `draft_deployment`: where the drafter runs, if not like the
    target."""

    def __init__(
        self, steps: TargetSteps, drafter: PricedDrafter, *, draft_deployment: Deployment | None = None
    ) -> None:
        self.drafter = drafter
        self._steps = steps
        self._where = draft_deployment or steps.deployment
        network = drafter.network
        self._one = ForwardSeconds(network, self._where) if network else None

    def price(self, tree: PlannedTree, batch: int, context: float) -> Point:
        """What this tree gives and costs; the point's `length` is its nodes.

        Raises:
            PlanError: the drafter can't draft that far, or batch or context is out of range.
        """
        Load(batch, len(tree) + 1, context).check()
        forwards = tree_forwards(self.drafter, tree)
        draft = sum(self._of(f.network)(batch, f.queries, context, f.scored) * f.repeats for f in forwards)
        return Point(
            self.drafter.name,
            batch,
            context,
            len(tree),
            tree.expected_tokens,
            self._steps.seconds(batch, 1, context),
            self.drafter.host_us * 1e-6 + draft if len(tree) else 0.0,
            self._steps.seconds(batch, len(tree) + 1, context),
        )

    def best(self, trees: Sequence[PlannedTree], batch: int, context: float) -> tuple[PlannedTree, Point]:
        """Of all beginnings of these trees, the one with the largest speedup; among equals that of the first tree, and
        of the fewest nodes. The empty tree where none pays.

        Raises:
            PlanError: the drafter can't draft that far, or batch or context is out of range.
        """
        Load(batch, 1, context).check()
        most = max(map(len, trees), default=0)
        steps = [self._steps.seconds(batch, queries, context) for queries in range(1, most + 2)]
        root = cache(lambda levels: self._root(levels, batch, context))
        level = cache(lambda width: self._level(width, batch, context))
        most_gain, best, length = 1.0, PlannedTree((), (), ()), 0
        for tree in trees:
            further = 0.0
            for nodes, (tokens, levels, expanded) in enumerate(tree.growth, 1):
                if expanded:
                    further += level(expanded) - level(expanded - 1)
                gain = tokens * steps[0] / (root(levels) + further + steps[nodes])
                if gain > most_gain:
                    most_gain, best, length = gain, tree, nodes
        found = best.first(length)
        return found, self.price(found, batch, context)

    def _root(self, levels: int, batch: int, context: float) -> float:
        """Seconds of a draft of so many levels up to its first forward."""
        forwards = self.drafter.forwards(levels)[:1]
        draft = sum(self._of(f.network)(batch, f.queries, context, f.scored) for f in forwards)
        return self.drafter.host_us * 1e-6 + draft

    def _level(self, width: int, batch: int, context: float) -> float:
        """Seconds of a further forward that reads `width` nodes."""
        network = self.drafter.network
        if network is None or self.drafter.parallel or not width:
            return 0.0
        return self._of(network)(batch, width, context, width)

    def _of(self, network: Network) -> ForwardSeconds:
        """One for all drafts where each forward runs the same network (all but Medusa)."""
        if network is self.drafter.network and self._one is not None:
            return self._one
        return ForwardSeconds(network, self._where)


def best_trees(
    acceptance: RankAcceptance, nodes: int, *, depth: int, branching: int | None = None
) -> list[PlannedTree]:
    """The best chain, the best tree of `nodes` nodes and `depth` levels, and those of fewer levels, down to 1: their
    beginnings are the best trees of every size and depth.

    Raises:
        PlanError: a limit is out of range.
    """
    table = TreeTable(acceptance, nodes, branching=branching)
    deepest = table.best(depth)
    fewer = reversed(range(1, deepest.levels))  # a limit that the deepest keeps anyway makes no other tree
    return [best_tree(acceptance, nodes, depth=depth, branching=1), deepest, *map(table.best, fewer)]


def batches_where(holds: Callable[[int], bool], most: int = MOST) -> list[tuple[int, int]]:
    """The batches from 1 to `most` where something holds, as first and last of each run of them.

    Several runs are possible: with experts, more tokens first touch more of them, and with long contexts the cache's
    bytes, which verification reads once for all queries, outweigh all else at large batches. The batches of `walked`
    are looked at, and between two that differ the change is found by halving; a change back and forth between two
    neighbours of these isn't seen.
    """
    runs: list[tuple[int, int]] = []
    first, before, state = 0, 0, False
    for batch in walked(most):
        if holds(batch) != state:
            low, high = before, batch
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if holds(middle) == state else (low, middle)
            if state:
                runs.append((first, low))
            first, state = high, not state
        before = batch
    return [*runs, (first, most)] if state else runs
