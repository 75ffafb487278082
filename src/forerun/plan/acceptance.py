"""From acceptance to tokens a step: the formulas of Leviathan et al. (arXiv 2211.17192), for any list of rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.errors import PlanError


@dataclass(frozen=True)
class Acceptance:
    """How often draft tokens are accepted.

    rates: probability that the token at each depth is accepted, given that all before it were; the last one goes on
    for ever. A constant rate is a tuple of one.
    """

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rates or not all(0 <= rate <= 1 for rate in self.rates):
            raise PlanError("acceptance", f"{list(self.rates)} is not allowed; expected rates from 0 to 1")

    @staticmethod
    def of(*rates: float) -> Acceptance:
        """Rates by depth; one rate for all depths."""
        return Acceptance(rates)

    def rate(self, depth: int) -> float:
        """Of the token at `depth`, 0 being the first."""
        return self.rates[min(depth, len(self.rates) - 1)]

    def survival(self, length: int) -> list[float]:
        """Probability that each of `length` draft tokens is accepted with all before it."""
        survival: list[float] = []
        product = 1.0
        for depth in range(length):
            product *= self.rate(depth)
            survival.append(product)
        return survival

    def expected_tokens(self, length: int) -> float:
        """Tokens of a step that verifies `length` draft tokens, the target's own one included.

        1 + the sum of the survivals; (1 - a^(length+1)) / (1 - a) for a constant rate a.
        """
        return 1.0 + sum(self.survival(length))


def speedup(expected_tokens: float, draft_cost: float, verify_ratio: float = 1.0) -> float:
    """Time without speculation over time with it: expected tokens / (draft cost + verify ratio).

    draft_cost: time of a whole draft, verify_ratio: of the verifying step, both in plain steps. With length * c and 1
    it is theorem 3.8 of the paper.
    """
    return expected_tokens / (draft_cost + verify_ratio)


def rate_for(expected_tokens: float, length: int) -> float:
    """The constant acceptance at which drafts of `length` give so many tokens a step: the root of (1 - a^(length+1)) /
    (1 - a) = expected_tokens; 0 for less than 1, 1 for more than length + 1."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (low, middle) if Acceptance.of(middle).expected_tokens(length) >= expected_tokens else (middle, high)
        )
    return high


def extra_operations(acceptance: Acceptance, length: int, draft_operations: float = 0.0) -> float:
    """Operations with speculation over those without, for each token (theorem 3.11 of the paper).

    draft_operations: of the drafter's forward of one token, in those of the target's.
    """
    return (length * draft_operations + length + 1) / acceptance.expected_tokens(length)


def rates_from_counts(accepted_by_position: Sequence[int], drafts: int) -> Acceptance:
    """Rates from an engine's counters: `accepted_by_position[i]` counts drafts of which at least i + 1 tokens were
    accepted, among `drafts` that proposed that many.

    Raises:
        PlanError: the counts don't fall.
    """
    before, rates = drafts, []
    for depth, count in enumerate(accepted_by_position):
        if not 0 <= count <= before:
            raise PlanError("acceptance", f"{count} drafts accepted at depth {depth} of {before} that reached it")
        if before == 0:
            break
        rates.append(count / before)
        before = count
    return Acceptance(tuple(rates))
