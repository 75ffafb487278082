"""How `forerun run` shows drafting: marks in the text, a line a step, and counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from forerun.engine.spans import DraftMarks, Span

if TYPE_CHECKING:
    from forerun.engine.output import Piece, SpeculationStats, TokenOrigin
    from forerun.engine.pace import Decision

__all__ = ["DraftMarks", "Span", "Trace", "describe", "legend", "marked", "reason", "summary"]

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


_REASONS: Mapping[str, str] = MappingProxyType({"resting after losses": "drafts cost more time than they won"})
"""What to say instead of some of the engine's reasons."""
_NOTHING_PROPOSED = "nothing proposed"
_NOT_WORTH_IT = ("no draft is worth its time", "the drafter's time isn't worth it", *_REASONS.values())


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
        self._decisions: list[Decision] = []

    def lines(self, piece: Piece) -> list[str]:
        """A line for each step since the last piece that could have drafted."""
        self._origins += piece.origins
        self._decisions += piece.decisions
        return [self._line(decision) for decision in piece.decisions]

    def describe(self) -> list[dict[str, object]]:
        """Every choice so far with all that was weighed, for JSON."""
        return [
            {
                "position": decision.position,
                "length": decision.length,
                "reason": reason(decision),
                "accepted": self._accepted(decision),
                "options": [
                    {"length": length, "expected_tokens": tokens, "expected_seconds": seconds}
                    for length, tokens, seconds in decision.options
                ],
            }
            for decision in self._decisions
        ]

    @property
    def why_nothing(self) -> str | None:
        """Why no step had a draft, if it is known and none had one."""
        reasons = [reason(decision) for decision in self._decisions]
        if not reasons or any(decision.length for decision in self._decisions):
            return None
        if any(one in _NOT_WORTH_IT for one in reasons):
            return "none was worth its time"
        return _NOTHING_PROPOSED if all(one == _NOTHING_PROPOSED for one in reasons) else None

    def _accepted(self, decision: Decision) -> int:
        if not decision.length:
            return 0
        count = 0
        for origin in self._origins[decision.position - self._n_prompt :]:
            if origin != "accepted":
                break
            count += 1
        return count

    def _line(self, decision: Decision) -> str:
        weighed = {length: (tokens, seconds) for length, tokens, seconds in decision.options}
        most = max(weighed, default=0)
        parts = [f"step at {decision.position}: length {decision.length}" + (f" of {most} proposed" if most else "")]
        why = reason(decision)
        plain = f"without {_rate(*weighed[0])}" if 0 in weighed else ""
        if decision.length in weighed and decision.length:
            if why != "most tokens per second":
                parts[0] += f" ({why})"
            tokens, seconds = weighed[decision.length]
            rates = "; ".join(filter(None, (_rate(tokens, seconds), plain)))
            shown = f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}"
            parts.append(f"expected {tokens:.1f} tokens in {shown} ms ({rates})")
        else:
            parts[0] += f" ({why}; {plain})" if most and plain else f" ({why})"
        if decision.length:
            parts.append(f"accepted {self._accepted(decision)}")
        return ", ".join(parts)


def reason(decision: Decision) -> str:
    """Why the length was chosen, in words for people."""
    if not decision.length and decision.reason.startswith("fixed"):
        return _NOTHING_PROPOSED
    return _REASONS.get(decision.reason, decision.reason)


def _rate(tokens: float, seconds: float) -> str:
    return f"{tokens / seconds:.1f}/s" if seconds > 0 else "-"


def describe(draft: str, draft_len: str, stats: SpeculationStats) -> dict[str, object]:
    """The counts for JSON, named as in `SpeculationStats`; rates without data are null."""
    counts = {field.name: getattr(stats, field.name) for field in dataclasses.fields(stats)}
    counts["by_drafter"] = {name: one._asdict() for name, one in stats.by_drafter.items()}
    rates = {"acceptance": stats.acceptance, "tokens_per_decision": stats.tokens_per_decision}
    return {"draft": draft, "draft_len": draft_len, **counts, **rates}


def summary(stats: SpeculationStats, why_nothing: str | None = None) -> str:
    """The counts in a few words; `why_nothing`: why there are none, if that is known."""
    if not stats.proposed:
        return "no drafts" if why_nothing is None else f"no drafts ({why_nothing})"
    text = f"draft tokens: {stats.accepted} of {stats.proposed} accepted"
    rate = stats.tokens_per_decision
    return text if rate is None else f"{text}, {rate:.1f} tokens a step"
