"""Schemas and expressions that broke other engines (cases 22 to 34), and the rest of each kind, through the masks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from forerun.constrain import Choice, Constraint, Json, JsonSchema, Lark, Regex
from forerun.constrain.lower import Lowered
from forerun.constrain.schema import json_grammar
from forerun.errors import ConstraintWarning, InvalidConstraintError
from reference.texts import TOKENIZER, DeadEndError, accepts, allowed, matcher_of


def starts(constraint: Constraint) -> LLMatcher:
    """The start of a constraint, which has been checked as at submission."""
    constraint.check()
    return matcher_of(constraint.grammar())


def check(constraint: Constraint, good: list[str], bad: list[str]) -> None:
    start = starts(constraint)
    assert [text for text in good if not accepts(start, text)] == []
    assert [text for text in bad if accepts(start, text)] == []


def obj(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **more}


INTEGER = {"type": "integer"}
HUGE = "9" * 40

CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    "22 required without properties": ({"type": "object", "required": ["a"]}, ['{"a":1}'], ["{}", '{"b":1}']),
    "22 required and further ones": (
        {"type": "object", "required": ["a"], "additionalProperties": INTEGER},
        ['{"a":1}', '{"a":1,"b":2}'],
        ['{"a":"x"}', '{"b":1}'],
    ),
    "23 allOf of a reference": (
        {
            "allOf": [{"$ref": "#/$defs/x"}, obj({"y": INTEGER})],
            "$defs": {"x": obj({"x": {"type": "integer", "minimum": 10}}, "x")},
        },
        ['{"x":10}', '{"x":10,"y":1}'],
        ['{"x":3}', "{}", '{"x":10,"y":"a"}'],
    ),
    "23 a reference with siblings": (
        {"$ref": "#/$defs/n", "maximum": 20, "$defs": {"n": {"type": "integer", "minimum": 10}}},
        ["10", "20"],
        ["9", "21"],
    ),
    "25 exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 0}, ["0.1", "1"], ["0", "-1", "0.0"]),
    "25 exclusiveMinimum of draft 4": (
        {"type": "number", "minimum": 0, "exclusiveMinimum": True},
        ["0.1", "1"],
        ["0", "-1"],
    ),
    "25 minimum 2": ({"type": "integer", "minimum": 2}, ["2", "10"], ["-1", "1", "02"]),
    "25 one to five": ({"type": "number", "minimum": 1, "maximum": 5}, ["1", "5", "4.9"], ["-5.7", "0.9", "5.1"]),
    "25 minimum -5": ({"type": "integer", "minimum": -5}, ["3", "-3", "-5"], ["-6", "-03"]),
    "25 minimum 3": ({"type": "integer", "minimum": 3}, ["3"], ["-01", "2", "03", "-3"]),
    "25 decimal bounds": (
        {"type": "number", "minimum": -1.5, "exclusiveMaximum": 0.25},
        ["-1.5", "0.20", "0.24", "-1"],
        ["-1.51", "0.25", "0.250", "-2"],
    ),
    "26 maxLength 1": (
        {"type": "string", "maxLength": 1},
        [r'"\""', '"😀"', r'"\ud83d\ude00"', '""', r'"\u0041"', r'"\\"'],
        [r'"\ud83d"', r'"\ude00"', '"\x01"', '"ab"', r'"a\u0041"', r'"\ude00\ud83d"', '"'],
    ),
    "26 minLength 2": ({"type": "string", "minLength": 2}, ['"😀a"', '"ab"', '"e\u0301"'], ['"😀"', '"a"', '""']),
    "26 maxLength 0": ({"type": "string", "maxLength": 0}, ['""'], ['"a"', '"\\n"']),
    "27 control characters": ({"type": "string"}, [r'"\t"', r'"\u0001"'], ['"\t"', '"\x01"', '"\n"']),
    "27 a key with a control character beside others": (
        obj({"a\u0001": INTEGER}, "a\u0001"),
        [r'{"a\u0001":1}', r'{"a\u0001":1,"b":"\n"}'],
        [r'{"a\u0001":1,"\u0061\u0001":2}', r'{"a\u0001":1,"a\u0001":2}', '{"b":1}'],
    ),
    "27 a key with a control character": (
        obj({"a\u0001": INTEGER}, "a\u0001", additionalProperties=False),
        [r'{"a\u0001":1}'],
        ['{"a\x01":1}', '{"a":1}'],
    ),
    "28 129 repetitions": (
        {"type": "string", "pattern": r"^[^\n\r]{1,129}$"},
        [f'"{"a" * 129}"', '"a"'],
        [f'"{"a" * 130}"', '""', r'"\n"'],
    ),
    "28 maxItems 2^64-1": ({"type": "array", "maxItems": 2**64 - 1}, ["[]", "[1,2]"], ["{}"]),
    "29 a recursive tree": (
        obj({"value": INTEGER, "children": {"type": "array", "items": {"$ref": "#"}}}, "value"),
        ['{"value":1}', '{"value":1,"children":[{"value":2,"children":[]}]}'],
        ['{"value":1,"children":[1]}', '{"value":1,"children":[{}]}'],
    ),
    "29 lists that refer to each other": (
        {
            "$ref": "#/$defs/a",
            "$defs": {
                "a": {"type": "array", "items": {"$ref": "#/$defs/b"}},
                "b": obj({"a": {"$ref": "#/$defs/a"}}, "a", additionalProperties=False),
            },
        },
        ["[]", '[{"a":[]}]', '[{"a":[{"a":[]}]}]'],
        ["[[]]", '[{"a":1}]'],
    ),
    "30 const 42": ({"const": 42}, ["42"], ["42.0", "4", "42.5", "true"]),
    "30 const true": ({"const": True}, ["true"], ["True", "1", "false"]),
    "30 const null": ({"const": None}, ["null"], ["None", "0", '""']),
    "30 an enum of one boolean": ({"type": "boolean", "enum": [True]}, ["true"], ["True", "false"]),
    "30 an enum against its type": ({"type": "string", "enum": ["a", 1]}, ['"a"'], ["1"]),
    "30 constants that hold others": (
        {"const": {"a": [1, None, {"b": "é\n"}]}},
        [r'{"a":[1,null,{"b":"é\n"}]}'],
        ['{"a":[1,null]}', "{}"],
    ),
    "31 no properties": (obj({}), ["{}", '{"a":1}'], ["[]", "{", '{"a":1,}']),
    "31 no properties at all": (obj({}, additionalProperties=False), ["{}"], ['{"a":1}']),
    "34 type integer": (INTEGER, ["0", "-0", "1", HUGE, "-" + HUGE], ["1.0", "1e10", "1E2", "01", "-01", "+1", "1."]),
    "34 type number": (
        {"type": "number"},
        ["0", "-0", "1.0", "1e10", "1E-5", "-0.0", "1.50", HUGE],
        ["01", ".5", "1.", "+1", "1e", "NaN", "Infinity", "0x1", "1_0"],
    ),
    "multipleOf of decimals": ({"type": "number", "multipleOf": 0.1}, ["0.3", "1", "-2.5", "0"], ["0.25", "0.01"]),
    "multipleOf and a bound": ({"type": "integer", "multipleOf": 3, "minimum": 4}, ["6", "9"], ["3", "7", "0"]),
    "a list of types": ({"type": ["string", "null"]}, ['"a"', "null"], ["1", "[]"]),
    "tuples of old drafts": (
        {"type": "array", "items": [INTEGER, {"type": "string"}], "additionalItems": False},
        ["[]", "[1]", '[1,"a"]'],
        ['["a"]', '[1,"a",2]'],
    ),
    "prefixItems and items": (
        {"type": "array", "prefixItems": [INTEGER], "items": {"type": "string"}, "minItems": 2},
        ['[1,"a"]', '[1,"a","b"]'],
        ["[1]", "[1,2]", "[]"],
    ),
    "true and false inside": (
        obj({"a": True, "b": False}),
        ['{"a":{}}', '{"c":1}'],
        ['{"b":1}', '{"a":1,"b":null}'],
    ),
    "anyOf beside properties": (
        obj({"a": INTEGER}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
        ['{"a":1}', '{"b":1}', '{"a":1,"b":1}'],
        ["{}", '{"a":"x"}', '{"c":1}'],
    ),
    "dependentRequired": (
        obj({"a": INTEGER, "b": INTEGER}, dependentRequired={"a": ["b"]}),
        ["{}", '{"b":1}', '{"a":1,"b":2}'],
        ['{"a":1}'],
    ),
    "dependencies of draft 7": (
        obj({"a": INTEGER, "b": INTEGER}, dependencies={"a": ["b"], "b": {"required": ["c"]}}),
        ["{}", '{"b":1,"c":0}', '{"a":1,"b":2,"c":null}'],
        ['{"a":1}', '{"b":1}', '{"a":1,"b":2}'],
    ),
    "a pattern on a declared key": (
        obj({"a": {"type": "string"}}, patternProperties={"^a$": {"minLength": 2}}, additionalProperties=False),
        ["{}", '{"a":"xx"}'],
        ['{"a":"x"}', '{"b":1}'],
    ),
    "an anchor and an id": (
        {
            "$id": "https://example.com/root",
            "properties": {"a": {"$ref": "#here"}, "b": {"$ref": "part#/$defs/n"}},
            "$defs": {
                "x": {"$anchor": "here", "type": "integer"},
                "y": {"$id": "part", "$defs": {"n": {"type": "null"}}},
            },
        },
        ['{"a":1,"b":null}', "[]"],
        ['{"a":null}', '{"b":1}'],
    ),
    "strange pointers": (
        {"properties": {"a": {"$ref": "#/$defs/x~1y~0%25"}}, "$defs": {"x/y~%": {"type": "null"}}},
        ['{"a":null}'],
        ['{"a":1}'],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    schema, good, bad = CASES[name]
    check(JsonSchema(schema), good, bad)
    check(JsonSchema(json.dumps(schema)), good, bad)


def test_an_empty_enum_is_refused() -> None:
    with pytest.raises(InvalidConstraintError, match=r'"enum" at #/properties/x/enum has no values') as caught:
        JsonSchema(obj({"x": {"enum": []}})).check()
    assert (caught.value.keyword, caught.value.path) == ("enum", "#/properties/x/enum")


def test_references_that_lead_nowhere_but_to_themselves() -> None:
    for definitions in (
        {"N": {"$ref": "#/$defs/N"}},
        {"N": {"$ref": "#/$defs/M"}, "M": {"allOf": [{"$ref": "#/$defs/N"}]}},
        {"N": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/N"}]}},
    ):
        with pytest.raises(InvalidConstraintError, match="leads back to itself") as caught:
            JsonSchema({"$ref": "#/$defs/N", "$defs": definitions}).check()
        assert caught.value.keyword == "$ref"


@pytest.mark.parametrize("n", [150, 2000])
def test_chains_of_references(n: int) -> None:
    """Nested by reference, they would take all of the compiler's stack."""

    def nested(name: str) -> dict[str, Any]:
        return obj({"a": {"$ref": f"#/$defs/{name}"}}, "a", additionalProperties=False)

    for link in (nested, lambda name: {"$ref": f"#/$defs/{name}"}, lambda name: {"items": {"$ref": f"#/$defs/{name}"}}):
        definitions = {f"d{i}": link(f"d{i + 1}") for i in range(n)}
        schema = JsonSchema({"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{n}": INTEGER}})
        if n == 150:
            starts(schema)
        else:
            with pytest.raises(InvalidConstraintError, match="nested deeper than 400 levels"):
                schema.check()


