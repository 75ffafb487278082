"""`forerun bench constrain`: the same tokens in every arm, validity, and what the report and exit code say."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from forerun import Engine, SamplingParams, cli
from forerun.cli import bench_arms, bench_constrain
from forerun.constrain.schema import JsonSchema
from forerun.engine.choose import Chooser, Walk
from reference.tiny import TinySpec, write_tiny_gguf

pytestmark = pytest.mark.usefixtures("steady_times")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["first", "second"]},
        "place": {
            "type": "object",
            "properties": {"town": {"enum": ["Here", "There"]}, "near": {"type": "boolean"}},
            "required": ["town", "near"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["kind", "place", "tags"],
    "additionalProperties": False,
}
TASKS = [
    {"task_id": "a", "category": "x/one", "prompt": "the sea the sea", "max_tokens": 200, "schema": SCHEMA},
    {"task_id": "b", "category": "x/one", "prompt": "one and two", "max_tokens": 200, "schema": SCHEMA},
    {"task_id": "c", "category": "x/two", "prompt": "a b a b a b", "max_tokens": 7, "schema": SCHEMA},
    {"task_id": "d", "category": "x/two", "prompt": "without a schema", "max_tokens": 7},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("constrain")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_tiny_gguf(folder / "tiny.gguf", TinySpec("llama", seed=5, layers=1))


@pytest.fixture(scope="module")
def tasks(folder: Path) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    return path


@pytest.fixture(autouse=True)
def environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(folder / "cache"))
    monkeypatch.setenv("FORERUN_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.delenv("FORERUN_CATALOG", raising=False)


def call(capsys: pytest.CaptureFixture[str], model: Path, tasks: Path, *more: str) -> tuple[int, str, str]:
    code = cli.dispatch(["bench", "constrain", "-m", str(model), "--tasks", str(tasks), *more])
    output, errors = capsys.readouterr()
    return code, output, errors


@pytest.mark.parametrize("batch", ["1", "2"])
def test_the_report_as_json(capsys: pytest.CaptureFixture[str], model: Path, tasks: Path, batch: str) -> None:
    code, output, errors = call(capsys, model, tasks, "--batch", batch, "--json")
    assert (code, errors) == (0, "")
    found = json.loads(output)
    assert list(found) == [
        "setup", "date", "draft", "draft_len", "tasks_file", "tasks_sha256", "max_tokens", "batch", "isolation",
        "left_out", "complete", "validated", "rows", "results", "differing", "invalid", "sound",
    ]  # fmt: skip
    assert all(field in bench_constrain.HELP for field in found)
    assert found["setup"]["sha256"] == hashlib.sha256(model.read_bytes()).hexdigest()
    assert found["setup"]["command"] == (
        f"forerun bench constrain -m {model} --tasks {tasks} --draft suffix --draft-len auto --max-tokens 512 "
        f"--batch {batch} --threads 1"
    )
    assert found["tasks_sha256"] == hashlib.sha256(tasks.read_bytes()).hexdigest()
    assert (found["left_out"], found["complete"], found["validated"], found["sound"]) == (["d"], True, True, True)
    assert [row["category"] for row in found["rows"]] == ["x", "x/one", "x/two"]
    results = {result["task_id"]: result for result in found["results"]}
    assert list(results) == ["a", "b", "c"]
    engine = Engine(model, kv_tokens=1024, threads=1, cache_weights=False, draft="none")
    for task in TASKS[:3]:
        params = SamplingParams(max_tokens=int(str(task["max_tokens"])), constraint=JsonSchema(SCHEMA))
        output_alone = engine.chat([{"role": "user", "content": str(task["prompt"])}], params)[0]
        result = results[str(task["task_id"])]
        assert result["text"] == output_alone.text
        assert result["tokens"] == len(output_alone.token_ids)
        assert result["finish_reason"] == output_alone.finish_reason
        assert result["own_text"] != result["text"]
        assert not result["own_valid"]
    assert [result["finish_reason"] for result in results.values()] == ["stop", "stop", "length"]
    assert [result["valid"] for result in results.values()] == [True, True, None]
    whole = found["rows"][0]
    assert (whole["records"], whole["finished"], whole["valid"], whole["own"]) == (3, 2, 2, 3)
    assert whole["tokens"] == sum(result["tokens"] for result in results.values())
    assert whole["forced_share"] == pytest.approx(sum(one["forced"] for one in results.values()) / whole["tokens"])
    # Of {"kind":"first","place":{"town":"Here","near":true},"tags":[]} only some characters are the model's to choose.
    assert 0.3 < whole["forced_share"] < 1
    assert whole["constrained_tokens_per_step"] > whole["repeated_tokens_per_step"] >= 1
    assert 0 < whole["mask_share"] < 1
    assert whole["full_steps"] > 0
    for name in ("ratio", "ratio_median", "ratio_mean", "ratio_p90", "total_ratio", "off_ratio", "gain"):
        assert whole[name] > 0


def test_the_report_as_text(capsys: pytest.CaptureFixture[str], model: Path, tasks: Path) -> None:
    code, output, errors = call(capsys, model, tasks, "--limit", "1")
    lines = output.splitlines()
    assert (code, errors) == (0, "")
    assert "--limit 1" in lines[3]
    assert max(len(line) for line in lines[4:]) <= 105
    heads = [n for n, line in enumerate(lines) if "CATEGORY" in line]
    assert [lines[head + 1 + row].split()[0] for head in heads for row in range(3)] == ["x", "x/one", "x/two"] * 2
    assert lines[-1] == "every constrained text is the same with and without speculation"


class Spy:
    """Notes every submission, by engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, str, bool, bool]] = []
        submit = Engine.submit

        def spied(engine: Engine, prompt: Any, params: SamplingParams, **more: Any) -> Any:
            self.seen.append((id(engine), more["scope"], more["speculate"], params.constraint is not None))
            return submit(engine, prompt, params, **more)

        monkeypatch.setattr(Engine, "submit", spied)


