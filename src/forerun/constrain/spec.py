"""What a text must be, as a caller writes it: the base of all constraints, and those that aren't JSON.

A constraint is cheap to make and immutable. `check` looks at it without a tokenizer, in the caller's
thread; `grammar` writes the grammar that llguidance compiles (https://github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Final

from llguidance import LLMatcher

from forerun.errors import InvalidConstraintError

MAX_CONSTRAINT_BYTES: Final = 4 << 20
"""The largest constraint: bytes of a schema as compact JSON, of a pattern or grammar, or of all choices together."""

MAX_CHOICES: Final = 50_000

MAX_REPEATS: Final = 100_000
"""Most that nested repetitions of a regular expression may multiply to."""


class Constraint(ABC):
    """Base of everything that `SamplingParams.constraint` takes.

    Two constraints are equal, and hash alike, when their type and content are the same.
    """

    is_json: ClassVar[bool] = False
    """Whether texts are JSON, so that the limits on digits apply."""

    @property
    @abstractmethod
    def content(self) -> str:
        """What the constraint says, in full: same content, same texts."""

    @cached_property
    def key(self) -> str:
        """A hash of type and content (hex), for caches."""
        digest = hashlib.sha256(type(self).__name__.encode())
        digest.update(b"\0")
        digest.update(self.content.encode())
        return digest.hexdigest()

    @abstractmethod
    def check(self) -> None:
        """Looks at what can be seen without a tokenizer; fast enough for the caller's thread.

        Raises InvalidConstraintError (for schemas with `keyword` and `path`), and warns with
        ConstraintWarning about what has no effect.
        """

    @abstractmethod
    def grammar(self) -> str:
        """The grammar for llguidance. May take long, and may be called from any thread. Raises as `check` does."""

    def explain(self, message: str) -> InvalidConstraintError:
        """llguidance's error about `grammar` in our words; may compile parts of the constraint to find the place."""
        return InvalidConstraintError(f"{self._title} can't be compiled: {first_line(message)}")

    @property
    def _title(self) -> str:
        return f"the {type(self).__name__} constraint"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constraint):
            return NotImplemented
        return type(self) is type(other) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@dataclass(frozen=True, eq=False)
class Regex(Constraint):
    """The whole text matches a regular expression, in the syntax of Rust's regex crate.

    `^` and `$` may stand at the ends, where they change nothing. There is no look-around, back reference or
    word boundary: these raise InvalidConstraintError, and so do repetitions that multiply to more than MAX_REPEATS.
    `.` is any character but a line end; `\\d`, `\\w` and `\\s` are those of Unicode.
    https://docs.rs/regex/latest/regex/#syntax
    """

    pattern: str

    def __post_init__(self) -> None:
        checked_text(self.pattern, "Regex", "pattern")

    @property
    def content(self) -> str:
        return self.pattern

    def check(self) -> None:
        if not self.pattern:
            raise InvalidConstraintError("the pattern of Regex is empty; only the empty text would match it.")
        if (len(self.pattern) - len(self.pattern.rstrip("\\"))) % 2:
            raise InvalidConstraintError("the pattern of Regex ends in a backslash that escapes nothing.")
        if (times := repeats(self.pattern)) > MAX_REPEATS:
            raise InvalidConstraintError(
                f"the pattern's nested repetitions multiply to {times}; the limit is {MAX_REPEATS}. Make them smaller."
            )
        failed, messages = LLMatcher.validate_grammar_with_warnings(self.grammar())
        if failed:
            raise self.explain(messages[0])

    def grammar(self) -> str:
        return LLMatcher.grammar_from_regex(self.pattern)

    def explain(self, message: str) -> InvalidConstraintError:
        lines = [line.strip() for line in message.splitlines()]
        reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
        if reason is None:
            reason = first_line(message).split("(in regex): ")[-1]
        shown = self.pattern if len(self.pattern) <= 80 else self.pattern[:80] + "..."
        return InvalidConstraintError(f"the regular expression {shown!r} can't be compiled: {reason}")


