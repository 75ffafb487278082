"""Copying words that are tokenized otherwise where they are copied to.

A quotation seldom begins with the tokens of its source: after a space a name is ` Wanda`, after a quotation mark it is
`W` `anda`. No context of tokens agrees there, and drafters that compare tokens see a new word although its rest and all
that follows stand in the prompt. This one compares bytes, and only the word that is being written: its beginning is
looked up among the words of the prompt. What is proposed is the rest of the word, as the model would tokenize it, and
then the prompt's own tokens.

It is what drafting across vocabularies does at every token (Timor et al., arXiv 2502.05202, match strings), restricted
to the place where one vocabulary disagrees with itself.

**Which word.** Of the words that begin like the one being written, the first behind the last one that was copied, as
extracts and summaries keep the order of their source; else the latest. The more different words begin so, the less it
is believed. A word that is whole already and stands in the prompt in the very same tokens is none of this drafter's
business.

**How much it is believed.** `BELIEFS` by the number of different words, times what the request has shown so far:
proposals that came true over those that were expected to, whether or not they were verified.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from forerun.models.tokenizer import Tokenizer

_LETTER: Final = rb"[0-9A-Za-z\x80-\xff]"
_WORD: Final = re.compile(_LETTER + rb"+")
_TAIL: Final = re.compile(_LETTER + rb"*\Z")

MAX_TOKENS: Final = 8192
"""The end of a prompt that is looked at: reading it takes a few microseconds a token, once a request."""

MOST_MATCHES: Final = 32
"""Places where the beginning of a word may stand; more say nothing."""

BELIEFS: Final = (0.6, 0.35, 0.25, 0.2)
"""Confidence in the rest of a word when so many different words begin alike."""

WITHIN: Final = 0.95
"""Confidence in the further tokens of a word."""
AFTER: Final = 0.7
"""In the first token behind it."""
ON: Final = 0.85
"""In those that follow."""

_LONGEST = 8  # tokens of a word's beginning
_PRIOR = 2.0  # proposals that the beliefs are worth
_MEMORY = 0.9  # of what was shown, per proposal


class Copy(NamedTuple):
    """A proposal. belief: of its first token, before anything was shown. end: offset in the source behind the word."""

    tokens: list[int]
    confidence: list[float]
    belief: float
    end: int


class WordIndex:
    """The words of a text by their beginnings; never changed, so requests may share it."""

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(tokens[-MAX_TOKENS:])
        self.n_tokens = len(tokens)
        pieces = [tokenizer.token_bytes(token) for token in self._tokens]
        # Where each token begins, and where the last one ends.
        self._offsets = list(accumulate(map(len, pieces), initial=0))
        data = b"".join(pieces)
        # The one at the very end may be the one that is being written.
        words = sorted((match.group(), match.start()) for match in _WORD.finditer(data) if match.end() < len(data))
        self._words = [word for word, _ in words]
        self._starts = [start for _, start in words]

    def copy(
        self, beginning: bytes, spelt: Sequence[int], after: int, budget: int, factor: float = 1.0, least: float = 0.0
    ) -> Copy | None:
        """What may follow the beginning of a word.

        Args:
            beginning: bytes of the word so far, at least one.
            spelt: the tokens that it is part of; the first may begin before it.
            after: offset in the text from which on a word is preferred.
            budget: most tokens.
            factor: on the belief in the first token.
            least: confidence that it must be above; less isn't worth the look.
        """
        low = bisect_left(self._words, beginning)
        high = bisect_left(self._words, beginning + b"\xff" * 8, low)
        if not low < high <= low + MOST_MATCHES:
            return None
        n_words = len(set(self._words[low:high]))
        if n_words > len(BELIEFS):
            return None
        places = self._starts[low:high]
        start = min((place for place in places if place >= after), default=max(places))
        word = self._words[low + places.index(start)]
        end = start + len(word)
        whole = len(word) == len(beginning)
        belief = BELIEFS[n_words - 1] * (AFTER if whole else 1.0)
        confident = min(belief * factor, WITHIN)
        if confident <= least or (whole and self._stands(start, spelt)):
            return None
        tokens = [] if whole else self._rest(word, beginning, spelt)[:budget]
        if not tokens and not whole:
            return None
        confidence = [confident, *[WITHIN] * (len(tokens) - 1)] if tokens else []
        index = bisect_left(self._offsets, end)
        if self._offsets[index] == end and (following := self._tokens[index : index + budget - len(tokens)]):
            confidence += [confident if whole else AFTER, *[ON] * (len(following) - 1)]
            tokens = tokens + following
        return Copy(tokens, confidence, belief, end) if tokens else None

    def _rest(self, word: bytes, beginning: bytes, spelt: Sequence[int]) -> list[int]:
        """Tokens of a word behind its beginning; empty if they can't be told."""
        try:
            whole = self._tokenizer.encode_plain(word.decode())
            if whole[: len(spelt)] == list(spelt):
                return whole[len(spelt) :]
            rest = word[len(beginning) :]
            tokens = self._tokenizer.encode_plain(rest.decode())
        except UnicodeDecodeError:
            return []
        return tokens if b"".join(map(self._tokenizer.token_bytes, tokens)) == rest else []

    def _stands(self, start: int, spelt: Sequence[int]) -> bool:
        """Whether a word of the text is part of the same tokens."""
        index = bisect_right(self._offsets, start) - 1
        return self._tokens[index : index + len(spelt)] == list(spelt)


