"""Exported configurations: what is written is what was planned, and what an engine doesn't take is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import PlanError
from forerun.plan.deployment import Deployment
from forerun.plan.export import ENGINES, export, write_out
from forerun.plan.export_plan import MOST, Export
from forerun.plan.export_text import written
from forerun.plan.hardware import Efficiency, Measured
from forerun.plan.memory import check_fits
from forerun.plan.speculate import best, price
from reference.exports import (
    CATALOG,
    crowded,
    make,
    one_gpu,
    parsed,
    plan_for,
    small_model,
    with_buckets,
    words_of,
)

KINDS = ["ngram", "medusa", "model", "eagle", "eagle3", "mtp"]
REFUSED = {
    ("sglang", "medusa"), ("tensorrt-llm", "medusa"), ("tensorrt-llm", "eagle"), ("llama.cpp", "medusa"),
    ("llama.cpp", "eagle"), *(("forerun", kind) for kind in ("medusa", "eagle", "eagle3", "mtp")),
}  # fmt: skip
SCHEDULED = ("vllm", "tensorrt-llm")


def numbers(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Every number of a configuration with its path; an entry of a schedule counts as one."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from numbers(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and all(isinstance(item, list) for item in value):
        for i, item in enumerate(value):
            yield f"{path}.{i}", item
    elif isinstance(value, int | float | list):
        yield path, value


def length_at(made: Export, batch: int) -> int:
    """The draft length that the engine uses at a batch, by its documentation."""
    if made.schema.engine == "vLLM":
        spec = made.config["--speculative-config"]
        for low, high, length in spec.get("num_speculative_tokens_per_batch_size", []):
            if low <= batch <= high:
                return int(length)
        return int(spec["num_speculative_tokens"])
    spec = made.config["speculative_config"]
    lengths = spec.get("draft_len_schedule")
    if lengths is None:
        return int(spec["max_draft_len"])
    return next((int(length) for most, length in sorted(lengths.items()) if batch <= most), 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_drafter_is_exported_or_refused_with_a_reason(engine: str, kind: str) -> None:
    plan = plan_for(kind)
    if (engine, kind) in REFUSED:
        with pytest.raises(PlanError, match=f"doesn't run {kind}: .{{20}}") as refused:
            export(engine, plan)
        assert refused.value.field == "drafter"
        return
    if engine == "forerun" and kind == "model":
        plan = small_model()
    made = export(engine, plan)
    assert parsed(made) == made.config
    ENGINES[engine][1].check(parsed(made))
    notes = {note.key: note for note in made.notes}
    assert len(notes) == len(made.notes)
    for path, number in numbers(made.config):
        assert notes[path].value == number, path
        assert len(notes[path].reason) > 10
    for note in made.notes:
        assert note.reason in written(made), "every reason is a comment of the text"
    for path in made.placeholders:
        assert path in written(made).split("filled in: ")[1].splitlines()[0]
    given = export(engine, plan, target_model="org/target", draft_model=None if kind == "ngram" else "org/draft")
    assert not given.placeholders
    assert "<path" not in written(given)
    assert "filled in" not in written(given)
    assert "org/target" in written(given)
    assert ("org/draft" in written(given)) == (kind != "ngram")


@pytest.mark.parametrize("kind", ["ngram", "model", "eagle3", "mtp"])
@pytest.mark.parametrize("engine", SCHEDULED)
def test_a_schedule_has_the_best_length_of_every_batch(engine: str, kind: str) -> None:
    plan = plan_for(kind, most=90)
    made = export(engine, plan)
    cap = length_at(made, 1) if engine == "tensorrt-llm" else 99
    lengths = set()
    for batch in range(1, 91):
        chosen = best(plan.target.network, plan.deployment, plan.proposal, batch=batch, context=1000).length
        assert length_at(made, batch) == min(chosen, cap), batch
        lengths.add(length_at(made, batch))
    assert len(lengths) > 1 or cap < 99, "a schedule of one length would test nothing"


def test_the_speedups_of_the_reasons_are_those_of_the_model() -> None:
    plan = crowded()
    made = export("vllm", plan)
    reasons = {note.key: note.reason for note in made.notes}
    schedule = made.config["--speculative-config"]["num_speculative_tokens_per_batch_size"]
    assert schedule[-1][2] == 0, "at the largest batches none pays"
    for i, (low, high, length) in enumerate(schedule):
        reason = reasons[f"--speculative-config.num_speculative_tokens_per_batch_size.{i}"]
        if not length:
            assert reason == f"from batch {low} to {high} no draft length pays"
            continue
        for batch in (low, high):
            point = price(plan.target.network, plan.deployment, plan.proposal, batch=batch, context=100, length=length)
            assert f"{point.speedup:.2f}x at {batch}" in reason


@pytest.mark.parametrize("engine", ["sglang", "llama.cpp"])
def test_one_length_is_the_best_one_at_the_batch(engine: str) -> None:
    flag = {"sglang": "--speculative-num-steps", "llama.cpp": "--spec-draft-n-max"}[engine]
    plan = crowded(most=128)
    found = {}
    for batch in (1, 64, None):
        made = export(engine, replace(plan, batch=batch or 128))
        wanted = best(plan.target.network, plan.deployment, plan.proposal, batch=batch or 128, context=100)
        assert made.config[flag] == wanted.length
        found[batch] = made
        reason = next(note.reason for note in made.notes if note.key == flag)
        assert f"best at batch {batch or 128}: {wanted.speedup:.2f}x" in reason
    assert found[1].config[flag] > found[None].config[flag]
    loss = plan.point(128, found[1].config[flag])
    assert loss.speedup < 1
    [warning] = [warning for warning in found[1].warnings if "slower than none" in warning]
    assert f"at batch 128 ({loss.speedup:.2f}x)" in warning
    assert not [warning for warning in found[None].warnings if "slower" in warning]


@pytest.mark.parametrize("engine", ["sglang", "llama.cpp"])
def test_without_a_length_that_pays_the_advice_is_good(engine: str) -> None:
    plan = crowded()
    with pytest.raises(PlanError, match=r"none pays.*--most (\d+)") as refused:
        export(engine, plan)
    assert refused.value.field == "batch"
    advised = int(str(refused.value).split("--most ")[1].split(",")[0])
    export(engine, crowded(most=advised))
    with pytest.raises(PlanError, match="none pays"):
        export(engine, crowded(most=advised + 1))


def test_lengths_that_rise_are_capped_where_the_first_must_be_the_longest() -> None:
    plan = with_buckets(plan_for("eagle3"), (1, 4, 2), (5, 8, 3), (9, 20, 4), (21, 30, 1), (31, 40, 0))
    made = export("tensorrt-llm", plan)
    spec = made.config["speculative_config"]
    assert (spec["max_draft_len"], spec["draft_len_schedule"]) == (2, {20: 2, 30: 1})
    assert any("no more than 2" in warning for warning in made.warnings)
    reason = next(note.reason for note in made.notes if note.key.endswith("schedule.20"))
    assert reason.startswith("as long as allowed from batch 1 to 20")
    with pytest.raises(PlanError, match="at batch 1"):
        export("tensorrt-llm", with_buckets(plan, (1, 4, 0), (5, 8, 3)))
    vllm = export("vllm", plan).config["--speculative-config"]
    assert vllm["num_speculative_tokens"] == 4


def test_a_plan_of_one_length_has_no_schedule() -> None:
    plan = with_buckets(plan_for("eagle3"), (1, 40, 3))
    assert "num_speculative_tokens_per_batch_size" not in export("vllm", plan).config["--speculative-config"]
    assert "draft_len_schedule" not in export("tensorrt-llm", plan).config["speculative_config"]


def test_several_modules_get_a_multiple_of_them() -> None:
    target = replace(CATALOG.shape("deepseek-v3"), mtp_layers=3)
    plan = make(target, "mtp", Deployment(hardware=CATALOG.gpu("h200"), tensor=16))
    for longest, window in ((2, 2), (3, 3), (4, 6), (6, 6), (7, 9)):
        spec = export("vllm", with_buckets(plan, (1, 64, longest))).config["--speculative-config"]
        assert spec["num_speculative_tokens"] == window
        assert ("num_speculative_tokens_per_batch_size" in spec) == (window > longest)


@pytest.mark.parametrize(("target", "differ"), [("qwen2.5-7b", True), ("qwen2.5-3b", False)])
def test_vocabularies_of_different_sizes_are_told_to_vllm(target: str, differ: bool) -> None:
    made = export("vllm", make(target, "model=qwen2.5-0.5b:0.8", one_gpu()))
    assert made.config["--speculative-config"].get("use_heterogeneous_vocab", False) == differ


def test_stages_of_a_pipeline_are_refused_where_they_are_not_supported() -> None:
    for engine in ("sglang", "tensorrt-llm"):
        with pytest.raises(PlanError, match="pipeline"):
            export(engine, plan_for("eagle3", pipeline=2))
    for kind in ("ngram", "medusa", "eagle"):
        with pytest.raises(PlanError, match="pipeline"):
            export("vllm", plan_for(kind, pipeline=2))
    made = export("vllm", plan_for("eagle3", pipeline=2))
    assert made.config["--pipeline-parallel-size"] == 2
    assert any("Model Runner V2" in warning for warning in made.warnings)
    assert export("llama.cpp", plan_for("eagle3", pipeline=2)).config["--split-mode"] == "layer"
    with pytest.raises(PlanError, match="not by both"):
        export("llama.cpp", plan_for("eagle3", pipeline=2, tensor=2))
    for settings in ({"pipeline": 2}, {"tensor": 2}):
        with pytest.raises(PlanError, match="one machine"):
            export("forerun", plan_for("ngram", **settings))


def test_the_split_and_the_cache_of_the_plan_are_kept() -> None:
    plan = plan_for("mtp", expert=16, kv="fp8")
    assert export("vllm", plan).config["--enable-expert-parallel"] is True
    assert export("vllm", plan).config["--kv-cache-dtype"] == "fp8"
    assert export("sglang", plan).config["--ep-size"] == 16
    assert export("sglang", plan).config["--kv-cache-dtype"] == "fp8_e4m3"
    made = export("tensorrt-llm", plan)
    assert (made.config["moe_expert_parallel_size"], made.config["kv_cache_config"]) == (16, {"dtype": "fp8"})
    assert parsed(made) == made.config
    with pytest.raises(PlanError, match="expert: 8"):
        export("vllm", plan_for("mtp", expert=8))
    with pytest.raises(PlanError, match="expert: 16"):
        export("llama.cpp", plan)
    for engine in ("vllm", "sglang", "tensorrt-llm"):
        with pytest.raises(PlanError, match="kv: int8"):
            export(engine, plan_for("eagle3", kv="int8"))
    made = export("llama.cpp", plan_for("eagle3", kv="int8"))
    assert made.config["--cache-type-k"] == made.config["--cache-type-v"] == "q8_0"
    with pytest.raises(PlanError, match="kv: fp8"):
        export("llama.cpp", plan_for("eagle3", kv="fp8"))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"most": 0}, "most"),
        ({"most": MOST + 1}, "most"),
        ({"batch": 0}, "batch"),
        ({"batch": 65}, "batch"),
        ({"longest": 0}, "longest"),
        ({"context": -1}, "context"),
        ({"context": float("nan")}, "context"),
        ({"context": float("inf")}, "context"),
        ({"context": 1e9}, "memory"),
    ],
)
def test_what_makes_no_plan_is_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(PlanError) as refused:
        plan_for("eagle3", **options)
    assert refused.value.field == field


def test_the_memory_holds_what_the_drafter_needs_too() -> None:
    """The target alone fits with that many tokens, with the draft model it doesn't."""
    where = one_gpu()
    target, draft = CATALOG.shape("qwen2.5-14b"), CATALOG.shape("qwen2.5-1.5b")
    room = 0.9 * where.hardware.memory - target.network.weight_bytes
    most = int(room / (1100 * target.network.kv_width * 2))
    check_fits(target.network, where, batch=most, context=1020)
    assert draft.network.weight_bytes > 1e9
    with pytest.raises(PlanError) as refused:
        make(target, "model=qwen2.5-1.5b", where, most=most)
    assert refused.value.field == "memory"


