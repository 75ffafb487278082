"""Drafters as people write them: KIND[=ARGUMENT][:RATE,RATE,...]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from forerun.errors import PlanError
from forerun.plan import drafters
from forerun.plan.acceptance import Acceptance
from forerun.plan.drafters import PricedDrafter
from forerun.plan.shapes import ModelShape
from forerun.plan.shown import shown
from forerun.plan.speculate import Proposal


class Assumed(NamedTuple):
    """Acceptance by depth, and what it was read from."""

    rates: tuple[float, ...]
    source: str


ASSUMED: Mapping[str, Assumed] = MappingProxyType({
    "ngram": Assumed(
        (0.22,),
        "this repository's chat tasks, README: 1.29 tokens a step = 1 / (1 - 0.22); arXiv 2411.04975: ShareGPT 1.20x",
    ),
    "medusa": Assumed(
        (0.6, 0.45, 0.35, 0.3),
        "first head about 0.6: EAGLE, arXiv 2401.15077; deeper taken to fall, as a head doesn't see the others' tokens",
    ),
    "model": Assumed((0.65,), "arXiv 2211.17192, T5: summaries, T = 0, 0.65; translation, T = 0, 0.75"),
    "eagle": Assumed(
        (0.6, 0.5, 0.45, 0.4),
        "vLLM pull request 16035, Llama 3 8B, MT-bench: 1.89 and 2.08 tokens a step with 2 and 4 drafts",
    ),
    "eagle3": Assumed(
        (0.7, 0.68, 0.62, 0.55, 0.5),
        "first three: mean of Llama 3.1 8B, Qwen3 8B and gpt-oss-20b on MT-bench, T = 0, of vLLM's "
        "test_acceptance_length.py; deeper taken to fall",
    ),
    "mtp": Assumed(
        (0.85, 0.5, 0.4),
        "first: DeepSeek-V3, arXiv 2412.19437, 85 to 90%; second: vLLM pull request 41044, 0.37 / 0.77; third taken to "
        "fall",
    ),
})  # fmt: skip
"""Where none is given, for chat in English: the lower of what is published, to be replaced by measured ones. The last
rate is that of all deeper tokens. docs/plan-speculate.md has the sources in words."""

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
        raise PlanError("drafter", f"{shown(text)} is not allowed; expected {FORM}, KIND one of {', '.join(ASSUMED)}")
    if equals and not argument:
        raise PlanError("drafter", f"{shown(text)} has nothing behind its =")
    rates = ASSUMED[kind].rates
    drafter = _drafter(kind, argument, text, target, model)
    if colon:
        try:
            rates = tuple(float(word) for word in tail.split(","))
        except ValueError as error:
            raise PlanError(
                "drafter", f"{shown(text)}: {shown(tail)} is not a list of rates such as 0.8,0.7"
            ) from error
        if len(rates) > drafter.longest:
            raise PlanError(
                "drafter", f"{shown(text)} has {len(rates)} rates for a draft of at most {drafter.longest} tokens"
            )
    return Proposal(drafter, Acceptance(rates))


def _drafter(
    kind: str, argument: str, text: str, target: ModelShape, model: Callable[[str], ModelShape]
) -> PricedDrafter:
    if kind == "model":
        if not argument:
            raise PlanError("drafter", f"{shown(text)} doesn't say which model; expected model=NAME")
        return drafters.model(model(argument), target)
    if kind == "medusa":
        return drafters.medusa(target, heads=_count(argument, text)) if argument else drafters.medusa(target)
    if kind == "eagle3":
        if not argument:
            return drafters.eagle3(target, draft_vocab=min(drafters.EAGLE3_VOCAB, target.vocab))
        return drafters.eagle3(target, draft_vocab=None if argument == "full" else _count(argument, text))
    if argument:
        raise PlanError("drafter", f"{shown(text)}: {kind} takes no argument")
    if kind == "ngram":
        return drafters.ngram()
    return drafters.eagle(target) if kind == "eagle" else drafters.mtp(target)


def _count(argument: str, text: str) -> int:
    if not (argument.isascii() and argument.isdecimal() and len(argument) < 8 and int(argument) > 0):
        raise PlanError("drafter", f"{shown(text)}: {shown(argument)} is not a number of heads or tokens")
    return int(argument)
