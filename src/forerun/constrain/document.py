"""A JSON Schema as a document: read from text, and its references resolved.

References work inside the document only: JSON pointers, anchors, and the `$id` of a part
(https://json-schema.org/draft/2020-12/json-schema-core#name-schema-references).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, NoReturn
from urllib.parse import unquote, urldefrag, urljoin

from forerun.errors import InvalidConstraintError

MAX_DEPTH: Final = 100
"""Deepest nesting of objects and arrays in a schema."""


MAX_DIGITS: Final = 400
"""Most digits of an integer in a schema."""


class Place(NamedTuple):
    """A part of a document: its value, where it stands ("#/properties/a"), and the URI that references start from."""

    node: Any
    path: str
    base: str


class SchemaError(InvalidConstraintError):
    """A schema can't be enforced, because of one keyword at one place."""


def fail(keyword: str | None, path: str, problem: str) -> NoReturn:
    """Raises the error about a keyword; `path` is that of the schema that holds it."""
    if keyword is None:
        raise SchemaError(f"the schema at {path} {problem}", path=path)
    here = child(path, keyword)
    raise SchemaError(f'the keyword "{keyword}" at {here} {problem}', keyword=keyword, path=here)


def child(path: str, *steps: str | int) -> str:
    """The path of a part of what stands at `path`."""
    return path + "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)


def shown(value: object) -> str:
    """A value for an error message."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:80] + "..."


def as_text(schema: Any) -> str:
    """A schema given as Python values, as compact JSON that keeps the order of keys.

    Raises InvalidConstraintError for what isn't JSON: other types, keys that aren't texts, NaN and infinity, lone
    surrogates, and nesting beyond MAX_DEPTH.
    """
    _check_json(schema, "#", 0)
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), default=dict)


def read(text: str) -> Any:
    """A schema given as text. Raises InvalidConstraintError for text that isn't JSON, as `as_text` does."""
    try:
        schema = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant, parse_int=_integer)
    except RecursionError:
        raise InvalidConstraintError(f"the schema is nested deeper than {MAX_DEPTH} levels.") from None
    except json.JSONDecodeError as error:
        hint = " Give its text, not the name of a file." if error.pos == 0 else ""
        raise InvalidConstraintError(
            f"the schema isn't JSON: {error.msg} at line {error.lineno}, column {error.colno}.{hint}"
        ) from error
    except ValueError as error:
        raise InvalidConstraintError(f"the schema isn't JSON: {error}.") from error
    _check_json(schema, "#", 0)
    return schema


class Document:
    """A schema whose parts can be found by reference."""

    def __init__(self, root: Any) -> None:
        self.root: Final = Place(root, "#", "")
        self._resources: dict[str, Place] = {"": self.root}
        self._anchors: dict[str, Place] = {}
        dialect = root.get("$schema") if isinstance(root, dict) else None
        self._id_keywords: Final = ("$id", "id") if isinstance(dialect, str) and "draft-04" in dialect else ("$id",)
        self._scan(root, "#", "")

    def resolve(self, reference: str, place: Place) -> Place:
        """What a `$ref` in the schema at `place` means. Raises SchemaError, which names that keyword and place."""
        uri, fragment = urldefrag(urljoin(place.base, reference) if place.base else reference)
        resource = self._resources.get(uri)
        if resource is None:
            fail(
                "$ref", place.path, f"is {shown(reference)}, which isn't in this schema. Put what it means under $defs."
            )
        fragment = unquote(fragment)
        if not fragment:
            return resource
        if not fragment.startswith("/"):
            if anchored := self._anchors.get(f"{uri}#{fragment}"):
                return anchored
            fail("$ref", place.path, f"is {shown(reference)}, but no schema has that anchor.")
        node, path, base = resource
        for raw in fragment[1:].split("/"):
            step = raw.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and step in node:
                node = node[step]
            elif isinstance(node, list) and step.isascii() and step.isdecimal() and int(step) < len(node):
                node = node[int(step)]
            else:
                fail("$ref", place.path, f"is {shown(reference)}, but there is nothing at that place.")
            path = child(path, step)
            base = self.base(node, base)
        return Place(node, path, base)

    def base(self, node: Any, base: str) -> str:
        """The URI that references in a schema start from, given its parent's."""
        if isinstance(node, dict):
            for keyword in self._id_keywords:
                value = node.get(keyword)
                if isinstance(value, str) and not value.startswith("#"):
                    return urldefrag(urljoin(base, value))[0]
        return base

    def _scan(self, node: Any, path: str, base: str) -> None:
        """Finds the names of schemas; in the values of enum, const, default and examples there are none."""
        if isinstance(node, list):
            for index, item in enumerate(node):
                self._scan(item, child(path, index), base)
        if not isinstance(node, dict):
            return
        inner = self.base(node, base)
        place = Place(node, path, inner)
        if inner != base:
            self._resources[inner] = place
        for keyword in ("$anchor", "$dynamicAnchor", *self._id_keywords):
            value = node.get(keyword)
            if isinstance(value, str) and (value.startswith("#") or keyword.endswith("nchor")):
                self._anchors[f"{inner}#{value.lstrip('#')}"] = place
        for key, value in node.items():
            if key not in ("enum", "const", "default", "examples", "example"):
                self._scan(value, child(path, key), inner)


def _is_plain(value: Any) -> bool:
    """Whether a value is a text without anything to check, as most of a large enum's are."""
    return type(value) is str and value.isascii()


def _check_json(value: Any, path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise InvalidConstraintError(f"the schema is nested deeper than {MAX_DEPTH} levels.", path=path)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise InvalidConstraintError(f"the schema has the key {key!r} at {path}, which is no text.", path=path)
            _check_text(key, path)
            if not _is_plain(inner):
                _check_json(inner, child(path, key), depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            if not _is_plain(inner):
                _check_json(inner, child(path, index), depth + 1)
    elif isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, int):
        if abs(value) >= 10**MAX_DIGITS:
            raise InvalidConstraintError(
                f"the schema has a number of more than {MAX_DIGITS} digits at {path}.", path=path
            )
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidConstraintError(f"the schema has {value} at {path}; JSON has only finite numbers.", path=path)
    elif value is not None:
        raise InvalidConstraintError(
            f"the schema has a {type(value).__name__} at {path}; expected what JSON has: objects, lists, texts, "
            "numbers, true, false and null.",
            path=path,
        )


def _check_text(text: str, path: str) -> None:
    if not text.isascii() and any(0xD800 <= ord(character) < 0xE000 for character in text):
        raise InvalidConstraintError(f"the schema has a lone surrogate in a text at {path}.", path=path)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {shown(key)} appears twice in one object")
            seen.add(key)
    return result


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    return int(digits)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