def test_a_drafter_that_never_pays_is_refused() -> None:
    with pytest.raises(PlanError, match="no draft length of ngram pays at any batch from 1 to 64") as refused:
        make("llama-3.1-8b", "ngram:0", one_gpu())
    assert refused.value.field == "drafter"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"target_model": ""}, "target_model"),
        ({"target_model": "a\nb"}, "target_model"),
        ({"target_model": "-x"}, "target_model"),
        ({"draft_model": "--port"}, "draft_model"),
        ({"draft_model": " "}, "draft_model"),
    ],
)
def test_a_path_that_is_none_is_refused(options: dict[str, str], field: str) -> None:
    with pytest.raises(PlanError) as refused:
        export("vllm", plan_for("eagle3"), **options)
    assert refused.value.field == field
    with pytest.raises(PlanError, match="no checkpoint"):
        export("vllm", plan_for("ngram"), draft_model="org/draft")
    with pytest.raises(PlanError, match=r"for: 'vLLM' is not allowed; expected one of vllm, "):
        export("vLLM", plan_for("ngram"))


@pytest.mark.parametrize("engine", ENGINES)
def test_names_cannot_leave_their_place(engine: str) -> None:
    evil = "a\n$(reboot)'\"\\ # {x}: [y"
    target = replace(CATALOG.shape("llama-3.1-8b"), name=evil)
    made = export(engine, make(target, "ngram", one_gpu()), target_model="it's $(here): #1")
    assert parsed(made) == made.config
    placed = export(engine, make(target, "ngram", one_gpu()))
    assert parsed(placed) == placed.config
    assert placed.placeholders
    if made.form == "shell":
        assert [word for word in words_of(written(made)) if "here" in word] == ["it's $(here): #1"]


