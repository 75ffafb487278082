"""How many tokens to draft: a decision per request and step, and 0 is always an allowed answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from forerun.draft.base import DraftTree


class Decision(NamedTuple):
    """One choice of a draft length, with its reasons.

    key: the request's.
    position: committed tokens when it was made.
    length: draft tokens that were verified.
    options: (length, expected emitted tokens of this row, expected seconds of the whole step) as they were compared.
    reason: in a few words.
    """

    key: int
    position: int
    length: int
    options: tuple[tuple[int, float, float], ...]
    reason: str


class Pace(Protocol):
    """Chooses draft lengths. Called by the engine's loop in this order: `wish`, then after planning `budget`, after
    drafting `cut`, after verification `verdict` for each drafted row and `step` once.

    max_draft: the most nodes of a request in a step.
    """

    max_draft: int

    def begin(self, key: int, tokens: Sequence[int] | None = None) -> None:
        """A request that may draft starts. `tokens` is its live list of committed tokens, prompt first, if there is
        one to be had: it tells what would have become of drafts that were not verified."""

    def wish(self, key: int) -> int:
        """The most draft tokens that this request could use in the next step; 0 to plan none."""

    def budget(self, keys: Sequence[int], granted: Sequence[int], n_tokens: int, n_deciding: int) -> list[int]:
        """The nodes to ask the drafter for, at most what the plan granted each request. `n_tokens` are the step's
        query tokens without drafts, of which `n_deciding` choose a token: those that draft and others."""

    def limits(self, key: int) -> Mapping[str, int] | None:
        """`DraftRow.limits` of a request in this step, after `budget`."""

    def cut(
        self, keys: Sequence[int], positions: Sequence[int], trees: Sequence[DraftTree], n_tokens: int
    ) -> list[int]:
        """How many nodes of each tree to verify, from its beginning; `positions` are the committed tokens of each."""

    def verdict(self, key: int, tree: DraftTree, accepted: Sequence[int]) -> None:
        """What became of the (cut) tree: indices of the accepted nodes."""

    def step(self, n_tokens: int, drafted: int, draft_seconds: float, forward_seconds: float) -> None:
        """What a step took: query tokens with drafts, nodes proposed before the cut, seconds of both."""

    def fork(self, key: int, child: int, tokens: Sequence[int] | None = None) -> None:
        """A second request continues like the first; `tokens` is its own live list."""

    def free(self, key: int) -> None:
        """The request has ended."""

    def decision(self, key: int) -> Decision | None:
        """The last choice for a request."""


class FixedPace:
    """Always the same length, or what the drafter has of it."""

    def __init__(self, length: int) -> None:
        self.max_draft = length
        self._last: dict[int, Decision] = {}

    def begin(self, key: int, tokens: Sequence[int] | None = None) -> None:
        """Nothing to prepare."""

    def wish(self, key: int) -> int:  # noqa: ARG002
        """The fixed length."""
        return self.max_draft

    def budget(
        self,
        keys: Sequence[int],  # noqa: ARG002
        granted: Sequence[int],
        n_tokens: int,  # noqa: ARG002
        n_deciding: int,  # noqa: ARG002
    ) -> list[int]:
        """All that was granted."""
        return list(granted)

    def limits(self, key: int) -> None:
        """None: parts of a drafter are not told apart."""

    def cut(
        self,
        keys: Sequence[int],
        positions: Sequence[int],
        trees: Sequence[DraftTree],
        n_tokens: int,  # noqa: ARG002
    ) -> list[int]:
        """Whole trees."""
        for key, position, tree in zip(keys, positions, trees, strict=True):
            self._last[key] = Decision(key, position, len(tree), (), f"fixed at {self.max_draft}")
        return [len(tree) for tree in trees]

    def verdict(self, key: int, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Nothing to learn."""

    def step(self, n_tokens: int, drafted: int, draft_seconds: float, forward_seconds: float) -> None:
        """Nothing to learn."""

    def fork(self, key: int, child: int, tokens: Sequence[int] | None = None) -> None:
        """Nothing to copy."""

    def free(self, key: int) -> None:
        """Forgets the last decision."""
        self._last.pop(key, None)

    def decision(self, key: int) -> Decision | None:
        """The last choice for a request."""
        return self._last.get(key)
