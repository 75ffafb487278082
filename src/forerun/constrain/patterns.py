"""Regular expressions of JSON Schema in the syntax that llguidance compiles.

`pattern` and `patternProperties` hold ECMA-262 expressions that search in a string
(https://json-schema.org/draft/2020-12/json-schema-core#name-regular-expressions). llguidance takes Rust's
syntax without look-around, so anchors are resolved here: the result always matches a whole string. Where
ECMA-262 and Python differ over a class (`\\s`, `\\W`, ...), the characters of a value must be in it by both; which keys
a pattern is about is up to ECMA-262 alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

MAX_ALTERNATIVES: Final = 256
"""Most alternatives that resolving anchors may multiply a pattern into."""

MAX_REPEATS: Final = 100_000
MAX_NESTING: Final = 100

ANY: Final = "(?s:.)"

_SPACE_BOTH: Final = r"\x{9}-\x{d}\x{20}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_SPACE_EITHER: Final = _SPACE_BOTH + r"\x{1c}-\x{1f}\x{85}\x{feff}"
_DIGIT: Final = "0-9"
_WORD: Final = "0-9A-Za-z_"
_DIGIT_EITHER: Final = r"\p{Nd}"
_WORD_EITHER: Final = r"\p{L}\p{N}\p{M}_"

_CAUTIOUS: Final = {"d": (_DIGIT, _DIGIT_EITHER), "w": (_WORD, _WORD_EITHER), "s": (_SPACE_BOTH, _SPACE_EITHER)}
"""The characters of a class: in it by every reading, and in it by any."""

_ECMA: Final = {
    "d": (_DIGIT, _DIGIT),
    "w": (_WORD, _WORD),
    "s": (_SPACE_BOTH + r"\x{feff}", _SPACE_BOTH + r"\x{feff}"),
}

_WIDE: Final = {name: (either, both) for name, (both, either) in _CAUTIOUS.items()}

_CONTROL: Final = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}


class PatternError(ValueError):
    """An expression that can't be enforced; the message says why and where."""


@dataclass
class _Anchor:
    """`^` or `$`."""

    start: bool


@dataclass
class _Group:
    """Alternatives in parentheses, and the quantifier behind them."""

    alternatives: list[list[_Term]]
    quantifier: str = ""

    @property
    def anchored(self) -> bool:
        """Whether there is an anchor anywhere inside."""
        return any(
            isinstance(term, _Anchor) or (isinstance(term, _Group) and term.anchored)
            for terms in self.alternatives
            for term in terms
        )


@dataclass
class _Atom:
    """A character or class in Rust's syntax, and the quantifier behind it."""

    text: str
    quantifier: str = ""


_Term = _Anchor | _Group | _Atom


def whole(pattern: str, *, exact: bool = False, wide: bool = False) -> str:
    """The Rust expression of all strings in which an ECMA-262 expression finds something.

    It holds no anchors and no look-around, and stands for a whole string. Unless `exact`, strings are left out of which
    Python's expressions would say otherwise because of a class; `wide` puts those in. Raises PatternError.
    """
    parsed = _Parser(pattern, _WIDE if wide else _ECMA if exact else _CAUTIOUS).parse()
    alternatives = []
    for terms in _resolved(parsed):
        start = bool(terms) and isinstance(terms[0], _Anchor) and terms[0].start
        while terms and isinstance(terms[0], _Anchor) and terms[0].start:
            terms = terms[1:]
        end = bool(terms) and isinstance(terms[-1], _Anchor) and not terms[-1].start
        while terms and isinstance(terms[-1], _Anchor) and not terms[-1].start:
            terms = terms[:-1]
        if any(isinstance(term, _Anchor) or (isinstance(term, _Group) and term.anchored) for term in terms):
            raise PatternError("^ and $ can only stand at the start and at the end of an alternative")
        body = "".join(map(_written, terms))
        if not start:
            body = f"{ANY}*{body}"
        if not end and (terms or start):
            body = f"{body}{ANY}*"
        alternatives.append(body)
    return "|".join(alternatives)


