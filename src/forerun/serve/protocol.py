"""What clients send, as OpenAI and vLLM have it. Unknown fields are refused by name (`--lenient` drops them)."""

from __future__ import annotations

import itertools
from contextvars import ContextVar
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

# The first wrong item tells enough: a list of a million wrong ones would have as many errors.
TokenIds = Annotated[list[int], Field(fail_fast=True, max_length=1_000_000)]
Text = Annotated[str, Field(max_length=8_000_000)]
Texts = Annotated[list[Text], Field(fail_fast=True)]


LENIENT: Final[ContextVar[bool]] = ContextVar("lenient", default=False)
"""Whether the request that is being read may have fields that nobody knows."""


class Strict(BaseModel):
    """No field but those that are declared, and no conversions: "1" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = (name for name in data if name not in known)
        # One unknown field is enough to refuse the request for, however many there are.
        kept = known if LENIENT.get() else {*known, *itertools.islice(unknown, 1)}
        return {name: value for name, value in data.items() if name in kept}


class StreamOptions(Strict):
    """include_usage: one more event before the end, with the usage of the whole request."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchemaFormat(Strict):
    """A named schema. `strict` changes nothing: a schema is always obeyed to the letter."""

    name: Annotated[str, Field(max_length=256)] = "answer"
    description: Annotated[str, Field(max_length=100_000)] | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """text: anything; json_object: any JSON; json_schema: JSON that the schema accepts."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class Function(Strict):
    """A tool's name and the JSON schema of its arguments."""

    name: Annotated[str, Field(max_length=256)]
    description: Annotated[str, Field(max_length=100_000)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """Something that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """The name of a tool."""

    name: str


class NamedTool(Strict):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class Sampling(Strict):
    """What both kinds of request may say about sampling, speculation and the end of the text."""

    model: Annotated[str, Field(max_length=1000)] | None = None
    max_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: (
        Annotated[dict[str, Any], Field(json_schema_extra={"additionalProperties": {"type": "number"}})] | None
    ) = None
    bad_words: Texts | None = None
    allowed_token_ids: TokenIds | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=1000)] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    speculate: bool = True
    draft_len: int | None = None
    verify: Literal["coupled", "rejection"] | None = None
    show_drafts: bool = False
    timeout: float | None = None


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: Text | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None


class ChatCompletionRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1, max_length=10_000)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True


class TokenizeRequest(Strict):
    """POST /v1/tokenize: a text, or messages through the chat template."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1, max_length=10_000)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """POST /v1/detokenize."""

    model: str | None = None
    tokens: TokenIds
