"""What an engine refuses before anything runs: prompts, parameters, conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from forerun.errors import ConfigurationError, InvalidRequestError
from forerun.models.checks import setting
from forerun.ops import BLOCK
from forerun.sample.params import SamplingParams

if TYPE_CHECKING:
    from forerun.engine.live import LiveRequest

Prompt: TypeAlias = str | Sequence[int]
Message: TypeAlias = Mapping[str, Any]


def checked_params(params: object, vocab_size: int) -> SamplingParams:
    """Sampling parameters that suit the model (None: the defaults); raises `InvalidRequestError`."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params must be SamplingParams, got {type(params).__name__}")
    params.validate_against(vocab_size)
    return params


def check_ends(params: SamplingParams, eos_ids: AbstractSet[int]) -> None:
    """Raises `InvalidRequestError` if a token that isn't one of the model's ends would end a constrained text."""
    others = set(params.stop_token_ids) - eos_ids
    if params.constraint is not None and others:
        raise InvalidRequestError(
            f"stop_token_ids contains {min(others)}, which isn't an end token of the model: with a constraint it "
            "could cut the text short of what the constraint demands; leave it out"
        )


def check_fork(parent: LiveRequest, params: SamplingParams) -> None:
    """Raises `InvalidRequestError` unless a request can be forked with these parameters."""
    name, given, had = parent.request.request_id, params.constraint, parent.params.constraint
    if parent.request.finished:
        raise InvalidRequestError(f"request {name!r} has ended; only a live request can be forked")
    if params.logprobs is not None and parent.params.logprobs is None and parent.request.n_output:
        raise InvalidRequestError(
            f"the output of request {name!r} so far has no log-probabilities, so a fork can't have them; ask for "
            "logprobs when the parent is submitted"
        )
    if given is not None and (had is None or given.key != had.key):
        raise InvalidRequestError("a fork can't have a constraint that its parent doesn't have")
    if had is not None and parent.grammar is None:
        raise InvalidRequestError(f"request {name!r} still waits for its constraint to be compiled; fork it later")


def checked_scope(scope: object) -> str | None:
    """The caller's name; raises `InvalidRequestError`."""
    if scope is not None and not isinstance(scope, str):
        raise InvalidRequestError(f"scope={scope!r} is not allowed; expected a text, or None")
    return scope


def model_length(wanted: int | None, context: int, kv_blocks: int) -> int:
    """The most positions that the engine uses; None: all that context and pool allow. Raises `ConfigurationError`."""
    if wanted is None:
        return min(context, kv_blocks * BLOCK)
    length = setting("max_model_len", wanted, 1, 2**31 - 1)
    if length > context:
        raise ConfigurationError(
            f"max_model_len={length} is above the model's context of {context} tokens; lower it, or leave it out"
        )
    return length


def params_for_each(params: object, n_prompts: int) -> Sequence[SamplingParams | None]:
    """One set of parameters for each prompt; raises `InvalidRequestError` when the numbers differ."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * n_prompts
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        raise InvalidRequestError(
            f"params must be SamplingParams, or a sequence of them with one for each prompt, got "
            f"{type(params).__name__}"
        )
    if len(params) != n_prompts:
        raise InvalidRequestError(
            f"{n_prompts} prompts, but {len(params)} sets of sampling parameters; give one set, or one for each prompt"
        )
    return params


def listed_prompts(prompts: object) -> Sequence[Prompt]:
    """The prompts of a `generate` call, which may be a single one; raises `InvalidRequestError`."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [cast("Sequence[int]", prompts)] if prompts.ndim == 1 else _rows(prompts)
    if isinstance(prompts, Mapping | bytes | bytearray | memoryview) or not hasattr(prompts, "__iter__"):
        raise InvalidRequestError(
            f"a prompt is text or a sequence of token ids, and prompts are a sequence of such; got "
            f"{type(prompts).__name__}"
        )
    listed = list(prompts)
    if listed and all(isinstance(p, int | np.integer) for p in listed):
        return [cast("Sequence[int]", listed)]
    return listed


def _rows(prompts: np.ndarray[Any, Any]) -> Sequence[Prompt]:
    if prompts.ndim != 2:
        raise InvalidRequestError(
            f"an array of token ids has one dimension (a prompt) or two (prompts), got {prompts.ndim}"
        )
    return list(prompts)


def checked_ids(ids: object, vocab_size: int, what: str) -> list[int]:
    """Token ids as Python integers, at least one; `what` says in errors what they should have been."""
    if isinstance(ids, np.ndarray) and ids.ndim > 0:
        ids = ids.tolist()
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes | bytearray | memoryview):
        raise InvalidRequestError(f"{what}, got {type(ids).__name__}")
    checked: list[int] = []
    for position, token in enumerate(ids):
        if isinstance(token, bool | np.bool_) or not isinstance(token, int | np.integer):
            raise InvalidRequestError(
                f"token id {token!r} at position {position} is a {type(token).__name__}; expected an integer"
            )
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"token id {token} at position {position} is outside the vocabulary; expected 0 to {vocab_size - 1}"
            )
        checked.append(int(token))
    if not checked:
        raise InvalidRequestError("the prompt is empty; give at least one token")
    return checked


def listed_conversations(messages: object) -> list[Sequence[Message]]:
    """The conversations of a `chat` call, which may be a single one; raises `InvalidRequestError`."""
    if isinstance(messages, Mapping | str | bytes) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            f"a conversation is a list of {{'role': ..., 'content': ...}}; got {type(messages).__name__}"
        )
    if messages and all(isinstance(m, Mapping) for m in messages):
        return [cast("Sequence[Message]", messages)]
    return list(messages)