def none_of(texts: Iterable[str]) -> str:
    """The Rust expression of all strings but some."""
    root = _Trie()
    for text in texts:
        node = root
        for character in text:
            node = node.children.setdefault(character, _Trie())
        node.ends = True
    return root.complement()


def literal(text: str) -> str:
    """A text as an expression that matches only it."""
    return "".join(map(_character, text))


def any_of(texts: Sequence[str]) -> str:
    """The Rust expression of some strings."""
    return "|".join(map(literal, texts))


@dataclass
class _Trie:
    children: dict[str, _Trie] = field(default_factory=dict)
    ends: bool = False

    def complement(self) -> str:
        """What may follow so that the whole is none of the texts."""
        if not self.children:
            return f"{ANY}+" if self.ends else f"{ANY}*"
        others = "[^" + "".join(_character(character) for character in self.children) + "]"
        options = [(_guarded(others) if {'"', "\\"} & self.children.keys() else others) + f"{ANY}*"]
        for character, child in self.children.items():
            inner = child.complement()
            options.append(f"{_character(character)}(?:{inner})" if "|" in inner else _character(character) + inner)
        if not self.ends:
            options.append("")
        return "|".join(options)


def _guarded(text: str) -> str:
    """A class without those control characters that JSON has no letter for.

    llguidance lets a class with (nearly) all of them match the escapes of " and \\ as well, be they in it or not.
    """
    return rf"[{text}&&[^\x{{0}}-\x{{7}}\x{{b}}\x{{e}}-\x{{1f}}]]"


