"""ECMA-262 expressions against Python's own, and formats against what defines them."""

from __future__ import annotations

import datetime
import ipaddress
import json
import random
import re
import uuid
from collections.abc import Callable

import pytest
from llguidance import LLMatcher

from forerun.constrain import JsonSchema, formats, patterns
from reference.texts import accepts, draw, matcher_of

PATTERNS = [
    *("^a$", "a", "^a|b$", "(^a|b$)", "^(?:a|b)*$", r"\d+", r"^\D$", r"^[^\d\s]$", r"^\s$", r"^\S\w$", r"^\W$", "^.$"),
    *(r"^[a-c\-]+$", "a{2,3}?", r"^\x61\/$", "^{a}$", "x{", "(?<n>a)b", r"^[\w.-]+$", r"\.js$", "^$", "", "^[]a]"),
    *("^a{0,2}b+$", "a?b??c", r"^[^\]]$", "^(a|^b)c", "^((a))+$", r"^[\s\S]$", r"^\u0061|\t$", "a||b", "^|$", "(|a)b"),
    *('^[^"]$', r"^[^\\]+$", r'^[^"\\]*$', r"^[^\n\\]$", "^[!-~]+$", "^[!#-~]$", r"^[\x00-\[]$", r'^(?:[^\\]|[^"])$'),
]
ALPHABET = '"\\ab3-.\n\rc]{} xé٣\u2028\u00a0_/\t\ufeffjs'


def start_of(expression: str) -> LLMatcher:
    return matcher_of(JsonSchema({"type": "string", "pattern": expression}).grammar())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_like_python(pattern: str) -> None:
    """Never a string that Python refuses; and the same strings, where Python reads the pattern as ECMA-262 does."""
    if pattern == "^[]a]":
        with pytest.raises(patterns.PatternError, match="differently"):
            patterns.whole(pattern)
        return
    start = start_of(pattern)
    python = re.compile(pattern.replace("(?<", "(?P<"))
    as_ecma = re.compile(re.sub(r"(?<!\\)\$(?=$|[|)])", r"\\Z", pattern.replace("(?<", "(?P<")), re.ASCII)
    rng = random.Random(pattern)
    for _ in range(150):
        text = "".join(rng.choices(ALPHABET, k=rng.randint(0, 4)))
        accepted = accepts(start, json.dumps(text, ensure_ascii=False))
        assert not accepted or python.search(text), text
        if text.isascii() and not set(text) & set("\n\r"):
            assert accepted == bool(as_ecma.search(text)), text
    for _ in range(5):
        text = draw(start, rng, 20)
        assert text is None or python.search(json.loads(text)), text


