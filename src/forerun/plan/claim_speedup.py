"""Whether "X times faster by speculation" can be: tokens a step against the time of the step (docs/plan-claim.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from forerun.errors import PlanError
from forerun.plan.acceptance import rate_for
from forerun.plan.catalog import PlanCatalog
from forerun.plan.claim import Verdict
from forerun.plan.claim_conditions import MOST_TOKENS, ways_to_fit
from forerun.plan.claim_setting import MOST_QUERIES, Room, Setting
from forerun.plan.derivation import Derivation
from forerun.plan.speculate import Point, Proposal, best


@dataclass(frozen=True)
class SpeedupAssessment:
    """What is left of a claimed speedup, all at peaks.

    verified: tokens that a step has to verify for one sequence, and verify_ratio: what such a step takes, in plain
    steps. needed: tokens a step; None: no number does. rate: constant acceptance that gives them with verified - 1
    drafts, 1 if all must be accepted. limit: the largest speedup under what is stated: tokens a step over the verify
    ratio, or the drafter's best, or what `MOST_TOKENS` allow. point: the drafter at its best length. room: memory.
    ways: plausible changes with which a model fits that doesn't.
    """

    setting: Setting
    claimed: float
    needed: float | None
    verified: int
    verify_ratio: float
    rate: float | None
    limit: float
    point: Point | None
    room: Room
    ways: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """The claim in limits."""
        return self.claimed / self.limit

    @property
    def verdict(self) -> Verdict:
        """physics: the model fits, and what is stated suffices. possible if: the tokens needed are plausible where none
        are stated, or more of the drafter's are accepted; a model that doesn't fit has a plausible way to.
        marketing: else."""
        plausible = self.needed is not None and self.needed <= MOST_TOKENS
        tokens_stated = self.setting.tokens_per_step > 1
        if self.ratio <= 1 and (tokens_stated or self.point is not None or self.claimed <= 1):
            if self.room.fits:
                return "physics"
            return "possible if" if self.ways else "marketing"
        if tokens_stated or not plausible or not (self.room.fits or self.ways):
            return "marketing"
        return "possible if"

    @property
    def summary(self) -> str:
        """The verdict with its reason, in a line."""
        if self.verdict == "physics":
            return f"{self.ratio:.0%} of what the stated speculation allows"
        if not (self.room.fits or self.ways):
            return f"the model doesn't fit: {self.room}"
        if self.ratio > 1 and self.setting.tokens_per_step > 1:
            return f"the stated {self.setting.tokens_per_step:g} tokens a step allow {self.limit:.2f} times"
        if self.needed is None:
            return f"verifying costs more than any number of tokens up to {MOST_QUERIES} gives"
        way = f"{self.needed:.2f} tokens a step, with drafts for free"
        if self.rate is not None and self.needed > 1:
            way += f" ({self.rate:.0%} of drafts of {_length(self.needed)} tokens accepted, at each position)"
        if self.verdict == "marketing":
            return f"it needs {way}; up to {MOST_TOKENS:g} are plausible"
        return way if self.room.fits else f"{way}; and so that it fits {' or '.join(self.ways)}"

    @property
    def questions(self) -> list[str]:
        """What to ask whoever makes the claim."""
        if self.verdict == "physics":
            return [_BASELINE, _CONDITIONS]
        return [_TOKENS, _BASELINE, _CONDITIONS]


_TOKENS = "How many tokens a step (mean, with the target's own), with which drafter and draft length?"
_BASELINE = "What is the baseline: the same engine, hardware, formats and batch without speculation? Its tokens/s?"
_CONDITIONS = "On which texts, at which temperature, batch and lengths, and is the output that of the model alone?"


def assess_speedup(
    setting: Setting, claimed: float, catalog: PlanCatalog, proposal: Proposal | None = None
) -> SpeedupAssessment:
    """Checks a claim of "so many times faster than without speculation", at the setting's batch and context.

    The baseline is plain decoding of the same model on the same hardware. With `setting.tokens_per_step` above 1 or a
    drafter with its acceptance the claim is measured by that.

    Raises:
        PlanError: the claim is no positive number, or both are stated.
    """
    if not 0 < claimed < math.inf:
        raise PlanError("speedup", f"{claimed} is not allowed; expected a number above 0")
    if proposal is not None and setting.tokens_per_step > 1:
        raise PlanError("tokens-per-step", "follows from the drafter and its acceptance; give only one of them")
    needed, verified, ratio = _needed(setting, claimed)
    point, room = None, setting.room
    if proposal is not None:
        network, where = setting.model.network, setting.forward().deployment
        point = best(network, where, proposal, batch=setting.batch, context=setting.context)
        room = setting.room_with(proposal.drafter, point.length)
        limit = point.speedup
    elif setting.tokens_per_step > 1:
        limit = setting.tokens_per_step / _verify_ratio(setting, math.ceil(setting.tokens_per_step))
    else:
        limit = max(n / _verify_ratio(setting, n) for n in range(1, int(MOST_TOKENS) + 1))
    rate = None if needed is None else rate_for(needed, _length(needed))
    ways = () if room.fits else tuple(ways_to_fit(setting, catalog))
    return SpeedupAssessment(setting, claimed, needed, verified, ratio, rate, limit, point, room, ways)


def explain_speedup(assessment: SpeedupAssessment) -> Derivation:
    """How the claim's ratio to the limit comes about."""
    d = Derivation("the claimed speedup, in limits")
    setting, point = assessment.setting, assessment.point
    d.given("claimed", assessment.claimed, "times", "the claim")
    if point is not None:
        d.given("tokens_per_step", point.tokens_per_step, "tokens", f"of {point.drafter} with {point.length} drafts")
        d.given("plain_seconds", point.plain_seconds, "s", "`forerun plan step --ideal`")
        d.given("draft_seconds", point.draft_seconds, "s", f"{point.length} tokens of {point.drafter}, at peaks")
        step = f"`forerun plan step --ideal --queries {point.length + 1}`"
        d.given("verify_seconds", point.verify_seconds, "s", step)
        d.derived("limit", "tokens_per_step * plain_seconds / (draft_seconds + verify_seconds)", "times", _SPEEDUP)
    else:
        tokens = setting.tokens_per_step
        source = "stated"
        if tokens == 1:
            tokens = max(range(1, int(MOST_TOKENS) + 1), key=lambda n: n / _verify_ratio(setting, n))
            source = "nothing is stated: the best of what is plausible"
        queries = math.ceil(tokens)
        d.given("tokens_per_step", tokens, "tokens", source)
        d.given("plain_seconds", _seconds(setting, 1), "s", "`forerun plan step --ideal`")
        d.given("verify_seconds", _seconds(setting, queries), "s", f"`forerun plan step --ideal --queries {queries}`")
        d.derived("verify_ratio", "verify_seconds / plain_seconds", "plain steps")
        d.derived("limit", "tokens_per_step / verify_ratio", "times", _SPEEDUP)
    d.derived("ratio", "claimed / limit", "", "above 1: not with these tokens a step")
    return d


_SPEEDUP = "Leviathan et al., theorem 3.8, with a verify ratio"


def _seconds(setting: Setting, queries: int) -> float:
    return replace(setting, tokens_per_step=queries).forward().seconds


def _verify_ratio(setting: Setting, queries: int) -> float:
    """A step that verifies so many tokens of each sequence, in plain steps, at peaks."""
    return _seconds(setting, queries) / _seconds(setting, 1)


def _needed(setting: Setting, claimed: float) -> tuple[float | None, int, float]:
    """Tokens a step that make the claim true with drafts for free, tokens verified for them, and their ratio."""
    ratio = 1.0
    for queries in range(1, MOST_QUERIES + 1):
        ratio = _verify_ratio(setting, queries)
        if claimed * ratio <= queries:
            return max(claimed * ratio, 1.0), queries, ratio
    return None, MOST_QUERIES, ratio


def _length(tokens: float) -> int:
    """A draft length for which the rate is told: twice the drafts that must be accepted."""
    return max(1, round(2 * (tokens - 1)))
