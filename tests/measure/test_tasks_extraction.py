"""tasks/extraction.jsonl: fifty records with schemas, and how they are made."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from forerun.errors import InvalidRequestError
from forerun.measure.tasks import read_tasks

TASKS = Path(__file__).parents[2] / "tasks"
EXTRACTION = TASKS / "extraction.jsonl"
KINDS = ["job", "order", "visit", "event", "inspection"]

pytestmark = pytest.mark.skipif(not TASKS.exists(), reason="tasks/ isn't part of this tree")


def entries() -> list[dict[str, Any]]:
    return [json.loads(line) for line in EXTRACTION.read_text(encoding="utf-8").splitlines()]


def parts(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all within."""
    if isinstance(schema, dict):
        yield schema
        for value in schema.values():
            yield from parts(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from parts(value)


def test_fifty_records_of_five_kinds() -> None:
    tasks = read_tasks(EXTRACTION)
    assert len(tasks) == 50
    assert Counter(task.category for task in tasks) == {f"extraction/{kind}": 10 for kind in KINDS}
    assert [task.category.split("/")[1] for task in tasks] == KINDS * 10
    assert len({json.dumps(task.schema) for task in tasks}) == 10
    assert len({task.prompt for task in tasks}) == 50


def test_every_schema_has_nesting_enums_arrays_numbers_and_booleans() -> None:
    for task in read_tasks(EXTRACTION):
        assert task.schema is not None
        jsonschema.Draft202012Validator.check_schema(task.schema)
        inner = [part for value in task.schema["properties"].values() for part in parts(value)]
        kinds = {part["type"] for part in inner if isinstance(part.get("type"), str)}
        assert {"object", "array", "boolean", "string"} <= kinds
        assert kinds & {"integer", "number"}
        assert any("enum" in part for part in inner)


def test_the_reference_obeys_the_schema_and_says_what_the_text_says() -> None:
    for entry in entries():
        jsonschema.validate(entry["reference"], entry["schema"])
        text = entry["prompt"].split("\n\nText:\n")[1]
        names = [value for value in leaves(entry["reference"]) if isinstance(value, str) and " " in value]
        assert names
        # Street and house number are two fields in one of the schemas, one in the other.
        assert all(name in text or re.match(r"\d+ ", name) for name in names)
        # At 2.5 characters a token the compact answer fits, and a bit more.
        assert entry["max_tokens"] > len(json.dumps(entry["reference"], separators=(",", ":"))) / 2.5


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def test_prompts_name_every_field() -> None:
    shown = 0
    for entry in entries():
        question = entry["prompt"].split("\n\nText:\n")[0]
        shown += json.dumps(entry["schema"]) in question
        for part in parts(entry["schema"]):
            for name in part.get("properties", {}):
                if part.get("type") == "object":
                    assert re.search(rf"\b{name}\b", question)
    assert shown == 30


def test_the_file_is_what_the_script_makes() -> None:
    made = subprocess.run(
        [sys.executable, str(TASKS / "make_extraction.py")],
        capture_output=True,
        check=True,
        text=True,
        encoding="utf-8",
    )
    assert made.stdout == EXTRACTION.read_text(encoding="utf-8")


def test_a_schema_must_be_an_object(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    task = {"task_id": "a", "category": "c", "prompt": "p"}
    path.write_text(json.dumps(task) + "\n" + json.dumps({**task, "task_id": "b", "schema": {"type": "null"}}))
    assert [one.schema for one in read_tasks(path)] == [None, {"type": "null"}]
    path.write_text(json.dumps({**task, "schema": [1]}))
    with pytest.raises(InvalidRequestError, match=r"line 1 of .* schema must be a JSON object, or none"):
        read_tasks(path)
