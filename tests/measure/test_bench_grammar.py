"""bench/grammar_texts.py and bench/grammar_stall.py: what they count, and that planted faults show."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from forerun import Engine, RequestOutput
from forerun.constrain.schema import JsonSchema
from reference.scripts import loaded
from reference.tiny import TinySpec, write_tiny_gguf

BENCH = Path(__file__).parents[2] / "bench"
CASES = [
    {"id": "A---bool", "schema": {"type": "boolean"}, "tests": []},
    {"id": "A---impossible", "schema": {"type": "integer", "minimum": 5, "maximum": 1}, "tests": []},
    {"id": "A---enum", "schema": {"enum": ["first", "second"]}, "tests": []},
    {
        "id": "B---list",
        "schema": {"type": "array", "items": {"enum": [1, 22]}, "minItems": 3, "maxItems": 4},
        "tests": [],
    },
    {"id": "B---text", "schema": {"type": "string", "minLength": 300}, "tests": []},
]

pytestmark = [
    pytest.mark.skipif(not BENCH.exists(), reason="bench/ isn't part of this tree"),
    pytest.mark.usefixtures("steady_times"),
]


@pytest.fixture
def texts() -> Iterator[ModuleType]:
    yield from loaded(BENCH / "grammar_texts.py")


@pytest.fixture
def stall() -> Iterator[ModuleType]:
    yield from loaded(BENCH / "grammar_stall.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_tiny_gguf(folder / "tiny.gguf", TinySpec("llama", layers=1, context=4096))


@pytest.fixture(scope="module")
def cases(folder: Path) -> Path:
    path = folder / "cases.jsonl"
    path.write_text("".join(json.dumps(case) + "\n" for case in CASES))
    return path


@pytest.fixture(autouse=True)
def environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(folder / "cache"))
    monkeypatch.setenv("FORERUN_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.delenv("FORERUN_CATALOG", raising=False)


def call(
    module: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object
) -> tuple[Any, dict[str, Any]]:
    """A script's exit code, or what it said in its place, and its JSON."""
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, arguments), "--json"])
    code: Any = 0
    try:
        module.main()
    except SystemExit as end:
        code = end.code
    output = capsys.readouterr().out
    return code, json.loads(output) if output else {}


def test_texts_are_counted_and_a_run_goes_on_where_the_last_one_ended(
    texts: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    cases: Path,
    tmp_path: Path,
) -> None:
    results = tmp_path / "results.jsonl"
    arguments = [cases, "-m", model, "--results", results, "--max-tokens", 40, "--drafters", "suffix"]
    code, found = call(texts, capsys, monkeypatch, *arguments, "--limit", 3)
    assert (code, found["schemas"], found["wanted"], found["faults"]) == (0, 3, 4, [])
    assert len(results.read_text().splitlines()) == 3
    code, found = call(texts, capsys, monkeypatch, *arguments)
    assert (code, found["schemas"], found["faults"]) == (0, 4, [])
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["case_id"] for line in lines] == ["A---bool", "A---enum", "B---list", "B---text"]
    assert list(found["ways"]) == ["none at 0", "suffix at 0", "none at 1", "suffix at 1"]
    for name, counts in found["ways"].items():
        drafted = name.startswith("suffix")
        assert (counts["texts"], counts["stop"], counts["valid"], counts["length"]) == (4, 3, 3, 1)
        assert (counts["compared"], counts["equal"]) == ((4, 4) if drafted else (0, 0))
        assert (counts["emitted"] > counts["decisions"]) == drafted
    assert call(texts, capsys, monkeypatch, *arguments) == (0, found)
    code, _ = call(texts, capsys, monkeypatch, *arguments[:-4], "--max-tokens", 41, "--drafters", "suffix")
    assert "results that were made otherwise" in code


