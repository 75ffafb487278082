"""What can't be enforced is refused at submission, by keyword and place; what JSON Schema doesn't know is listed."""

from __future__ import annotations

import json
import time
import warnings
from typing import Any

import pytest
from llguidance import LLMatcher

from forerun.constrain import JsonSchema, keywords
from forerun.constrain.document import MAX_DEPTH
from forerun.constrain.spec import MAX_CONSTRAINT_BYTES
from forerun.errors import ConstraintWarning, InvalidConstraintError, InvalidRequestError
from reference.texts import accepts, matcher_of

REFUSED: list[tuple[str, Any]] = [
    ("not", {"type": "null"}),
    ("contains", {"type": "null"}),
    ("uniqueItems", True),
    ("propertyNames", {"pattern": "^a"}),
    ("unevaluatedProperties", False),
    ("unevaluatedItems", False),
    ("$dynamicRef", "#a"),
    ("$recursiveRef", "#"),
    ("extends", {}),
    ("disallow", "string"),
    ("divisibleBy", 3),
    ("enum", []),
    ("enum", 3),
    ("type", []),
    ("type", "any"),
    ("type", "int"),
    ("type", 3),
    ("type", ["null", "null"]),
    ("minimum", "a"),
    ("maximum", True),
    ("minLength", -1),
    ("minLength", 1.5),
    ("maxLength", "a"),
    ("minItems", 2**64 - 1),
    ("maxItems", None),
    ("multipleOf", 0),
    ("multipleOf", -2),
    ("multipleOf", 1e-40),
    ("multipleOf", 1e10),
    ("oneOf", []),
    ("anyOf", {}),
    ("allOf", []),
    ("required", True),
    ("required", [1]),
    ("properties", []),
    ("patternProperties", {"(": {}}),
    ("patternProperties", 1),
    ("prefixItems", {}),
    ("$ref", "#/$defs/missing"),
    ("$ref", "#missing"),
    ("$ref", "https://example.com/schema"),
    ("$ref", 3),
    ("format", "foo"),
    ("format", "regex"),
    ("format", 3),
    ("pattern", 3),
    ("pattern", "(a"),
    ("pattern", r"(?=a)b"),
    ("pattern", r"(?<!a)b"),
    ("pattern", r"(a)\1"),
    ("pattern", r"\bfoo"),
    ("pattern", "a$b"),
    ("pattern", "(?i)a"),
    ("pattern", r"\Z"),
    ("pattern", "(" * 500),
    ("dependentRequired", {"a": "b"}),
    ("dependentSchemas", []),
    ("minProperties", 2),
]


@pytest.mark.parametrize(("keyword", "value"), REFUSED, ids=[f"{key}-{str(value)[:20]}" for key, value in REFUSED])
def test_keyword_and_place_are_named(keyword: str, value: Any) -> None:
    schema = {"properties": {"a/b": {"items": {keyword: value}}}}
    with pytest.raises(InvalidConstraintError) as caught:
        JsonSchema(schema).check()
    error = caught.value
    assert isinstance(error, InvalidRequestError)
    assert error.keyword == keyword
    assert error.path == f"#/properties/a~1b/items/{keyword}"
    assert f'"{keyword}" at {error.path}' in str(error)


def test_if_is_refused_only_where_it_says_something() -> None:
    with pytest.raises(InvalidConstraintError, match='"if" at #/if'):
        JsonSchema({"if": {"type": "null"}, "then": {"type": "null"}}).check()
    for harmless in (
        {"if": {"type": "null"}},
        {"then": {"type": "null"}},
        {"uniqueItems": False},
        {"uniqueItems": True, "maxItems": 1},
        {"minContains": 2},
        {"contains": {}, "minContains": 0},
        {"unevaluatedProperties": True},
        {"not": False},
        {"propertyNames": {}},
    ):
        JsonSchema(harmless).check()


def test_definitions_that_nothing_refers_to_say_nothing() -> None:
    JsonSchema({"type": "null", "$defs": {"a": {"not": {}}}, "definitions": {"b": {"enum": []}}}).check()
    with pytest.raises(InvalidConstraintError) as caught:
        JsonSchema({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}).check()
    assert caught.value.path == "#/$defs/a/not"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        *(
            ("oneof", "oneOf"),
            ("require", "required"),
            ("aditionalItems", "additionalItems"),
            ("minlenght", "minLength"),
        ),
        *(("AnyOf", "anyOf"), ("item", "items"), ("propertes", "properties"), ("patern", "pattern"), ("enums", "enum")),
        *(("additionalproperties", "additionalProperties"), ("type:", "type"), ("maxItem", "maxItems")),
        *(("patternPropertys", "patternProperties"), ("unqueItems", "uniqueItems"), ("minimun", "minimum")),
    ],
)
def test_a_misspelled_keyword_is_refused(wrong: str, right: str) -> None:
    with pytest.raises(InvalidConstraintError, match=f'did you mean "{right}"') as caught:
        JsonSchema({"items": {wrong: 1}}).check()
    assert (caught.value.keyword, caught.value.path) == (wrong, f"#/items/{wrong}")