def test_what_patterns_mean_where_engines_differ() -> None:
    for pattern, good, bad in (
        (r"^\d$", ["3"], ["٣"]),
        (r"^\w$", ["a", "_"], ["é"]),
        (r"^\W$", ["-"], ["é", "a"]),
        ("^.$", ["a", "😀"], ["\n", "\r", "\u2028"]),
        (r"^\s$", [" ", "\u00a0", "\n"], ["\u0085", "\u001c"]),
        (r"^\p{Lu}$", ["A", "É"], ["a"]),
        (r"^[\p{L}\d]$", ["é", "3"], ["-"]),
        (r"^\ud83d\ude00$", ["😀"], ["a"]),
        (r"^\u{1F600}$", ["😀"], ["a"]),
        ("^a$", ["a"], ["a\n"]),
        (r"^\cA$", ["\u0001"], ["A"]),
        (r"^[&&~#/]+$", ["&~#/"], ["a"]),
        (r"^a/b$", ["a/b"], ["ab"]),
    ):
        start = start_of(pattern)
        for text in good:
            assert accepts(start, json.dumps(text, ensure_ascii=False)), (pattern, text)
        for text in bad:
            assert not accepts(start, json.dumps(text, ensure_ascii=False)), (pattern, text)
    exact = patterns.whole(r"^\W$", exact=True)
    assert exact != patterns.whole(r"^\W$")


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        *((r"(?=a)", "look-around"), (r"(?<=a)b", "look-around"), (r"(a)\1", "references"), (r"\ba", "word boundary")),
        *(("a$b", "only stand"), ("(^a)*", "repeated group"), ("a**", "repeated"), ("[z-a]", "backwards")),
        *(
            ("(a", r"has no \)"),
            ("a)", "closes nothing"),
            ("[a", "too early"),
            ("a\\", "too early"),
            ("*a", "nothing before"),
        ),
        *(
            (r"\ud83d", "no character"),
            (r"\u{110000}", "no character"),
            (r"\uD83Da", "no character"),
            (r"\x6", "digits"),
        ),
        *(
            ("a{,3}", "differently"),
            ("a{3,2}", "wrong order"),
            ("a{200000}", "more than"),
            ("a{9999999999}", "more than"),
        ),
        *((r"\Z", r"use \^ and \$"), ("(?i)a", "flags"), (r"\p{}", "property"), (r"\p", "property"), (r"\01", "octal")),
        *(
            (r"\q", "isn't part"),
            ("(" * 200, "nested deeper"),
            (r"[\b\B]", "can't stand"),
            ("(?<n", "no end"),
            ("{3}", "nothing"),
        ),
        *(("(^|a)" * 12, "alternatives"), ("^*", "can't be repeated")),
    ],
)
def test_what_is_refused(pattern: str, words: str) -> None:
    with pytest.raises(patterns.PatternError, match=words):
        patterns.whole(pattern)


def test_any_text_gives_an_expression_or_a_clean_error() -> None:
    rng = random.Random(3)
    compiled = 0
    for _ in range(3000):
        text = "".join(rng.choices("ab^$|()[]{}*+?.\\d-,0123uxpw:=<>é", k=rng.randint(0, 12)))
        try:
            expression = patterns.whole(text)
        except patterns.PatternError:
            continue
        compiled += 1
        if compiled % 10 == 0:
            grammar = LLMatcher.grammar_from_json_schema({"type": "string", "pattern": f"^(?:{expression})$"})
            failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
            assert not failed or "Regex is empty" in messages[0] or "Unicode property" in messages[0], (text, messages)
    assert compiled > 300


def test_all_texts_but_some() -> None:
    names = ["a", "ab", "b", "", "é\n", "a/b", "\\"]
    grammar = LLMatcher.grammar_from_json_schema({"type": "string", "pattern": f"^(?:{patterns.none_of(names)})$"})
    rest = matcher_of(grammar)
    for name in names:
        assert not accepts(rest, json.dumps(name, ensure_ascii=False))
    for other in ("aa", "abc", "c", "é", "\n", "a\nb", "é\n\n", "a/", "😀"):
        assert accepts(rest, json.dumps(other, ensure_ascii=False))