def test_recursion_that_cannot_end() -> None:
    with pytest.raises(InvalidConstraintError, match="values without end"):
        JsonSchema(obj({"next": {"$ref": "#"}}, "next")).check()
    endless = {"type": "array", "items": {"$ref": "#/$defs/e"}, "minItems": 1}
    check(
        JsonSchema({"anyOf": [{"$ref": "#/$defs/e"}, {"type": "null"}], "$defs": {"e": endless}}),
        ["null"],
        ["[]", "[["],
    )
    check(
        JsonSchema(obj({"e": {"$ref": "#/$defs/e"}, "x": INTEGER}, **{"$defs": {"e": endless}})),
        ['{"x":1}'],
        ['{"e":[]}'],
    )


def test_left_recursion_and_nested_repetition_do_not_hang() -> None:
    check(Lark('start: start "a" | "b"'), ["b", "ba", "baaa"], ["", "a", "ab"])
    check(Lark('start: ("a"*)*'), ["", "aaa"], ["b"])
    check(Regex("([abc]*)*"), ["", "abcabc"], ["d"])
    check(Regex("(a*)*b|(a|aa)+"), ["b", "aaab", "aaaa"], ["", "ba"])


def test_expressions() -> None:
    check(Regex("[0-9]([0-9]|)"), ["1", "12"], ["", "123"])
    check(Regex("^a|ab$"), ["a", "ab"], ["abc", "aab"])
    check(Regex(r'["/\\\n]é'), ['"é', "/é", "\\é", "\né"], ["é"])
    start = starts(Regex("[0-9]([0-9]|)"))
    assert start.consume_token(ord("1"))
    assert start.is_accepting()


