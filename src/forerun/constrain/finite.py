"""Recursive definitions: which can end, and what is left of a schema without those that can't."""

from __future__ import annotations

from typing import Any

from forerun.constrain.document import fail

Json = Any

_DEFS = "#/$defs/"


def prune(root: Json, definitions: dict[str, Json], path: str) -> Json:
    """A schema with its definitions, in which those that no finite value satisfies are false.

    Raises SchemaError where nothing finite satisfies the whole.
    """
    ends: set[str] = set()
    growing = True
    while growing:
        fresh = {name for name, node in definitions.items() if name not in ends and _ends(node, ends)}
        growing = bool(fresh)
        ends |= fresh
    if not _ends(root, ends):
        fail(None, path, "describes only values without end: each contains another of its kind. Make the recursive "
             "property optional, or the list possibly empty.")  # fmt: skip
    schema = _without(root, ends)
    if not isinstance(schema, dict) or not ends:
        return schema
    return {**schema, "$defs": {name: _without(definitions[name], ends) for name in sorted(ends)}}


def _ends(node: Json, ends: set[str]) -> bool:
    """Whether a finite value may satisfy a schema, given the definitions known to have one."""
    if not isinstance(node, dict):
        return True
    if "$ref" in node and node["$ref"].removeprefix(_DEFS) not in ends:
        return False
    if not all(_ends(option, ends) for option in node.get("allOf", [])):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in node and not any(_ends(option, ends) for option in node[keyword]):
            return False
    types = node.get("type", "null")
    return any(_type_ends(name, node, ends) for name in ([types] if isinstance(types, str) else types))


def _type_ends(name: str, node: Json, ends: set[str]) -> bool:
    if name == "object":
        properties = node.get("properties", {})
        return all(_ends(properties.get(key, True), ends) for key in node.get("required", []))
    if name == "array":
        least = node.get("minItems", 0)
        first = node.get("prefixItems", [])
        return all(_ends(item, ends) for item in first[:least]) and (
            least <= len(first) or _ends(node.get("items", True), ends)
        )
    return True


def _without(node: Json, ends: set[str]) -> Json:
    if not isinstance(node, dict):
        return node
    reference = node.get("$ref")
    if reference is not None and reference.removeprefix(_DEFS) not in ends:
        return False
    out = dict(node)
    for keyword, value in node.items():
        if keyword in ("properties", "patternProperties"):
            out[keyword] = {key: _without(inner, ends) for key, inner in value.items()}
        elif keyword in ("items", "additionalProperties"):
            out[keyword] = _without(value, ends)
        elif keyword in ("allOf", "anyOf", "oneOf", "prefixItems"):
            out[keyword] = [_without(inner, ends) for inner in value]
    return out
