"""How likely draft tokens are to be accepted: what a drafter's record and a request's own say together.

A drafter's word (`DraftTree.confidence`, or the depth where it has none) is translated into a probability by its record
over all requests: accepted over trials for each range of confidence, with the word itself as the prior (a Beta prior of
a few trials), old trials fading.

On top of it each request is, at any time, in one of a few hidden states: drafts fare much worse than the record says,
as it says, better, or much better. Each trial moves the belief by Bayes' rule and then lets a little of it go back to
where requests usually are, so that a request may change (copying a passage, then thinking about it). Because a state
lasts, a chain's survival is the mixture of the states' products, not the product of the mixture: "all of it or none of
it, even odds" is worth drafting for, at full length. This is the forward filter of a hidden Markov model (Rabiner 1989)
with the transitions of fixed share (Herbster and Warmuth 1998).

A last factor by depth corrects what a request does at one position in particular.

A node that can't be rejected (`DraftTree.settled`) needs no record and leaves none.

A trial is a node whose parent was accepted. A depth that wasn't tried says nothing (censoring by the window).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from forerun.draft.base import DraftTree

_STATES = (1 / 50, 1 / 4, 2.0, 40.0)
"""Odds of a draft token in each state, relative to the drafter's record."""
_START = (0.25, 0.3, 0.25, 0.2)

_SHARE = 0.03  # of the belief that returns to the start after a trial
_DRIFT = 0.015  # and after a step without one
_MEMORY = 1 - 1 / 64  # of the drafter's record, per trial of a range
_PRIOR = 3.0  # trials that the drafter's word is worth
_UNKNOWN = 0.5  # acceptance of a drafter without an opinion and without a record
_SURE = 0.9999
_DEPTHS = 16  # deeper nodes count as the last depth
_DEPTH_MEMORY = 0.9
_DEPTH_PRIOR = 4.0

# Confidence in 32nds to a range: finer near 1, where long chains are decided.
_EDGES = (2, 5, 8, 12, 16, 20, 24, 27, 29, 30, 31, 32)
_RANGE = tuple(sum(edge <= i for edge in _EDGES) for i in range(33))
_RANGES = len(_EDGES) + 1
_CENTRES = tuple(min((a + b) / 64, 0.995) for a, b in zip((0, *_EDGES), (*_EDGES, 33), strict=True))


_WORD = (*_CENTRES, *(_UNKNOWN,) * _DEPTHS, 1.0)
_CERTAIN = _RANGES + _DEPTHS
"""The cell of nodes that can't be rejected, because a grammar leaves nothing else: they teach nothing."""


class RequestAcceptance:
    """What one request has shown of one drafter: the belief over states, and the depths' own factors."""

    __slots__ = ("depth_accepted", "depth_expected", "factors", "totals", "trials", "weights")

    def __init__(self, weights: tuple[float, float, float, float]) -> None:
        self.weights = weights
        self.totals = [0.0, 0.0, 0.0, 0.0]  # of the weights over all trials
        self.trials = 0
        self.depth_accepted: list[float] | None = None
        self.depth_expected: list[float] = []
        self.factors: list[float] | None = None  # nothing known: as if all were 1

    def copy(self) -> RequestAcceptance:
        """The same for a request that continues like this one."""
        other = RequestAcceptance(self.weights)
        other.totals = list(self.totals)
        other.trials = self.trials
        if self.depth_accepted is not None and self.factors is not None:
            other.depth_accepted = list(self.depth_accepted)
            other.depth_expected = list(self.depth_expected)
            other.factors = list(self.factors)
        return other


