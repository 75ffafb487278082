"""The two rates that counts of speculation give, wherever the counts come from (docs/counting.md). Imports nothing."""

from __future__ import annotations


class SpeculationRates:
    """Base of a dataclass that has these counts as fields."""

    __slots__ = ()

    proposed: int
    accepted: int
    emitted: int
    decisions: int

    @property
    def acceptance(self) -> float | None:
        """Accepted over proposed draft tokens; None without drafts (no data, not 0)."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def tokens_per_decision(self) -> float | None:
        """Emitted tokens per row that chose tokens; None without such rows."""
        return self.emitted / self.decisions if self.decisions else None