def test_a_file_is_there_in_full_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "serve.sh"
    write_out(path, "one\n")
    with pytest.raises(PlanError, match="is there already; use --force"):
        write_out(path, "two\n")
    assert path.read_text() == "one\n"
    write_out(path, "two\n", force=True)
    assert path.read_text() == "two\n"

    def full(_source: object, _target: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(PlanError, match="can't be written: No space left"):
            write_out(path, "three\n", force=True)
    assert path.read_text() == "two\n"
    assert [item.name for item in tmp_path.iterdir()] == ["serve.sh"], "nothing is left beside it"
    for bad, fault in ((tmp_path, "is no file"), (tmp_path / "none" / "x", "can't be written: No such file")):
        with pytest.raises(PlanError, match=fault) as refused:
            write_out(bad, "x", force=True)
        assert refused.value.field == "out"
    with pytest.raises(PlanError, match="is no file"):
        write_out(Path(os.devnull), "x", force=True)


def test_what_was_not_measured_is_said() -> None:
    ranges: dict[str, Any] = {"batch": (1, 64), "queries": (1, 17), "context": (0, 2000)}
    fitted = Measured(model="llama-3.1-8b", **ranges, points=9, error_max=0.05)
    gpu = replace(CATALOG.gpu("h100"), efficiency=Efficiency(), measured=fitted)
    where = Deployment(hardware=gpu)

    def warned(**options: Any) -> list[str]:
        made = export("vllm", make("llama-3.1-8b", "eagle3", where, **options))
        assert all(warning in written(made) for warning in made.warnings)
        return [warning for warning in made.warnings if "extrapolated" in warning]

    assert not warned(most=64)
    assert any("batch" in warning for warning in warned(most=65))
    assert any("context" in warning for warning in warned(most=8, context=3000))


DOCS = (Path(__file__).parents[2] / "docs" / "plan-export.md").read_text()


def rows(first: str) -> list[list[str]]:
    """The cells of the page's table whose first column has that title."""
    table = DOCS.split(f"| {first} |")[1].split("\n\n")[0]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_drafters_of_the_page_are_those_of_the_engines() -> None:
    where = {
        "vllm": ("--speculative-config", "method"), "sglang": ("--speculative-algorithm",),
        "tensorrt-llm": ("speculative_config", "decoding_type"), "llama.cpp": ("--spec-type",), "forerun": ("draft",),
    }  # fmt: skip
    for kind, *names in rows("drafter"):
        for engine, name in zip(ENGINES, names, strict=True):
            plan = plan_for(kind)
            if engine == "forerun" and kind == "model":
                plan = small_model()
            if name == "-":
                with pytest.raises(PlanError, match="doesn't run"):
                    export(engine, plan)
                continue
            value: Any = export(engine, plan, draft_model=None if kind == "ngram" else "NAME").config
            for key in where[engine]:
                value = value[key]
            assert value == name, (engine, kind)


def test_the_versions_of_the_page_are_those_of_the_schemas() -> None:
    named = [row[0] for row in rows("engine | read in")]
    assert len(named) == len(ENGINES)
    for text, (_, schema) in zip(named, ENGINES.values(), strict=True):
        assert text.startswith(schema.engine)
        assert text.endswith(schema.version)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_heads_that_cannot_be_split_evenly_are_refused(engine: str) -> None:
    plan = plan_for("eagle3")
    where = replace(plan.deployment, tensor=3)
    with pytest.raises(PlanError, match=r"^tensor: 3 is not allowed; .* splits the \d+ attention heads of .* evenly"):
        export(engine, replace(plan, deployment=where))