def test_a_complete_value_allows_only_the_end() -> None:
    start = starts(JsonSchema({"enum": [1, 12]}))
    assert start.consume_token(ord("1"))
    assert start.is_accepting()
    assert start.consume_token(ord("2"))
    assert start.is_stopped()


def test_any_json() -> None:
    good = ["1", "null", '""', "[]", "{}", '{"a":[1,{"b":null}],"a":2}', r'"\ud83d\ude00"', "-1.5e3"]
    check(Json(), good, ["", "{", "[1,]", '{"a"}', "nul", "[1 ]", r'"\ud83d"', '{"a": 1}', "01"])
    check(Json("flexible"), [*good, '{"a" : 1 , "b":[ ]}', "[\n\t1\r]"], [" 1", "1 ", f"[{' ' * 65}1]"])
    assert accepts(starts(Json("flexible")), f"[{' ' * 64}1]")


def test_whitespace_is_bounded_in_the_flexible_form_and_absent_in_the_compact() -> None:
    schema = obj({"a": {"type": "array", "items": INTEGER}}, "a")
    check(JsonSchema(schema), ['{"a":[1,2]}'], ['{"a": [1,2]}', '{"a":[1, 2]}', '{ "a":[1,2]}'])
    check(
        JsonSchema(schema, whitespace="flexible"),
        ['{"a":[1,2]}', '{ "a" : [ 1 , 2 ] }', f'{{{" " * 64}"a":[]}}'],
        [f'{{{" " * 65}"a":[]}}', ' {"a":[]}', '{"a":[]} '],
    )