def _character(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"


def _written(term: _Term) -> str:
    if isinstance(term, _Group):
        inner = "|".join("".join(map(_written, terms)) for terms in term.alternatives)
        return f"(?:{inner}){term.quantifier}"
    assert isinstance(term, _Atom)
    return term.text + term.quantifier


def _resolved(alternatives: list[list[_Term]]) -> list[list[_Term]]:
    """Groups with anchors inside, multiplied out, so that anchors stand at the top."""
    done: list[list[_Term]] = []
    todo = list(reversed(alternatives))
    while todo:
        terms = todo.pop()
        at = next((i for i, term in enumerate(terms) if isinstance(term, _Group) and term.anchored), None)
        if at is None:
            done.append(terms)
        else:
            group = terms[at]
            assert isinstance(group, _Group)
            if group.quantifier:
                raise PatternError("^ and $ can't stand in a repeated group")
            todo += [terms[:at] + inner + terms[at + 1 :] for inner in reversed(group.alternatives)]
        if len(done) + len(todo) > MAX_ALTERNATIVES:
            raise PatternError(f"its anchors make more than {MAX_ALTERNATIVES} alternatives")
    return done


class _Parser:
    def __init__(self, pattern: str, classes: dict[str, tuple[str, str]]) -> None:
        self._text = pattern
        self._classes = classes
        self._at = 0
        self._depth = 0

    def parse(self) -> list[list[_Term]]:
        alternatives = self._alternatives()
        if self._at < len(self._text):
            raise self._error("a ) closes nothing")
        return alternatives

    def _error(self, what: str) -> PatternError:
        return PatternError(f"{what} (at character {self._at})")

    def _peek(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise self._error("it ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _alternatives(self) -> list[list[_Term]]:
        alternatives: list[list[_Term]] = [[]]
        while self._at < len(self._text) and not self._peek(")"):
            if self._peek("|"):
                self._at += 1
                alternatives.append([])
            else:
                alternatives[-1].append(self._term())
        return alternatives

    def _term(self) -> _Term:
        character = self._next()
        if character in "^$":
            if self._at < len(self._text) and self._text[self._at] in "*+?":
                raise self._error("^ and $ can't be repeated")
            return _Anchor(character == "^")
        term: _Group | _Atom
        if character == "(":
            term = self._group()
        elif character == "[":
            term = _Atom(self._class())
        elif character == ".":
            term = _Atom(r"[^\x{a}]" if self._classes is _WIDE else r"[^\x{a}\x{d}\x{2028}\x{2029}]")
        elif character == "\\":
            term = _Atom(self._escape())
        elif character in "*+?":
            self._at -= 1
            raise self._error(f"there is nothing before {character} to repeat")
        elif character == "{" and self._at < len(self._text) and self._text[self._at] in "0123456789,":
            raise self._error("a { starts a repetition of nothing; write \\{ for the character")
        else:
            term = _Atom(_character(character))
        term.quantifier = self._quantifier()
        return term

    def _group(self) -> _Group:
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise self._error(f"groups are nested deeper than {MAX_NESTING}")
        if self._peek("?"):
            if any(self._peek(start) for start in ("?=", "?!", "?<=", "?<!")):
                raise self._error("look-around isn't supported")
            if self._peek("?:"):
                self._at += 2
            elif self._peek("?<") or self._peek("?P<"):
                end = self._text.find(">", self._at)
                if end < 0:
                    raise self._error("the name of a group has no end")
                self._at = end + 1
            else:
                raise self._error("flags and other (? groups aren't part of JSON Schema's expressions")
        group = _Group(self._alternatives())
        if not self._peek(")"):
            raise self._error("a ( has no )")
        self._at += 1
        self._depth -= 1
        return group

    def _quantifier(self) -> str:
        quantifier = ""
        if self._at < len(self._text) and self._text[self._at] in "*+?":
            quantifier = self._next()
        elif self._peek("{"):
            end = self._text.find("}", self._at)
            inside = self._text[self._at + 1 : end] if end > 0 else ""
            low, comma, high = inside.partition(",")
            if low.isascii() and low.isdecimal() and (not high or (high.isascii() and high.isdecimal())):
                if max(len(low), len(high)) > 9 or max(int(low), int(high or 0)) > MAX_REPEATS:
                    raise self._error(f"it repeats something more than {MAX_REPEATS} times")
                if high and int(low) > int(high):
                    raise self._error(f"{{{inside}}} has its numbers in the wrong order")
                self._at = end + 1
                quantifier = f"{{{int(low)}{comma}{int(high) if high else ''}}}"
            elif inside.startswith(",") and inside[1:].isdecimal():
                raise self._error(f"write {{0{inside}}} for {{{inside}}}, which engines read differently")
        if quantifier and self._peek("?"):
            self._at += 1
        if quantifier and self._at < len(self._text) and self._text[self._at] in "*+?":
            raise self._error("a repetition is repeated")
        return quantifier

    def _escape(self) -> str:
        """An escape outside of a class."""
        character = self._next()
        if character.lower() in self._classes:
            surely, possibly = self._classes[character.lower()]
            return f"[{surely}]" if character.islower() else f"[^{possibly}]"
        if character in "pP":
            return self._property(character)
        if character in "bB":
            raise self._error(f"\\{character} (a word boundary) isn't supported")
        if character in "123456789k":
            raise self._error("references to groups aren't supported")
        return _code(self._code(character))

    def _property(self, character: str) -> str:
        end = self._text.find("}", self._at)
        if not self._peek("{") or end < 0:
            raise self._error(f"\\{character} needs the name of a Unicode property in braces")
        name = self._text[self._at + 1 : end]
        if not name or not all(part.isascii() and (part.isalnum() or part in "_=") for part in name):
            raise self._error(f"{name!r} is no Unicode property")
        self._at = end + 1
        return f"\\{character}{{{name}}}"

    def _code(self, character: str) -> int:
        """The code point of an escape for one character, whose first letter has been read."""
        if character == "0" and self._at < len(self._text) and self._text[self._at].isdecimal():
            raise self._error("octal escapes aren't part of JSON Schema's expressions")
        if character in _CONTROL:
            return _CONTROL[character]
        if character == "x":
            return self._hex(2)
        if character == "c":
            letter = self._next()
            if not (letter.isascii() and letter.isalpha()):
                raise self._error("\\c needs a letter")
            return ord(letter) % 32
        if character == "u":
            return self._unicode()
        if character.isalnum():
            hint = "; use ^ and $" if character in "AzZ" else ""
            raise self._error(f"\\{character} isn't part of JSON Schema's expressions{hint}")
        return ord(character)

    def _unicode(self) -> int:
        if self._peek("{"):
            end = self._text.find("}", self._at)
            digits = self._text[self._at + 1 : end] if end > 0 else ""
            if not 1 <= len(digits) <= 6:
                raise self._error("\\u{ needs hexadecimal digits and }")
            self._at += 1
            code = self._hex(len(digits))
            self._at += 1
        else:
            code = self._hex(4)
            if 0xD800 <= code < 0xDC00 and self._peek("\\u"):
                self._at += 2
                low = self._hex(4)
                if not 0xDC00 <= low < 0xE000:
                    raise self._error("a surrogate stands alone")
                code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise self._error(f"U+{code:04X} is no character")
        return code

    def _hex(self, count: int) -> int:
        digits = self._text[self._at : self._at + count]
        if len(digits) < count or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
            raise self._error(f"an escape needs {count} hexadecimal digits")
        self._at += count
        return int(digits, 16)

    def _class(self) -> str:
        negated = self._peek("^")
        self._at += negated
        if self._peek("]"):
            raise self._error("engines read [] and [^] differently; write \\] for the character")
        items: list[str] = []
        ranges: list[tuple[int, int]] = []
        while not self._peek("]"):
            first = self._class_item(negated)
            if self._peek("-") and not self._peek("-]"):
                self._at += 1
                last = self._class_item(negated)
                if isinstance(first, int) and isinstance(last, int):
                    if first > last:
                        raise self._error("a range in a class runs backwards")
                    ranges.append((first, last))
                    continue
                ranges.append((ord("-"), ord("-")))
                parts = [first, last]
            else:
                parts = [first]
            for part in parts:
                if isinstance(part, int):
                    ranges.append((part, part))
                else:
                    items.append(part)
        self._at += 1
        inside = "".join([*items, *(_range(first, last) for first, last in ranges)])
        text = f"[{'^' if negated else ''}{inside}]"
        marks = [any(first <= ord(mark) <= last for first, last in ranges) for mark in '"\\']
        wide = any(item.startswith("[^") for item in items)
        named = any(item.startswith("\\") and item[1] in "pP" for item in items)
        if negated:
            return _guarded(text) if any(marks) or wide or named else text
        low = any(first < 0x20 for first, _ in ranges)
        return _guarded(text) if (low or named) and not all(marks) and not wide else text

    def _class_item(self, negated: bool) -> int | str:
        """A code point, or a class in Rust's syntax."""
        character = self._next()
        if character != "\\":
            return ord(character)
        escape = self._next()
        if escape.lower() in self._classes:
            surely, possibly = self._classes[escape.lower()]
            if escape.islower():
                return possibly if negated else surely
            return f"[^{surely if negated else possibly}]"
        if escape in "pP":
            return self._property(escape)
        if escape == "b":
            return 8
        if escape == "B" or escape in "123456789k":
            raise self._error(f"\\{escape} can't stand in a class")
        return self._code(escape)


def _code(code: int) -> str:
    return f"\\x{{{code:x}}}"


def _range(first: int, last: int) -> str:
    """A range without the surrogates, which no text contains."""
    pieces = [(first, min(last, 0xD7FF)), (max(first, 0xE000), last)]
    return "".join(f"{_code(low)}-{_code(high)}" for low, high in pieces if low <= high)