def test_a_text_that_breaks_its_schema_is_a_fault(
    texts: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path, cases: Path
) -> None:
    monkeypatch.setattr(texts, "JsonSchema", lambda _schema: JsonSchema({"const": "other"}))
    code, found = call(texts, capsys, monkeypatch, cases, "-m", model, "--drafters", "", "--schemas", 2)
    assert code == 1
    assert [(fault["case_id"], fault["fault"]) for fault in found["faults"]] == [
        ("A---bool", "invalid"), ("A---bool", "invalid"), ("A---enum", "invalid"), ("A---enum", "invalid"),
    ]  # fmt: skip


def test_a_text_that_depends_on_drafts_is_a_fault(
    texts: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path, cases: Path
) -> None:
    make = texts.Texts.make

    def spoilt(self: Any, group: Any, way: Any) -> list[RequestOutput]:
        made: list[RequestOutput] = make(self, group, way)
        return [make(self, group, way._replace(temperature=2.0))[0], *made[1:]] if way.drafter == "lookup" else made

    monkeypatch.setattr(texts.Texts, "make", spoilt)
    arguments = ["-m", model, "--drafters", "lookup", "--max-tokens", 40, "--schemas", 1, "--limit", 1]
    path = cases.parent / "text.jsonl"
    path.write_text(json.dumps(CASES[4]))
    code, found = call(texts, capsys, monkeypatch, path, *arguments)
    assert code == 1
    assert {(fault["way"], fault["fault"]) for fault in found["faults"]} == {
        ("lookup at 0", "differs"), ("lookup at 1", "differs"),
    }  # fmt: skip


STALL = ["--requests", 2, "--rounds", 2, "--seconds", 0.8, "--values", 200, "--bytes", 20_000]


def test_the_stall_report(
    stall: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    _, found = call(stall, capsys, monkeypatch, "-m", model, *STALL)
    assert (found["requests"], found["rounds"], found["enum_values"]) == (2, 2, 200)
    assert 18_000 < found["schema_bytes"] < 24_000
    assert found["compiles"] >= 2
    assert 0 < found["compile_s_p50"] <= found["compile_s_max"]
    for name in ("quiet", "compiling"):
        figures = found[name]
        assert figures["count"] > 10
        assert 0 < figures["p50_ms"] <= figures["p99_ms"] <= figures["max_ms"]
    assert found["ratio_p99"] == pytest.approx(found["compiling"]["p99_ms"] / found["quiet"]["p99_ms"])
    assert found["setup"]["command"].startswith("python bench/grammar_stall.py -m ")


def test_a_compile_that_holds_up_the_loop_shows(
    stall: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    compile_once = stall.compile_once

    def holding(engine: Engine, *arguments: Any) -> Any:
        compile_once(engine, *arguments)
        began = time.perf_counter()
        for _ in range(3):
            with engine.loop.lock:
                time.sleep(0.4)
        return stall.Window(began, time.perf_counter())

    monkeypatch.setattr(stall, "compile_once", holding)
    code, found = call(stall, capsys, monkeypatch, "-m", model, *STALL)
    assert code == 1
    assert found["compiling"]["max_ms"] > 390
    assert found["ratio_p99"] > 1.2


def test_large_schemas_are_new_each_time(stall: ModuleType) -> None:
    schemas = stall.Schemas(5000, 1_000_000)
    first, second = schemas.next(), schemas.next()
    assert len(json.dumps(first)) > 1_000_000
    values = [set(one["properties"]["code"]["enum"]) for one in (first, second)]
    assert [len(one) for one in values] == [5000, 5000]
    assert values[0] != values[1]


def test_gaps_and_windows(stall: ModuleType) -> None:
    gaps = [stall.Gap(0, 1), stall.Gap(1, 3), stall.Gap(3, 4)]
    window = [stall.Window(0.5, 3)]
    assert stall.in_windows(gaps, window, whole=False) == [1, 2]
    assert stall.in_windows(gaps, window, whole=True) == [2]
    assert stall.in_windows(gaps, [], whole=True) == []
