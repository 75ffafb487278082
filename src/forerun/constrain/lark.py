"""Texts of a context-free grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from llguidance import LLMatcher

from forerun.constrain.document import Document, read
from forerun.constrain.lower import lower
from forerun.constrain.schema import compile_options
from forerun.constrain.spec import Constraint, checked_text, first_line
from forerun.errors import InvalidConstraintError

MAX_NODES: Final = 2_000
"""Most rules, terminals and groups of a grammar; llguidance's stack has room for a chain of some more."""

_NODE: Final = re.compile(r"[(\[:]")

_TOKEN: Final = re.compile(
    r"""//[^\n]*|\#[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|%json\s*|<\[|\b(?:max_tokens|temperature)\s*="""
)


@dataclass(frozen=True, eq=False)
class Lark(Constraint):
    """The whole text follows a context-free grammar in llguidance's dialect of Lark, from the rule `start` on.

    Left recursion is fine. `%json {...}` stands for a value of a JSON Schema, which is checked as `JsonSchema` is, and
    is compact. `max_tokens`, `temperature` and tokens by number (`<[5]>`) raise InvalidConstraintError: they aren't
    about the text. So do more than MAX_NODES rules, terminals and groups.
    https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
    """

    text: str

    def __post_init__(self) -> None:
        checked_text(self.text, "Lark", "grammar")

    @property
    def content(self) -> str:
        return self.text

    def check(self) -> None:
        if not self.text.strip():
            raise InvalidConstraintError("the grammar of Lark is empty; expected rules, one of them named start.")
        failed, messages = LLMatcher.validate_grammar_with_warnings(self.grammar())
        if failed and "special token" not in messages[0]:
            raise self.explain(messages[0])

    def grammar(self) -> str:
        return LLMatcher.grammar_from_lark(self._enforced)

    def explain(self, message: str) -> InvalidConstraintError:
        return InvalidConstraintError(
            f"the Lark grammar can't be compiled: {first_line(message)} (line and column in parentheses)."
            if re.match(r"(?:at )?\d+\(", message)
            else f"the Lark grammar can't be compiled: {first_line(message)}"
        )

    @cached_property
    def _enforced(self) -> str:
        """The grammar with its JSON schemas as llguidance enforces them."""
        out = []
        at = nodes = 0
        while found := _TOKEN.search(self.text, at):
            nodes += len(_NODE.findall(self.text, at, found.start()))
            out.append(self.text[at : found.end()])
            at = found.end()
            word = found[0]
            if word.startswith("%json"):
                schema, at = _embedded(self.text, at)
                out.append(json_rule(schema))
            elif word == "<[":
                line = self.text.count("\n", 0, found.start()) + 1
                raise InvalidConstraintError(
                    f"the Lark grammar names tokens by number at line {line}, which can't be taken back exactly; write "
                    "their text."
                )
            elif word.endswith("=") and word[0] in "mt":
                name = word.rstrip("= \t\n")
                line = self.text.count("\n", 0, found.start()) + 1
                raise InvalidConstraintError(
                    f"the Lark grammar sets {name} at line {line}; use SamplingParams.{name}.", keyword=name
                )
        nodes += len(_NODE.findall(self.text, at))
        if nodes > MAX_NODES:
            raise InvalidConstraintError(
                f"the Lark grammar has {nodes} rules, terminals and groups; the limit is {MAX_NODES}. Use fewer, or "
                "regular expressions and Choice."
            )
        return "".join([*out, self.text[at:]])


def json_rule(schema: Any, adapt: Callable[[dict[str, Any]], None] = lambda _: None) -> str:
    """What follows `%json` in a grammar for the values of a schema; `adapt` may change llguidance's options."""
    lowered = lower(Document(schema))
    if lowered.schema is False:
        raise InvalidConstraintError("the schema is false, which no text satisfies.", path="#")
    options = compile_options(lowered)
    adapt(options)
    body = lowered.schema if isinstance(lowered.schema, dict) else {}
    return json.dumps({**body, "x-guidance": options}, ensure_ascii=False)


def _embedded(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at a place in a grammar, and where it ends."""
    try:
        _, end = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        line = text.count("\n", 0, at) + 1
        raise InvalidConstraintError(f"the Lark grammar has no JSON schema after %json at line {line}.") from error
    schema = read(text[at:end])
    if not isinstance(schema, (dict, bool)):
        raise InvalidConstraintError("the schema after %json must be an object or a boolean.")
    return schema, end