def test_unknown_keywords_are_listed_once_and_have_no_effect() -> None:
    schema = {
        "type": "object",
        "foo": 1,
        "properties": {"bar": {"type": "integer", "propertyOrder": 3, "_format": "x"}},
    }
    constraint = JsonSchema(schema)
    with pytest.warns(ConstraintWarning, match="no effect") as caught:
        constraint.check()
    assert len(caught) == 1
    for path in ("#/foo", "#/properties/bar/propertyOrder", "#/properties/bar/_format"):
        assert path in str(caught[0].message)
    assert accepts(matcher_of(constraint.grammar()), '{"bar":1}')


def test_annotations_pass_silently() -> None:
    known = dict.fromkeys(sorted(keywords.ANNOTATIONS), "text")
    schema = {"title": "T", "x-order": 1, "X-any": 2, **known, "type": "null", "$schema": "https://example.com/other"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        JsonSchema(schema).check()


def test_options_of_the_compiler_in_a_schema_have_no_effect() -> None:
    constraint = JsonSchema({"x-guidance": {"lenient": True, "whitespace_flexible": True}, "type": "array"})
    with pytest.warns(ConstraintWarning, match="x-guidance"):
        constraint.check()
    assert not accepts(matcher_of(constraint.grammar()), "[ ]")


@pytest.mark.parametrize("value", [None, 3, [], 1.5, b"{}", object()])
def test_a_schema_of_another_type(value: Any) -> None:
    with pytest.raises(InvalidConstraintError, match="must be an object"):
        JsonSchema(value).check()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty text"),
        (" \n", "empty text"),
        ("{", "isn't JSON"),
        ("3", "must be an object or a boolean"),
        ("null", "must be an object or a boolean"),
        ('"string"', "must be an object or a boolean"),
        ("[]", "must be an object or a boolean"),
        ("{} {}", "isn't JSON"),
        ('{"type":"null","type":"string"}', 'key "type" appears twice'),
        ('{"minimum":NaN}', "NaN is no number"),
        ('{"minimum":-Infinity}', "no number"),
        ('{"minimum":1e999}', "finite"),
        ('{"minimum":' + "9" * 5000 + "}", "digits"),
        ('{"const":"\\ud800"}', "lone surrogate"),
        ("[" * 100_000, "nested deeper"),
        ('{"items":' * 5000 + "{}" + "}" * 5000, "nested deeper"),
        ("false", "is false"),
        ("\ud800", "lone surrogate"),
    ],
)
def test_texts_that_are_no_schema(text: str, words: str) -> None:
    with pytest.raises(InvalidConstraintError, match=words):
        JsonSchema(text).check()


def test_values_that_are_no_json() -> None:
    loop: dict[str, Any] = {}
    loop["items"] = loop
    for value in (
        {1: 2},
        {"a": {1}},
        {"const": float("nan")},
        {"const": "\udfff"},
        {"\ud800": 1},
        {"const": b""},
        loop,
    ):
        with pytest.raises(InvalidConstraintError):
            JsonSchema(value).check()


def test_nesting_up_to_the_limit() -> None:
    def nested(levels: int) -> Any:
        schema: Any = {"type": "null"}
        for _ in range(levels):
            schema = {"items": schema}
        return schema

    constraint = JsonSchema(nested(MAX_DEPTH - 1))
    constraint.check()
    assert accepts(matcher_of(constraint.grammar()), "[[null,[]]]")
    with pytest.raises(InvalidConstraintError, match="nested deeper"):
        JsonSchema(nested(MAX_DEPTH + 1))


