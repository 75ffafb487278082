"""From a client's request to what the engine is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forerun.constrain.lark import Lark
from forerun.constrain.schema import Json, JsonSchema
from forerun.constrain.spec import Choice, Constraint, Regex
from forerun.constrain.tools import ToolCalls
from forerun.errors import InvalidRequestError
from forerun.sample.params import SamplingParams
from forerun.serve.errors import ApiError
from forerun.serve.protocol import ChatCompletionRequest, CompletionRequest, NamedTool, ResponseFormat, Sampling

_PLAIN: Final = (
    "n", "seed", "temperature", "top_p", "top_k", "min_p", "typical_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "bad_words", "allowed_token_ids", "stop", "stop_token_ids", "min_tokens", "verify",
)  # fmt: skip
"""Fields that the engine's parameters have under the same names."""

MAX_TOP_LOGPROBS: Final = 20


@dataclass(frozen=True)
class Asked:
    """A request, understood.

    params: for the engine. tools: format of the tool calls that the text may have, or None.
    """

    params: SamplingParams
    tools: str | None = None


def completion_params(request: CompletionRequest) -> Asked:
    """Parameters of a text completion. Raises ApiError or InvalidRequestError."""
    if request.suffix is not None:
        raise ApiError(400, "suffix isn't supported; put all of the text into prompt", param="suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ApiError(400, "best_of isn't supported beyond n; leave it out", param="best_of")
    if request.echo and request.logprobs is not None:
        raise ApiError(400, "logprobs of an echoed prompt aren't supported; leave echo or logprobs out", param="echo")
    constraint = _constraint(request, request.response_format)
    tokens = 16 if request.max_tokens is None else request.max_tokens
    return Asked(_params(request, tokens, request.logprobs, constraint))


def chat_params(request: ChatCompletionRequest, tool_format: str) -> Asked:
    """Parameters of a chat completion. Raises ApiError or InvalidRequestError."""
    if not request.add_generation_prompt:
        raise ApiError(
            400, "add_generation_prompt: false isn't supported; render the prompt yourself and use /v1/completions",
            param="add_generation_prompt",
        )  # fmt: skip
    limits = (request.max_completion_tokens, request.max_tokens)
    if None not in limits and limits[0] != limits[1]:
        raise ApiError(400, "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
    tokens = limits[0] if limits[0] is not None else limits[1]
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if request.top_logprobs is not None and not 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS:
        raise ApiError(
            400, f"top_logprobs={request.top_logprobs} is not allowed; expected 0 to {MAX_TOP_LOGPROBS}",
            param="top_logprobs",
        )  # fmt: skip
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    constraint = _constraint(request, request.response_format)
    calls = _tool_calls(request, tool_format)
    if calls is not None and constraint is not None:
        raise ApiError(400, "tools can't be combined with another constraint; leave one of them out", param="tools")
    asked = _params(request, tokens, logprobs, calls or constraint)
    return Asked(asked, tool_format if calls is not None else None)


def _params(
    request: Sampling, max_tokens: int | None, logprobs: int | None, constraint: Constraint | None
) -> SamplingParams:
    if request.stream_options is not None and request.stream_options.continuous_usage_stats:
        raise ApiError(400, "continuous_usage_stats isn't supported; use include_usage", param="stream_options")
    values: dict[str, Any] = {name: value for name in _PLAIN if (value := getattr(request, name)) is not None}
    # OpenAI's default; the engine's own is greedy.
    values.setdefault("temperature", 1.0)
    if request.top_k == -1:
        values["top_k"] = 0
    if request.logit_bias is not None:
        values["logit_bias"] = _bias(request.logit_bias)
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            constraint=constraint,
            logprobs=logprobs,
            ignore_eos=request.ignore_eos,
            include_stop_str_in_output=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            **values,
        )
    except InvalidRequestError as error:
        field = str(error).partition("=")[0].partition(" ")[0]
        raise ApiError(400, str(error), param=field if field in type(request).model_fields else None) from error


def _bias(bias: dict[str, Any]) -> dict[int, float]:
    found: dict[int, float] = {}
    for key, value in bias.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ApiError(400, f"logit_bias: the bias of {key[:40]!r} is no number", param="logit_bias")
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise ApiError(400, f"logit_bias: {key[:40]!r} is no token id", param="logit_bias")
        found[int(key)] = value
    return found


def _constraint(request: Sampling, response: ResponseFormat | None) -> Constraint | None:
    found: list[tuple[str, Constraint]] = []
    if request.guided_json is not None:
        found.append(("guided_json", JsonSchema(request.guided_json)))
    if request.guided_regex is not None:
        found.append(("guided_regex", Regex(request.guided_regex)))
    if request.guided_choice is not None:
        found.append(("guided_choice", Choice(request.guided_choice)))
    if request.guided_grammar is not None:
        found.append(("guided_grammar", Lark(request.guided_grammar)))
    if response is not None and response.type == "json_object":
        found.append(("response_format", Json()))
    if response is not None and response.type == "json_schema":
        if response.json_schema is None or response.json_schema.schema_ is None:
            raise ApiError(400, "response_format: json_schema needs a schema", param="response_format")
        found.append(("response_format", JsonSchema(response.json_schema.schema_)))
    if len(found) > 1:
        raise ApiError(400, f"{found[0][0]} and {found[1][0]} can't be combined; give one", param=found[1][0])
    return found[0][1] if found else None


def _tool_calls(request: ChatCompletionRequest, tool_format: str) -> ToolCalls | None:
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return None
    if choice == "none":
        return None
    name = choice.function.name if isinstance(choice, NamedTool) else choice or "auto"
    names = [tool.function.name for tool in request.tools]
    if isinstance(choice, NamedTool) and name not in names:
        raise ApiError(400, f"tool_choice names {name!r}, but the tools are {', '.join(names)}", param="tool_choice")
    # One call after another is OpenAI's default, where the model's format can say it.
    parallel = (
        request.parallel_tool_calls is not False
        and tool_format in ("qwen", "hermes")
        and not isinstance(choice, NamedTool)
    )
    tools = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in request.tools]
    return ToolCalls(tools, format=tool_format, choice=name, parallel=parallel)
