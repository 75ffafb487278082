"""Flags of `python3 -m sglang.launch_server`.

Read in: SGLang's documentation, Speculative Decoding and Adaptive Speculative Decoding, and
python/sglang/srt/server_args.py, python/sglang/srt/arg_groups/speculative_hook.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.errors import PlanError
from forerun.plan.export_plan import (
    DraftPlan,
    Entries,
    Export,
    check_split,
    drafter_path,
    losses,
    one_length,
    refuse,
    target_path,
    why_one,
)
from forerun.plan.export_schema import Key, Schema

_ALGORITHMS = {"ngram": "NGRAM", "model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "EAGLE"}


def _check_speculative(config: Mapping[str, Any]) -> None:
    tokens, steps = config["--speculative-num-draft-tokens"], config.get("--speculative-num-steps")
    if config["--speculative-algorithm"] == "NGRAM":
        return
    if steps is None or "--speculative-eagle-topk" not in config:
        missing = "--speculative-num-steps" if steps is None else "--speculative-eagle-topk"
        raise PlanError(missing, "missing; SGLang wants all three of steps, top-k and draft tokens, or none")
    if config["--speculative-eagle-topk"] == 1 and tokens != steps + 1:
        raise PlanError("--speculative-num-draft-tokens", f"{tokens} is not allowed; with top-k 1 it is {steps} + 1")
    if config["--speculative-algorithm"] in ("STANDALONE", "EAGLE3") and "--speculative-draft-model-path" not in config:
        raise PlanError("--speculative-draft-model-path", f"missing with {config['--speculative-algorithm']}")


def _check_pipeline(config: Mapping[str, Any]) -> None:
    if config.get("--pp-size", 1) > 1:
        raise PlanError("--pp-size", "SGLang refuses pipeline stages with speculation; expected 1")


SCHEMA = Schema(
    "SGLang",
    "main at 001067ff",
    "documentation, Speculative Decoding; srt/server_args.py, srt/arg_groups/speculative_hook.py",
    {
        "--model-path": Key("str", needed=True),
        "--tp-size": Key("int", least=1),
        "--pp-size": Key("int", least=1),
        "--ep-size": Key("int", least=1),
        "--kv-cache-dtype": Key("str", choices=("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")),
        "--max-running-requests": Key("int", least=1),
        "--speculative-algorithm": Key("str", needed=True, choices=(
            "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DSPARK",
        )),
        "--speculative-draft-model-path": Key("str"),
        "--speculative-num-steps": Key("int", least=1),
        "--speculative-eagle-topk": Key("int", least=1),
        "--speculative-num-draft-tokens": Key("int", least=2, needed=True),
        "--speculative-ngram-min-bfs-breadth": Key("int", least=1),
        "--speculative-ngram-max-bfs-breadth": Key("int", least=1),
    },
    (_check_speculative, _check_pipeline),
)  # fmt: skip


def build(plan: DraftPlan, target: str | None, draft: str | None) -> Export:
    """The flags for a plan. Raises PlanError for what SGLang doesn't run."""
    where, kind = plan.deployment, plan.proposal.drafter.kind
    if kind not in _ALGORITHMS:
        raise refuse(plan, "SGLang", f"it has {', '.join(sorted(set(_ALGORITHMS.values())))}")
    if where.pipeline > 1:
        raise PlanError(
            "pipeline", f"{where.pipeline} is not allowed; SGLang refuses pipeline stages with speculation; expected 1"
        )
    length = one_length(plan, "SGLang")
    check_split(plan, "SGLang")
    made = Entries()
    made.put("--model-path", target_path(plan, target))
    if where.tensor > 1:
        made.put("--tp-size", where.tensor, "planned: each matrix is split over so many accelerators")
    if where.expert > 1:
        made.put("--ep-size", where.expert, "planned: whole experts are dealt out to so many accelerators")
    if where.kv == "fp8":
        made.put("--kv-cache-dtype", "fp8_e4m3", "planned: a byte for each number of the cache")
    elif where.kv not in ("bf16", "f16"):
        raise PlanError("kv", f"{where.kv} is not allowed for SGLang; expected bf16, f16 or fp8")
    made.put("--max-running-requests", plan.most, "planned up to this batch (--most); SGLang would take 48 otherwise")
    made.put("--speculative-algorithm", _ALGORITHMS[kind])
    if kind in ("model", "eagle", "eagle3") or draft is not None:
        made.put("--speculative-draft-model-path", drafter_path(plan, draft))
    if kind == "ngram":
        made.put("--speculative-num-draft-tokens", length + 1, f"{length} and the last known one; {why_one(plan)}")
        made.put("--speculative-ngram-max-bfs-breadth", 1, "the plan prices a chain; SGLang's default is a tree of 10")
        made.warnings.append("n-gram drafting switches mixed chunked prefill off and doesn't go with data-parallel "
                             "attention")  # fmt: skip
    else:
        made.put("--speculative-num-steps", length, why_one(plan))
        made.put("--speculative-eagle-topk", 1, "the plan prices a chain; overlap scheduling needs 1, trees need more")
        made.put("--speculative-num-draft-tokens", length + 1, "steps and the last known token, as top-k 1 demands")
    if kind == "mtp" and draft is None:
        made.warnings.append("for some models SGLang wants --speculative-draft-model-path with the target's own path")
    if kind == "model":
        made.warnings.append("a draft model doesn't go with data-parallel attention")
    made.warnings += losses(plan, length)
    if len(plan.buckets) > 1 and kind in ("eagle", "eagle3", "mtp"):
        shortest = min(bucket.length for bucket in plan.buckets if bucket.length)
        tiers = sorted({shortest, length, plan.longest})
        made.warnings.append(
            f"the best length is {_listed(plan)}, but SGLang has no schedule by batch; --speculative-adaptive with "
            f"candidate_steps {tiers} lets it choose among these by acceptance"
        )
    return Export(
        SCHEMA, plan, "shell", ("python3", "-m", "sglang.launch_server"), made.config, tuple(made.notes),
        tuple(made.warnings), tuple(made.placeholders),
    )  # fmt: skip


def _listed(plan: DraftPlan) -> str:
    return ", ".join(f"{bucket.length} up to batch {bucket.hi}" for bucket in plan.buckets)
