"""What drafters that copy have in common: an index of each request's text, and the doubt that it repeats itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from forerun import _native
from forerun.draft.base import Drafter, DraftRow, DraftTree
from forerun.draft.doubt import updated_doubt
from forerun.draft.words import WordCopies


class CopyState:
    """What is kept for one request: its text's index (of `lengths`), its scope's name in a store, its doubt, and the
    words that it may copy, if that is done."""

    __slots__ = ("doubt", "scope", "text", "words")

    def __init__(
        self, text: _native.SuffixText, scope: bytes = b"", doubt: float = 1.0, words: WordCopies | None = None
    ) -> None:
        self.text = text
        self.scope = scope
        self.doubt = doubt
        self.words = words

    def fork(self) -> CopyState:
        """The same for a request that continues like this one."""
        words = None if self.words is None else self.words.fork()
        return CopyState(self.text.copy(), self.scope, self.doubt, words)

    def truncate(self, n_tokens: int) -> None:
        """Forgets the request's tokens from `n_tokens` on."""
        self.text.truncate(n_tokens)
        if self.words is not None:
            self.words.truncate(n_tokens)


class CopyingDrafter(Drafter):
    """Keeps the states. A drafter adds `begin`, which makes one, and `_draft`; states live in `_states`, by key."""

    reads_ahead = True

    def __init__(self) -> None:
        self._states: dict[int, CopyState] = {}

    @property
    def n_requests(self) -> int:
        """Requests that something is kept for."""
        return len(self._states)

    @property
    def state_bytes(self) -> int:
        """Memory of all requests' own indexes."""
        return sum(state.text.bytes for state in self._states.values())

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """A draft of at most `budget` nodes for each row; empty where its text doesn't repeat anything."""
        return [self._propose(row) for row in rows]

    def _propose(self, row: DraftRow) -> DraftTree:
        state = self._states[row.key]
        text = state.text
        text.follow(row.tokens)
        if not row.ahead:
            return self._draft(state, row)
        text.follow([*row.tokens, *row.ahead])
        try:
            return self._draft(state, row)
        finally:
            text.truncate(len(row.tokens))

    @abstractmethod
    def _draft(self, state: CopyState, row: DraftRow) -> DraftTree:
        """What may follow the request's text, which its index has, the tokens ahead included."""

    def observe(self, key: int, tree: DraftTree, accepted: Sequence[int]) -> None:
        """The request's doubt follows what became of its drafts; trees of other drafters teach nothing."""
        if tree.drafter in ("", self.name):
            state = self._states[key]
            state.doubt = updated_doubt(state.doubt, tree, accepted)

    def truncate(self, key: int, n_tokens: int) -> None:
        """Forgets the request's tokens from `n_tokens` on."""
        self._states[key].truncate(n_tokens)

    def fork(self, key: int, child: int) -> None:
        """Copies what is kept for the request."""
        self._states[child] = self._states[key].fork()

    def free(self, key: int, tokens: Sequence[int]) -> None:  # noqa: ARG002
        """Gives the request's index back."""
        del self._states[key]

    def close(self) -> None:
        """Gives everything back."""
        self._states.clear()
