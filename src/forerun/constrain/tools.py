"""Calls of tools in the format that a model was trained on: what the text must be, and reading calls back."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

from llguidance import LLMatcher

from forerun.constrain.diagnosis import diagnose
from forerun.constrain.document import as_text, read
from forerun.constrain.lark import json_rule
from forerun.constrain.schema import JsonSchema
from forerun.constrain.spec import Constraint, checked_text, quoted
from forerun.errors import InvalidConstraintError

MAX_TOOLS: Final = 128
MAX_TOOL_NAME: Final = 64
CHOICES: Final = ("auto", "required")

_SPACE: Final = re.compile(r"\s*")
_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolCall(NamedTuple):
    """A call of a tool: its name, and its arguments as the JSON text that the model wrote."""

    name: str
    arguments: str


@dataclass(frozen=True)
class _Format:
    """How a model writes calls.

    before, after: around one call. between: between several; None where there can be only one.
    opening, closing: around all of them. arguments: the key that holds the arguments.
    """

    before: str
    after: str
    between: str | None
    arguments: str
    opening: str = ""
    closing: str = ""


_HERMES: Final = _Format("<tool_call>\n", "\n</tool_call>", "\n", "arguments")

FORMATS: Final[Mapping[str, _Format]] = {
    "qwen": _HERMES,
    "hermes": _HERMES,
    "llama3": _Format("", "", None, "parameters"),
    "json": _Format("", "", ", ", "arguments", "[", "]"),
}
"""qwen, hermes: <tool_call> blocks, as Qwen2.5 and Hermes write them. llama3: {"name": ..., "parameters": ...} alone.
json: {"name": ..., "arguments": ...} alone, or a list of such with `parallel`."""


@dataclass(frozen=True, eq=False)
class ToolCalls(Constraint):
    """The text calls tools whose arguments obey their schemas.

    tools: as OpenAI's: {"type": "function", "function": {"name": ..., "parameters": a JSON schema}}.
    format: how the model writes calls, one of FORMATS.
    choice: "required": at least one call. "auto": free text, or calls; in the formats with <tool_call> also free text
        before them. Otherwise the name of the tool that is called.
    parallel: whether there may be several calls.
    """

    tools: Sequence[Mapping[str, Any]]
    format: str = "qwen"
    choice: str = "required"
    parallel: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.tools, (str, bytes)) or not isinstance(self.tools, Sequence):
            raise InvalidConstraintError(f"ToolCalls takes a list of tools, got {type(self.tools).__name__}.")
        if not isinstance(self.parallel, bool):
            raise InvalidConstraintError(f"parallel must be True or False, got {self.parallel!r}.")
        if not isinstance(self.format, str) or self.format not in FORMATS:
            raise InvalidConstraintError(f"the format {self.format!r} is unknown; expected {', '.join(FORMATS)}.")
        text = checked_text(as_text(list(self.tools)), "ToolCalls", "tools")
        object.__setattr__(self, "tools", tuple(read(text)))
        object.__setattr__(self, "_text", text)
        functions = self.functions
        if not isinstance(self.choice, str) or self.choice not in (*CHOICES, *functions):
            raise InvalidConstraintError(
                f"the choice {self.choice!r} is no tool; expected auto, required, or one of {', '.join(functions)}."
            )
        if self.parallel and FORMATS[self.format].between is None:
            raise InvalidConstraintError(f"the format {self.format} has no way to write several calls; leave parallel.")

    @property
    def is_json(self) -> bool:  # type: ignore[override]
        """Whether texts are JSON but for marks around it."""
        return self.choice != "auto"

    @property
    def content(self) -> str:
        return json.dumps([self.__dict__["_text"], self.format, self.choice, self.parallel])

    @cached_property
    def functions(self) -> dict[str, Any]:
        """The JSON schema of each tool's arguments, by the tool's name."""
        if not 1 <= len(self.tools) <= MAX_TOOLS:
            raise InvalidConstraintError(f"there are {len(self.tools)} tools; expected 1 to {MAX_TOOLS}.")
        functions: dict[str, Any] = {}
        for index, tool in enumerate(self.tools):
            name, parameters = _function(tool, index)
            if name in functions:
                raise InvalidConstraintError(f"two tools are named {name}; give each its own name.")
            functions[name] = parameters
        return functions

    def check(self) -> None:
        for name, schema in self._schemas.items():
            try:
                schema.check()
            except InvalidConstraintError as error:
                raise _of_tool(name, error) from error

    def grammar(self) -> str:
        form = FORMATS[self.format]
        rules, calls = [], []
        for index, (name, schema) in enumerate(self._schemas.items()):
            head = f'{{"name": {json.dumps(name)}, "{form.arguments}": '
            rules.append(f"call{index}: {quoted(head)} arguments{index} {quoted('}')}")
            rules.append(f"arguments{index}: %json {json_rule(schema.document.root.node, _spaced)}")
            calls.append(f"call{index}")
        rules.append(f"call: {' | '.join(calls)}")
        rules += self._start(form)
        return LLMatcher.grammar_from_lark("\n".join(rules))

    def explain(self, message: str) -> InvalidConstraintError:
        for name, schema in self._schemas.items():
            failed, messages = LLMatcher.validate_grammar_with_warnings(schema.grammar())
            if failed:
                return _of_tool(name, diagnose(schema.document, messages[0]))
        return super().explain(message)

    def _start(self, form: _Format) -> list[str]:
        """The rules of the whole text."""
        one = " ".join([*_literal(form.before), "call", *_literal(form.after)])
        inner = "call"
        if self.parallel and form.between is not None:
            inner = " ".join(["call", "(", *_literal(form.after + form.between + form.before), "call", ")*"])
        rest = " ".join([inner, *_literal(form.after + form.closing if self.parallel else form.after)])
        several = " ".join([*_literal(form.opening + form.before if self.parallel else form.before), rest])
        whole = several if self.parallel else one
        if self.choice != "auto":
            return [f"start: {whole}"]
        if not form.before:
            return [f"start: {whole} | FREE", r"FREE: /[^{\[](?s:.)*/"]
        mark = form.before.strip()
        after = form.before[len(mark) :]
        return [
            f"start: FREE | marked {' '.join([*_literal(after), rest])}",
            f"FREE: /(?s:.)*/ & ~/(?s:.)*{mark}(?s:.)*/",
            f"marked[lazy]: /(?s:.)*{mark}/",
        ]

    @cached_property
    def _schemas(self) -> dict[str, JsonSchema]:
        """The tools that may be called."""
        return {name: JsonSchema(schema) for name, schema in self.functions.items() if self.choice in (*CHOICES, name)}


def _of_tool(name: str, error: InvalidConstraintError) -> InvalidConstraintError:
    return InvalidConstraintError(f"the tool {name}: {error}", keyword=error.keyword, path=error.path)


def parse_tool_calls(text: str, format: str = "qwen") -> list[ToolCall]:
    """The complete calls in a text, in order; none in a text without calls.

    A call that the text cuts short is left out, and so is one that isn't JSON or is nested too deep. Raises
    InvalidConstraintError for an unknown format.
    """
    if format not in FORMATS:
        raise InvalidConstraintError(f"the format {format!r} is unknown; expected one of {', '.join(FORMATS)}.")
    form = FORMATS[format]
    if form.before:
        return _marked(text, form)
    value, end = _value(text, len(text) - len(text.lstrip()))
    if text[end:].strip():
        return []
    several = form.opening and isinstance(value, list) and not isinstance(value, _Pairs)
    values = value if several else [value]
    calls = [_call(one, form) for one in values]
    return [call for call in calls if call is not None]


def _marked(text: str, form: _Format) -> list[ToolCall]:
    text = _Unnumbered(text)
    calls = []
    mark, end_mark = form.before.strip(), form.after.strip()
    at = text.find(mark)
    while at >= 0:
        at += len(mark)
        value, end = _value(text, _SPACE.match(text, at).end())  # type: ignore[union-attr]
        call = _call(value, form)
        if call is not None and text.startswith(end_mark, _SPACE.match(text, end).end()):  # type: ignore[union-attr]
            calls.append(call)
            at = end
        at = text.find(mark, at)
    return calls


def _value(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at a place, and its end; None and the place where there is none."""
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


