"""A run under load beside an earlier one, if both had the same load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from forerun.errors import InvalidRequestError
from forerun.measure.load import KIND, Load, LoadReport

HOW_FIELDS: Final = frozenset(("speculate", "draft_len", "verify"))
"""Further fields of requests that say how an answer is made and not which: they may differ."""
_UNLIKE_TOKENS: Final = 0.05
"""Answers whose mean lengths differ by more are different work, which is said."""


@dataclass(frozen=True)
class Ratio:
    """A figure of both runs; ratio: now / then, None where then is 0."""

    name: str
    then: float
    now: float
    ratio: float | None


@dataclass(frozen=True)
class Comparison:
    """This run beside an earlier one.

    file: the earlier run's report. notes: what to keep in mind, such as answers of different lengths.
    """

    file: str
    then: Mapping[str, Any]
    rows: tuple[Ratio, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Earlier:
    """An earlier run's report, as --json wrote it."""

    path: Path
    report: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Earlier:
        """Reads a report. Raises InvalidRequestError if it is none, or of a run that was interrupted."""
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidRequestError(f"{path} can't be read: {error.strerror}; check the path") from error
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{path} is no JSON: {error}; --compare wants what --json printed") from error
        if not isinstance(report, dict) or report.get("kind") != KIND or not isinstance(report.get("load"), dict):
            raise InvalidRequestError(f"{path} is no report of {KIND}; --compare wants what its --json printed")
        if not report.get("complete"):
            raise InvalidRequestError(f"the run of {path} was interrupted, so its load isn't known; run it again")
        return cls(path, report)

    def check(self, load: Load) -> None:
        """Raises InvalidRequestError, which names every difference, unless the load is the same."""
        found = differences(self.report["load"], asdict(load))
        if found:
            raise InvalidRequestError(
                f"the load isn't that of {self.path}, so nothing would follow from a comparison: {'; '.join(found)}"
            )

    def compare(self, now: LoadReport) -> Comparison:
        """Figures of both runs. Raises InvalidRequestError if their loads differ, or this one was interrupted."""
        self.check(now.load)
        if not now.complete:
            raise InvalidRequestError("this run was interrupted, so it had another load")
        report = asdict(now)
        before, after = _figures(self.report), _figures(report)
        rows = tuple(
            Ratio(name, before[name], after[name], after[name] / before[name] if before[name] else None)
            for name in after
            if name in before
        )
        return Comparison(str(self.path), self.report.get("setup", {}), rows, tuple(_notes(self.report, report)))


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two loads, in words."""
    found = []
    for name in (*now, *(name for name in then if name not in now)):
        before, after = then.get(name), now.get(name)
        if name == "extra":
            before, after = _asking(before), _asking(after)
        if before != after:
            found.append(f"{name} was {_shown(before)} and is {_shown(after)}")
    return found


def _asking(extra: object) -> object:
    if not isinstance(extra, Mapping):
        return extra
    return {name: value for name, value in extra.items() if name not in HOW_FIELDS}


def _shown(value: object) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _figures(report: Mapping[str, Any]) -> dict[str, float]:
    """Numbers that a report has, by name."""
    found: dict[str, float] = {}
    for name in ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s"):
        _put(found, name, report.get(name))
    for name in ("first_token_ms", "between_tokens_ms", "between_events_ms", "token_ms", "end_to_end_ms"):
        times = report.get(name)
        for part in ("mean", "p50", "p90", "p99"):
            if isinstance(times, Mapping):
                _put(found, f"{name} {part}", times.get(part))
    goodput = report.get("goodput")
    if isinstance(goodput, Mapping):
        targets = goodput.get("targets", {})
        name = f"goodput requests_per_s (ttft {targets.get('ttft_ms')}, tpot {targets.get('tpot_ms')} ms)"
        _put(found, name, goodput.get("requests_per_s"))
    return found


def _put(found: dict[str, float], name: str, value: object) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        found[name] = float(value)


def _notes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    notes = []
    for name, what in (("prompt_tokens", "prompts"), ("output_tokens", "answers")):
        before, after = _mean(then, name), _mean(now, name)
        if before and after and abs(after / before - 1) > _UNLIKE_TOKENS:
            notes.append(
                f"{what} had {before:.1f} tokens on average then and {after:.1f} now: times of whole requests and "
                "requests/s compare unlike work"
            )
    for report, when in ((then, "then"), (now, "now")):
        failed = sum((report.get("errors") or {}).values())
        if failed:
            notes.append(f"{failed} requests failed {when}; latencies are over the others")
    return notes


def _mean(report: Mapping[str, Any], name: str) -> float | None:
    answered, total = report.get("answered"), report.get(name)
    return total / answered if answered and total and not report.get("without_usage") else None
