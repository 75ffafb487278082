"""Whether a claimed speed is physics, possible under conditions that it doesn't state, or marketing.

One division first (bandwidth over the bytes that a step reads), then the full model of a step, then each unstated
condition solved for the value that would make the claim true (docs/plan-claim.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forerun.errors import PlanError
from forerun.plan.catalog import PlanCatalog
from forerun.plan.claim_conditions import KINDS, Condition, Pair, conditions, pairs
from forerun.plan.claim_setting import Room, Setting
from forerun.plan.speculate import Proposal
from forerun.plan.steptime import ForwardTime

Verdict = Literal["physics", "possible if", "marketing"]


@dataclass(frozen=True)
class Assessment:
    """What is left of a claim.

    claimed: tokens/s, of one sequence or of all (`setting.aggregate`). ceiling: by the division. ideal, usual: by the
    full model at peaks and at the achievable shares of them. forward: the step at peaks. room: memory. conditions:
    every unstated one, solved by itself. pairs: of them, where no single one is enough.
    """

    setting: Setting
    claimed: float
    ceiling: float
    ideal: float
    usual: float
    forward: ForwardTime
    room: Room
    conditions: tuple[Condition, ...]
    pairs: tuple[Pair, ...]

    @property
    def ratio(self) -> float:
        """The claim in ceilings."""
        return self.claimed / self.ceiling

    @property
    def share(self) -> float:
        """The claim in what the full model allows at peaks."""
        return self.claimed / self.ideal

    @property
    def verdict(self) -> Verdict:
        """physics: the model fits and the peaks suffice under the stated conditions. possible if: one plausible
        unstated condition, or two together, make it so. marketing: neither."""
        if self.share <= 1 and self.room.fits:
            return "physics"
        return "possible if" if self.pairs or any(each.counts for each in self.conditions) else "marketing"

    @property
    def summary(self) -> str:
        """The verdict with its reason, in a line."""
        if self.verdict == "physics":
            of = f"{self.share:.0%}" if self.share >= 0.01 else f"{100 * self.share:.2g}%"
            of += " of what the hardware allows"
            if self.claimed <= self.usual:
                return f"{of}, and no more than engines usually reach"
            return f"{of}, more than engines usually reach ({self.usual:.0f} tokens/s)"
        if self.verdict == "possible if":
            ways = [each.real for each in self.conditions if each.counts] or [pair.text for pair in self.pairs]
            return "; or ".join(ways)
        return "no plausible condition that it doesn't state makes it true, nor do two of them"

    @property
    def questions(self) -> list[str]:
        """What to ask whoever makes the claim: about the conditions that would make it true first."""
        if self.verdict == "physics":
            return _physical(self)
        kinds: list[str] = [each.kind for each in self.conditions if each.counts]
        if not kinds:
            settled = {each.kind for each in self.conditions if each.settled}
            kinds = list(dict.fromkeys(kind for pair in self.pairs for kind in pair.kinds))
            kinds = kinds or [kind for kind in _LAST_RESORT if kind not in settled]
        return [*(_question(kind, self) for kind in kinds), _CONTEXT]


_LEAST, _MOST = 1e-6, 1e9
"""Tokens/s of a claim: beyond these nothing that is solved for it means anything."""


def assess(
    setting: Setting,
    claimed: float,
    catalog: PlanCatalog,
    *,
    stated: frozenset[str] = frozenset(),
    proposal: Proposal | None = None,
) -> Assessment:
    """Checks a claim of so many tokens/s.

    `stated`: kinds of condition that the claim itself settles, so that they can't be otherwise. `proposal`: a drafter
    whose speed is computed besides.

    Raises:
        PlanError: the claim is no positive number, or a kind is unknown.
    """
    if not _LEAST <= claimed <= _MOST:
        raise PlanError("tokens-per-s", f"{claimed} is not allowed; expected {_LEAST:g} to {_MOST:g}")
    unknown = stated - set(KINDS)
    if unknown:
        raise PlanError("stated", f"{min(unknown)!r} is no condition; expected some of {', '.join(KINDS)}")
    true = setting.allows(claimed)
    found = () if true else tuple(conditions(setting, claimed, catalog, stated=stated, proposal=proposal))
    alone = true or any(each.counts for each in found)
    return Assessment(
        setting=setting,
        claimed=claimed,
        ceiling=setting.ceiling,
        ideal=setting.rate(),
        usual=setting.rate(setting.deployment.eff),
        forward=setting.forward(),
        room=setting.room,
        conditions=found,
        pairs=() if alone else tuple(pairs(setting, claimed, catalog, stated)),
    )


_CONTEXT = "At which lengths of prompt and reply is it measured, and does it count prompt tokens?"
_LAST_RESORT = ("hardware", "gpus", "batch", "weights", "acceptance", "active")


def _physical(assessment: Assessment) -> list[str]:
    """Of a claim that can be true: what decides whether it is."""
    asked = [_CONTEXT]
    if assessment.claimed > assessment.usual:
        asked.insert(0, "What share of the memory bandwidth is reached, and how is it measured?")
    return asked


def _question(kind: str, assessment: Assessment) -> str:
    setting = assessment.setting
    gpu = setting.deployment.hardware.name
    return {
        "weights": "In which format are weights, head included, and what does that cost on which evaluations?",
        "kv": "In which type is the KV cache?",
        "gpus": f"How many {gpu} serve one copy of the model, and over what link?",
        "hardware": f"On which accelerator exactly, with how much memory bandwidth, if not {gpu}?",
        "batch": "Is it the speed of one user or of how many together? What does each of them get (median, p99)?"
        if not setting.aggregate
        else "How many sequences share a step, and what does each of them get (median, p99)?",
        "acceptance": "Is there speculation? How many tokens a step (mean), on which texts, at which temperature?",
        "drafter": "Which drafter, with which acceptance by position, on which texts, at which temperature?",
        "active": f"Is it {setting.model.name} itself, every layer of it, or a model with fewer active parameters?",
    }[kind]
