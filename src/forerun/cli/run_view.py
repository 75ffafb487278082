"""How `forerun run` shows drafting: marks in the text, a line a step, and counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from forerun.engine.output import Piece, SpeculationStats, TokenOrigin
    from forerun.engine.pace import Decision
    from forerun.models.tokenizer import Tokenizer

_COLOURS: Mapping[TokenOrigin, tuple[str, str]] = MappingProxyType({
    "accepted": ("\x1b[32m", "\x1b[0m"),
    "correction": ("\x1b[33m", "\x1b[0m"),
    "bonus": ("\x1b[36m", "\x1b[0m"),
})  # fmt: skip
_BRACKETS: Mapping[TokenOrigin, tuple[str, str]] = MappingProxyType({
    "accepted": ("<+", "+>"),
    "correction": ("<!", "!>"),
    "bonus": ("<*", "*>"),
})  # fmt: skip


class Span(NamedTuple):
    """Text of tokens that came from the same place."""

    text: str
    origin: TokenOrigin


class DraftMarks:
    """Splits a request's text by where its tokens came from.

    A character whose bytes are spread over several tokens belongs to the token that completes it, so no character is
    ever split. Text comes with its piece, which may be later than its token (what may begin a stop string is held
    back) or never (a stop string is cut off).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        from forerun.models.tokenizer import StreamDecoder

        self._decoder = StreamDecoder(tokenizer)
        self._waiting: list[Span] = []
        self._latest: TokenOrigin = "target"

    def spans(self, piece: Piece) -> list[Span]:
        """The piece's text in stretches of one origin; joined, they are the piece."""
        for token, origin in zip(piece.token_ids, piece.origins, strict=True):
            self._latest = origin
            text = self._decoder.push([token])
            if text:
                self._waiting.append(Span(text, origin))
        spans: list[Span] = []
        at = 0
        while at < len(piece):
            rest = len(piece) - at
            # With no token left it is what the end makes of an unfinished character.
            text, origin = self._waiting.pop(0) if self._waiting else Span(piece[at:], self._latest)
            if len(text) > rest:
                self._waiting.insert(0, Span(text[rest:], origin))
            text = piece[at : at + len(text)]
            at += len(text)
            if spans and spans[-1].origin == origin:
                text = spans.pop().text + text
            spans.append(Span(text, origin))
        return spans


def marked(span: Span, *, colour: bool) -> str:
    """A stretch of text as it is shown: coloured, or in brackets that name its origin."""
    before, after = (_COLOURS if colour else _BRACKETS).get(span.origin, ("", ""))
    return before + span.text + after


def legend(*, colour: bool) -> str:
    """What the marks mean."""
    shown = [marked(Span(f"{origin}", origin), colour=colour) for origin in _BRACKETS]
    return f"drafts: {' '.join(shown)}, unmarked: a step without a draft"


class Trace:
    """Tells each choice of a draft length, and what became of it."""

    def __init__(self, n_prompt: int) -> None:
        self._n_prompt = n_prompt
        self._origins: list[TokenOrigin] = []

    def lines(self, piece: Piece) -> list[str]:
        """A line for each step since the last piece that could have drafted."""
        self._origins += piece.origins
        return [self._line(decision) for decision in piece.decisions]

    def _line(self, decision: Decision) -> str:
        options = ", ".join(
            f"{length}: {tokens:.2f} tokens in {seconds * 1e3:.1f} ms" for length, tokens, seconds in decision.options
        )
        accepted = 0
        for origin in self._origins[decision.position - self._n_prompt :]:
            if origin != "accepted":
                break
            accepted += 1
        outcome = f", accepted {accepted}" if decision.length else ""
        considered = f" {options};" if options else ""
        return f"step at {decision.position}:{considered} length {decision.length} ({decision.reason}){outcome}"


def describe(draft: str, draft_len: str, stats: SpeculationStats) -> dict[str, object]:
    """The counts for JSON, named as in `SpeculationStats`; rates without data are null."""
    counts = {field.name: getattr(stats, field.name) for field in dataclasses.fields(stats)}
    counts["by_drafter"] = {name: one._asdict() for name, one in stats.by_drafter.items()}
    rates = {"acceptance": stats.acceptance, "tokens_per_decision": stats.tokens_per_decision}
    return {"draft": draft, "draft_len": draft_len, **counts, **rates}


def summary(stats: SpeculationStats) -> str:
    """The counts in a few words."""
    if not stats.proposed:
        return "no drafts"
    text = f"drafts: {stats.accepted} of {stats.proposed} accepted"
    rate = stats.tokens_per_decision
    return text if rate is None else f"{text}, {rate:.1f} tokens a step"
