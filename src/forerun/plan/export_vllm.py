"""Flags of `vllm serve`.

Read in: vLLM's documentation, Speculative Decoding (README, Dynamic Speculative Decoding, MTP, Draft Models), and
vllm/config/speculative.py, vllm/v1/spec_decode/dynamic/utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.errors import PlanError
from forerun.plan.export_plan import DraftPlan, Entries, Export, check_split, drafter_path, refuse, target_path
from forerun.plan.export_schema import Key, Schema, check_ranges

_SPECULATIVE = "--speculative-config"
_SCHEDULE = "num_speculative_tokens_per_batch_size"
_METHODS = {
    "ngram": "ngram", "medusa": "medusa", "model": "draft_model", "eagle": "eagle", "eagle3": "eagle3", "mtp": "mtp",
}  # fmt: skip


def _check_speculative(config: Mapping[str, Any]) -> None:
    spec = config[_SPECULATIVE]
    field = f"{_SPECULATIVE}.{_SCHEDULE}"
    if _SCHEDULE in spec:
        check_ranges(field, spec[_SCHEDULE], spec["num_speculative_tokens"])
    if spec["method"] in ("medusa", "draft_model", "eagle", "eagle3") and "model" not in spec:
        raise PlanError(f"{_SPECULATIVE}.model", f"missing, though the method is {spec['method']}")
    if spec.get("use_heterogeneous_vocab") and spec["method"] != "draft_model":
        raise PlanError(f"{_SPECULATIVE}.use_heterogeneous_vocab", f"not allowed with {spec['method']}")


SCHEMA = Schema(
    "vLLM",
    "0.32.0",
    "documentation, Speculative Decoding and Dynamic Speculative Decoding; vllm/config/speculative.py",
    {
        "model": Key("str", needed=True),
        "--tensor-parallel-size": Key("int", least=1),
        "--pipeline-parallel-size": Key("int", least=1),
        "--enable-expert-parallel": Key("bool"),
        "--kv-cache-dtype": Key("str", choices=("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")),
        "--max-num-seqs": Key("int", least=1),
        _SPECULATIVE: Key(
            "table",
            needed=True,
            keys={
                "method": Key("str", needed=True, choices=tuple(_METHODS.values())),
                "model": Key("str"),
                "num_speculative_tokens": Key("int", least=1, needed=True),
                _SCHEDULE: Key("list"),
                "draft_tensor_parallel_size": Key("int", least=1),
                "use_heterogeneous_vocab": Key("bool"),
                "prompt_lookup_min": Key("int", least=1),
                "prompt_lookup_max": Key("int", least=1),
            },
        ),
    },
    (_check_speculative,),
)


def build(plan: DraftPlan, target: str | None, draft: str | None) -> Export:
    """The flags for a plan. Raises PlanError for what vLLM doesn't run."""
    where, drafter = plan.deployment, plan.proposal.drafter
    kind = drafter.kind
    check_split(plan, "vLLM")
    made = Entries()
    made.put("model", target_path(plan, target))
    if where.tensor > 1:
        made.put("--tensor-parallel-size", where.tensor, "planned: each matrix is split over so many accelerators")
    if where.pipeline > 1:
        if kind != "eagle3":
            raise refuse(
                plan, "vLLM", f"pipeline stages ({where.pipeline}) go only with EAGLE-3; plan with --pipeline 1"
            )
        made.put("--pipeline-parallel-size", where.pipeline, "planned: stages of layers")
        made.warnings.append(
            "with pipeline stages EAGLE-3 runs on Model Runner V2 alone, and only for targets that pass their hidden "
            "states from stage to stage"
        )
    if where.expert > 1:
        if where.expert != where.tensor:
            raise PlanError(
                "expert", f"{where.expert} is not allowed; vLLM deals experts out to all {where.tensor} or to none"
            )
        made.put("--enable-expert-parallel", True, f"planned: whole experts are dealt out to {where.expert}")
    if where.kv == "fp8":
        made.put("--kv-cache-dtype", "fp8", "planned: a byte for each number of the cache")
    elif where.kv not in ("bf16", "f16"):
        raise PlanError("kv", f"{where.kv} is not allowed for vLLM; expected bf16, f16 or fp8")
    made.put("--max-num-seqs", plan.most, "planned up to this batch (--most)")
    _speculative(plan, draft, made)
    return Export(
        SCHEMA, plan, "shell", ("vllm", "serve"), made.config, tuple(made.notes), tuple(made.warnings),
        tuple(made.placeholders),
    )  # fmt: skip


def _speculative(plan: DraftPlan, draft: str | None, made: Entries) -> None:
    kind, longest = plan.proposal.drafter.kind, plan.longest
    made.put("method", _METHODS[kind], table=_SPECULATIVE)
    if kind in ("medusa", "model", "eagle", "eagle3") or draft is not None:
        made.put("model", drafter_path(plan, draft), table=_SPECULATIVE)
    modules = plan.target.mtp_layers if kind == "mtp" else 1
    window = longest if longest <= modules else -(-longest // modules) * modules
    why = "the longest at any batch" if len(plan.buckets) > 1 else plan.why(plan.buckets[0])
    if window > longest:
        why = f"{longest} rounded up to a multiple of the {modules} modules, as vLLM demands"
    made.put("num_speculative_tokens", window, why, table=_SPECULATIVE)
    scheduled = len(plan.buckets) > 1 or window > longest
    if scheduled:
        table = [[bucket.lo, bucket.hi, bucket.length] for bucket in plan.buckets]
        made.put(_SCHEDULE, table, table=_SPECULATIVE)
        for i, (entry, bucket) in enumerate(zip(table, plan.buckets, strict=True)):
            made.note(f"{_SPECULATIVE}.{_SCHEDULE}.{i}", entry, plan.why(bucket))
        made.warnings.append(
            "lengths by batch size don't go with data parallelism; vLLM then uses the longest at every batch"
        )
        if kind not in ("eagle", "eagle3"):
            made.warnings.append(
                f"vLLM has tested lengths by batch size with EAGLE, EAGLE-3 and DFlash, not with {kind}"
            )
    if kind == "medusa":
        made.warnings.append("Medusa runs on Model Runner V1 and without asynchronous scheduling")
    if kind == "ngram":
        made.warnings.append("n-gram drafting on the CPU switches asynchronous scheduling off")
    if kind == "mtp" and longest > modules:
        made.warnings.append(f"{longest} tokens come out of {modules} module(s) run again, which are accepted less")
    if kind == "model":
        _vocabularies(plan, made)


def _vocabularies(plan: DraftPlan, made: Entries) -> None:
    network = plan.proposal.drafter.network
    assert network is not None
    assert network.head is not None
    theirs, ours = network.head.n_out, plan.target.vocab
    if theirs != ours:
        made.put(
            "use_heterogeneous_vocab", True,
            f"the draft model has {theirs} rows, the target {ours}, and vLLM demands equal numbers otherwise",
            table=_SPECULATIVE,
        )  # fmt: skip
        made.warnings.append("different vocabularies need Model Runner V1 and greedy drafts")
