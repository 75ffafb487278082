"""Chat templates: what the sandbox gives them, what it refuses, and how failures read."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import InvalidRequestError, ModelFormatError
from forerun.models import chat
from forerun.models.chat import ChatTemplate
from reference.tiny import CHAT_TEMPLATE

USER = [{"role": "user", "content": "Hi"}]
NOON = datetime(2024, 7, 26, 12, 0)


def render(source: str, messages: Any = USER, **options: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>", now=lambda: NOON).render(messages, **options)


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text()), min_size=1))
def test_chatml_is_rendered_to_the_letter(turns: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": text} for role, text in turns]
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert render(CHAT_TEMPLATE, messages, add_generation_prompt=False) == expected
    assert render(CHAT_TEMPLATE, messages) == expected + "<|im_start|>assistant\n"


def test_what_a_template_sees() -> None:
    assert render("{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}") == "<s></s>True"
    assert render("{{ tools is none }} {{ documents is none }} {{ other is defined }}") == ("True True False")
    assert render("{{ tools[0].name }}{{ thinking }}", tools=[{"name": "f"}], thinking=0) == "f0"
    assert render("{{ bos_token }}{{ documents }}", bos_token="<x>", documents=1) == "<x>1"
    assert render("{{ messages[0].name }}", [{**USER[0], "name": "Ada"}]) == "Ada"
    assert render("{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024"


def test_whitespace_is_trimmed_as_in_hugging_face() -> None:
    assert render("  {% if true %}\n  a\n  {% endif %}\nb\n") == "  a\nb"


def test_loop_controls_and_generation_tag() -> None:
    loop = "{% for n in range(9) %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}"
    assert render(loop) == "01"
    assert render("a{% generation %}b{{ bos_token }}{% endgeneration %}c") == "ab<s>c"


def test_tojson_is_plain_json() -> None:
    value = {"b": "<é> & 'x'", "a": [1, None, True]}
    assert render("{{ v | tojson }}", v=value) == json.dumps(value, ensure_ascii=False)
    assert render("{{ v | tojson(indent=2) }}", v=value) == json.dumps(value, ensure_ascii=False, indent=2)
    assert json.loads(render("{{ v | tojson(ensure_ascii=true, sort_keys=true) }}", v=value)) == value


def test_text_parts_are_joined_and_tool_calls_need_no_content() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert render("{{ messages[0].tool_calls[0].name }}", [call]) == "f"
    assert render("{{ messages[0].content is none }}", [call]) == "True"


def test_messages_are_not_changed() -> None:
    parts = [{"type": "text", "text": "a"}]
    messages = [{"role": "user", "content": parts}]
    render(CHAT_TEMPLATE, messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "must be a list .* got str"),
        ({"role": "user"}, "must be a list .* got dict"),
        (None, "got NoneType"),
        ([], "no messages"),
        (["Hi"], "message 0 must be .* got str"),
        ([{"content": "x"}], "message 0 needs a 'role'"),
        ([{"role": "", "content": "x"}], "needs a 'role'"),
        ([{"role": 3, "content": "x"}], "needs a 'role'"),
        ([*USER, {"role": "user"}], "message 1 has no 'content'"),
        ([{"role": "user", "content": 5}], "'content' of type int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "isn't text"),
        ([{"role": "user", "content": ["x"]}], "isn't text"),
    ],
)
def test_malformed_messages(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        render(CHAT_TEMPLATE, messages)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "refuses .*: Roles must alternate"),
        ("{{ nothing.at.all }}", "refuses .*'nothing' is undefined"),
        ("{{ 'a' + none }}", "fails .*TypeError"),
        ("{{ 1 // 0 }}", "fails .*ZeroDivisionError"),
        ("{{ messages.append(1) }}", "refuses .*append"),
        ("{{ messages[0].update(role='x') }}", "refuses .*update"),
        ("{{ ''.__class__.__mro__ }}", "refuses .*__class__"),
        ("{{ raise_exception.__globals__.json }}", "refuses .*__globals__"),
        ("{{ strftime_now.__globals__.json }}", "refuses .*__globals__"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails .*RecursionError"),
        ("{% include 'x' %}", "loader"),
        ("{% for n in range(100001) %}{% endfor %}", "Range too big"),
        ("{{ 'a' * 10 ** 9 }}", "repetition exceeds"),
        ("{{ 10 ** 9 * [1] }}", "repetition exceeds"),
        ("{{ 9 ** 99999 }}", "number exceeds 4096 bits"),
        ("{{ 2 ** 4000 * 2 ** 4000 * 2 }}", "number exceeds 4096 bits"),
        ("{{ lipsum(n=5) }}", "'lipsum' is undefined"),
        ("{% for n in range(90000) %}{{ 'a' * 1000 }}{% endfor %}", "exceeds 16000000 characters"),
    ],
)
def test_failures_and_limits(source: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        render(source)


def test_limits_leave_ordinary_arithmetic_alone() -> None:
    assert render("{{ '=' * 10 }}{{ 3 * 4 }}{{ 2 ** 10 }}{{ 2.5 * 2 }}") == "=" * 10 + "12" + "10245.0"
    longest = chat.MAX_PROMPT_CHARS // 100
    assert len(render("{% for n in range(100) %}{{ v }}{% endfor %}", v="a" * longest)) == (chat.MAX_PROMPT_CHARS)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "broken at line 1"),
        ("a\n{% for x in y %}", "broken at line 2"),
        ("{{ x | no_such_filter }}", "no_such_filter"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "can't be compiled|broken"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "can't be compiled|broken"),
    ],
)
def test_broken_templates_are_refused_at_construction(source: str, message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        ChatTemplate(source, "", "")