class _Unnumbered(str):
    """A text whose lines aren't counted: each error of the decoder would read all that comes before it."""

    def count(self, *_: object) -> int:
        return 0

    def rfind(self, *_: object) -> int:
        return -1


class _Pairs(list[tuple[str, Any]]):
    """An object as its pairs, so that its text keeps order and repeated keys."""


def _finite(number: str) -> float:
    """A number of JSON. Raises ValueError for one that isn't, or is too large to be written as it was."""
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number} is no number of JSON")
    return value


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_Pairs, parse_float=_finite, parse_constant=_finite)


def _call(value: Any, form: _Format) -> ToolCall | None:
    if not isinstance(value, _Pairs):
        return None
    fields = dict(value)
    name, arguments = fields.get("name"), fields.get(form.arguments)
    if not isinstance(name, str) or not isinstance(arguments, _Pairs):
        return None
    try:
        return ToolCall(name, json.dumps(_plain(arguments), ensure_ascii=False))
    except RecursionError:
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, _Pairs):
        return {key: _plain(inner) for key, inner in value}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value


def _function(tool: object, index: int) -> tuple[str, Any]:
    """Name and schema of one tool."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(function, Mapping):
        raise InvalidConstraintError(
            f'tool {index} must be {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}.'
        )
    name = function.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_TOOL_NAME or not _is_name(name) or name in CHOICES:
        raise InvalidConstraintError(
            f"tool {index} has the name {name!r}; expected 1 to {MAX_TOOL_NAME} letters, digits, _, - or dots, "
            f"and not {' or '.join(CHOICES)}."
        )
    parameters = function.get("parameters")
    if parameters is None:
        return name, _NO_PARAMETERS
    if not isinstance(parameters, Mapping):
        raise InvalidConstraintError(f"the parameters of the tool {name} must be a JSON schema of an object.")
    if parameters.get("type", "object") != "object":
        raise InvalidConstraintError(f"the parameters of the tool {name} must be of type object.", keyword="type")
    return name, {"type": "object", **parameters}


def _is_name(name: str) -> bool:
    return name.isascii() and all(character.isalnum() or character in "_-." for character in name)


def _literal(text: str) -> list[str]:
    return [quoted(text)] if text else []


def _spaced(options: dict[str, Any]) -> None:
    """JSON as models are shown it in templates: with a space behind each comma and colon."""
    options.update(item_separator=", ", key_separator=": ")