def _is(kind: Callable[[str], object]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            kind(text)
        except ValueError:
            return False
        return True

    return check


READERS: dict[str, Callable[[str], bool]] = {
    "date": _is(datetime.date.fromisoformat),
    "date-time": _is(
        lambda text: datetime.datetime.fromisoformat(text.upper()[:19] + re.sub(r"^\.\d+", "", text[19:]).upper())
    ),
    "time": _is(lambda text: datetime.time.fromisoformat(text[:8] + re.sub(r"^\.\d+", "", text[8:]).upper())),
    "ipv4": _is(ipaddress.IPv4Address),
    "ipv6": _is(ipaddress.IPv6Address),
    "uuid": _is(uuid.UUID),
}

EXAMPLES: dict[str, tuple[list[str], list[str]]] = {
    "date": (
        ["2024-02-29", "2000-02-29", "1999-12-31"],
        ["2023-02-29", "1900-02-29", "2023-02-30", "2023-13-01", "23-1-1", "0000-01-01"],
    ),
    "time": (["00:00:00Z", "23:59:59.123+02:00"], ["24:00:00Z", "12:60:00Z", "12:00:00", "1:00:00Z"]),
    "date-time": (
        ["2024-02-29T12:00:00Z", "2023-01-01t00:00:00-08:00"],
        ["2023-02-29T12:00:00Z", "2024-02-29 12:00:00Z"],
    ),
    "duration": (["P1D", "PT1S", "P1Y2M3DT4H5M6S", "P2W"], ["P", "PT", "1D", "P1S", "P1W1D", "P1DT"]),
    "email": (["a@b.c", "a.b+c@example.com"], ["a", "@b", "a@", "a@b@c", "a@-b", ".a@b", "a..b@c"]),
    "hostname": (["a", "a-b.example", "a" * 63], ["-a", "a-", "a_b", "a..b", "a." * 130 + "a", "a" * 64, "xn--a"]),
    "ipv4": (["0.0.0.0", "255.255.255.255"], ["256.1.1.1", "1.2.3", "01.2.3.4", "1.2.3.4.5"]),
    "ipv6": (["::", "::1", "1:2:3:4:5:6:7:8", "fe80::1"], ["1", ":::", "1::2::3", "1:2:3:4:5:6:7:8:9", "g::"]),
    "uuid": (
        ["2EB8AA08-aa98-11ea-b4aa-73b441d16380"],
        ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4ga-73b441d16380"],
    ),
    "uri": (
        ["https://a.b/c?d=e#f", "urn:a:b", "mailto:a@b.c", "http://[::1]:80/"],
        ["a", "//a", "http://a b", "http://a%2", ":a", "#x"],
    ),
    "uri-reference": (["", "/a", "a/b", "../x?y#z", "#f", "https://a.b"], ["a b", "%", "\\"]),
    "json-pointer": (["", "/a", "/a~1b/~0"], ["a", "/~", "/~2", "#/a"]),
    "relative-json-pointer": (["0", "1/a", "2#"], ["", "01", "-1", "/a"]),
    "byte": (["", "YQ==", "YWI=", "YWJj"], ["Y", "YQ=", "YR==", "Y Q="]),
}


@pytest.mark.parametrize("name", formats.PATTERNS)
def test_formats(name: str) -> None:
    constraint = JsonSchema({"type": "string", "format": name})
    constraint.check()
    start = matcher_of(constraint.grammar())
    good, bad = EXAMPLES.get(name, ([], []))
    assert [text for text in good if not accepts(start, json.dumps(text))] == []
    assert [text for text in bad if accepts(start, json.dumps(text))] == []
    rng = random.Random(name)
    reader = READERS.get(name, lambda _: True)
    for _ in range(30):
        text = draw(start, rng, 40)
        assert text is None or reader(json.loads(text)), text


def test_formats_of_numbers_and_none() -> None:
    for name, good, bad in (
        ("int32", str(2**31 - 1), str(2**31)),
        ("uint32", "0", "-1"),
        ("double", "1.5", "[]"),
    ):
        constraint = JsonSchema({"type": "number", "format": name})
        constraint.check()
        start = matcher_of(constraint.grammar())
        assert accepts(start, good)
        assert not accepts(start, bad)
    both = matcher_of(JsonSchema({"type": "string", "format": "date", "pattern": "^2024"}).grammar())
    assert accepts(both, '"2024-01-01"')
    assert not accepts(both, '"2023-01-01"')


def test_the_comparison_finds_a_wrong_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(patterns._CAUTIOUS, "d", ("0-8", r"\p{Nd}"))
    assert not accepts(start_of(r"^\d$"), '"9"')
    with pytest.raises(AssertionError):
        monkeypatch.setitem(patterns._CAUTIOUS, "s", ("a", "a"))
        test_like_python(r"^\s$")
