"""Choices, expressions and grammars: what is accepted, what is refused, and how constraints are told apart."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from llguidance import LLMatcher

from forerun.constrain import Choice, Constraint, Json, JsonSchema, Lark, Regex, ToolCalls
from forerun.constrain.spec import MAX_CHOICES, MAX_CONSTRAINT_BYTES, MAX_REPEATS, repeats
from forerun.errors import InvalidConstraintError
from reference.texts import TOKENIZER, accepts, matcher_of

TOOL = {"type": "function", "function": {"name": "f"}}


def starts(constraint: Constraint) -> LLMatcher:
    constraint.check()
    return matcher_of(constraint.grammar())


def test_equal_by_type_and_content() -> None:
    constraints: list[Constraint] = [
        *(Regex("a"), Regex("b"), Lark("a"), Choice(["a"]), Choice(["a", "b"]), Choice(["b", "a"]), Choice(["a,b"])),
        *(Json(), Json("flexible"), JsonSchema({}), JsonSchema({}, "flexible"), JsonSchema(True)),
        *(
            ToolCalls([TOOL]),
            ToolCalls([TOOL], "json"),
            ToolCalls([TOOL], choice="auto"),
            ToolCalls([TOOL], parallel=True),
        ),
    ]
    assert len({constraint.key for constraint in constraints}) == len(constraints)
    assert len(set(constraints)) == len(constraints)
    assert Choice(["a"]) == Choice(("a",))
    assert Regex("a") != "a"
    with pytest.raises(AttributeError):
        Regex("a").pattern = "b"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ([], "no choices"),
        ([""], "only choice is the empty text"),
        (["a", "b", "a"], "'a' appears more than once"),
        ("abc", "takes a list"),
        (None, "takes a list"),
        ([1], "choice 0 of Choice must be a text"),
        (["a", None], "choice 1"),
        (["\ud800"], r"lone surrogate \(U\+D800\)"),
        (["x" * (MAX_CONSTRAINT_BYTES + 1)], "limit"),
        (["x" * MAX_CONSTRAINT_BYTES, "y"], "limit"),
        ([str(index) for index in range(MAX_CHOICES + 1)], "exceed the limit"),
    ],
)
def test_choices_that_are_refused(choices: Any, words: str) -> None:
    with pytest.raises(InvalidConstraintError, match=words):
        Choice(choices).check()


def test_random_choices_are_exact() -> None:
    rng = random.Random(7)
    alphabet = "ab\"'\\/\n\r\t {}[]|()*?+.^$#<>é😀\u0000\u007f\u2028\ufeffu0041"
    for _ in range(60):
        choices = list({"".join(rng.choices(alphabet, k=rng.randint(1, 5))) for _ in range(6)})
        start = starts(Choice(choices))
        for _ in range(20):
            text = rng.choice(choices)
            at = rng.randrange(len(text) + 1)
            changed = text[:at] + rng.choice(alphabet) + text[at:]
            assert accepts(start, text)
            assert accepts(start, changed) == (changed in choices)
            assert accepts(start, text[:at]) == (text[:at] in choices)


def test_many_choices() -> None:
    start = starts(Choice([f"number {index}" for index in range(5000)]))
    assert accepts(start, "number 4999")
    assert accepts(start, "number 4")
    assert not accepts(start, "number 5000")


@pytest.mark.parametrize(
    "pattern",
    [
        *("", "(a", "a)", "[", "[]", "a{2,1}", "*a", "$^", "(?Z)", "\\", r"a\\\\"[:4], r"\p{Foo}"),
        *(r"(?=a)", r"(?<!a)b", r"(a)\1", r"\bfoo", r"\ud83d"),
    ],
)
def test_expressions_that_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidConstraintError) as caught:
        Regex(pattern).check()
    assert "\n" not in str(caught.value)
    assert "pattern" in str(caught.value) or "regular expression" in str(caught.value)


def test_texts_of_the_wrong_kind() -> None:
    for make in (Regex, Lark):
        for value in (None, 3, b"a", ["a"]):
            with pytest.raises(InvalidConstraintError, match="must be a text"):
                make(value)
        with pytest.raises(InvalidConstraintError, match="lone surrogate"):
            make("a\udc00")
        with pytest.raises(InvalidConstraintError, match="limit"):
            make("é" * MAX_CONSTRAINT_BYTES)


def test_catastrophic_expressions_cost_nothing() -> None:
    before = time.monotonic()
    for pattern in (
        r"(a+)+b",
        r"(a|a)*b",
        r"(a|aa)+c",
        r"(.*a){1000}",
        r"(a|b)*a(a|b){20}",
        r"(x+x+)+y",
        r"([a-z]+)*\d",
        "a{100000}",
    ):
        start = starts(Regex(pattern))
        for token in b"a" * 60:
            if not start.try_consume_tokens([token]):
                break
        start.compute_bitmask()
    assert time.monotonic() - before < 5


def test_nested_repetitions_are_limited() -> None:
    for pattern, times in (
        ("a", 1),
        ("a{3}", 3),
        ("(a{3}b){4,5}", 15),
        ("((a{10}){10}){10}", 1000),
        ("a{3}b{7}", 7),
        (r"a\{3}", 1),
        ("[a{9}]{2}", 2),
        (r"(\(a{2}){3}", 6),
        ("(a{2}|b{9}){2}", 18),
        ("a{5,}", 5),
        ("(((", 1),
        ("(a{999999999}", 999999999),
    ):
        assert repeats(pattern) == times, pattern
    with pytest.raises(InvalidConstraintError, match="multiply to 1000000"):
        Regex("((a{100}){100}){100}").check()
    assert repeats("(a{100}){1000}") == MAX_REPEATS


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("garbage", "can't be compiled"),
        ('root ::= root "a" | "b"', "can't be compiled"),
        ("start: missing", 'unknown name: "missing"'),
        ('x: "a"', "start"),
        ("start: /(/", "can't be compiled"),
        ("start: /(?=a)/", "can't be compiled"),
        ('start[max_tokens=3]: "a"', "max_tokens at line 1; use SamplingParams.max_tokens"),
        ('start: x\nx[temperature=0.5]: "a"', "temperature at line 2"),
        ('start: "a"\nx: <[5]>', "names tokens by number at line 2"),
        ("start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(20_000)) + 'r20000: "a"', "20002 rules"),
        ("start: %json {", "no JSON schema after %json at line 1"),
        ("start: %json 3", "must be an object or a boolean"),
        ('start: "a"\nx: %json {"not": {}}', '"not" at #/not'),
        ('start: %json {"type": "string", "tpye": 1}', "did you mean"),
        ("start: %json false", "false"),
    ],
)
def test_grammars_that_are_refused(grammar: str, words: str) -> None:
    with pytest.raises(InvalidConstraintError, match=words):
        Lark(grammar).check()


def test_schemas_inside_grammars_are_enforced_as_alone() -> None:
    start = starts(
        Lark('start: "<" value ">" // %json 1\nvalue: %json {"type":"object","properties":{"a":{"type":"null"}}}')
    )
    assert accepts(start, '<{"a":null,"b":1}>')
    for text in ('<{"a":1}>', '<{ "a":null}>', r'<{"a":null,"\u0061":1}>', '{"a":null}'):
        assert not accepts(start, text), text
    quoted = starts(Lark('start: "%json {" /%json x/ # max_tokens=3\n'))
    assert accepts(quoted, "%json {%json x")


def test_unproductive_grammars_end_in_a_dead_end_not_in_a_text() -> None:
    start = LLMatcher(TOKENIZER, Lark('start: x\nx: x "a"').grammar(), log_level=0)
    assert not start.is_accepting()