def test_a_schema_is_a_snapshot_with_a_key_of_its_content() -> None:
    given = {"properties": {"a": {"type": "null"}}, "required": ["a"]}
    one = JsonSchema(given)
    same = JsonSchema(json.dumps(given, separators=(",", ":")))
    given["required"].append("b")  # type: ignore[attr-defined]
    assert one == same
    assert hash(one) == hash(same)
    assert one.key == same.key
    others = [
        JsonSchema(given),
        JsonSchema(same.schema, whitespace="flexible"),
        JsonSchema({"required": ["a"], "properties": {"a": {"type": "null"}}}),
    ]
    assert all(one.key != other.key for other in others)
    assert len({one, same, *others}) == 4
    with pytest.raises(InvalidConstraintError, match="whitespace"):
        JsonSchema({}, whitespace="none")  # type: ignore[arg-type]


def test_large_schemas() -> None:
    values = [f"{index:06d}" + "x" * 200 for index in range(5000)]
    schema = {"type": "object", "properties": {"a": {"enum": values}}, "required": ["a"]}
    assert len(json.dumps(schema)) > 1_000_000
    before = time.monotonic()
    constraint = JsonSchema(schema)
    constraint.check()
    start = matcher_of(constraint.grammar())
    assert time.monotonic() - before < 10
    assert accepts(start, json.dumps({"a": values[4999]}, separators=(",", ":")))
    assert not accepts(start, '{"a":"000000"}')
    with pytest.raises(InvalidConstraintError, match=f"limit is {MAX_CONSTRAINT_BYTES}"):
        JsonSchema({"const": "x" * MAX_CONSTRAINT_BYTES})


EXPLAINED: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "integer", "minimum": 5, "maximum": 3}, "maximum", "#/properties/a/maximum"),
    ({"type": "string", "minLength": 5, "maxLength": 3}, "maxLength", "#/properties/a/maxLength"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "maxItems", "#/properties/a/maxItems"),
    ({"type": "string", "pattern": "^a$", "minLength": 2}, "minLength", "#/properties/a/minLength"),
    ({"oneOf": [{"minimum": 1}, {"maximum": 5}]}, "oneOf", "#/properties/a/oneOf"),
    ({"anyOf": [{"type": "null"}, {"oneOf": [{}, {"type": "null"}]}]}, "oneOf", "#/properties/a/anyOf/1/oneOf"),
    ({"$ref": "#/$defs/x"}, "oneOf", "#/$defs/x/oneOf"),
    (
        {"patternProperties": {"^a": {"type": "null"}, "b$": {"type": "string"}}},
        "patternProperties",
        "#/properties/a/patternProperties",
    ),
]


@pytest.mark.parametrize(("schema", "keyword", "path"), EXPLAINED)
def test_errors_of_the_compiler_are_located(schema: dict[str, Any], keyword: str, path: str) -> None:
    whole = {
        "type": "object",
        "properties": {"a": schema, "b": {"type": "string"}},
        "required": ["a"],
        "$defs": {"x": {"oneOf": [{"minimum": 1}, {"maximum": 5}]}},
    }
    constraint = JsonSchema(whole)
    constraint.check()
    failed, messages = LLMatcher.validate_grammar_with_warnings(constraint.grammar())
    assert failed
    error = constraint.explain(messages[0])
    assert (error.keyword, error.path) == (keyword, path)
    assert f'"{keyword}" at {path}' in str(error)


def test_finding_the_place_is_bounded() -> None:
    wide = {f"p{index}": {"type": "object", "properties": {"x": {"type": "string"}}} for index in range(2000)}
    schema = {
        "type": "object",
        "properties": {**wide, "bad": {"type": "integer", "minimum": 2, "maximum": 1}},
        "required": ["bad"],
    }
    constraint = JsonSchema(schema)
    constraint.check()
    before = time.monotonic()
    error = constraint.explain("Unsatisfiable schema: required property 'bad' is unsatisfiable")
    assert time.monotonic() - before < 5
    assert "bad" in str(error)


@pytest.mark.parametrize(
    ("schema", "meant"),
    [
        ({"name": "person", "strict": True, "schema": {"type": "object"}}, 'give what its "schema" holds'),
        ({"name": {"type": "string"}, "age": {"type": "integer"}}, 'put properties into "properties"'),
    ],
    ids=["wrapped", "bare properties"],
)
def test_a_schema_without_a_single_keyword_is_no_schema(schema: dict[str, object], meant: str) -> None:
    """It would allow any JSON, which nobody means who writes so much."""
    with pytest.raises(InvalidConstraintError, match=meant):
        JsonSchema(schema).check()
    JsonSchema({}).check()
    JsonSchema({"title": "anything"}).check()


def test_the_name_of_a_file_is_no_schema() -> None:
    with pytest.raises(InvalidConstraintError, match="not the name of a file"):
        JsonSchema("person.json").check()
