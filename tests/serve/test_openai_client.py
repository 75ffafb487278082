"""The official client against a live server: what it sends is understood, what it gets back is what it expects."""

from __future__ import annotations

import json
from typing import Literal

import openai
import pydantic
import pytest

from forerun import JsonSchema, SamplingParams
from reference.live_server import LiveServer

MESSAGES = [{"role": "user", "content": "Say something."}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place.",
            "parameters": {
                "type": "object",
                "properties": {"unit": {"enum": ["C", "F"]}},
                "required": ["unit"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "forerun"
    with pytest.raises(openai.NotFoundError, match="'other'"):
        client.models.retrieve("other")


def test_a_completion_is_the_engines(client: openai.OpenAI, server: LiveServer) -> None:
    answer = client.completions.create(model="tiny", prompt="Once upon", max_tokens=12, temperature=0)
    [expected] = server.engine.generate("Once upon", SamplingParams(max_tokens=12))
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(expected.prompt_token_ids), 12)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_stream_is_the_same_text(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="Once upon", max_tokens=40, temperature=0)
    chunks = list(
        client.completions.create(
            model="tiny", prompt="Once upon", max_tokens=40, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) <= {None}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == 40
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_several_prompts_and_texts(client: openai.OpenAI, server: LiveServer) -> None:
    prompts = ["One", "Two", "Three"]
    answer = client.completions.create(model="tiny", prompt=prompts, max_tokens=6, n=2, temperature=1.0, seed=5)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for which, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=6, n=2, temperature=1.0, seed=5 + which)
        [expected] = server.engine.generate(prompt, params)
        assert [answer.choices[2 * which + i].text for i in range(2)] == [s.text for s in expected.samples]


def test_token_prompts_and_echo(client: openai.OpenAI) -> None:
    text = client.completions.create(model="tiny", prompt="in the", max_tokens=4, temperature=0, echo=True)
    assert text.choices[0].text.startswith("in the")
    ids = client.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=4, temperature=0)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3


def test_chat(client: openai.OpenAI, server: LiveServer) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=9, temperature=0)
    [expected] = server.engine.chat(MESSAGES, SamplingParams(max_tokens=9))
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.object == "chat.completion"


def test_chat_streams_role_first_then_text(client: openai.OpenAI, server: LiveServer) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=30, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    [expected] = server.engine.chat(MESSAGES, SamplingParams(max_tokens=30))
    usage = chunks.pop().usage
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == expected.finish_reason
    # One event a step: accepted drafts share one.
    assert usage is not None
    assert len(chunks) <= usage.model_extra["speculation"]["decisions"] + 1  # type: ignore[index]


def test_several_texts_in_one_stream(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "n": 3, "seed": 1, "temperature": 1.0}
    whole = client.chat.completions.create(**asked)
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_seeds(client: openai.OpenAI) -> None:
    def text(seed: int | None) -> str:
        return client.completions.create(
            model="tiny", prompt="x", max_tokens=16, temperature=2.0, seed=seed
        ).choices[0].text  # fmt: skip

    assert text(3) == text(3) != text(4)
    assert text(None) != text(None)


def test_logprobs_of_chat(client: openai.OpenAI, server: LiveServer) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "temperature": 0, "logprobs": True}
    answer = client.chat.completions.create(**asked, top_logprobs=3)
    [expected] = server.engine.chat(MESSAGES, SamplingParams(max_tokens=6, logprobs=3))
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [entry.logprob for entry in content] == pytest.approx([entry.logprob for entry in expected.logprobs])
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, top_logprobs=3, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert [entry.logprob for entry in streamed] == [entry.logprob for entry in content]
    none = client.chat.completions.create(**asked)
    assert none.choices[0].logprobs is not None
    assert all(entry.top_logprobs == [] for entry in none.choices[0].logprobs.content or [])


def test_logprobs_of_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="x", max_tokens=5, temperature=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 5
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[0] == 0


class Colour(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: Literal["red", "green", "blue"]
    warm: bool


def test_json_schema_into_pydantic(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Colour, max_tokens=64, temperature=1.0, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Colour)
    assert answer.choices[0].finish_reason == "stop"


def test_json_object_and_guided_extras(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=20, temperature=0, extra_body={"guided_choice": ["yes", "no"]}
    )
    assert answer.choices[0].message.content in ("yes", "no")
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=20, temperature=0, extra_body={"guided_regex": "[0-9]{3}"}
    )
    assert answer.choices[0].message.content is not None
    assert answer.choices[0].message.content.isdigit()
    cut = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=4, temperature=0, response_format={"type": "json_object"}
    )
    assert cut.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_tools(client: openai.OpenAI, stream: bool, choice: object) -> None:
    asked = {
        "model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 200, "seed": 2,
        "temperature": 1.0, "parallel_tool_calls": False,
    }  # fmt: skip
    if stream:
        deltas = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
        calls = [call for choice_ in deltas for call in choice_.delta.tool_calls or []]
        reason = deltas[-1].finish_reason
        assert "".join(choice_.delta.content or "" for choice_ in deltas) == ""
    else:
        answer = client.chat.completions.create(**asked).choices[0]
        calls, reason = answer.message.tool_calls or [], answer.finish_reason
    assert reason == "tool_calls"
    [call] = calls
    assert call.function is not None
    assert call.function.name in ("weather", "now")
    arguments = json.loads(call.function.arguments or "")
    if call.function.name == "weather":
        assert arguments["unit"] in ("C", "F")
    if choice != "required":
        assert call.function.name == "weather"


def test_speculation_can_be_left_out_and_is_told(client: openai.OpenAI) -> None:
    prompt = "abcabcabcabcabcabcabc"
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0}
    with_drafts = client.completions.create(**asked)
    without = client.completions.create(**asked, extra_body={"speculate": False})
    capped = client.completions.create(**asked, extra_body={"draft_len": 0})
    assert with_drafts.choices[0].text == without.choices[0].text == capped.choices[0].text
    told = [answer.usage.model_extra["speculation"] for answer in (with_drafts, without, capped)]  # type: ignore[union-attr,index]
    assert told[0]["emitted"] == told[1]["emitted"] == 40
    assert told[0]["proposed"] >= told[0]["accepted"]
    assert told[1]["proposed"] == told[2]["proposed"] == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"seed": -1}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"extra_body": {"unknown_thing": 1}}, "unknown_thing"),
        ({"extra_body": {"draft_len": -1}}, None),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    ],
)
def test_errors_name_the_parameter(client: openai.OpenAI, fields: dict[str, object], param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, **{"max_tokens": 4, **fields})  # type: ignore[arg-type]
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_a_schema_that_cannot_be_obeyed_is_refused_by_its_keyword(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    with pytest.raises(openai.BadRequestError, match="not") as caught:
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=4,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        )  # fmt: skip
    assert caught.value.code == "invalid_constraint"
    assert JsonSchema(schema)


def test_too_long_a_prompt(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[1] * 3000, max_tokens=4)
    assert caught.value.code == "context_length_exceeded"
