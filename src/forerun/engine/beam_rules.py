"""Which beams go on, which end, and when a search is over: the rules of beam search, without a model.

They are those of Hugging Face Transformers 5 (`GenerationMixin._beam_search`), where the candidates of a step are all
continuations of all beams, best sum of log-probabilities first:

- a candidate that ends (end token, or the last token that max_tokens allows) becomes a finished text if it is among
  the first `beams`; with a score below those it is worth nothing;
- the first `beams` candidates that don't end go on, however many that end stand before them. (Transformers looks at
  the first max(2, 1 + end tokens) * beams candidates, which always suffices.)
- the best `beams` finished texts are kept, by score = sum / length ** length_penalty, where the length counts
  generated tokens, an end token included;
- a search is over when no beam goes on; when `early_stopping` is True and `beams` texts are finished; or when they are
  and the best beam's sum, taken for a score at the length that its score could be best at, doesn't beat the worst of
  them. That length is the current one, but with early_stopping="never" and a positive length_penalty the longest
  possible one.

Differences: sums are in float64 (Transformers: float32), and of equal candidates the one of the earlier beam comes
first, then the smaller token id (Transformers leaves that open).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, cast

from forerun.engine.request import FinishReason
from forerun.errors import InvalidRequestError

EarlyStopping = bool | Literal["never"]

MAX_BEAMS: Final = 256
MAX_PENALTY: Final = 10.0


class Candidate(NamedTuple):
    """A beam (its index, best first) continued by a token; `total` is the sum of log-probabilities with the token's."""

    beam: int
    token: int
    logprob: float
    total: float


class Ending(NamedTuple):
    """A candidate that ends a text, why, and what the text is worth."""

    candidate: Candidate
    reason: FinishReason
    score: float


class Selection(NamedTuple):
    """What becomes of a step's candidates.

    going: those that go on, best first.
    ended: those that finish a text, best first.
    """

    going: list[Candidate]
    ended: list[Ending]


@dataclass(frozen=True, slots=True)
class BeamRules:
    """The settings of a search, checked on creation; raises `InvalidRequestError`.

    beams: sequences that are kept, 1 to 256.
    length_penalty: exponent of the length in the score, -10 to 10: 0 compares sums, which favours short texts; above 0
        favours long ones.
    early_stopping: True ends when `beams` texts are finished, False when it's unlikely that a better one follows,
        "never" when that is impossible.
    n_return: texts to return, at most `beams`; None: all of them.
    """

    beams: int = 4
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    n_return: int | None = None

    def __post_init__(self) -> None:
        _check_count("beams", self.beams, MAX_BEAMS)
        if self.n_return is not None:
            _check_count("n_return", self.n_return, self.beams)
        penalty = cast("object", self.length_penalty)
        if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not abs(penalty) <= MAX_PENALTY:
            raise InvalidRequestError(
                f"length_penalty={penalty!r} is not allowed; expected a number from -{MAX_PENALTY:g} to {MAX_PENALTY:g}"
            )
        stopping = cast("object", self.early_stopping)
        if not isinstance(stopping, bool) and stopping != "never":
            raise InvalidRequestError(f"early_stopping={stopping!r} is not allowed; expected True, False or 'never'")

    def score(self, total: float, length: int) -> float:
        """What a text with this sum of log-probabilities and so many generated tokens is worth."""
        return total / math.pow(length, self.length_penalty)

    def choose(
        self, candidates: Iterable[Candidate], length: int, ends: Callable[[Candidate], FinishReason | None]
    ) -> Selection:
        """Divides a step's candidates, of texts that have `length` tokens with theirs; `ends` is asked in order."""
        selection = Selection([], [])
        for rank, candidate in enumerate(sorted(candidates, key=lambda c: (-c.total, c.beam, c.token))):
            if len(selection.going) == self.beams and rank >= self.beams:
                break
            reason = ends(candidate)
            if reason is None:
                if len(selection.going) < self.beams:
                    selection.going.append(candidate)
            elif rank < self.beams:
                selection.ended.append(Ending(candidate, reason, self.score(candidate.total, length)))
        return selection

    def over(self, best: float | None, length: int, longest: int, finished: list[float]) -> bool:
        """Whether nothing more is to be done.

        best: the best sum of a beam that goes on, None if none does. length: its generated tokens, of at most
        `longest`. finished: scores of the finished texts, best first, at most `beams`.
        """
        if best is None:
            return True
        if len(finished) < self.beams:
            return False
        if self.early_stopping is True:
            return True
        hoped = longest if self.early_stopping == "never" and self.length_penalty > 0 else length
        return self.score(best, hoped) <= finished[-1]


def _check_count(field: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InvalidRequestError(f"{field}={value!r} is not allowed; expected an integer from 1 to {most}")
