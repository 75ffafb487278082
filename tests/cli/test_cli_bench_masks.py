"""`forerun bench masks`: the report, its exit code, and what is refused before anything is compiled."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forerun import cli
from forerun.cli import bench_masks
from forerun.constrain.schema import Json, JsonSchema
from reference.tiny import TinySpec, write_tiny_gguf

INTEGER = {"type": "integer"}
CASES = [
    {
        "id": "One---integer", "schema": INTEGER,
        "tests": [{"description": "a number", "valid": True, "data": 12}, {"valid": False, "data": "12"}],
    },
    {"id": "One---impossible", "schema": {**INTEGER, "minimum": 5, "maximum": 1}, "tests": []},
    {"id": "Two---list", "schema": {"type": "array", "items": INTEGER}, "tests": [{"valid": True, "data": [1, 2]}]},
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("masks")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_tiny_gguf(folder / "tiny.gguf", TinySpec("llama", layers=1))


@pytest.fixture(scope="module")
def cases(folder: Path) -> Path:
    path = folder / "cases.jsonl"
    path.write_text("".join(json.dumps(case) + "\n" for case in CASES))
    return path


@pytest.fixture(autouse=True)
def environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(folder / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.delenv("FORERUN_CATALOG", raising=False)


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.dispatch(["bench", "masks", *arguments])
    output, errors = capsys.readouterr()
    return code, output, errors


def test_the_report_as_json(capsys: pytest.CaptureFixture[str], model: Path, cases: Path) -> None:
    code, output, errors = call(capsys, str(cases), "-m", str(model), "--json")
    assert (code, errors) == (0, "")
    found = json.loads(output)
    assert list(found) == [
        "setup", "date", "cases_file", "cases_sha256", "whitespace", "rows", "refused", "notices", "false_accepts",
        "false_rejects", "disagreements", "sound",
    ]  # fmt: skip
    assert found["setup"]["sha256"] == hashlib.sha256(model.read_bytes()).hexdigest()
    assert found["setup"]["command"] == f"forerun bench masks {cases} -m {model} --whitespace compact"
    assert found["setup"]["vocab_size"] == 300
    assert found["cases_sha256"] == hashlib.sha256(cases.read_bytes()).hexdigest()
    assert (found["whitespace"], found["sound"]) == ("compact", True)
    assert [(row["category"], row["schemas"], row["compiled"]) for row in found["rows"]] == [
        ("One", 2, 1), ("Two", 1, 1), ("all", 3, 2),
    ]  # fmt: skip
    total = found["rows"][-1]
    assert list(total) == [
        "category", "schemas", "compiled", "refused", "reasons", "valid_accepted", "valid_refused", "invalid_accepted",
        "invalid_refused", "compile", "mask",
    ]  # fmt: skip
    assert (total["valid_accepted"], total["invalid_refused"], total["refused"]) == (2, 1, 1)
    for times in (total["compile"], total["mask"]):
        assert list(times) == ["count", "p50_ms", "p99_ms", "max_ms"]
        assert 0 < times["p50_ms"] <= times["p99_ms"] <= times["max_ms"]
    assert (total["compile"]["count"], total["mask"]["count"]) == (2, 3 + 1 + 6)
    (refusal,) = found["refused"]
    assert list(refusal) == ["case_id", "keyword", "path", "message"]
    assert refusal["case_id"] == "One---impossible"
    assert total["reasons"] == {refusal["keyword"] or "other": 1}
    words = " ".join(bench_masks.HELP.split())
    assert all(field in words for field in [*found, *total, *refusal])


def test_the_report_as_text(capsys: pytest.CaptureFixture[str], model: Path, cases: Path) -> None:
    code, output, errors = call(capsys, str(cases), "-m", str(model), "--whitespace", "flexible", "--limit", "1")
    lines = output.splitlines()
    assert (code, errors) == (0, "")
    assert f"forerun bench masks {cases} -m {model} --whitespace flexible --limit 1" in lines
    head = next(n for n, line in enumerate(lines) if "COMPILED" in line)
    assert [line.split() for line in lines[head + 1 : head + 4]] == [
        ["One", "1", "1", "0", "1", "0", "1", "0"],
        ["Two", "1", "1", "0", "1", "0", "0", "0"],
        ["all", "2", "2", "0", "2", "0", "1", "0"],
    ]
    assert "refused:" not in output
    assert lines[-1] == "every valid instance is accepted, every invalid one is refused"
    code, output, _ = call(capsys, str(cases), "-m", str(model))
    assert code == 0
    assert "One---impossible: " in output


@pytest.mark.parametrize(
    ("wrong", "title", "name"),
    [
        (Json(), "FALSE ACCEPTS: 1", "One---integer"),
        (JsonSchema({"type": "integer", "maximum": 9}), "FALSE REJECTS: 2", "Two---list"),
    ],
)
def test_a_wrong_grammar_shows(
    capsys: pytest.CaptureFixture[str],
    model: Path,
    cases: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrong: Any,
    title: str,
    name: str,
) -> None:
    monkeypatch.setattr(bench_masks, "constraint_maker", lambda _whitespace: partial(lambda one, _schema: one, wrong))
    code, output, _ = call(capsys, str(cases), "-m", str(model), "--limit", "1")
    assert code == 1
    assert title in output
    assert f"  {name} test " in output
    assert output.splitlines()[-1].startswith("SOME INSTANCES WENT THE WRONG WAY")
    code, output, _ = call(capsys, str(cases), "-m", str(model), "--json", "--limit", "1")
    found = json.loads(output)
    assert (code, found["sound"]) == (1, False)
    wrong_ones = found["false_accepts"] + found["false_rejects"]
    assert name in [one["case_id"] for one in wrong_ones]
    assert all(field in bench_masks.HELP for field in wrong_ones[0])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["none.jsonl"], 1, "none.jsonl can't be read: No such file or directory; check the path"),
        (["CASES", "--whitespace", "wide"], 2, "'wide' is not compact or flexible"),
        (["CASES", "--limit", "0"], 2, "--limit"),
        (["CASES", "-m", "none.gguf"], 1, "none.gguf"),
        (["BROKEN"], 1, "line 2 of"),
        ([], 2, "FILE.jsonl"),
    ],
)
def test_what_is_refused(
    capsys: pytest.CaptureFixture[str],
    model: Path,
    cases: Path,
    tmp_path: Path,
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text(cases.read_text().splitlines()[0] + "\n{")
    names = {"CASES": str(cases), "BROKEN": str(broken)}
    given = [names.get(word, word) for word in arguments]
    if "-m" not in given:
        given += ["-m", str(model)]
    found, output, errors = call(capsys, *given)
    assert (found, output) == (code, "")
    assert words in errors
    assert errors.count("\n") == 1


def test_the_weights_are_not_read(
    capsys: pytest.CaptureFixture[str], model: Path, cases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("forerun.models.source.ModelSource.tensor", refuse)
    monkeypatch.setattr("forerun.models.source._GGUFSource.tensor", refuse)
    assert call(capsys, str(cases), "-m", str(model))[0] == 0
