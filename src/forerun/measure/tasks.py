"""Task files: prompts of several kinds, to compare ways of answering them."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from forerun.measure.jsonl import Named, read_entries

CHAT = "chat"
SPEC_BENCH_CATEGORIES: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
        CHAT,
    )
    | {name: name for name in ("translation", "summarization", "qa", "math_reasoning", "rag")}
)
"""Spec-Bench's categories, and ours: the eight of MT-Bench are short conversations of all sorts."""


class Task(NamedTuple):
    """One prompt.

    task_id: unique in its file. category: "code_edit/rename" and the like belong to "code_edit", too.
    prompt: the user's message. max_tokens: the most that its answer needs; None where the file doesn't say.
    schema: JSON Schema of the answer; None where the file doesn't give one.
    """

    task_id: str
    category: str
    prompt: str
    max_tokens: int | None
    schema: Mapping[str, Any] | None = None


def read_tasks(path: Path, limit: int | None = None) -> list[Task]:
    """The tasks of a .jsonl file, in its order; with `limit` the first so many of each category.

    Two forms of lines are read: {"task_id", "category", "prompt", "max_tokens" and "schema" (optional)}, and
    Spec-Bench's {"question_id", "category", "turns"}, of which the first turn is the prompt. Other fields are ignored.
    Raises `InvalidRequestError`, which names the line, for what is neither, for control characters in ids and
    categories, for texts that UTF-8 can't hold, and for files without tasks.
    """
    return read_entries(path, "task", _task, lambda task: Named(task.task_id, task.category), limit)


def groups(tasks: Sequence[Task], size: int) -> list[list[Task]]:
    """Tasks that are answered together: of one category, `size` at a time (the last of a category may be fewer)."""
    by_category: dict[str, list[Task]] = {}
    for task in tasks:
        by_category.setdefault(task.category, []).append(task)
    return [of_kind[start : start + size] for of_kind in by_category.values() for start in range(0, len(of_kind), size)]


def families(category: str) -> list[str]:
    """The categories that a task counts for, the widest first: "code_edit/typo" is in "code_edit", too."""
    parts = category.split("/")
    return ["/".join(parts[: n + 1]) for n in range(len(parts))]


def _task(entry: object) -> Task:
    if not isinstance(entry, dict):
        raise ValueError("expected a JSON object")
    if "turns" in entry:
        question, turns = entry.get("question_id"), entry["turns"]
        if isinstance(question, bool) or not isinstance(question, int | str):
            raise ValueError("question_id must be a number or a text")
        if not isinstance(turns, list) or not turns:
            raise ValueError("turns must be a list of texts")
        category = _name(entry, "category")
        if category not in SPEC_BENCH_CATEGORIES:
            raise ValueError(f"category {category!r} is not one of {', '.join(SPEC_BENCH_CATEGORIES)}")
        if isinstance(question, str):
            question = _name(entry, "question_id")
        return Task(str(question), SPEC_BENCH_CATEGORIES[category], _text({"turns": turns[0]}, "turns"), None)
    most = entry.get("max_tokens")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise ValueError(f"max_tokens={most!r} is not allowed; expected a number from 1, or none")
    schema = entry.get("schema")
    if schema is not None and not isinstance(schema, dict):
        raise ValueError("schema must be a JSON object, or none")
    return Task(_name(entry, "task_id"), _name(entry, "category"), _text(entry, "prompt"), most, schema)


def _text(entry: Mapping[str, object], field: str) -> str:
    value = entry.get(field)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{field} must be a text that isn't empty")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(f"{field} has half of a surrogate pair, which is no character")
    return value


def _name(entry: Mapping[str, object], field: str) -> str:
    """A text that is shown as it is: it may not drive a terminal or break a line."""
    value = _text(entry, field)
    if any(unicodedata.category(letter) in ("Cc", "Zl", "Zp") for letter in value):
        raise ValueError(f"{field} {value!r} has a control character")
    return value