def test_arms_share_nothing(
    capsys: pytest.CaptureFixture[str], model: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    assert call(capsys, model, tasks)[0] == 0
    constrained = {engine for engine, _, _, has in spy.seen if has}
    plain = {engine for engine, _, _, has in spy.seen if not has}
    assert len(constrained) == len(plain) == 1
    assert constrained != plain
    measured = [(speculate, has) for _, scope, speculate, has in spy.seen if scope == "measured"]
    assert measured == [
        (False, True), (True, True), (True, False), (False, False),
        (False, True), (True, False), (True, True), (False, False),
        (False, True), (True, True), (True, False), (False, False),
    ]  # fmt: skip
    assert [scope for _, scope, _, _ in spy.seen] == ["warm"] * 4 + ["measured"] * 12 + ["own"] * 3


class Free(bench_arms.Repeater):
    """Lets the target choose what it likes."""

    def greedy(self, walks: Sequence[Walk], argmax: npt.NDArray[np.int32]) -> None:
        Chooser.greedy(self, walks, argmax)


def test_a_text_that_is_not_repeated_shows(
    capsys: pytest.CaptureFixture[str], model: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_arms, "Repeater", Free)
    code, output, _ = call(capsys, model, tasks)
    assert code == 1
    assert "TEXTS DIFFER between runs: a, b, c" in output


def test_a_text_that_breaks_its_schema_shows(
    capsys: pytest.CaptureFixture[str], model: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_arms, "JsonSchema", lambda _schema: JsonSchema({"enum": ["first", "second"]}))
    code, output, _ = call(capsys, model, tasks, "--json")
    found = json.loads(output)
    assert code == 1
    assert (found["invalid"], found["differing"], found["sound"]) == (["a", "b", "c"], [], False)
    assert found["rows"][0]["valid"] == 0


def test_without_jsonschema_nothing_is_judged(
    capsys: pytest.CaptureFixture[str], model: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    code, output, _ = call(capsys, model, tasks)
    assert code == 0
    assert "texts weren't validated: that needs the package jsonschema" in output


def test_an_interrupt_keeps_what_was_finished(
    capsys: pytest.CaptureFixture[str], model: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, calls = bench_arms.ArmRunner.trial, []

    def interrupted(self: Any, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return trial(self, *arguments)

    monkeypatch.setattr(bench_arms.ArmRunner, "trial", interrupted)
    code, output, _ = call(capsys, model, tasks, "--json")
    found = json.loads(output)
    assert (code, found["complete"]) == (130, False)
    assert [(result["task_id"], result["own_text"]) for result in found["results"]] == [("a", None)]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--draft", "none"], 2, "none drafts nothing"),
        (["--draft", "nobody"], 1, "nobody"),
        (["--batch", "0"], 2, "--batch"),
        (["--max-tokens", "100000"], 1, "no task with a schema fits the model's context"),
    ],
)
def test_what_is_refused(
    capsys: pytest.CaptureFixture[str], model: Path, folder: Path, arguments: list[str], code: int, words: str
) -> None:
    path = folder / "long.jsonl"
    path.write_text(json.dumps({"task_id": "a", "category": "c", "prompt": "p", "schema": SCHEMA}))
    found, output, errors = call(capsys, model, path, *arguments)
    assert (found, output) == (code, "")
    assert words in errors


def test_tasks_without_schemas_are_refused(capsys: pytest.CaptureFixture[str], model: Path, folder: Path) -> None:
    path = folder / "plain.jsonl"
    path.write_text(json.dumps(TASKS[3]))
    code, _, errors = call(capsys, model, path)
    assert code == 1
    assert "has a schema; add one to its lines" in errors
