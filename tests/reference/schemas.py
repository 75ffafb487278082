"""Random JSON Schemas over few keys and values, so that their parts meet and contradict each other."""

from __future__ import annotations

import random
from typing import Any

_KEYS = ["a", "b", "ab", "a\n", "", '"', "\\a"]
_PATTERNS = [
    "^a",
    "b$",
    "^[ab]$",
    "a",
    "^$",
    "^.b?$",
    "\\d",
    "^\\W",
    "^a|b$",
    "^[^a]*$",
    "^(?:a|\\n)+$",
    '^[^"]*$',
    r"^[^\\]+$",
    r"^[^a\\]|b",
]
_CONSTANTS: list[Any] = [0, 1, -1, 1.0, 1.5, -0.25, 100, "a", "b", "ab", "a\n", "", "😀", "\u0001", True, False, None]
_FORMATS = ["date", "time", "date-time", "ipv4", "ipv6", "uuid", "email", "hostname", "uri", "duration", "int32"]
_TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]


def random_schema(rng: random.Random) -> dict[str, Any]:
    """A schema with up to two definitions, which may be recursive."""
    names = rng.sample(["x", "y"], rng.randint(0, 2))
    schema = _schema(rng, 3, names)
    if not isinstance(schema, dict):
        schema = {"items": schema}
    if names:
        schema["$defs"] = {name: _schema(rng, 2, names) for name in names}
    return schema


def _schema(rng: random.Random, depth: int, names: list[str]) -> Any:
    if rng.random() < 0.06:
        return rng.random() < 0.5
    if depth == 0:
        return rng.choice([_leaf, _constant])(rng)
    makers = [_leaf, _constant, _object, _object, _object, _array, _combined, _combined]
    out: dict[str, Any] = rng.choice(makers)(rng, depth, names)  # type: ignore[operator]
    if names and rng.random() < 0.25:
        out["$ref"] = f"#/$defs/{rng.choice(names)}"
    if rng.random() < 0.25:
        extra = rng.choice(makers)(rng, depth, names)  # type: ignore[operator]
        out = {**extra, **out}
    if "type" not in out and rng.random() < 0.3:
        out["type"] = rng.sample(_TYPES, rng.randint(1, 3))
    return out


def _leaf(rng: random.Random, *_: Any) -> dict[str, Any]:
    kind = rng.choice(["integer", "number", "string", "string"])
    out: dict[str, Any] = {"type": kind}
    if kind == "string":
        if rng.random() < 0.5:
            out["pattern"] = rng.choice(_PATTERNS)
        if rng.random() < 0.3:
            out["minLength"] = rng.randint(0, 2)
        if rng.random() < 0.4:
            out["maxLength"] = rng.randint(0, 3)
        if rng.random() < 0.2:
            out = {"type": "string", "format": rng.choice(_FORMATS)}
        return out
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if rng.random() < 0.3:
            out[keyword] = rng.choice([-11, -5.7, -1, 0, 0.1, 1, 5, 9.99, 10, 100, 1e10, 2**53 + 1, 2**63])
    if rng.random() < 0.3:
        out["multipleOf"] = rng.choice([1, 2, 3, 0.1, 0.5, 1.5, 0.01, 7])
    return out


def _constant(rng: random.Random, *_: Any) -> dict[str, Any]:
    if rng.random() < 0.4:
        value = rng.choice(_CONSTANTS)
        return {"const": rng.choice([value, [value], {rng.choice(_KEYS): value}])}
    return {"enum": [rng.choice(_CONSTANTS) for _ in range(rng.randint(1, 4))]}


def _object(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    out: dict[str, Any] = {"type": "object"} if rng.random() < 0.8 else {}
    keys = rng.sample(_KEYS, rng.randint(0, 3))
    if keys:
        out["properties"] = {key: _schema(rng, depth - 1, names) for key in keys}
    if rng.random() < 0.5:
        out["required"] = rng.sample(_KEYS, rng.randint(0, 2))
    if rng.random() < 0.3:
        out["patternProperties"] = {
            pattern: _schema(rng, depth - 1, names) for pattern in rng.sample(_PATTERNS, rng.randint(1, 2))
        }
    if rng.random() < 0.5:
        out["additionalProperties"] = rng.choice([False, _schema(rng, depth - 1, names)])
    if rng.random() < 0.2:
        out[rng.choice(["minProperties", "maxProperties"])] = rng.randint(0, 3)
    if rng.random() < 0.15:
        out["dependentRequired"] = {rng.choice(_KEYS): rng.sample(_KEYS, rng.randint(0, 2))}
    if rng.random() < 0.1:
        out["dependentSchemas"] = {rng.choice(_KEYS): _schema(rng, depth - 1, names)}
    return out


def _array(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    out: dict[str, Any] = {"type": "array"} if rng.random() < 0.8 else {}
    if rng.random() < 0.4:
        out["prefixItems"] = [_schema(rng, depth - 1, names) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.7:
        out["items"] = _schema(rng, depth - 1, names)
    for keyword in ("minItems", "maxItems"):
        if rng.random() < 0.4:
            out[keyword] = rng.randint(0, 3)
    return out


def _combined(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    keyword = rng.choice(["allOf", "allOf", "anyOf", "anyOf", "oneOf"])
    return {keyword: [_schema(rng, depth - 1, names) for _ in range(rng.randint(1, 3))]}


def random_value(rng: random.Random, depth: int = 2) -> Any:
    """A value of the keys and constants that the schemas are about."""
    if depth == 0 or rng.random() < 0.4:
        return rng.choice(_CONSTANTS)
    if rng.random() < 0.4:
        return [random_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return {key: random_value(rng, depth - 1) for key in rng.sample([*_KEYS, "c"], rng.randint(0, 3))}