CHOICES = [
    "a",
    "ab",
    "abc",
    'say "no"',
    "line\nend",
    "back\\slash",
    "😀",
    "é",
    "\u0001\x7f",
    " ",
    "a/b",
    "{}",
    "<|x|>",
    "\u2028",
]


def test_choices_are_exact_and_one_may_start_another() -> None:
    check(Choice(CHOICES), CHOICES, ["", "abcd", "b", "say ", "\\u0001", "\\n", "e\u0301", "\ufeff"])
    check(Choice(["", "yes"]), ["", "yes"], ["y", "no"])
    start = starts(Choice(["a", "ab"]))
    assert start.consume_token(ord("a"))
    assert start.is_accepting()
    assert ord("b") in allowed(start)


def test_keys_cannot_be_smuggled_in_by_another_spelling() -> None:
    open_object = obj({"a": INTEGER, "/": INTEGER}, "a")
    bad = [r'{"a":1,"\u0061":"x"}', r'{"\u0061":1}', '{"a":1,"a":2}', r'{"a":1,"\/":"x"}']
    check(JsonSchema(open_object), ['{"a":1,"b":[]}', '{"a":1,"b":1,"b":2}', '{"a":1,"aa":1,"":2}'], bad)
    merged = {"allOf": [open_object, {"properties": {"c": {"type": "null"}}}]}
    check(JsonSchema(merged), ['{"a":1,"c":null}'], [*bad, r'{"a":1,"\u0063":1}'])
    by_pattern = {"type": "object", "patternProperties": {"^a": INTEGER}, "additionalProperties": {"type": "string"}}
    check(JsonSchema(by_pattern), ['{"ab":1,"c":"x"}'], [r'{"\u0061b":"x"}', '{"ab":"x"}', '{"c":1}'])
    with_control = obj({"a": INTEGER, "c": {"const": "\u0001"}}, "a")
    check(
        JsonSchema(with_control),
        [r'{"a":1,"c":"\u0001","b":"\u0002"}'],
        [r'{"a":1,"\u0061":"x"}', r'{"a":1,"c":"\u0002"}'],
    )
    with pytest.raises(InvalidConstraintError, match='"const" at #/properties/c/const has a control character'):
        JsonSchema({**with_control, "anyOf": [{"required": ["c"]}, {"required": ["d"]}]}).check()
    rewritten = starts(JsonSchema(open_object))
    as_given = matcher_of(json_grammar(Lowered(open_object, True, (), ())))
    assert not accepts(rewritten, bad[0])
    assert accepts(as_given, bad[0]), "llguidance has closed the hole: the rewriting isn't needed any more"


