"""What the keywords of JSON Schema (drafts 4 to 2020-12) are to us: enforced, refused, without effect, or unknown.

https://json-schema.org/draft/2020-12/json-schema-validation and its predecessors.
"""

from __future__ import annotations

from typing import Final

TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")

ENFORCED: Final = frozenset(
    {
        *("$ref", "allOf", "anyOf", "oneOf", "const", "enum", "type"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minLength", "maxLength", "pattern", "format"),
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
        *("dependencies", "dependentRequired", "dependentSchemas"),
    }
)
"""Keywords that the text obeys; some of their combinations are refused."""

REFUSED: Final = {
    "not": "use enum, or say what is allowed",
    "if": "use anyOf with one schema for each case",
    "contains": "use items, or prefixItems",
    "uniqueItems": "leave it out and check the answer, or list the possible arrays with enum",
    "propertyNames": "use patternProperties with additionalProperties false",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items with prefixItems",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "extends": "use allOf",
    "disallow": "say what is allowed",
    "divisibleBy": "use multipleOf",
}
"""Keywords that say something about texts, but can't be enforced here; what to do instead."""

DEPENDENT: Final = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
"""Keywords that say nothing without another one; beside it, that one is refused."""

PLACES: Final = frozenset({"$id", "id", "$anchor", "$defs", "definitions", "$schema", "$vocabulary"})
"""Keywords that name schemas."""

ANNOTATIONS: Final = frozenset(
    {
        *("$comment", "title", "description", "default", "examples", "readOnly", "writeOnly", "deprecated"),
        *("contentEncoding", "contentMediaType", "contentSchema", "$dynamicAnchor", "$recursiveAnchor"),
        *("comment", "comments", "readonly", "readOnlyMode", "example", "externalDocs", "xml", "discriminator"),
    }
)
"""Keywords that describe without saying what is valid, by the standard or by custom."""

_SPELLABLE: Final = sorted(ENFORCED | REFUSED.keys() | DEPENDENT.keys())


def is_private(keyword: str) -> bool:
    """Whether a keyword is marked as somebody's own, so that it can't be a slip of the pen."""
    return keyword.startswith(("x-", "X-", "_", "@"))


def meant(keyword: str) -> str | None:
    """The keyword that an unknown one may be a misspelling of."""
    lowered = keyword.lower()
    for candidate in _SPELLABLE:
        if len(candidate) < 4:
            continue
        if lowered == candidate.lower() or sorted(lowered) == sorted(candidate.lower()):
            return candidate
        shorter = min(len(candidate), len(keyword))
        allowed = 0 if shorter < 4 or max(len(candidate), len(keyword)) < 5 else 1 if shorter < 9 else 2
        if allowed and _distance(lowered, candidate.lower(), allowed) <= allowed:
            return candidate
    return None


def _distance(a: str, b: str, limit: int) -> int:
    """Insertions, deletions, replacements and swaps of neighbours between two words; above `limit` only that it is."""
    if abs(len(a) - len(b)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        after = [i]
        for j, y in enumerate(b, 1):
            cost = min(row[j] + 1, after[j - 1] + 1, row[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, before[j - 2] + 1)
            after.append(cost)
        before, row = row, after
    return row[-1]
