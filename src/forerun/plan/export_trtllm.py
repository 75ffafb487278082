"""A YAML file for `trtllm-serve MODEL --config FILE`.

Read in: TensorRT-LLM's documentation, Speculative Decoding and Feature Combination Matrix, and
tensorrt_llm/llmapi/llm_args.py, tensorrt_llm/_torch/speculative/interface.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.errors import PlanError
from forerun.plan.export_plan import DraftPlan, Entries, Export, check_split, drafter_path, refuse, target_path
from forerun.plan.export_schema import Key, Schema

_SPECULATIVE = "speculative_config"
_TYPES = {"ngram": "SA", "model": "Draft_Target", "eagle3": "Eagle3", "mtp": "MTP"}


def _check_speculative(config: Mapping[str, Any]) -> None:
    spec = config[_SPECULATIVE]
    longest = spec["max_draft_len"]
    if spec["decoding_type"] in ("Draft_Target", "Eagle3") and "speculative_model" not in spec:
        raise PlanError(f"{_SPECULATIVE}.speculative_model", f"missing with {spec['decoding_type']}")
    if config.get("pipeline_parallel_size", 1) > 1:
        raise PlanError("pipeline_parallel_size", "TensorRT-LLM has no speculation with pipeline stages; expected 1")
    lengths = spec.get("draft_len_schedule")
    if lengths is None:
        return
    field = f"{_SPECULATIVE}.draft_len_schedule"
    if "max_concurrency" in spec:
        raise PlanError(field, "not allowed together with max_concurrency")
    if spec["decoding_type"] == "NGram":
        raise PlanError(field, "NGram has one draft length for all batches")
    if not lengths:
        raise PlanError(field, "empty; expected batch: length")
    for batch, length in lengths.items():
        if type(batch) is not int or batch < 1:
            raise PlanError(field, f"{batch!r} is not a batch; expected whole numbers from 1")
        if type(length) is not int or not 0 <= length <= longest:
            raise PlanError(field, f"{batch}: {length!r} is not allowed; expected 0 to max_draft_len, {longest}")
    if list(lengths) != sorted(lengths):
        raise PlanError(field, f"batches {list(lengths)} are not in order")
    if lengths[min(lengths)] != longest:
        raise PlanError(field, f"begins with {lengths[min(lengths)]}; expected max_draft_len, {longest}")


SCHEMA = Schema(
    "TensorRT-LLM",
    "main at 00043967",
    "documentation, Speculative Decoding and Feature Combination Matrix; tensorrt_llm/llmapi/llm_args.py",
    {
        "backend": Key("str", choices=("pytorch",)),
        "tensor_parallel_size": Key("int", least=1),
        "pipeline_parallel_size": Key("int", least=1),
        "moe_expert_parallel_size": Key("int", least=1),
        "max_batch_size": Key("int", least=1),
        "disable_overlap_scheduler": Key("bool"),
        "kv_cache_config": Key("table", keys={"dtype": Key("str", choices=("auto", "fp8", "nvfp4"))}),
        _SPECULATIVE: Key("table", needed=True, keys={
            "decoding_type": Key("str", needed=True, choices=(
                "Eagle3", "MTP", "NGram", "Draft_Target", "PARD", "DFlash", "SA",
            )),
            "max_draft_len": Key("int", least=1, needed=True),
            "speculative_model": Key("str"),
            "max_concurrency": Key("int", least=1),
            "draft_len_schedule": Key("table"),
        }),
    },
    (_check_speculative,),
)  # fmt: skip


def build(plan: DraftPlan, target: str | None, draft: str | None) -> Export:
    """The file for a plan. Raises PlanError for what TensorRT-LLM doesn't run."""
    where, kind = plan.deployment, plan.proposal.drafter.kind
    if kind not in _TYPES:
        why = "its PyTorch backend has none"
        if kind == "eagle":
            why = "its PyTorch backend reads EAGLE-3 checkpoints alone"
        raise refuse(plan, "TensorRT-LLM", why)
    if where.pipeline > 1:
        raise PlanError(
            "pipeline",
            f"{where.pipeline} is not allowed; TensorRT-LLM has no speculation with pipeline stages; expected 1",
        )
    check_split(plan, "TensorRT-LLM")
    made = Entries()
    made.put("backend", "pytorch")
    if where.tensor > 1:
        made.put("tensor_parallel_size", where.tensor, "planned: each matrix is split over so many accelerators")
    if where.expert > 1:
        made.put("moe_expert_parallel_size", where.expert, "planned: whole experts are dealt out to so many")
    if where.kv == "fp8":
        made.put("dtype", "fp8", "planned: a byte for each number of the cache", table="kv_cache_config")
    elif where.kv not in ("bf16", "f16"):
        raise PlanError("kv", f"{where.kv} is not allowed for TensorRT-LLM; expected bf16, f16 or fp8")
    made.put("max_batch_size", plan.most, "planned up to this batch (--most)")
    _speculative(plan, draft, made)
    command = ("trtllm-serve", target_path(plan, target), "--config")
    if target is None:
        made.placeholders.append("model")
    return Export(
        SCHEMA, plan, "yaml", command, made.config, tuple(made.notes), tuple(made.warnings), tuple(made.placeholders)
    )


def _speculative(plan: DraftPlan, draft: str | None, made: Entries) -> None:
    kind = plan.proposal.drafter.kind
    first = plan.buckets[0].length
    if not first:
        raise PlanError(
            "drafter",
            "no draft length pays at batch 1, and TensorRT-LLM's draft_len_schedule begins with its longest; leave "
            "speculation off, or export for another engine",
        )
    if plan.longest > first:
        made.warnings.append(
            f"the best length rises to {plan.longest} with the batch, but draft_len_schedule begins with its longest: "
            f"no more than {first} anywhere"
        )
    plan = plan.capped(first)
    made.put("decoding_type", _TYPES[kind], table=_SPECULATIVE)
    if kind in ("model", "eagle3") or draft is not None:
        made.put("speculative_model", drafter_path(plan, draft), table=_SPECULATIVE)
    many = len(plan.buckets) > 1
    why = "the length at the smallest batches, which must be the longest" if many else plan.why(plan.buckets[0])
    made.put("max_draft_len", first, why, table=_SPECULATIVE)
    if many:
        kept = list(plan.buckets)
        while not kept[-1].length:
            del kept[-1]
        lengths = {bucket.hi: bucket.length for bucket in kept}
        what = "batches up to: draft length; above the last one nothing is drafted"
        made.put("draft_len_schedule", lengths, what, table=_SPECULATIVE)
        for bucket in kept:
            path = f"{_SPECULATIVE}.draft_len_schedule.{bucket.hi}"
            made.note(path, bucket.length, plan.why(bucket))
        made.warnings.append("draft_len_schedule is called a developer interface, which may change")
    if kind == "mtp":
        made.warnings.append("multi-token prediction is documented for DeepSeek models alone")
    if kind == "ngram":
        made.warnings.append(
            "n-grams are matched by the suffix automaton, which drafts on the GPU and has lengths by batch; NGram has "
            "neither"
        )
    made.warnings.append("batches with sampling verify by exact match unless use_rejection_sampling is set")
