"""Texts that are JSON: any value, or what a JSON Schema describes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final, Literal

from llguidance import LLMatcher

from forerun.constrain.diagnosis import diagnose
from forerun.constrain.document import Document, as_text, child, read
from forerun.constrain.lower import Lowered, lower
from forerun.constrain.spec import Constraint, checked_text
from forerun.errors import ConstraintWarning, InvalidConstraintError

Whitespace = Literal["compact", "flexible"]
"""compact: none at all. flexible: up to MAX_WHITESPACE characters wherever JSON allows it, but not around the value."""

MAX_WHITESPACE: Final = 64

_WHITESPACE: Final = rf"[ \t\n\r]{{1,{MAX_WHITESPACE}}}"
_ESCAPES: Final = 'nrbtf\\"'
_LISTED: Final = 8


@dataclass(frozen=True, eq=False)
class JsonSchema(Constraint):
    """The text is a JSON value that a JSON Schema accepts (drafts 4 to 2020-12, given as values or as JSON text).

    Beyond what the schema says: declared properties come in the order of the schema, required ones that aren't declared
    after them, and further ones last; a number of type integer has no fraction or exponent, and one with bounds no
    exponent; an exclusive bound that is whole may be enforced as the next decimal, and a ConstraintWarning says so; a
    keyword beside `$ref` applies, in every draft; formats are enforced. A decimal below a bound may need as many digits
    as the bound (0.70 under a maximum of 0.75), and a multiple as many as `multipleOf` (0.50 for 0.25). Where an object
    takes keys beyond the declared ones, strings have no escapes by \\u, and so no control characters but \\b, \\t, \\n,
    \\f and \\r.

    What the grammar can't enforce is refused with InvalidConstraintError, which names the keyword and its place.
    Keywords that JSON Schema doesn't know describe nothing: one ConstraintWarning lists them, unless they begin with
    "x-" or are common annotations.
    """

    schema: Mapping[str, Any] | str | bool
    whitespace: Whitespace = "compact"
    is_json: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_whitespace(self.whitespace)
        given = self.schema
        if not isinstance(given, (Mapping, str, bool)):
            raise InvalidConstraintError(
                f"a JSON schema must be an object, a boolean, or JSON text, got {type(given).__name__}."
            )
        text = given if isinstance(given, str) else as_text(given)
        object.__setattr__(self, "schema", checked_text(text, "JsonSchema", "schema"))

    @property
    def content(self) -> str:
        return f"{self.whitespace} {self.schema}"

    def check(self) -> None:
        lowered = self.lowered
        if lowered.unknown or lowered.notes:
            warnings.warn(_effects(lowered), ConstraintWarning, stacklevel=3)

    def grammar(self) -> str:
        return json_grammar(self.lowered, self.whitespace)

    def explain(self, message: str) -> InvalidConstraintError:
        return diagnose(self.document, message)

    @cached_property
    def document(self) -> Document:
        """The schema with its references. Raises InvalidConstraintError for text that isn't a schema."""
        text = str(self.schema)
        if not text.strip():
            raise InvalidConstraintError("the schema is an empty text; expected a JSON object or boolean.")
        root = read(text)
        if not isinstance(root, (dict, bool)):
            raise InvalidConstraintError(f"a JSON schema must be an object or a boolean, got {type(root).__name__}.")
        return Document(root)

    @cached_property
    def lowered(self) -> Lowered:
        """The schema as llguidance enforces it."""
        lowered = lower(self.document)
        if lowered.schema is False:
            raise InvalidConstraintError("the schema is false, which no text satisfies.", path="#")
        root = self.document.root.node
        if isinstance(root, dict) and root and set(lowered.unknown) >= {child("#", key) for key in root}:
            inner = next((key for key in ("schema", "json_schema") if isinstance(root.get(key), dict)), None)
            meant = f'give what its "{inner}" holds' if inner else 'put properties into "properties"'
            raise InvalidConstraintError(
                f"none of the schema's keys ({', '.join(list(root)[:_LISTED])}) is a keyword of JSON Schema, so that "
                f"any JSON value would pass: {meant}.",
                path="#",
            )
        return lowered


@dataclass(frozen=True, eq=False)
class Json(Constraint):
    """The text is any JSON value."""

    whitespace: Whitespace = "compact"
    is_json: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_whitespace(self.whitespace)

    @property
    def content(self) -> str:
        return self.whitespace

    def check(self) -> None:
        return

    def grammar(self) -> str:
        return json_grammar(Lowered({}, True, (), ()), self.whitespace)


def json_grammar(lowered: Lowered, whitespace: Whitespace = "compact") -> str:
    """The grammar of a schema written for llguidance."""
    options: Any = compile_options(lowered, whitespace)
    schema = {} if lowered.schema is True else lowered.schema
    return LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False), overrides=options)


def compile_options(lowered: Lowered, whitespace: Whitespace = "compact") -> dict[str, Any]:
    """llguidance's options for a schema."""
    options: dict[str, Any] = {"whitespace_flexible": False}
    if whitespace == "flexible":
        options = {"whitespace_pattern": _WHITESPACE}
    if lowered.escapes:
        options["json_allow_general_unicode_escapes"] = True
    else:
        options["json_allowed_escapes"] = _ESCAPES
    return options


def _check_whitespace(whitespace: object) -> None:
    if whitespace not in ("compact", "flexible"):
        raise InvalidConstraintError(f'whitespace must be "compact" or "flexible", got {whitespace!r}.')


def _effects(lowered: Lowered) -> str:
    parts = []
    if unknown := lowered.unknown:
        more = f" and {len(unknown) - _LISTED} more" if len(unknown) > _LISTED else ""
        parts.append(
            "the schema has keywords that JSON Schema doesn't know, which have no effect on the text: "
            f"{', '.join(unknown[:_LISTED])}{more}"
        )
    if notes := lowered.notes:
        parts.append("; ".join(notes[:_LISTED]))
    return ". ".join(parts) + "."