class Acceptance:
    """One drafter's record over all requests of an engine.

    Trees come with their `cells`: for each node, which range of confidence (or which depth) it belongs to.
    """

    def __init__(self) -> None:
        n = _CERTAIN + 1
        self._accepted = [0.0] * n
        self._trials = [0.0] * n
        self._tables = tuple([0.0] * n for _ in _STATES)
        self._tabulate(range(n))
        self._stale: set[int] = set()  # depths whose counts have changed since they were tabulated
        self._start: tuple[float, float, float, float] = _START
        self._ended = 0

    def begin(self) -> RequestAcceptance:
        """The state of a request that starts."""
        return RequestAcceptance(self._start)

    def end(self, request: RequestAcceptance) -> None:
        """A request has ended: the next ones start where requests have been on average."""
        if not request.trials:
            return
        self._ended += 1
        gain = max(1.0 / (self._ended + 1), 0.1) * min(request.trials / 8, 1.0)
        mixed = [
            max((1 - gain) * old + gain * total / request.trials, 0.02)
            for old, total in zip(self._start, request.totals, strict=True)
        ]
        total = sum(mixed)
        self._start = (mixed[0] / total, mixed[1] / total, mixed[2] / total, mixed[3] / total)

    def estimate(self, cell: int) -> float:
        """The record's probability for a node of that cell, its parent being accepted."""
        p = (self._accepted[cell] + _PRIOR * _WORD[cell]) / (self._trials[cell] + _PRIOR)
        return min(max(p, 0.005), 0.995)

    def survival(self, request: RequestAcceptance, tree: DraftTree, cells: Sequence[int]) -> list[float]:
        """For each node the probability that it is accepted, all of its path included; never above its parent's."""
        if self._stale and cells and cells[0] >= _RANGES:
            self._refresh()
        return self._chain(request, cells) if tree.is_chain else self._tree(request, tree.parents, cells)

    def survival_by_depth(self, request: RequestAcceptance, count: int) -> list[float]:
        """The same for a chain of `count` nodes that is not there yet."""
        self._refresh()
        return self._chain(request, [_RANGES + (d if d < _DEPTHS else _DEPTHS - 1) for d in range(count)])

    def _refresh(self) -> None:
        self._tabulate(self._stale)
        self._stale.clear()

    def _chain(self, request: RequestAcceptance, cells: Sequence[int]) -> list[float]:
        p0, p1, p2, p3 = self._tables
        s0, s1, s2, s3 = request.weights
        factors = request.factors
        out: list[float] = []
        if factors is None:
            for cell in cells:
                s0 *= p0[cell]
                s1 *= p1[cell]
                s2 *= p2[cell]
                s3 *= p3[cell]
                out.append(s0 + s1 + s2 + s3)
            return out
        factor = above = 1.0
        for depth, cell in enumerate(cells):
            s0 *= p0[cell]
            s1 *= p1[cell]
            s2 *= p2[cell]
            s3 *= p3[cell]
            factor *= factors[depth] if depth < _DEPTHS else factors[-1]
            above = min(above, (s0 + s1 + s2 + s3) * factor)
            out.append(above)
        return out

    def _tree(self, request: RequestAcceptance, parents: Sequence[int], cells: Sequence[int]) -> list[float]:
        p0, p1, p2, p3 = self._tables
        factors = request.factors or (1.0,)
        last = len(factors) - 1
        root = (*request.weights, 1.0, 0)
        nodes: list[tuple[float, float, float, float, float, int]] = []
        out: list[float] = []
        room = [1.0]  # what siblings have left of their parent's survival; the root's comes first
        for parent, cell in zip(parents, cells, strict=True):
            s0, s1, s2, s3, factor, depth = nodes[parent] if parent >= 0 else root
            s0 *= p0[cell]
            s1 *= p1[cell]
            s2 *= p2[cell]
            s3 *= p3[cell]
            factor *= factors[min(depth, last)]
            s = min((s0 + s1 + s2 + s3) * factor, room[parent + 1])
            room[parent + 1] -= s
            nodes.append((s0, s1, s2, s3, factor, depth + 1))
            room.append(s)
            out.append(s)
        return out

    def learn(self, request: RequestAcceptance, tree: DraftTree, cells: Sequence[int], accepted: Sequence[int]) -> None:
        """The whole tree was verified and its nodes `accepted` (root to leaf) were accepted."""
        n = len(accepted)
        if tree.is_chain:
            tried = min(n + 1, len(tree.tokens))
            self._believe(request, 0, [(cell,) for cell in cells[:tried]], n)
            for depth in range(tried):
                self._count(cells[depth], depth, depth < n)
        else:
            parents = tree.parents
            levels: list[list[int]] = []
            for depth, parent in enumerate((-1, *accepted)):
                children = [i for i in range(parent + 1, len(parents)) if parents[i] == parent]
                if children:
                    levels.append([cells[i] for i in children])
                for i in children:
                    self._count(cells[i], depth, depth < n and i == accepted[depth])
            self._believe(request, 0, levels, n)
        self._tabulate(set(cells))

    def learn_next(
        self, request: RequestAcceptance, cells: Sequence[int], depth: int, nodes: Sequence[int], hit: int | None
    ) -> None:
        """Siblings at `depth` that were not verified would have been rejected, or `hit` accepted; their parent was."""
        siblings = [cells[i] for i in nodes]
        self._believe(request, depth, (siblings,), 0 if hit is None else 1)
        for i in nodes:
            self._count(cells[i], depth, i == hit)
        self._tabulate(siblings)

    def forget(self, request: RequestAcceptance) -> None:
        """A step went by without evidence: a little of the belief returns to the start."""
        w0, w1, w2, w3 = request.weights
        t0, t1, t2, t3 = self._start
        keep = 1 - _DRIFT
        request.weights = (
            keep * w0 + _DRIFT * t0, keep * w1 + _DRIFT * t1, keep * w2 + _DRIFT * t2, keep * w3 + _DRIFT * t3
        )  # fmt: skip

    def _believe(
        self, request: RequestAcceptance, first: int, levels: Sequence[Sequence[int]], n_accepted: int
    ) -> None:
        """Siblings at the depths from `first` on, of which at most one can be accepted: one was on the first
        `n_accepted` levels, none on the next."""
        p0, p1, p2, p3 = self._tables
        w0, w1, w2, w3 = request.weights
        t0, t1, t2, t3 = self._start
        t0, t1, t2, t3 = t0 * _SHARE, t1 * _SHARE, t2 * _SHARE, t3 * _SHARE
        if request.depth_accepted is None or request.factors is None:
            request.depth_accepted = [0.0] * _DEPTHS
            request.depth_expected = [0.0] * _DEPTHS
            request.factors = [1.0] * _DEPTHS
        by_depth, expectations, factors = request.depth_accepted, request.depth_expected, request.factors
        depth = first
        for level in levels:
            cell = level[0]
            a, b, c, d = p0[cell], p1[cell], p2[cell], p3[cell]
            for cell in level[1:]:
                a, b = min(a + p0[cell], 0.999), min(b + p1[cell], 0.999)
                c, d = min(c + p2[cell], 0.999), min(d + p3[cell], 0.999)
            hit = depth - first < n_accepted
            at = depth if depth < _DEPTHS else _DEPTHS - 1
            wins = by_depth[at] = _DEPTH_MEMORY * by_depth[at] + hit
            expected = w0 * a + w1 * b + w2 * c + w3 * d
            expected = expectations[at] = _DEPTH_MEMORY * expectations[at] + expected
            factors[at] = (wins + _DEPTH_PRIOR) / (expected + _DEPTH_PRIOR)
            if hit:
                w0, w1, w2, w3 = w0 * a, w1 * b, w2 * c, w3 * d
            else:
                w0, w1, w2, w3 = w0 - w0 * a, w1 - w1 * b, w2 - w2 * c, w3 - w3 * d
            keep = (1 - _SHARE) / (w0 + w1 + w2 + w3)
            w0, w1, w2, w3 = w0 * keep + t0, w1 * keep + t1, w2 * keep + t2, w3 * keep + t3
            depth += 1
        request.weights = (w0, w1, w2, w3)
        n = depth - first
        totals = request.totals
        totals[0] += n * w0
        totals[1] += n * w1
        totals[2] += n * w2
        totals[3] += n * w3
        request.trials += n

    def _count(self, cell: int, depth: int, accepted: bool) -> None:
        if cell == _CERTAIN:
            return
        trials, wins = self._trials, self._accepted
        trials[cell] = _MEMORY * trials[cell] + 1
        wins[cell] = _MEMORY * wins[cell] + accepted
        if cell < _RANGES:
            cell = _RANGES + (depth if depth < _DEPTHS else _DEPTHS - 1)
            trials[cell] = _MEMORY * trials[cell] + 1
            wins[cell] = _MEMORY * wins[cell] + accepted
            self._stale.add(cell)

    def _tabulate(self, cells: Iterable[int]) -> None:
        p0, p1, p2, p3 = self._tables
        for cell in cells:
            if cell == _CERTAIN:
                p0[cell] = p1[cell] = p2[cell] = p3[cell] = _SURE
                continue
            p = self.estimate(cell)
            odds = p / (1 - p)
            x = odds * _STATES[0]
            p0[cell] = x / (1 + x)
            x = odds * _STATES[1]
            p1[cell] = x / (1 + x)
            x = odds * _STATES[2]
            p2[cell] = x / (1 + x)
            x = odds * _STATES[3]
            p3[cell] = x / (1 + x)


def cells_of(tree: DraftTree) -> list[int]:
    """What the record knows a tree's nodes by: ranges of confidence; depths where it is missing or no probability.

    Drawn tokens go by depth, too: a cut that depends on what was drawn would change the distribution of the answer.
    """
    confidence = tree.confidence
    if tree.q is None and len(confidence) == len(tree.tokens) and all(0 <= c <= 1 for c in confidence):
        cells = [_RANGE[int(c * 32)] for c in confidence]
    else:
        last = _RANGES + _DEPTHS - 1
        depths = range(len(tree.tokens)) if tree.is_chain else tree.depths()
        cells = [min(_RANGES + depth, last) for depth in depths]
    cells[: tree.settled] = [_CERTAIN] * tree.settled
    return cells
