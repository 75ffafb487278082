"""Renders a model's chat template: messages to the prompt text that the model was trained on.

Templates are Jinja programs that come with the model, so they run in Jinja's immutable sandbox,
with what Hugging Face's apply_chat_template gives them: trim_blocks and lstrip_blocks, loop
controls, `raise_exception`, `strftime_now`, a `tojson` that doesn't escape HTML, and the
`generation` tag.
https://huggingface.co/docs/transformers/chat_templating

Limits: `range` is the sandbox's (100,000 items), one repetition or product can't make a huge value,
and a prompt ends at `MAX_PROMPT_CHARS`. That stops accidents, not malice: nested loops may still
run long and a text joined to itself in a loop may still fill memory, so a model file deserves the
trust that a program does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forerun.errors import InvalidRequestError, ModelFormatError

MAX_PROMPT_CHARS: Final = 16_000_000
"""Longest prompt that a template may produce: above any model's context, below any harm."""

_MAX_REPEATED: Final = 1_000_000
_MAX_BITS: Final = 4096


class ChatTemplate:
    """One compiled template; `render` may be called from several threads.

    `source` is the Jinja text, `bos_token` and `eos_token` how the model writes those (empty where
    it has none). `now` is the clock behind `strftime_now`. Raises ModelFormatError for a template
    that can't be compiled.
    """

    def __init__(
        self,
        source: str,
        bos_token: str,
        eos_token: str,
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source: Final = source
        self._tokens: Final = {"bos_token": bos_token, "eos_token": eos_token}
        environment = _Environment(now)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelFormatError(
                f"the model's chat template is broken at line {error.lineno}: {error.message}. Use "
                "prompts without a template, or another file of the model."
            ) from error
        except (TemplateError, ArithmeticError, SyntaxError, ValueError, RecursionError) as error:
            raise ModelFormatError(
                f"the model's chat template can't be compiled: {error}. Use prompts without a "
                "template, or another file of the model."
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The prompt of a conversation; encode it with `add_special=False`.

        Each message has a `role` and a `content`: a text, a list of text parts (joined by line
        ends), or None beside `tool_calls`. `add_generation_prompt` ends the prompt where the
        model's answer begins. `extra` are further variables of the template.
        Raises InvalidRequestError for messages of another form, and with the template's own words
        where it refuses them or fails.
        """
        context = {
            "documents": None,
            **self._tokens,
            **extra,
            "messages": _checked(messages),
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(context):
                length += len(piece)
                if length > MAX_PROMPT_CHARS:
                    raise SecurityError(f"the prompt exceeds {MAX_PROMPT_CHARS} characters")
                pieces.append(piece)
        except TemplateError as error:
            raise InvalidRequestError(f"the model's chat template refuses these messages: {error.message}") from error
        # A template is a program over the caller's data, so it can fail in any of these ways.
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            MemoryError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise InvalidRequestError(
                f"the model's chat template fails on these messages: {type(error).__name__}: {error}"
            ) from error
        return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with Hugging Face's additions, and without ways to make huge values cheaply."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self.filters["tojson"] = _to_json
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for value, times in ((left, right), (right, left)):
            if not isinstance(times, int):
                continue
            repeats = isinstance(value, (str, bytes, list, tuple))
            if operator == "*" and repeats and len(value) * times > _MAX_REPEATED:
                raise SecurityError(f"a repetition exceeds {_MAX_REPEATED} items")
        if isinstance(left, int) and isinstance(right, int):
            wide = left.bit_length() * right if operator == "**" else left.bit_length()
            if wide > _MAX_BITS:
                raise SecurityError(f"a number exceeds {_MAX_BITS} bits")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the model's words for training."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _checked(messages: Any) -> list[dict[str, Any]]:
    """The messages as the template sees them, or what is wrong with them."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            f"messages must be a list of {{'role': ..., 'content': ...}}, got {type(messages).__name__}."
        )
    if not messages:
        raise InvalidRequestError("there are no messages: give at least one.")
    return [_checked_message(message, index) for index, message in enumerate(messages)]


def _checked_message(message: Any, index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"message {index} must be {{'role': ..., 'content': ...}}, got {type(message).__name__}."
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"message {index} needs a 'role' such as 'user', got {role!r}.")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_part_text(part, index) for part in content)
    elif content is None and not message.get("tool_calls"):
        raise InvalidRequestError(f"message {index} has no 'content': give a text.")
    elif content is not None and not isinstance(content, str):
        raise InvalidRequestError(f"message {index} has a 'content' of type {type(content).__name__}, expected a text.")
    return {**message, "content": content}


def _part_text(part: Any, index: int) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise InvalidRequestError(
        f"message {index} has a content part that isn't text; expected parts of the form "
        "{'type': 'text', 'text': ...}. Forerun serves text models only."
    )
