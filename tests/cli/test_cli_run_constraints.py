"""`forerun run` with a constraint: answers obey it, and what can't be obeyed is said before a model is loaded."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun.cli import dispatch
from reference.tiny import TinySpec, write_tiny_gguf

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["A", "B"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_gguf(tmp_path_factory.mktemp("run") / "tiny.gguf", TinySpec("llama", seed=5)))


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FORERUN_THREADS", "1")
    with open(os.devnull, encoding="utf-8") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield


def answered(model: str, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[str, str]:
    """Standard output without the line end, and standard error."""
    assert dispatch(["run", "-m", model, "hello", "--max-tokens", "200", *options]) == 0
    shown = capsys.readouterr()
    return shown.out.removesuffix("\n"), shown.err


@pytest.fixture
def schema_file(tmp_path: Path) -> str:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    return str(path)


def test_a_schema_a_choice_an_expression_and_a_grammar(
    model: str, capsys: pytest.CaptureFixture[str], schema_file: str, tmp_path: Path
) -> None:
    text, notes = answered(model, capsys, "--json-schema", schema_file)
    value = json.loads(text)
    assert value["kind"] in ("A", "B")
    assert 0 <= value["size"] <= 99
    assert "finish: stop" in notes
    assert answered(model, capsys, "--choice", "yes", "--choice", "no, never")[0] in ("yes", "no, never")
    assert re.fullmatch("[ab]{3}-[0-9]{2}", answered(model, capsys, "--regex", "[ab]{3}-[0-9]{2}")[0])
    grammar = tmp_path / "grammar.lark"
    grammar.write_text('start: "<" /[xyz]{2}/ ">"')
    assert re.fullmatch("<[xyz]{2}>", answered(model, capsys, "--lark", str(grammar))[0])
    sampled = answered(model, capsys, "--json-schema", schema_file, "-t", "1.5", "--whitespace", "flexible")[0]
    assert set(json.loads(sampled)) == {"kind", "size"}


def test_any_json_is_json_or_cut_short(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(4):
        text, notes = answered(model, capsys, "--any-json", "-t", "1", "--seed", str(seed))
        if "finish: stop" in notes:
            json.loads(text)
        else:
            assert "finish: length" in notes
            assert "cut short" in notes


def test_forced_text_shows_as_accepted_drafts(model: str, capsys: pytest.CaptureFixture[str], schema_file: str) -> None:
    text, _ = answered(model, capsys, "--json-schema", schema_file, "--show-drafts")
    assert "<+" in text
    assert json.loads(re.sub(r"<[+!*]|[+!*]>", "", text))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--choice", "a", "--regex", "b"], "--regex and --choice can't be combined"),
        (["--regex", "a("], "unclosed group"),
        (["--whitespace", "flexible"], "goes with --json-schema"),
        (["--whitespace", "wide", "--any-json"], "neither compact nor flexible"),
        (["--choice", "a", "--stop", "x"], "stop can't be combined with a constraint"),
        (["--any-json", "--ignore-eos"], "ignore_eos"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    """Before a model is looked for."""
    assert dispatch(["run", "-m", "no-such-model", "hello", *options]) != 0
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_schema_that_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    for content, message in (
        (b'{"type": "object"', "JSON"),
        (b"\xff\xfe", "isn't UTF-8"),
        (b'{"type": "object", "not": {}}', "not"),
        (b'{"type": "object", "require": ["a"]}', "required"),
    ):
        path.write_bytes(content)
        assert dispatch(["run", "-m", "no-such-model", "hello", "--json-schema", str(path)]) != 0
        shown = " ".join(capsys.readouterr().err.split())
        assert message in shown
        assert "schema.json" in shown
        assert "no-such-model" not in shown


def test_unknown_keywords_are_told_once(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA | {"units": "none"}))
    _, notes = answered(model, capsys, "--json-schema", str(path))
    assert notes.count("units") == 1
