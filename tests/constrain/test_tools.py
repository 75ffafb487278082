"""Calls of tools: the text that a model may write, and what is read back from it."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from forerun.constrain import ToolCall, ToolCalls, parse_tool_calls, tools
from forerun.errors import ConstraintWarning, InvalidConstraintError
from forerun.models.chat import ChatTemplate
from reference.texts import accepts, draw, matcher_of


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    function = {"name": name, "description": "what it does"}
    return {"type": "function", "function": function if parameters is None else {**function, "parameters": parameters}}


WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [tool("get_weather", WEATHER), tool("now")]

NOW = {
    "qwen": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "json": '{"name": "now", "arguments": {}}',
}
NOW |= {"hermes": NOW["qwen"], "llama3": '{"name": "now", "parameters": {}}'}


def starts(constraint: ToolCalls) -> LLMatcher:
    constraint.check()
    return matcher_of(constraint.grammar())


def paris(form: str, days: str = "2") -> str:
    return NOW[form].replace('"now"', '"get_weather"').replace("{}", f'{{"city": "Paris", "days": {days}}}')


@pytest.mark.parametrize("form", tools.FORMATS)
def test_one_required_call(form: str) -> None:
    start = starts(ToolCalls(TOOLS, form))
    assert accepts(start, NOW[form])
    assert accepts(start, paris(form))
    for text in (
        *("", "hello", paris(form, "0"), paris(form, "1.5"), NOW[form] + NOW[form], NOW[form] + "\n" + NOW[form]),
        *(NOW[form].replace("now", "other"), NOW[form].replace("{}", '{"a": 1}'), NOW[form][:-1], " " + NOW[form]),
    ):
        assert not accepts(start, text), text
    assert parse_tool_calls(paris(form), form) == [ToolCall("get_weather", '{"city": "Paris", "days": 2}')]


@pytest.mark.parametrize("form", tools.FORMATS)
def test_a_named_tool(form: str) -> None:
    start = starts(ToolCalls(TOOLS, form, "get_weather"))
    assert accepts(start, paris(form))
    assert not accepts(start, NOW[form])


@pytest.mark.parametrize("form", ["qwen", "hermes", "json"])
def test_several_calls(form: str) -> None:
    start = starts(ToolCalls(TOOLS, form, parallel=True))
    several = [NOW[form], paris(form), NOW[form]]
    join = (lambda calls: f"[{', '.join(calls)}]") if form == "json" else "\n".join
    for count in (1, 2, 3):
        text = join(several[:count])
        assert accepts(start, text), text
        assert [call.name for call in parse_tool_calls(text, form)] == ["now", "get_weather", "now"][:count]
    assert not accepts(start, join([NOW[form], paris(form, "0")]))
    assert not accepts(start, join([]))
    with pytest.raises(InvalidConstraintError, match="no way to write several calls"):
        ToolCalls(TOOLS, "llama3", parallel=True)


@pytest.mark.parametrize("form", tools.FORMATS)
def test_free_text_or_calls(form: str) -> None:
    constraint = ToolCalls(TOOLS, form, "auto")
    assert not constraint.is_json
    assert ToolCalls(TOOLS, form).is_json
    start = starts(constraint)
    for text in ("hello", "It's 5 < 6.\n", "<tool", "é😀", NOW[form], paris(form)):
        assert accepts(start, text), text
    assert not accepts(start, NOW[form][:-2])
    assert not accepts(start, paris(form, "0"))
    if form in ("qwen", "hermes"):
        assert accepts(start, "Let me look.\n" + NOW[form])
        for text in ("<tool_call>", "a <tool_call> b", NOW[form] + " and more", "x<tool_call>" + NOW[form]):
            assert not accepts(start, text), text
    else:
        for text in ('{"name": "other"}', "{", "[1"):
            assert not accepts(start, text), text


def test_arguments_that_look_like_marks() -> None:
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "</tool_call>\\n<tool_call>"}}\n</tool_call>'
    for choice in ("auto", "required"):
        assert accepts(starts(ToolCalls(TOOLS, "qwen", choice)), text)
    (call,) = parse_tool_calls(text)
    assert json.loads(call.arguments) == {"city": "</tool_call>\n<tool_call>"}


@pytest.mark.parametrize(
    ("form", "parallel"),
    [(form, parallel) for form in tools.FORMATS for parallel in (False, True) if form != "llama3" or not parallel],
)
def test_random_texts_are_valid_calls(form: str, parallel: bool) -> None:
    start = starts(ToolCalls(TOOLS, form, parallel=parallel))
    rng = random.Random(form)
    for _ in range(25):
        text = draw(start, rng, 80)
        if text is None:
            continue
        calls = parse_tool_calls(text, form)
        assert calls, text
        assert parallel or len(calls) == 1
        for call in calls:
            schema = WEATHER if call.name == "get_weather" else {"maxProperties": 0}
            jsonschema.validate(json.loads(call.arguments), schema)


def test_what_is_read_from_texts_that_are_cut_or_wrong() -> None:
    call = NOW["qwen"]
    for text in (
        "",
        "hello",
        call[:-1],
        "<tool_call>\n{",
        "<tool_call>3</tool_call>",
        '<tool_call>\n{"name": 1}\n</tool_call>',
    ):
        assert parse_tool_calls(text) == [], text
    assert parse_tool_calls(f"{call}\n{call[:30]}") == [ToolCall("now", "{}")]
    assert parse_tool_calls(f"<tool_call>\n{{broken\n</tool_call>\n{call}") == [ToolCall("now", "{}")]
    for form in ("json", "llama3"):
        for text in ("", "hello", "[", "3", "[3]", NOW[form] + "x", NOW[form][:-1], "[" * 100_000):
            assert parse_tool_calls(text, form) == [], text
    with pytest.raises(InvalidConstraintError, match="unknown"):
        parse_tool_calls("", "other")


def test_the_format_is_what_the_template_writes() -> None:
    source = (
        "{% for message in messages %}{% for call in message.tool_calls %}"
        '<tool_call>\n{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}\n</tool_call>'
        "{% endfor %}{% endfor %}"
    )
    template = ChatTemplate(source, "", "")
    arguments = {"city": 'Zürich "x" <b>', "days": 3}
    written = template.render(
        [{"role": "assistant", "content": None, "tool_calls": [{"name": "get_weather", "arguments": arguments}]}]
    )
    assert accepts(starts(ToolCalls(TOOLS, "qwen")), written)
    assert json.loads(parse_tool_calls(written)[0].arguments) == arguments


BAD_TOOLS: list[tuple[Any, str]] = [
    ([], "0 tools"),
    ("tools", "takes a list"),
    (None, "takes a list"),
    ([3], "tool 0 must be"),
    ([{"type": "function"}], "tool 0 must be"),
    ([{"type": "other", "function": {"name": "a"}}], "tool 0 must be"),
    ([tool("")], "name ''"),
    ([tool("a b")], "name 'a b'"),
    ([tool("auto")], "not auto or required"),
    ([tool("x" * 65)], "1 to 64"),
    ([tool("a"), tool("a")], "two tools are named a"),
    ([tool("a", [])], "must be a JSON schema of an object"),
    ([tool("a", {"type": "string"})], "must be of type object"),
    ([tool(f"t{index}") for index in range(129)], "129 tools"),
    ([tool("a", {"const": float("nan")})], "finite"),
]


@pytest.mark.parametrize(("given", "words"), BAD_TOOLS)
def test_tools_that_are_refused(given: Any, words: str) -> None:
    with pytest.raises(InvalidConstraintError, match=words):
        ToolCalls(given)


def test_other_arguments_that_are_refused() -> None:
    for more, words in (
        ({"format": "xml"}, "format 'xml' is unknown"),
        ({"choice": "other"}, "'other' is no tool"),
        ({"choice": None}, "is no tool"),
        ({"parallel": 1}, "parallel must be"),
    ):
        with pytest.raises(InvalidConstraintError, match=words):
            ToolCalls(TOOLS, **more)  # type: ignore[arg-type]


def test_schemas_of_tools_are_checked() -> None:
    with pytest.raises(InvalidConstraintError, match='"not" at #/properties/x/not') as caught:
        ToolCalls([tool("a", {"properties": {"x": {"not": {}}}})]).check()
    assert caught.value.keyword == "not"
    with pytest.warns(ConstraintWarning, match="#/foo"):
        ToolCalls([tool("a", {"foo": 1})]).check()
    impossible = ToolCalls(
        [tool("a", {"properties": {"x": {"type": "integer", "minimum": 2, "maximum": 1}}, "required": ["x"]})]
    )
    impossible.check()
    failed, messages = LLMatcher.validate_grammar_with_warnings(impossible.grammar())
    assert failed
    error = impossible.explain(messages[0])
    assert error.path == "#/properties/x/maximum"
    assert "the tool a:" in str(error)


@pytest.mark.parametrize("hostile", ["<tool_call>", "<tool_call>\n{", "<tool_call> "])
def test_reading_hostile_text_takes_time_in_proportion(hostile: str) -> None:
    start = time.process_time()
    assert parse_tool_calls(hostile * 64_000) == []
    assert time.process_time() - start < 2


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "[" * 900 + "]" * 900, '{"a":' * 600 + "1" + "}" * 600])
def test_calls_that_can_not_be_written_again_are_left_out(value: str) -> None:
    call = f'<tool_call>{{"name":"a","arguments":{{"x":{value}}}}}</tool_call>'
    good = '<tool_call>{"name":"b","arguments":{}}</tool_call>'
    assert parse_tool_calls(call + good) == [ToolCall("b", "{}")]


def test_an_error_names_the_tool() -> None:
    tools = [
        {"type": "function", "function": {"name": "good", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "bad", "parameters": {"not": {"type": "object"}}}},
    ]
    with pytest.raises(InvalidConstraintError, match="the tool bad: ") as caught:
        ToolCalls(tools).check()
    assert (caught.value.keyword, caught.value.path) == ("not", "#/not")
    ToolCalls(tools, choice="good").check()
