#!/usr/bin/env python3
"""Makes tasks/extraction.jsonl: short texts to be turned into JSON of a given schema.

    python tasks/make_extraction.py > tasks/extraction.jsonl

Ten records of each of five kinds: job (a posting), order (a customer's message), visit (a clinic's note), event (an
announcement), inspection (a technician's report). Every schema has nested objects, enums, arrays, numbers and
booleans; each kind has two of them, with other names and another nesting. Three of five prompts show the schema
itself, the others say in words what each field is. People, firms and places are invented.

Every choice follows from SHA-256 of a fixed seed, the record's id and what is chosen: the same bytes on every machine
and Python version.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from extraction_kinds import KINDS, Choices, Record, and_list

PER_KIND = 10
CHARACTERS_PER_TOKEN = 2.5
"""A low estimate for compact JSON, so that `max_tokens` cuts no expected answer off."""
SPARE_TOKENS = 96
"""For whitespace of an answer without constraint, a code block around it, or a longer wording."""


def in_words(schema: Mapping[str, Any]) -> str:
    """What a field may be, as one would write it to a person; "" for any text."""
    if "anyOf" in schema:
        return f"{in_words(schema['anyOf'][0])}, or null"
    if "enum" in schema:
        return and_list(schema["enum"], "or")
    if schema["type"] == "array":
        inner = in_words(schema["items"])
        return f"a list of {inner}" if inner else "a list of texts"
    if schema["type"] == "object":
        fields = [(name, in_words(value)) for name, value in schema["properties"].items()]
        return and_list([f"{name} ({inner})" if inner else name for name, inner in fields])
    meanings = {"boolean": "true or false", "integer": "a whole number", "number": "a number"}
    return "YYYY-MM-DD" if schema.get("format") == "date" else meanings.get(schema["type"], "")


def prompt(record: Record, shows_schema: bool) -> str:
    """The user's message."""
    if shows_schema:
        ask = "Extract the information from the text as JSON that conforms to this JSON schema:"
        what = json.dumps(record.schema, ensure_ascii=False)
    else:
        ask = "Extract the information from the text as one JSON object with these fields, in this order:"
        fields = [(name, in_words(field)) for name, field in record.schema["properties"].items()]
        what = "\n".join(f"- {name}: {inner}" if inner else f"- {name}" for name, inner in fields)
    return f"{ask}\n\n{what}\n\nText:\n{record.text}\n\nAnswer with the JSON alone."


def compact(value: Any) -> str:
    """JSON without whitespace."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def make() -> list[dict[str, Any]]:
    """The records, kinds in turn, so that the first n have them in equal parts."""
    tasks = []
    for n in range(PER_KIND):
        for kind, make_record in KINDS:
            name = f"extraction/{kind}/{n + 1}"
            record = make_record(Choices(name), n % 2)
            tasks.append(
                {
                    "task_id": name,
                    "category": f"extraction/{kind}",
                    # Both schemas of a kind come in both forms.
                    "prompt": prompt(record, n // 2 % 2 == 0),
                    "max_tokens": int(len(compact(record.answer)) / CHARACTERS_PER_TOKEN) + SPARE_TOKENS,
                    "schema": record.schema,
                    "reference": record.answer,
                }
            )
    return tasks


def main() -> None:
    """Writes the tasks to standard output."""
    for task in make():
        sys.stdout.write(json.dumps(task, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
