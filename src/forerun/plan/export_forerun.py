"""Arguments of Forerun's own `Engine`, and the options of `forerun run`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.errors import PlanError
from forerun.plan.export_plan import DraftPlan, Entries, Export, drafter_path, is_placeholder, refuse, target_path
from forerun.plan.export_schema import Key, Schema

MAX_DRAFT = 63
"""Draft tokens of a step: nodes of a draft, an ancestor mask of 64 bits less the last token."""


def _check_draft(config: Mapping[str, Any]) -> None:
    name, colon, argument = config["draft"].partition(":")
    if name not in ("none", "lookup", "suffix", "model", "combined"):
        raise PlanError("draft", f"{name!r} is not allowed; expected none, lookup, suffix, model or combined")
    if (name in ("model", "combined")) != bool(argument) or bool(colon) != bool(argument):
        form = f"{name}:NAME" if name in ("model", "combined") else name
        raise PlanError("draft", f"{config['draft']!r} is not allowed; expected {form}")
    length = config["draft_len"]
    if length != "auto" and not (type(length) is int and 1 <= length <= MAX_DRAFT):
        raise PlanError("draft_len", f"{length!r} is not allowed; expected auto or 1 to {MAX_DRAFT}")


class _Length(Key):
    def check(self, field: str, value: object) -> None:
        if not isinstance(value, int | str):
            raise PlanError(field, f"{value!r} is not allowed; expected auto or 1 to {MAX_DRAFT}")


SCHEMA = Schema(
    "Forerun",
    "0.1.0",
    "the docstring of forerun.Engine; docs/drafting.md and docs/draft-length.md",
    {
        "model": Key("str", needed=True),
        "draft": Key("str", needed=True),
        "draft_len": _Length("int", needed=True),
        "max_rows": Key("int", least=1, most=4096),
    },
    (_check_draft,),
)


def build(plan: DraftPlan, target: str | None, draft: str | None) -> Export:
    """The arguments for a plan. Raises PlanError for what Forerun doesn't run."""
    where, kind = plan.deployment, plan.proposal.drafter.kind
    if kind not in ("ngram", "model"):
        raise refuse(plan, "Forerun", "it drafts with the text itself (ngram) or with a smaller model (model)")
    for name in ("tensor", "pipeline"):
        if getattr(where, name) > 1:
            raise PlanError(name, f"{getattr(where, name)} is not allowed; Forerun runs on one machine; expected 1")
    made = Entries()
    made.put("model", target_path(plan, target))
    name = drafter_path(plan, draft)
    made.put("draft", "suffix" if kind == "ngram" else f"model:{name}")
    if kind == "model" and is_placeholder(name):
        made.placeholders.append("draft")
    if len(plan.buckets) > 1:
        listed = "; ".join(plan.why(bucket) for bucket in plan.buckets)
        made.put("draft_len", "auto", f"Forerun chooses a length for each request and step; planned: {listed}")
    else:
        made.put("draft_len", min(plan.length, MAX_DRAFT), plan.why(plan.buckets[0]))
    made.put("max_rows", plan.most, "planned up to this batch (--most)")
    return Export(
        SCHEMA, plan, "python", ("forerun", "run"), made.config, tuple(made.notes), tuple(made.warnings),
        tuple(made.placeholders),
    )  # fmt: skip