@dataclass(frozen=True, eq=False)
class Choice(Constraint):
    """The whole text is one of several, character for character.

    One may be the start of another: both can be chosen. The empty text may be one of several.
    """

    choices: Sequence[str]

    def __post_init__(self) -> None:
        given = self.choices
        if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
            raise InvalidConstraintError(f"Choice takes a list of texts, got {type(given).__name__}.")
        object.__setattr__(self, "choices", tuple(given))
        for index, choice in enumerate(self.choices):
            checked_text(choice, "Choice", f"choice {index}")

    @property
    def content(self) -> str:
        return json.dumps(self.choices)

    def check(self) -> None:
        choices = self.choices
        if not choices:
            raise InvalidConstraintError("there are no choices: give at least one text.")
        if len(choices) > MAX_CHOICES:
            raise InvalidConstraintError(f"{len(choices)} choices exceed the limit of {MAX_CHOICES}.")
        if not any(choices):
            raise InvalidConstraintError("the only choice is the empty text, which leaves nothing to generate.")
        if len(set(choices)) != len(choices):
            seen: set[str] = set()
            twice = next(choice for choice in choices if choice in seen or seen.add(choice))  # type: ignore[func-returns-value]
            raise InvalidConstraintError(f"the choice {twice[:80]!r} appears more than once; give each text once.")
        if (size := sum(len(choice.encode()) for choice in choices)) > MAX_CONSTRAINT_BYTES:
            raise InvalidConstraintError(f"the choices have {size} bytes; the limit is {MAX_CONSTRAINT_BYTES}.")

    def grammar(self) -> str:
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + "\n  | ".join(map(quoted, self.choices)))


def quoted(text: str) -> str:
    """A text as a string of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def first_line(message: str) -> str:
    """The part of an error of llguidance that says what is wrong."""
    line = message.strip().splitlines()[0] if message.strip() else "unknown error"
    return line if len(line) <= 500 else line[:500] + "..."


def checked_text(text: object, what: str, part: str) -> str:
    """A text of valid Unicode within the limit, or InvalidConstraintError."""
    if not isinstance(text, str):
        raise InvalidConstraintError(f"the {part} of {what} must be a text, got {type(text).__name__}.")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidConstraintError(
            f"the {part} of {what} has a lone surrogate (U+{ord(text[error.start]):04X}) at {error.start}, which no "
            "text can contain; write the whole character."
        ) from error
    if size > MAX_CONSTRAINT_BYTES:
        raise InvalidConstraintError(f"the {part} of {what} has {size} bytes; the limit is {MAX_CONSTRAINT_BYTES}.")
    return text


_REPETITION: Final = re.compile(r"\{(\d{1,9})(?:,(\d{0,9}))?\}")


def repeats(pattern: str) -> int:
    """The most that nested repetitions of a regular expression multiply to; `*` and `+` count once."""
    most = [1]
    last = 1
    at = 0
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            last = 1
            at += 2
            continue
        if character == "[":
            at = _class_end(pattern, at)
            last = 1
            continue
        if character == "(":
            most.append(1)
            last = 1
        elif character == ")" and len(most) > 1:
            last = most.pop()
            most[-1] = max(most[-1], last)
        elif character == "{" and (found := _REPETITION.match(pattern, at)):
            last *= max(int(found[1]), int(found[2] or 0), 1)
            most[-1] = max(most[-1], last)
            at = found.end()
            continue
        elif character not in "*+?":
            last = 1
        at += 1
    return max(most)


def _class_end(pattern: str, at: int) -> int:
    """The end of a class of characters, whose own brackets may be nested."""
    depth = 0
    while at < len(pattern):
        depth += {"[": 1, "]": -1}.get(pattern[at], 0)
        at += 2 if pattern[at] == "\\" else 1
        if depth <= 0:
            break
    return at
