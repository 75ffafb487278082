"""Prompt lookup: propose what followed the last time that the text read like this.

The rule (prompt lookup decoding, A. Saxena 2023; n-gram proposers of other engines): take the longest of the last
`max_match` to `min_match` tokens that occurred before, and propose what came after the latest such occurrence. Where
that text ends, it goes on with the proposal itself, as a copy does in LZ77: after "a b a b", "a b" is found two tokens
back and gives "a b a b ...".

The text is indexed as it grows, by hash chains per match length (csrc/suffix.hpp), so that a lookup follows a link
instead of reading the text. Tokens are compared on every hit; after 64 hash collisions a lookup gives up. Memory: 4
bytes per token, and 8 to 12 for each match length.
"""

from __future__ import annotations

from forerun import _native
from forerun.draft.base import MAX_NODES, NO_DRAFT, DraftRow, DraftTree
from forerun.draft.copying import CopyingDrafter, CopyState
from forerun.errors import ConfigurationError

MAX_MATCH = 32
"""Matches are measured up to this many tokens, whatever length they are searched by."""

_ESCAPE = 2.5
_EVIDENCE = tuple(length**1.2 for length in range(MAX_MATCH + MAX_NODES + 1))
"""A token after `length` agreeing ones is right with probability evidence / (evidence + escape): .48 for 2, .68 for 4,
.83 for 8, .96 for 32. Between what was counted on prose (.32, .54, .92, .94) and on edits of code (.72, .79, .91, .99);
the request's own doubt does the rest."""


class PromptLookup(CopyingDrafter):
    """Proposes a chain: the continuation of the latest earlier occurrence of the last tokens, longest context first.

    Args:
        min_match, max_match: how many of the last tokens must have occurred before, 1 to 32; tried from max to min.
        max_draft: the longest chain, 1 to 63 tokens.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    name = "lookup"

    def __init__(self, min_match: int = 2, max_match: int = 4, max_draft: int = MAX_NODES) -> None:
        if not 1 <= min_match <= max_match <= MAX_MATCH:
            raise ConfigurationError(
                f"prompt lookup needs 1 <= min_match <= max_match <= {MAX_MATCH}, "
                f"got min_match={min_match} and max_match={max_match}"
            )
        if not 1 <= max_draft <= MAX_NODES:
            raise ConfigurationError(f"max_draft of prompt lookup must be from 1 to {MAX_NODES}, got {max_draft}")
        super().__init__()
        self._lengths = tuple(range(min_match, max_match + 1))
        self._max_draft = max_draft

    def begin(self, key: int, scope: str | None) -> None:  # noqa: ARG002
        """A request starts. Its scope doesn't matter: nothing is shared."""
        self._states[key] = CopyState(_native.SuffixText(self._lengths))

    def _draft(self, state: CopyState, row: DraftRow) -> DraftTree:
        tokens, match = state.text.latest(min(row.budget, self._max_draft))
        if not tokens:
            return NO_DRAFT
        escape = _ESCAPE * state.doubt
        confidence = [evidence / (evidence + escape) for evidence in _EVIDENCE[match : match + len(tokens)]]
        return DraftTree.chain(tokens, confidence, drafter=self.name)
