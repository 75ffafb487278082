"""Where one constrained text stands in its grammar: masks, forced text, exact rollback.

A mask has one bit for each token: bit t % 32 of word t // 32 says whether token t may come next. While the grammar
forces the text, it allows one token only: the next of the forced text in the model's own tokenization.

Built on llguidance's matcher, whose errors are final: a matcher that met one is replaced by a new one that has read
the same tokens. https://github.com/guidance-ai/llguidance
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from forerun.constrain.digits import MAX_DIGITS, START, JsonPlace, after
from forerun.errors import ConstraintError

if TYPE_CHECKING:
    from forerun.constrain.compiler import Grammar


_RUNS: Final = tuple(bytes([byte]) for byte in b"0123456789 \t\r\n")
"""Ends of texts within which it matters to a tokenizer what came before the last token."""


class DeadEndError(ConstraintError):
    """No token of the model continues the text."""


MIN_CONTEXT: Final = 4
MAX_CONTEXT: Final = 32
"""Tokens before a forced text that are looked at to write it as the model would; beyond the least within a number."""


class ForcedText(NamedTuple):
    """Tokens of text that must come next; the first `settled` of them stay the same whatever follows."""

    tokens: list[int]
    settled: int


class GrammarState:
    """Where one text stands. Not thread-safe: one user at a time; made by `Grammar.start`.

    An end token is consumed when the text so far is valid as a whole; what follows it is dropped.
    """

    def __init__(self, grammar: Grammar, matcher: LLMatcher) -> None:
        self._grammar: Final = grammar
        self._vocabulary: Final = grammar.vocabulary
        self._matcher = matcher
        self._tokens: list[int] = []
        self._places: list[JsonPlace] = [START]
        # What `_settled` found at each place, so that long forced text isn't tokenized anew for each of its tokens.
        self._found: list[list[int] | None] = [None]
        self._ended = False
        self._limit = ""

    @property
    def words(self) -> int:
        """W = ceil(V / 32), the length of a mask."""
        return self._vocabulary.words

    @property
    def n_tokens(self) -> int:
        """Tokens consumed, an end token included."""
        return len(self._tokens) + self._ended

    @property
    def ended(self) -> bool:
        """Whether an end token was consumed."""
        return self._ended

    @property
    def accepting(self) -> bool:
        """Whether the text so far is valid as a whole, so that it may end."""
        return self._ended or bool(self._matcher.is_accepting())

    @property
    def complete(self) -> bool:
        """Whether the text is valid as a whole and nothing can follow."""
        return self._ended or (bool(self._matcher.is_stopped()) and self.accepting)

    def mask(self, out: NDArray[np.uint32]) -> None:
        """Write which tokens may come next into `out`, uint32[W or more]; the words past W become 0.

        The tokens that end a text are allowed exactly where it is `accepting`, and alone where it is complete. Raises
        ConstraintError where nothing at all is allowed, or where finding out costs more than the grammar's limits;
        the state stays as it is.
        """
        if self._fill(out):
            return
        # The states of a lexer add up over all that a matcher has seen, drafts included: one without that past decides.
        if "states" in reason(self._matcher):
            self._renew()
            if self._fill(out):
                return
        self._fail()

    def masks(self, tokens: Sequence[int], parents: Sequence[int], out: NDArray[np.uint32]) -> list[bool]:
        """Masks along every path of a draft tree into `out`, uint32[n + 1, W or more].

        Row 0 is as `mask` writes it, row 1 + i what may come after the path to node i; `parents[i]` < i, -1 for the
        root. Returns which nodes the grammar can reach: those whose token their parent's row allows and after which
        some token is allowed. The others' rows are 0. The state stays as it is. Raises what `mask` raises, for row 0.
        """
        self.mask(out[0])
        out[1 : len(tokens) + 1] = 0
        start = len(self._tokens)
        reached = [False] * len(tokens)
        for node, above in _walk(parents):
            token, parent = int(tokens[node]), parents[node]
            if (parent >= 0 and not reached[parent]) or not self._has(out[parent + 1], token):
                continue
            row = out[node + 1]
            if token in self._vocabulary.ends:
                row[: self.words] = self._vocabulary.end_bits
                reached[node] = True
                continue
            self._pop(len(self._tokens) - start - above)
            if not self._push(token):
                continue
            reached[node] = self._fill(row)
            if not reached[node]:
                row[:] = 0
                self._pop(1)
        self._pop(len(self._tokens) - start)
        return reached

    def reachable(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """Which nodes of a draft tree the grammar can reach, without their masks: as `masks` says, but for nodes after
        which nothing is allowed. The state stays as it is."""
        start = len(self._tokens)
        reached = [False] * len(tokens)
        ended = [self._ended, *reached]
        for node, above in _walk(parents):
            token, parent = int(tokens[node]), parents[node]
            if parent >= 0 and not reached[parent]:
                continue
            end = token in self._vocabulary.ends
            if ended[parent + 1]:
                reached[node] = ended[node + 1] = end
                continue
            self._pop(len(self._tokens) - start - above)
            if end:
                reached[node] = ended[node + 1] = bool(self._matcher.is_accepting())
            else:
                reached[node] = self._allows(token) and self._push(token)
        self._pop(len(self._tokens) - start)
        return reached

    def forced(self, limit: int) -> list[int]:
        """At most `limit` tokens that must come next, in the model's own tokenization; maybe none.

        Only tokens that stay the same whatever follows. No end token is among them.
        """
        if limit <= 0 or self._ended:
            return []
        return self._settled()[:limit]

    def forced_text(self, limit: int) -> ForcedText:
        """At most `limit` tokens of all the text that must come next, as the model would write it on its own.

        Those behind the settled ones are a guess: the last may merge with what follows the forced text. A last token of
        one byte, such as a quotation mark, mostly does and is left out.
        """
        settled = self.forced(limit)
        rest = b"" if self._ended or len(settled) >= limit else self._matcher.compute_ff_bytes()
        vocabulary = self._vocabulary
        rest = rest[sum(len(vocabulary.token_bytes[token]) for token in settled) :]
        if not rest:
            return ForcedText(settled, len(settled))
        context = [*self._context(), *settled]
        known = b"".join(map(vocabulary.token_bytes.__getitem__, context))
        ids = vocabulary.backend.tokenize_bytes(known + rest)
        guess = ids[len(context) :] if ids[: len(context)] == context else vocabulary.backend.tokenize_bytes(rest)
        if len(vocabulary.token_bytes[guess[-1]]) == 1:
            guess.pop()
        return ForcedText([*settled, *guess][:limit], len(settled))

    def advance(self, tokens: Sequence[int]) -> int:
        """Consume tokens that were committed, and return how many.

        Fewer than all only if a token ends the text: those behind it are dropped. Raises ConstraintError if the
        grammar doesn't allow one of them; the state stays as it was.
        """
        start = self.n_tokens
        for n, token in enumerate(map(int, tokens)):
            if self._ended:
                return n
            if token in self._vocabulary.ends and self._matcher.is_accepting():
                self._ended = True
            elif token in self._vocabulary.ends or not self._push(token):
                limit = self._limit if token not in self._vocabulary.ends else ""
                self.rollback(self.n_tokens - start)
                if limit:
                    raise _too_costly(start + n, limit)
                raise ConstraintError(
                    f"token {token} isn't allowed as number {start + n} of the constrained text: choose tokens under "
                    "the mask."
                )
        return len(tokens)

    def rollback(self, n: int) -> None:
        """Take back the last `n` tokens consumed. Raises ValueError if there are fewer."""
        if not 0 <= n <= self.n_tokens:
            raise ValueError(f"can't take back {n} of {self.n_tokens} tokens.")
        if n:
            inner = n - self._ended
            self._ended = False
            self._pop(inner)

    def fork(self) -> GrammarState:
        """A state that stands at the same place and goes its own way."""
        twin = GrammarState(self._grammar, self._matcher.deep_copy())
        twin._tokens = self._tokens.copy()
        twin._places = self._places.copy()
        twin._found = self._found.copy()
        twin._ended = self._ended
        return twin

    def _fill(self, row: NDArray[np.uint32]) -> bool:
        """Write the mask of where the matcher stands; False if nothing is allowed."""
        vocabulary, words = self._vocabulary, self.words
        _check_row(row, words)
        row[words:] = 0
        row = row[:words]
        if self._ended:
            row[:] = vocabulary.end_bits
            return True
        settled = self._settled()
        if settled:
            row[:] = 0
            row[settled[0] >> 5] = 1 << (settled[0] & 31)
            return True
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            return False
        row &= ~vocabulary.end_bits
        if self._matcher.is_accepting():
            row |= vocabulary.end_bits
        if self._places[-1].digits >= MAX_DIGITS:
            rest = row & ~vocabulary.digit_bits
            if rest.any():
                row[:] = rest
        return bool(row.any())

    def _settled(self) -> list[int]:
        """The tokens of the forced text that stay the same whatever follows, as the model writes them after its own."""
        found = self._found[-1]
        if found is None:
            found = self._find_settled()
            if not self._matcher.is_error():
                self._found[-1] = found
        return found

    def _find_settled(self) -> list[int]:
        """The tokens of the forced text that stay the same whatever follows, as the model writes them after its own.

        llguidance looks at one token before the forced text. That isn't enough within a run that a tokenizer cuts by
        its length or its end, as those do that write digits in threes.
        """
        vocabulary = self._vocabulary
        settled: list[int] = self._matcher.compute_ff_tokens()
        if not settled or not self._tokens or not vocabulary.token_bytes[self._tokens[-1]].endswith(_RUNS):
            return settled
        context = self._context()
        if not context:
            return settled
        known = b"".join(map(vocabulary.token_bytes.__getitem__, context))
        ids = vocabulary.backend.tokenize_bytes(known + self._matcher.compute_ff_bytes())
        if ids[: len(context)] != context:
            return settled
        left = sum(len(vocabulary.token_bytes[token]) for token in settled)
        own = []
        for token in ids[len(context) :]:
            left -= len(vocabulary.token_bytes[token])
            if left < 0:
                break
            own.append(token)
        return own or settled

    def _context(self) -> list[int]:
        """The last tokens of the text, without special ones, from where a character begins and no number goes on."""
        vocabulary = self._vocabulary
        begin = end = len(self._tokens)
        for at in range(end - 1, max(end - MAX_CONTEXT, 0) - 1, -1):
            text = vocabulary.token_bytes[self._tokens[at]]
            if not text:
                break
            if text[0] & 0xC0 != 0x80:
                begin = at
                if end - at >= MIN_CONTEXT and not text[:1].isdigit():
                    break
        return self._tokens[begin:]

    def _allows(self, token: int) -> bool:
        """Whether the mask of where the matcher stands may have this token, which doesn't end a text; without a mask.

        What the grammar says about its bytes is left to `_push`.
        """
        settled = self._settled()
        if settled:
            return settled[0] == token
        if self._places[-1].digits >= MAX_DIGITS and self._has(self._vocabulary.digit_bits, token):
            row = np.empty(self.words, dtype=np.uint32)
            return self._fill(row) and self._has(row, token)
        return True

    def _push(self, token: int) -> bool:
        """Read one token that doesn't end the text; False, and nothing changes, if the grammar doesn't allow it."""
        self._limit = ""
        if not 0 <= token < self._vocabulary.size:
            return False
        if self._matcher.try_consume_tokens([token]) != 1:
            if not self._matcher.is_error():
                return False
            # As in `mask`: what the matcher saw before doesn't count, nor does an error that it met.
            self._renew()
            if self._matcher.try_consume_tokens([token]) != 1:
                if self._matcher.is_error():
                    self._limit = reason(self._matcher)
                    self._renew()
                return False
        place = self._places[-1]
        self._places.append(after(place, self._vocabulary.token_bytes[token]) if self._grammar.is_json else place)
        found = self._found[-1]
        self._found.append(found[1:] if found and len(found) > 1 and found[0] == token else None)
        self._tokens.append(token)
        return True

    def _pop(self, n: int) -> None:
        """Take back the last `n` tokens read."""
        if n <= 0:
            return
        del self._tokens[-n:]
        del self._places[-n:]
        del self._found[-n:]
        if self._matcher.is_error() or not self._matcher.rollback(n):
            self._renew()

    def _renew(self) -> None:
        """A new matcher that has read the same tokens."""
        self._matcher = self._grammar.matcher()
        if self._matcher.try_consume_tokens(self._tokens) != len(self._tokens):
            raise _too_costly(len(self._tokens), reason(self._matcher))

    def _has(self, row: NDArray[np.uint32], token: int) -> bool:
        return 0 <= token < self._vocabulary.size and bool(int(row[token >> 5]) >> (token & 31) & 1)

    def _fail(self) -> NoReturn:
        """Say why nothing is allowed. What is asked of the matcher next renews it, if it must."""
        why = reason(self._matcher)
        dead = not self._matcher.is_error() or why == "NoExtensionBias"
        if dead:
            raise DeadEndError(
                f"the constraint has no way on after {self.n_tokens} tokens: no token of this model continues the "
                "text. Allow other texts."
            )
        raise _too_costly(self.n_tokens, why)


def _too_costly(n: int, why: str) -> ConstraintError:
    return ConstraintError(f"the constraint costs more than the limits allow after {n} tokens ({why}): simplify it.")


def reason(matcher: LLMatcher) -> str:
    """Why a matcher failed, in llguidance's words."""
    lines = [line for line in matcher.get_error().splitlines() if line and not line.startswith("<")]
    return lines[0].rstrip(".") if lines else str(matcher.stop_reason())


def _walk(parents: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Each node of a tree and the number of nodes above it, depth first, so that a path is walked once."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        children[parent + 1].append(node)
    stack = [(node, 0) for node in reversed(children[0])]
    while stack:
        node, level = stack.pop()
        yield node, level
        stack += [(child, level + 1) for child in reversed(children[node + 1])]


def _check_row(row: NDArray[np.uint32], words: int) -> None:
    if row.dtype != np.uint32 or row.ndim != 1 or len(row) < words or not row.flags.c_contiguous:
        raise ValueError(
            f"expected a contiguous row of at least {words} uint32, got {row.dtype}[{', '.join(map(str, row.shape))}]."
        )
