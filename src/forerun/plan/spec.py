"""Drafters as people write them: KIND[=ARGUMENT][:RATE,RATE,...]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from forerun.errors import PlanError
from forerun.plan import drafters
from forerun.plan.acceptance import Acceptance
from forerun.plan.drafters import PricedDrafter
from forerun.plan.shapes import ModelShape
from forerun.plan.speculate import Proposal

ASSUMED: Mapping[str, tuple[float, ...]] = MappingProxyType({
    "ngram": (0.45,),
    "medusa": (0.65, 0.55, 0.5, 0.45),
    "model": (0.75,),
    "eagle": (0.72, 0.68, 0.65),
    "eagle3": (0.8, 0.76, 0.73),
    "mtp": (0.87, 0.75, 0.65),
})  # fmt: skip
"""Acceptance by depth where none is given: round figures for chat in English, to be replaced by measured ones."""

FORM = "KIND[=ARGUMENT][:RATE,RATE,...]"


def proposal_of(text: str, target: ModelShape, model: Callable[[str], ModelShape]) -> Proposal:
    """A drafter for `target` with its acceptance by depth.

    "ngram:0.5", "medusa=3:0.7,0.6,0.5" (heads), "model=llama-3.1-8b:0.8", "eagle:0.7", "eagle3=full:0.8" (entries of
    the draft vocabulary, or full), "mtp:0.87,0.75". Without rates, those of `ASSUMED`. `model` finds a draft model by
    name.

    Raises:
        PlanError: the text isn't of that form, or the drafter doesn't go with the target.
    """
    head, colon, tail = text.partition(":")
    kind, equals, argument = head.partition("=")
    if kind not in ASSUMED:
        raise PlanError("drafter", f"{text!r} is not allowed; expected {FORM}, KIND one of {', '.join(ASSUMED)}")
    if equals and not argument:
        raise PlanError("drafter", f"{text!r} has nothing behind its =")
    rates = ASSUMED[kind]
    drafter = _drafter(kind, argument, text, target, model)
    if colon:
        try:
            rates = tuple(float(word) for word in tail.split(","))
        except ValueError as error:
            raise PlanError("drafter", f"{text!r}: {tail!r} is not a list of rates such as 0.8,0.7") from error
        if len(rates) > drafter.longest:
            raise PlanError(
                "drafter", f"{text!r} has {len(rates)} rates for a draft of at most {drafter.longest} tokens"
            )
    return Proposal(drafter, Acceptance(rates))


def _drafter(
    kind: str, argument: str, text: str, target: ModelShape, model: Callable[[str], ModelShape]
) -> PricedDrafter:
    if kind == "model":
        if not argument:
            raise PlanError("drafter", f"{text!r} doesn't say which model; expected model=NAME")
        return drafters.model(model(argument), target)
    if kind == "medusa":
        return drafters.medusa(target, heads=_count(argument, text)) if argument else drafters.medusa(target)
    if kind == "eagle3":
        if not argument:
            return drafters.eagle3(target, draft_vocab=min(drafters.EAGLE3_VOCAB, target.vocab))
        return drafters.eagle3(target, draft_vocab=None if argument == "full" else _count(argument, text))
    if argument:
        raise PlanError("drafter", f"{text!r}: {kind} takes no argument")
    if kind == "ngram":
        return drafters.ngram()
    return drafters.eagle(target) if kind == "eagle" else drafters.mtp(target)


def _count(argument: str, text: str) -> int:
    if not (argument.isascii() and argument.isdecimal() and 0 < int(argument) < 10**7):
        raise PlanError("drafter", f"{text!r}: {argument!r} is not a number of heads or tokens")
    return int(argument)
