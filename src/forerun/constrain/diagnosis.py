"""Finds the keyword behind an error of llguidance, by compiling parts of a schema alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Final

from llguidance import LLMatcher

from forerun.constrain import keywords
from forerun.constrain.document import Document, Place, SchemaError, child
from forerun.constrain.lower import lower
from forerun.constrain.spec import first_line
from forerun.errors import InvalidConstraintError

MAX_COMPILES: Final = 300
MAX_SECONDS: Final = 2.0

_CAUSES: Final = {
    "oneOf constraints are not supported": (
        "oneOf",
        "has alternatives that may overlap, so that a text might satisfy two of them. Use anyOf, or give each a "
        "required property with a constant of its own.",
    ),
    "are not disjoint": (
        "patternProperties",
        "has patterns that match the same keys. Make them exclude each other.",
    ),
    "circular references with sibling keys": (
        "$ref",
        "is recursive and stands beside other keywords, or in allOf. Move them into the definition.",
    ),
    "min/maxProperties": (
        "minProperties",
        "can't be enforced beside optional properties. Require all properties, or leave it out.",
    ),
}
"""Words of llguidance's errors: the keyword at fault, and what to do."""


def diagnose(document: Document, message: str) -> InvalidConstraintError:
    """The error that names the keyword and place at fault, as far as bounded work finds them."""
    reason = first_line(message)
    place = document.root
    budget = _Budget()
    seen: set[str] = {place.path}
    deeper: Place | None = place
    while deeper is not None:
        place = deeper
        deeper = next((part for part in _parts(document, place) if _fails(document, part, reason, budget, seen)), None)
    keyword = _keyword(document, place, reason, budget)
    words = _words(reason)
    if keyword is None:
        return InvalidConstraintError(f"the schema at {place.path} {words}", path=place.path)
    path = child(place.path, keyword)
    return InvalidConstraintError(f'the keyword "{keyword}" at {path} {words}', keyword=keyword, path=path)


class _Budget:
    """Compiles within limits on their number and time."""

    def __init__(self) -> None:
        self._left = MAX_COMPILES
        self._until = time.monotonic() + MAX_SECONDS

    def error(self, document: Document, place: Place) -> str | None:
        """Why a part doesn't compile alone; None if it does, or when the budget is spent."""
        if self._left <= 0 or time.monotonic() > self._until:
            return None
        self._left -= 1
        try:
            lowered = lower(document, place)
        except SchemaError:
            return None
        if isinstance(lowered.schema, bool):
            return None if lowered.schema else "Unsatisfiable schema: schema is false"
        text = json.dumps(lowered.schema)
        grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
        return str(first_line(messages[0])) if failed else None


def _alike(one: str, other: str) -> bool:
    """Whether two errors are of a kind."""
    for words in _CAUSES:
        if words in one or words in other:
            return words in one and words in other
    return ("Unsatisfiable" in one or "unsatisfiable" in one) == ("Unsatisfiable" in other or "unsatisfiable" in other)


def _fails(document: Document, part: Place, reason: str, budget: _Budget, seen: set[str]) -> bool:
    """Whether a part that wasn't looked at before fails alone as the whole does."""
    if part.path in seen:
        return False
    seen.add(part.path)
    why = budget.error(document, part)
    return why is not None and _alike(why, reason)


def _parts(document: Document, place: Place) -> Iterator[Place]:
    """The schemas in a schema, and the one that it refers to."""
    node, path, base = place
    if not isinstance(node, dict):
        return
    base = document.base(node, base)
    if isinstance(node.get("$ref"), str):
        yield document.resolve(node["$ref"], Place(node, path, base))
    for keyword in ("properties", "patternProperties", "dependentSchemas"):
        inner = node.get(keyword)
        if isinstance(inner, dict):
            for key, value in inner.items():
                yield Place(value, child(path, keyword, key), base)
    for keyword in ("allOf", "anyOf", "oneOf", "prefixItems", "items"):
        inner = node.get(keyword)
        if isinstance(inner, list):
            for index, value in enumerate(inner):
                yield Place(value, child(path, keyword, index), base)
    for keyword in ("items", "additionalItems", "additionalProperties"):
        if isinstance(node.get(keyword), dict):
            yield Place(node[keyword], child(path, keyword), base)


def _keyword(document: Document, place: Place, reason: str, budget: _Budget) -> str | None:
    node = place.node
    if not isinstance(node, dict):
        return None
    for words, (keyword, _) in _CAUSES.items():
        if words in reason and keyword in node:
            return keyword
    applied: list[str] = [key for key in node if key in keywords.ENFORCED]
    if len(applied) == 1:
        return applied[0]
    for key in reversed(applied):
        without = {other: value for other, value in node.items() if other != key}
        if key != "type" and budget.error(document, Place(without, place.path, place.base)) is None:
            return key
    return None


def _words(reason: str) -> str:
    for words, (_, advice) in _CAUSES.items():
        if words in reason:
            return advice
    if "nsatisfiable" in reason:
        detail = reason.split(":", 1)[-1].strip()
        return f"leaves no valid value: {detail}. Relax it."
    return f"can't be compiled: {reason}"
