"""Two drafters as one: a cheap one where it is confident, a dearer one otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.draft.base import NO_DRAFT, Drafter, DraftRow, DraftTree
from forerun.errors import ConfigurationError


class CombinedDrafter(Drafter):
    """Asks `first` for every row, and `second` for the rows where the first has nothing or little to say.

    The usual pair is a suffix drafter and a model, as in the hybrid of SuffixDecoding (Oliaro et al. 2024,
    arXiv:2411.04975). A row's tree is the first's if it isn't empty and its first node's confidence is at least
    `confident` (a tree without confidences counts as confident); otherwise the second's, unless that is empty. The
    second is asked only for those rows; what happened to a request in between it has to find out from the tokens.

    A part that is too dear to be asked, or to be asked for as much, is limited by `DraftRow.limits`.

    Trees name the part that made them. Both parts are told everything else: starts and ends of requests, verdicts
    (which part's tree it was, `tree.drafter` says), truncations and forks.

    Args:
        first, second: any drafters, which are closed with this one.
        confident: in [0, 1].

    Raises `ConfigurationError` for other arguments.
    """

    name = "combined"

    def __init__(self, first: Drafter, second: Drafter, *, confident: float = 0.3) -> None:
        for part in (first, second):
            if not isinstance(part, Drafter):
                raise ConfigurationError(f"a combined drafter is made of two drafters, got a {type(part).__name__}")
        if not 0 <= confident <= 1:
            raise ConfigurationError(f"confident={confident!r} is not allowed; expected a number from 0 to 1")
        self.first = first
        self.second = second
        self.reads_ahead = first.reads_ahead or second.reads_ahead
        self._confident = float(confident)

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """One tree a row, from whichever part is to be believed."""
        trees = [NO_DRAFT] * len(rows)
        for part in (self.first, self.second):
            asked = [
                (i, view)
                for i, (row, tree) in enumerate(zip(rows, trees, strict=True))
                if not self._is_confident(tree) and (view := _view(row, part)) is not None
            ]
            if asked:
                proposed = part.propose([view for _, view in asked])
                for (i, _), tree in zip(asked, proposed, strict=True):
                    if len(tree):
                        trees[i] = _named(tree, part)
        self.setup_seconds = self.first.setup_seconds + self.second.setup_seconds
        return trees

    def begin(self, key: int, scope: str | None) -> None:
        """Told to both."""
        self.first.begin(key, scope)
        self.second.begin(key, scope)

    def observe(self, key: int, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Told to both."""
        self.first.observe(key, tree, accepted)
        self.second.observe(key, tree, accepted)

    def truncate(self, key: int, n_tokens: int) -> None:
        """Told to both."""
        self.first.truncate(key, n_tokens)
        self.second.truncate(key, n_tokens)

    def fork(self, key: int, child: int) -> None:
        """Told to both."""
        self.first.fork(key, child)
        self.second.fork(key, child)

    def free(self, key: int, tokens: Sequence[int]) -> None:
        """Told to both, whatever the first says."""
        try:
            self.first.free(key, tokens)
        finally:
            self.second.free(key, tokens)

    def close(self) -> None:
        """Closes both, whatever the first says."""
        try:
            self.first.close()
        finally:
            self.second.close()

    def _is_confident(self, tree: DraftTree) -> bool:
        return len(tree) > 0 and (len(tree.confidence) == 0 or tree.confidence[0] >= self._confident)


def _view(row: DraftRow, part: Drafter) -> DraftRow | None:
    """What a part is asked, if anything; one that is made of parts itself sees to the limits of those."""
    if row.ahead and not part.reads_ahead:
        return None
    return row if isinstance(part, CombinedDrafter) else row.limited(part.name)


def _named(tree: DraftTree, part: Drafter) -> DraftTree:
    if tree.drafter:
        return tree
    return DraftTree(tree.tokens, tree.parents, tree.confidence, tree.q, part.name)