class WordCopies:
    """What one request copies, and how often that came true."""

    __slots__ = ("_after", "_expected", "_index", "_pending", "_tokenizer", "_wins")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._index: WordIndex | None = None
        self._after = 0
        self._wins = self._expected = 0.0
        self._pending: tuple[Sequence[int], int, Copy] | None = None

    @property
    def ready(self) -> bool:
        """Whether the source is read."""
        return self._index is not None

    def read(self, tokens: Sequence[int]) -> None:
        """Takes a request's tokens as the source of its copies."""
        self._index = WordIndex(self._tokenizer, tokens)

    def fork(self) -> WordCopies:
        """The same for a request that continues like this one."""
        child = WordCopies(self._tokenizer)
        child._index = self._index
        child._after, child._wins, child._expected = self._after, self._wins, self._expected
        child._pending = self._pending
        return child

    def truncate(self, n_tokens: int) -> None:
        """The request goes back to its first `n_tokens` tokens."""
        self._pending = None
        if self._index is not None and n_tokens < self._index.n_tokens:
            self._index = None
            self._after = 0

    def propose(self, tokens: Sequence[int], ahead: Sequence[int], budget: int, least: float = 0.0) -> Copy | None:
        """What may follow a request's tokens and those `ahead` of them, if it is believed more than `least`.

        Where no source is read yet, the tokens become it.
        """
        if self._index is None:
            self.read(tokens)
        assert self._index is not None
        self._settle(tokens)
        beginning, spelt = self._beginning(tokens, ahead)
        if not beginning:
            return None
        factor = (self._wins + _PRIOR) / (self._expected + _PRIOR)
        copy = self._index.copy(beginning, spelt, self._after, budget, factor, least)
        if copy is not None:
            self._pending = (tuple(ahead), len(tokens), copy)
        return copy

    def _settle(self, tokens: Sequence[int]) -> None:
        """Learns from the last proposal, if the token in its place is known."""
        if self._pending is None:
            return
        ahead, position, copy = self._pending
        place = position + len(ahead)
        if place >= len(tokens):
            return
        self._pending = None
        if tuple(tokens[position:place]) != ahead:
            return
        hit = tokens[place] == copy.tokens[0]
        self._wins = _MEMORY * self._wins + hit
        self._expected = _MEMORY * self._expected + copy.belief
        if hit:
            self._after = copy.end

    def _beginning(self, tokens: Sequence[int], ahead: Sequence[int]) -> tuple[bytes, list[int]]:
        """The bytes of the word that is being written, and the tokens that it is part of."""
        beginning, spelt = b"", list[int]()
        for back in range(1, _LONGEST + 1):
            if back <= len(ahead):
                token = ahead[-back]
            elif back - len(ahead) <= len(tokens):
                token = tokens[len(ahead) - back]
            else:
                return beginning, spelt
            tail = _TAIL.search(self._tokenizer.token_bytes(token))
            assert tail is not None
            if tail.group():
                spelt.insert(0, token)
                beginning = tail.group() + beginning
            if tail.start() > 0:
                return beginning, spelt
        return b"", []
