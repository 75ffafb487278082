"""The option for drafters that several planner commands share, and which drafters are priced without it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from forerun.errors import PlanError

if TYPE_CHECKING:
    from forerun.cli.plan_setup import PlanSetup
    from forerun.plan.catalog import PlanCatalog
    from forerun.plan.shapes import ModelShape
    from forerun.plan.speculate import Proposal

DRAFTERS = typer.Option(
    [], "--drafter", "-d", metavar="SPEC",
    help="KIND[=ARGUMENT][:RATE,RATE,...], repeatable: ngram, medusa[=HEADS], model=NAME, eagle, eagle3[=VOCAB|full], "
    "mtp; rates are acceptances by depth, the last one for all deeper. [default: those that go with the model]",
)  # fmt: skip

VOCAB_PADDING = 1024
"""Vocabularies whose sizes differ by less are taken for the same, padded."""

DRAFT_MODEL_SHARE = 1 / 6
"""Parameters of a draft model that is taken by itself, at most, of those that a token of the target uses."""


def proposals_of(texts: Sequence[str], setup: PlanSetup) -> list[Proposal]:
    """The drafters of `--drafter`, in order; without any, those of `default_drafters`. Two of one name
    go by their texts.

    Raises:
        PlanError: a text isn't of the form, its drafter doesn't go with the model, or it is given twice.
    """
    from forerun.plan.spec import proposal_of

    wanted = list(texts) or default_drafters(setup.model, setup.catalog)
    found = [proposal_of(text, setup.model, setup.catalog.shape) for text in wanted]
    for i, proposal in enumerate(found):
        if proposal in found[:i]:
            raise PlanError("drafter", f"{wanted[i]!r} is there already; change its rates or leave one out")
    names = [proposal.drafter.name for proposal in found]
    return [
        proposal
        if names.count(proposal.drafter.name) == 1
        else proposal._replace(drafter=replace(proposal.drafter, name=text))
        for text, proposal in zip(wanted, found, strict=True)
    ]


def default_drafters(model: ModelShape, catalog: PlanCatalog) -> list[str]:
    """Specs of what can be put on a model without further knowledge: n-gram, Medusa, EAGLE-3, its own
    multi-token-prediction module, and a smaller model of its family and vocabulary if the catalog has one."""
    draft = draft_model_for(model, catalog)
    return [
        "ngram",
        "medusa",
        "eagle3",
        *(["mtp"] if model.mtp_layers else []),
        *([f"model={draft}"] if draft else []),
    ]


def draft_model_for(model: ModelShape, catalog: PlanCatalog) -> str | None:
    """The catalog's name of a draft model: the target's vocabulary but for padding, and a name that begins alike. Of
    several the one with most words alike and fewest others, and of these the largest that isn't too large."""
    words = model.name.lower().split("-")
    most = DRAFT_MODEL_SHARE * model.network.n_active
    found = []
    for name, shape in catalog.models.items():
        others, size = name.lower().split("-"), shape.network.n_parameters
        alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(words, others, strict=False)))
        if alike and abs(shape.vocab - model.vocab) < VOCAB_PADDING and size <= most:
            found.append((alike, -len(others), size, name))
    return max(found)[-1] if found else None


def rates_text(proposal: Proposal) -> str:
    """The acceptances as they are written in a spec: 0.8,0.76,0.73."""
    return ",".join(f"{rate:g}" for rate in proposal.acceptance.rates)


def drafter_lines(texts: Sequence[str], proposals: Sequence[Proposal]) -> list[str]:
    """What is said about the drafters above a table: each with its acceptances, and where these are from."""
    given = [":" in text for text in texts] or [False] * len(proposals)
    lines = []
    for known, title, end in (
        (True, "given", ""),
        (False, "assumed, not measured", " (sources: docs/plan-speculate.md)"),
    ):
        listed = [
            f"{proposal.drafter.name} {rates_text(proposal)}"
            for proposal, is_given in zip(proposals, given, strict=True)
            if is_given == known
        ]
        if listed:
            lines.append(f"acceptance by depth, {title}: {'; '.join(listed)}{end}")
    return lines


def drafters_json(texts: Sequence[str], proposals: Sequence[Proposal]) -> list[dict[str, Any]]:
    """The drafters for JSON: drafter, kind, acceptance, assumed, weight_bytes."""
    given = [":" in text for text in texts] or [False] * len(proposals)
    return [
        {
            "drafter": proposal.drafter.name,
            "kind": proposal.drafter.kind,
            "acceptance": list(proposal.acceptance.rates),
            "assumed": not is_given,
            "weight_bytes": proposal.drafter.weight_bytes,
        }
        for proposal, is_given in zip(proposals, given, strict=True)
    ]
