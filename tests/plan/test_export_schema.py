"""What the engines take: faults of a configuration are found, and what is right passes."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.draft.base import MAX_NODES
from forerun.draft.registry import drafter_factory
from forerun.errors import ConfigurationError, PlanError
from forerun.plan.export import ENGINES, export
from forerun.plan.export_forerun import MAX_DRAFT
from forerun.plan.export_schema import Key, Schema, check_ranges
from reference.exports import make, one_gpu, plan_for, with_buckets


def spec_of(schema: Schema, config: dict[str, Any], **changes: Any) -> None:
    """Checks a configuration with changes to its table of speculation; None removes a key."""
    table = "--speculative-config" if schema.engine == "vLLM" else "speculative_config"
    changed = {**config, table: {k: v for k, v in {**config[table], **changes}.items() if v is not None}}
    schema.check(changed)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"num_speculative_tokens_per_batch_size": [[1, 8, 3], [10, 64, 1]]}, "leaves out batches from 9"),
        ({"num_speculative_tokens_per_batch_size": [[1, 8, 3], [8, 64, 1]]}, "overlaps the one before"),
        ({"num_speculative_tokens_per_batch_size": [[2, 64, 3]]}, "leaves out batches from 1"),
        ({"num_speculative_tokens_per_batch_size": [[1, 64, 4]]}, "length of 4; expected 0 to 3"),
        ({"num_speculative_tokens_per_batch_size": [[1, 64, -1]]}, "length of -1"),
        ({"num_speculative_tokens_per_batch_size": [[1, 0, 1]]}, "ends before it begins"),
        ({"num_speculative_tokens_per_batch_size": [[1, 64]]}, "expected .first batch"),
        ({"num_speculative_tokens_per_batch_size": [[1, 64, 2.0]]}, "expected .first batch"),
        ({"num_speculative_tokens_per_batch_size": [[1, 64, True]]}, "expected .first batch"),
        ({"num_speculative_tokens_per_batch_size": []}, "expected a list"),
        ({"num_speculative_tokens_per_batch_size": "1:3"}, "expected list"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens: 0 is not allowed"),
        ({"num_speculative_tokens": True}, "True is not allowed; expected int"),
        ({"num_speculative_tokens": None}, "num_speculative_tokens: missing"),
        ({"method": "eagle4"}, "method: 'eagle4' is not allowed"),
        ({"model": None}, "model: missing, though the method is eagle3"),
        ({"num_speculative_token": 3}, "unknown; did you mean num_speculative_tokens"),
        ({"use_heterogeneous_vocab": True}, "not allowed with eagle3"),
    ],
)
def test_faults_of_a_vllm_configuration_are_found(changes: dict[str, Any], fault: str) -> None:
    schema = ENGINES["vllm"][1]
    config = export("vllm", with_buckets(plan_for("eagle3"), (1, 64, 3))).config
    spec_of(schema, config)
    spec_of(schema, config, num_speculative_tokens_per_batch_size=[[1, 8, 3], [9, 20, 0], [21, 64, 1]])
    with pytest.raises(PlanError, match=fault) as found:
        spec_of(schema, config, **changes)
    assert found.value.field.startswith("--speculative-config.")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"draft_len_schedule": {8: 2, 64: 1}}, "begins with 2; expected max_draft_len, 3"),
        ({"draft_len_schedule": {8: 3, 64: 4}}, "64: 4 is not allowed; expected 0 to max_draft_len, 3"),
        ({"draft_len_schedule": {64: 3, 8: 3}}, "not in order"),
        ({"draft_len_schedule": {0: 3}}, "0 is not a batch"),
        ({"draft_len_schedule": {"8": 3}}, "'8' is not a batch"),
        ({"draft_len_schedule": {}}, "empty"),
        ({"draft_len_schedule": {8: 3}, "max_concurrency": 8}, "not allowed together"),
        ({"draft_len_schedule": {8: 3}, "decoding_type": "NGram"}, "one draft length"),
        ({"decoding_type": "Eagle"}, "decoding_type: 'Eagle' is not allowed"),
        ({"speculative_model": None}, "speculative_model: missing with Eagle3"),
        ({"max_draft_len": None}, "max_draft_len: missing"),
        ({"num_draft": 3}, "num_draft: unknown"),
    ],
)
def test_faults_of_a_tensorrt_llm_configuration_are_found(changes: dict[str, Any], fault: str) -> None:
    schema = ENGINES["tensorrt-llm"][1]
    config = export("tensorrt-llm", with_buckets(plan_for("eagle3"), (1, 64, 3))).config
    spec_of(schema, config, draft_len_schedule={8: 3, 64: 0})
    with pytest.raises(PlanError, match=fault):
        spec_of(schema, config, **changes)
    with pytest.raises(PlanError, match="pipeline_parallel_size"):
        schema.check({**config, "pipeline_parallel_size": 2})


@pytest.mark.parametrize(
    ("engine", "kind", "changes", "fault"),
    [
        ("sglang", "eagle3", {"--speculative-num-draft-tokens": 3}, "with top-k 1 it is 3 . 1"),
        ("sglang", "eagle3", {"--speculative-num-steps": None}, "num-steps: missing"),
        ("sglang", "eagle3", {"--speculative-eagle-topk": None}, "eagle-topk: missing"),
        ("sglang", "eagle3", {"--speculative-draft-model-path": None}, "draft-model-path: missing with EAGLE3"),
        ("sglang", "eagle3", {"--pp-size": 2}, "pp-size: SGLang refuses"),
        ("sglang", "eagle3", {"--speculative-algorithm": "MEDUSA"}, "'MEDUSA' is not allowed"),
        ("sglang", "eagle3", {"--speculative-num-step": 2}, "unknown to SGLang; did you mean"),
        ("sglang", "ngram", {"--speculative-num-draft-tokens": 1}, "1 is not allowed; expected 2 to inf"),
        ("llama.cpp", "ngram", {"--spec-ngram-simple-size-m": 1025}, "1025 is not allowed; expected 1 to 1024"),
        ("llama.cpp", "ngram", {"--spec-ngram-simple-size-m": None}, "size-m: missing with ngram-simple"),
        ("llama.cpp", "eagle3", {"--spec-draft-n-max": None}, "n-max: missing with draft-eagle3"),
        ("llama.cpp", "eagle3", {"--spec-draft-model": None}, "model: missing with draft-eagle3"),
        ("llama.cpp", "eagle3", {"--spec-type": "draft"}, "'draft' is not allowed"),
        ("llama.cpp", "eagle3", {"--draft-max": 3}, "--draft-max: unknown to llama.cpp"),
        ("llama.cpp", "eagle3", {"--spec-draft-p-min": float("nan")}, "nan is not allowed"),
        ("forerun", "ngram", {"draft": "medusa"}, "'medusa' is not allowed"),
        ("forerun", "ngram", {"draft": "model"}, "expected model:NAME"),
        ("forerun", "ngram", {"draft": "suffix:4"}, "expected suffix"),
        ("forerun", "ngram", {"draft_len": 64}, "64 is not allowed; expected auto or 1 to 63"),
        ("forerun", "ngram", {"draft_len": 2.5}, "2.5 is not allowed"),
        ("forerun", "ngram", {"max_rows": 0}, "max_rows: 0 is not allowed"),
        ("forerun", "ngram", {"model": None}, "model: missing"),
        ("forerun", "ngram", {"model": 3}, "model: 3 is not allowed; expected str"),
    ],
)
def test_faults_of_the_other_configurations_are_found(
    engine: str, kind: str, changes: dict[str, Any], fault: str
) -> None:
    schema = ENGINES[engine][1]
    config = export(engine, with_buckets(plan_for(kind), (1, 64, 3))).config
    schema.check(config)
    changed = {key: value for key, value in {**config, **changes}.items() if value is not None}
    with pytest.raises(PlanError, match=fault):
        schema.check(changed)


def test_a_schedule_may_end_anywhere_but_leaves_nothing_out() -> None:
    """Against a brute force over all schedules of two entries up to batch 4."""
    for entries in [[[a, b, 1], [c, d, 0]] for a in range(5) for b in range(5) for c in range(5) for d in range(5)]:
        covered = [batch for low, high, _ in entries for batch in range(low, high + 1)]
        good = all(low <= high for low, high, _ in entries) and covered == list(range(1, len(covered) + 1))
        if good:
            check_ranges("field", entries, 1)
        else:
            with pytest.raises(PlanError):
                check_ranges("field", entries, 1)


def test_a_number_is_no_truth() -> None:
    with pytest.raises(PlanError):
        Key("int").check("field", True)
    with pytest.raises(PlanError):
        Key("bool").check("field", 1)
    Key("float", least=0, most=1).check("field", 1)


def test_what_forerun_is_told_is_what_its_engine_takes() -> None:
    assert MAX_DRAFT == MAX_NODES
    made = export("forerun", make("qwen2.5-7b", "model=qwen2.5-0.5b", one_gpu()), draft_model="qwen2.5-0.5b-instruct")
    assert drafter_factory(made.config["draft"]) is not None
    assert drafter_factory(export("forerun", plan_for("ngram")).config["draft"]) is not None
    schema = ENGINES["forerun"][1]
    names = "none lookup suffix model:x combined:x model lookup:x combined none:x eagle model: suffix:"
    for draft in names.split():
        config = {"model": "m", "draft": draft, "draft_len": 4}
        try:
            drafter_factory(draft)
        except ConfigurationError:
            with pytest.raises(PlanError):
                schema.check(config)
        else:
            schema.check(config)
