"""Flags of `llama-server`.

Read in: llama.cpp's docs/speculative.md, common/arg.cpp, common/speculative.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.errors import PlanError
from forerun.plan.export_plan import (
    DraftPlan,
    Entries,
    Export,
    drafter_path,
    losses,
    one_length,
    refuse,
    target_path,
    why_one,
)
from forerun.plan.export_schema import Key, Schema

_TYPES = {"ngram": "ngram-simple", "model": "draft-simple", "eagle3": "draft-eagle3", "mtp": "draft-mtp"}
_VOCABULARIES_APART = 128
_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


def _check_speculative(config: Mapping[str, Any]) -> None:
    kind = config["--spec-type"]
    length = "--spec-ngram-simple-size-m" if kind == "ngram-simple" else "--spec-draft-n-max"
    if length not in config:
        raise PlanError(length, f"missing with {kind}")
    if kind in ("draft-simple", "draft-eagle3") and "--spec-draft-model" not in config:
        raise PlanError("--spec-draft-model", f"missing with {kind}")


SCHEMA = Schema(
    "llama.cpp",
    "main at 0017d6fb",
    "docs/speculative.md, common/arg.cpp, common/speculative.cpp",
    {
        "--model": Key("str", needed=True),
        "--split-mode": Key("str", choices=("none", "layer", "row", "tensor")),
        "--cache-type-k": Key("str", choices=_CACHE_TYPES),
        "--cache-type-v": Key("str", choices=_CACHE_TYPES),
        "--parallel": Key("int", least=1),
        "--spec-type": Key("str", needed=True, choices=(
            "draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark", "ngram-simple", "ngram-map-k",
            "ngram-map-k4v", "ngram-mod", "ngram-cache",
        )),
        "--spec-draft-model": Key("str"),
        "--spec-draft-n-max": Key("int", least=1),
        "--spec-draft-n-min": Key("int", least=0),
        "--spec-draft-p-min": Key("float", least=0, most=1),
        "--spec-ngram-simple-size-n": Key("int", least=1, most=1024),
        "--spec-ngram-simple-size-m": Key("int", least=1, most=1024),
    },
    (_check_speculative,),
)  # fmt: skip


def build(plan: DraftPlan, target: str | None, draft: str | None) -> Export:
    """The flags for a plan. Raises PlanError for what llama.cpp doesn't run."""
    where, kind = plan.deployment, plan.proposal.drafter.kind
    if kind not in _TYPES:
        why = "of the EAGLE heads it reads EAGLE-3" if kind == "eagle" else f"it has {', '.join(_TYPES.values())}"
        raise refuse(plan, "llama.cpp", why)
    if where.expert > 1:
        raise PlanError("expert", f"{where.expert} is not allowed; llama.cpp doesn't deal experts out; expected 1")
    if where.tensor > 1 and where.pipeline > 1:
        raise PlanError("pipeline", "llama.cpp splits by layers or by matrices, not by both; expected 1")
    length = one_length(plan, "llama.cpp")
    made = Entries()
    made.put("--model", target_path(plan, target))
    if where.tensor > 1:
        made.put("--split-mode", "tensor", f"planned: each matrix is split over {where.tensor} accelerators")
        made.warnings.append("--split-mode tensor is called experimental")
    elif where.pipeline > 1:
        made.put("--split-mode", "layer", f"planned: {where.pipeline} stages of layers")
    if where.kv == "int8":
        for flag in ("--cache-type-k", "--cache-type-v"):
            made.put(flag, "q8_0", "planned: a byte for each number of the cache; q8_0 has scales on top, 6% more")
    elif where.kv == "f32":
        for flag in ("--cache-type-k", "--cache-type-v"):
            made.put(flag, "f32", "planned: four bytes for each number of the cache")
    elif where.kv not in ("bf16", "f16"):
        raise PlanError("kv", f"{where.kv} is not allowed for llama.cpp; expected f16, int8 or f32")
    made.put("--parallel", plan.most, "planned up to this batch (--most); --ctx-size is shared by so many slots")
    made.put("--spec-type", _TYPES[kind])
    if kind in ("model", "eagle3") or draft is not None:
        made.put("--spec-draft-model", drafter_path(plan, draft))
    if kind == "ngram":
        made.put("--spec-ngram-simple-size-m", length, why_one(plan))
    else:
        made.put("--spec-draft-n-max", length, why_one(plan))
        made.warnings.append("--spec-draft-p-min ends a draft where the drafter doubts; the plan reckons with 0")
    if kind == "model":
        made.warnings += _vocabularies(plan)
    if kind == "mtp":
        made.warnings.append("the GGUF must have kept its multi-token-prediction layers, or come with a second one")
    if len(plan.buckets) > 1:
        made.warnings.append("llama.cpp has one length for all batches, of all its slots")
    made.warnings += losses(plan, length)
    return Export(
        SCHEMA, plan, "shell", ("llama-server",), made.config, tuple(made.notes), tuple(made.warnings),
        tuple(made.placeholders),
    )  # fmt: skip


def _vocabularies(plan: DraftPlan) -> list[str]:
    network = plan.proposal.drafter.network
    assert network is not None
    assert network.head is not None
    apart = abs(network.head.n_out - plan.target.vocab)
    if apart <= _VOCABULARIES_APART:
        return []
    return [f"the vocabularies differ by {apart} rows; llama.cpp refuses more than {_VOCABULARIES_APART} tokens"]
