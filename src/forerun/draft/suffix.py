"""Suffix drafting: propose the continuations that this text and finished ones most often took, as a tree.

The idea is SuffixDecoding's (Oliaro et al., arXiv 2411.04975): look up the longest suffixes of the context in the
request's own text and in a store of finished texts, count what followed, and propose a tree whose nodes are the most
probable ones, as many as are likely enough to be accepted. What differs is how texts are indexed and how counts become
probabilities.

**Index.** Hash chains, as in LZ77 compressors, instead of a suffix tree or automaton: for contexts of 1, 2, 4, 8 and 16
tokens a table leads to the latest occurrence and each occurrence to the one before. Appending a token costs one step a
length, and so does taking it back, which an automaton can't do cheaply; memory per token is fixed; a text leaves the
store by unlinking its tokens; and the latest occurrences come first, which are the ones to believe. A proposal reads
`own_limit` occurrences of the own text and `shared_limit` of the store at most, so its cost doesn't grow with either.
Tokens are compared on every hit, up to 32 backwards; a hash collision costs a look and proposes nothing.

**Probabilities.** As in prediction by partial matching (Cleary and Witten 1984; escapes by the number of different
continuations: method C, Moffat 1990). Occurrences are classed by the length of the context that they share with the
node, 16 and more down to 1. A class with total weight n, of which c went on with token x, and k different tokens gives
x the part c / (n + e k) of what longer contexts left open and leaves e k / (n + e k) to shorter ones; e falls with the
length. Counts include those of longer contexts; a class without occurrences of its own is passed over. Going down the
tree a token makes every context that still agrees one longer. An occurrence in the store counts less than one in the
own text, and where two continuations are equally likely the one of the longer context, then of the own text, then the
later one comes first. The children of a node are found by sorting its occurrences, nodes are taken in the order of
their survival (the product of the probabilities on their path), and those under `min_survival` are not proposed. The
factor on e that each request learns from its accepted drafts is in `doubt.py`.

**Store.** Texts lie in pages of one reserved area; the least recently used one (proposed from, or put in) leaves first.
Scopes have hash chains of their own, and an occurrence counts only if its text belongs to the asking scope. The
beginning of a text that its scope holds already in stretches of 64 tokens or more is not kept twice, so that neither
the same instructions before every request nor a conversation that comes back longer fill the store. It takes about
70 bytes a token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import blake2b

from forerun import _native
from forerun.draft.base import MAX_NODES, NO_DRAFT, DraftRow, DraftTree
from forerun.draft.copying import CopyingDrafter, CopyState
from forerun.draft.words import WordCopies
from forerun.errors import ConfigurationError
from forerun.models.tokenizer import Tokenizer

LENGTHS = (1, 2, 4, 8, 16)
"""Context lengths that are indexed, in tokens."""

ESCAPES = (2.0, 1.0, 0.6, 0.2, 0.06)
"""How many occurrences after a context of each of these lengths, all going on alike, are believed as much as not.
Chosen by log loss on program code, edits of code, articles and chat; halving or doubling one changes it by a few
percent."""

SHARED_WEIGHT = 0.5
"""An occurrence in a finished text counts as this many in the request's own."""

WORDS = "words"
"""Names the proposals of `forerun.draft.words`, as a drafter's name does."""

MIN_SHARED_BYTES = 1 << 16
"""The smallest store: less doesn't hold a page of text for every list that it needs."""


class SuffixDrafter(CopyingDrafter):
    """Proposes a tree of the continuations seen most often in the request's own text and in finished ones of its scope.

    Args:
        shared: keep finished texts for later requests of the same scope.
        shared_bytes: the most memory that all of them may take, at least 65,536; reserved when the first text comes,
            used as texts arrive.
        min_survival: a node is proposed if its estimated probability of being reached and accepted is at least this.
        max_depth: the longest path of a tree, 1 to 63.
        own_limit, shared_limit: occurrences that a proposal may use, of the own text and of the store.
        tokenizer: the target's, to look words up that the prompt has in other tokens, too (`forerun.draft.words`): a
            chain of the drafter "words", where it is believed more than the tree. None: tokens only.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    name = "suffix"

    def __init__(
        self,
        *,
        shared: bool = True,
        shared_bytes: int = 64 << 20,
        min_survival: float = 0.1,
        max_depth: int = MAX_NODES,
        own_limit: int = 64,
        shared_limit: int = 32,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if not 0 < min_survival <= 1:
            raise ConfigurationError(f"min_survival must be above 0 and at most 1, got {min_survival}")
        if not 1 <= max_depth <= MAX_NODES:
            raise ConfigurationError(f"max_depth must be from 1 to {MAX_NODES}, got {max_depth}")
        if not (1 <= own_limit <= 4096 and 1 <= shared_limit <= 4096):
            raise ConfigurationError(
                f"own_limit and shared_limit must be from 1 to 4096, got {own_limit} and {shared_limit}"
            )
        if shared and shared_bytes < MIN_SHARED_BYTES:
            raise ConfigurationError(
                f"shared_bytes must be at least {MIN_SHARED_BYTES}, got {shared_bytes}; shared=False (shared_bytes=0 "
                "of an engine) keeps no texts"
            )
        super().__init__()
        self._rule = _native.SuffixRule(ESCAPES, SHARED_WEIGHT, min_survival, max_depth, own_limit, shared_limit)
        self._store = _native.SuffixStore(LENGTHS, shared_bytes) if shared else None
        self._tokenizer = tokenizer

    @property
    def store(self) -> _native.SuffixStore | None:
        """The finished texts, None if they aren't kept. To look at its counts and limits."""
        return self._store

    def begin(self, key: int, scope: str | None) -> None:
        """A request starts; it sees finished texts of `scope` only."""
        words = None if self._tokenizer is None else WordCopies(self._tokenizer)
        self._states[key] = CopyState(_native.SuffixText(LENGTHS), scope_key(scope), words=words)

    def _draft(self, state: CopyState, row: DraftRow) -> DraftTree:
        budget = min(row.budget, MAX_NODES)
        tokens, parents, confidence = _native.propose_suffix(
            state.text, self._store, state.scope, budget, self._rule, state.doubt
        )
        if state.words is not None:
            if not state.words.ready:
                began = time.perf_counter()
                state.words.read(row.tokens)
                self.setup_seconds += time.perf_counter() - began
            copy = state.words.propose(row.tokens, row.ahead, budget, confidence[0] if confidence else 0.0)
            if copy is not None:
                return DraftTree.chain(copy.tokens, copy.confidence, drafter=WORDS)
        return DraftTree(tokens, parents, confidence, drafter=self.name) if tokens else NO_DRAFT

    def free(self, key: int, tokens: Sequence[int]) -> None:
        """Gives the request's index back and puts its text into the store."""
        scope = self._states[key].scope
        super().free(key, tokens)
        if self._store is not None:
            self._store.insert(scope, tokens)

    def close(self) -> None:
        """Gives everything back, finished texts included."""
        super().close()
        if self._store is not None:
            self._store.clear()


def scope_key(scope: str | None) -> bytes:
    """The name of a scope inside the store: short whatever its length, and different for different scopes."""
    if scope is None:
        return b""
    return blake2b(scope.encode("utf-8", "surrogatepass"), digest_size=16).digest()
