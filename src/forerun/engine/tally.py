"""Counting what speculation did, step by step."""

from __future__ import annotations

from typing import NamedTuple

from forerun.draft.base import DraftTree
from forerun.engine.output import DrafterCounts, SpeculationStats


class StepSeconds(NamedTuple):
    """Wall-clock seconds of the parts of a step; `masks` is how much of them went on grammars."""

    draft: float
    forward: float
    verify: float
    schedule: float
    masks: float = 0.0


class Tally:
    """Running counts, as `SpeculationStats` defines them, of one request or of an engine."""

    __slots__ = (
        "_accepted_at", "_by_drafter", "_by_length", "_proposed_at", "accepted", "computed", "cut", "decisions",
        "draft_seconds", "drafted", "emitted", "forward_seconds", "mask_seconds", "proposed", "schedule_seconds",
        "steps", "verify_seconds",
    )  # fmt: skip

    def __init__(self) -> None:
        self.steps = self.decisions = self.drafted = self.proposed = 0
        self.computed = self.accepted = self.cut = self.emitted = 0
        self.draft_seconds = self.forward_seconds = self.verify_seconds = self.schedule_seconds = 0.0
        self.mask_seconds = 0.0
        self._proposed_at: list[int] = []
        self._accepted_at: list[int] = []
        self._by_drafter: dict[str, list[int]] = {}
        self._by_length: list[int] = []

    def row(self, known: int) -> None:
        """A row with so many known query tokens was computed."""
        self.steps += 1
        self.computed += known

    def draft(self, tree: DraftTree, accepted: int) -> None:
        """A tree was verified and so many of its nodes were accepted."""
        n = len(tree)
        self.drafted += 1
        self.proposed += n
        self.computed += n
        self.accepted += accepted
        proposed_at, accepted_at = self._proposed_at, self._accepted_at
        depths = tree.depths()
        missing = max(depths) + 1 - len(proposed_at)
        if missing > 0:
            proposed_at += [0] * missing
            accepted_at += [0] * missing
        for depth in depths:
            proposed_at[depth] += 1
        for depth in range(accepted):
            accepted_at[depth] += 1
        by_length = self._by_length
        if n > len(by_length):
            by_length += [0] * (n - len(by_length))
        by_length[n - 1] += 1
        counts = self._by_drafter.setdefault(tree.drafter, [0, 0, 0])
        counts[0] += 1
        counts[1] += n
        counts[2] += accepted

    def decision(self, tokens: int, kept: int) -> None:
        """A row chose so many tokens, its own included, of which so many became output."""
        self.decisions += 1
        self.emitted += kept
        self.cut += tokens - kept

    def seconds(self, step: StepSeconds) -> None:
        """A step took so long."""
        self.draft_seconds += step.draft
        self.forward_seconds += step.forward
        self.verify_seconds += step.verify
        self.schedule_seconds += step.schedule
        self.mask_seconds += step.masks

    def stats(self) -> SpeculationStats:
        """The counts so far."""
        return SpeculationStats(
            steps=self.steps,
            decisions=self.decisions,
            drafted=self.drafted,
            proposed=self.proposed,
            computed=self.computed,
            accepted=self.accepted,
            cut=self.cut,
            emitted=self.emitted,
            proposed_by_position=tuple(self._proposed_at),
            accepted_by_position=tuple(self._accepted_at),
            drafted_by_length=tuple(self._by_length),
            by_drafter={name: DrafterCounts(*counts) for name, counts in self._by_drafter.items()},
            draft_seconds=self.draft_seconds,
            forward_seconds=self.forward_seconds,
            verify_seconds=self.verify_seconds,
            schedule_seconds=self.schedule_seconds,
            mask_seconds=self.mask_seconds,
        )