def test_big_integers() -> None:
    check(JsonSchema({"type": "integer", "minimum": 0}), [str(2**64), HUGE], ["-1"])
    check(JsonSchema({"type": "integer", "maximum": 2**53}), [str(2**53), "-" + HUGE], [str(2**53 + 1)])
    for schema, keyword in (
        ({"const": 2**63}, "const"),
        ({"const": -(2**63)}, "const"),
        ({"enum": [1, 2**53 + 1]}, "enum"),
        ({"const": {"a": [10**30]}}, "const"),
        ({"minimum": 2**64}, "minimum"),
        ({"type": "integer", "exclusiveMaximum": -(2**63)}, "exclusiveMaximum"),
        ({"const": 1e-300}, "const"),
    ):
        with pytest.raises(InvalidConstraintError) as caught:
            JsonSchema(schema).check()
        assert caught.value.keyword == keyword
    for schema in (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "integer", "format": "int64"},
    ):
        constraint = JsonSchema(schema)
        with pytest.warns(ConstraintWarning, match="is enforced"):
            constraint.check()
        start = matcher_of(constraint.grammar())
        assert accepts(start, str(2**62))
        assert accepts(start, str(-(2**62)))
        assert not accepts(start, str(2**63))
        assert not accepts(start, str(-(2**63) - 1))


def test_a_dead_end_is_no_end() -> None:
    start = matcher_of(LLMatcher.grammar_from_lark('start: "a" x\nx: x "b"'))
    assert start.consume_token(ord("a"))
    assert not start.is_accepting()
    assert DeadEndError.__doc__
    assert TOKENIZER.eos_token not in allowed(start) or not start.is_accepting()


def test_schemas_that_are_booleans() -> None:
    for schema in (True, "true", {}, "{}"):
        check(JsonSchema(schema), ["1", '{"a":[null]}'], ["", "{ }"])


def test_numbers_with_more_digits_than_can_be_enforced() -> None:
    with pytest.raises(InvalidConstraintError, match="exact up to 15 digits"):
        JsonSchema({"const": 0.30000000000000004}).check()
    constraint = JsonSchema({"type": "number", "exclusiveMaximum": 0.30000000000000004, "minimum": 0})
    with pytest.warns(ConstraintWarning, match="enforced as 0.3"):
        constraint.check()
    assert not accepts(matcher_of(constraint.grammar()), "0.300000000000000023")


def test_keys_that_engines_read_differently_obey_the_pattern() -> None:
    check(
        JsonSchema({"type": "object", "patternProperties": {"^.*$": {"type": "null"}}}),
        ['{"a":null}', r'{"a\r":null}', r'{"a\n":1}'],
        ['{"a":1}', r'{"a\r":1}'],
    )


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "0.5 0.001", "0 -0 0.0 0.51 -0.1"),
        ({"exclusiveMinimum": 3, "exclusiveMaximum": 3.5}, "3.1 3.001", "3 3.0 3.5 4"),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, "-1.5 -1.001", "-1 -1.0 -0.9 -1.51"),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, "-0.5 -0.001", "0 -0 0.0 -0.0"),
        ({"allOf": [{"exclusiveMinimum": 3}, {"maximum": 3.5}]}, "3.1 3.5", "3 3.0 3.51"),
        ({"allOf": [{"exclusiveMinimum": 3}], "maximum": 3.5}, "3.1 3.5", "3 3.0 3.51"),
    ],
)
def test_exclusive_bounds_at_whole_numbers(schema: dict[str, Any], good: str, bad: str) -> None:
    """llguidance alone lets 3 through above 3 and up to 3.5."""
    constraint = JsonSchema({"type": "number", **schema})
    with pytest.warns(ConstraintWarning, match="the nearest that can be enforced exactly"):
        check(constraint, good.split(), bad.split())


def test_exclusive_bounds_that_need_no_change_are_kept() -> None:
    for schema in ({"exclusiveMinimum": 0, "maximum": 1}, {"exclusiveMinimum": 0}, {"exclusiveMaximum": 2.5}):
        assert not JsonSchema({"type": "number", **schema}).lowered.notes
    with pytest.warns(ConstraintWarning):
        check(JsonSchema({"allOf": [{"exclusiveMinimum": 3}, {"type": "integer"}]}), ["4"], ["3"])
