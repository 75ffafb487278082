"""What a caller gets back: text as it grows, the finished output, and counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

from forerun.engine.request import FinishReason


class TokenLogprob(NamedTuple):
    """Log-probabilities (natural logarithm) of the model's raw distribution at one output position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most probable tokens, best first, as many as `SamplingParams.logprobs` asked for."""


class Piece(str):
    """A stretch of text that one step added; a `str` that also carries what belongs to it.

    Attributes:
        token_ids: tokens committed since the last piece; their text may follow later (a character's bytes can be
            spread over tokens, and what might begin a stop string is held back).
        logprobs: one entry per token id if the request asked for them, else empty.
        finish_reason: set on the last piece.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None

    def __new__(
        cls,
        text: str,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        finish_reason: FinishReason | None = None,
    ) -> Self:
        self = super().__new__(cls, text)
        self.token_ids = token_ids
        self.logprobs = logprobs
        self.finish_reason = finish_reason
        return self


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Counts and times of one request. Times are wall-clock seconds.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: of the tokens that had to be in the KV cache, those found in the prefix cache (over all
            admissions).
        output_tokens: tokens emitted, an end token included.
        steps: steps in which the request had a row, prefill chunks included.
        preemptions: times that its KV was dropped and computed again.
        queue_seconds: from submission to the first step that ran it.
        first_token_seconds: from submission to the first token.
        total_seconds: from submission to the end.
    """

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    steps: int
    preemptions: int
    queue_seconds: float
    first_token_seconds: float | None
    total_seconds: float

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first over the time after the first; None with fewer than two tokens."""
        if self.first_token_seconds is None or self.output_tokens < 2:
            return None
        seconds = self.total_seconds - self.first_token_seconds
        return (self.output_tokens - 1) / seconds if seconds > 0 else None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request.

    Attributes:
        text: the decoded output, without the stop string or end token that ended it.
        token_ids: all tokens committed, the ending one included.
        finish_reason: "stop" (end token, stop token or stop string), "length" (max_tokens or the context's end),
            "cancelled".
        logprobs: one entry per token id if asked for, else empty.
        seed: the seed that the noise was drawn from; gives the same text again.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    seed: int
    stats: RequestStats


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since the engine was made.

    Attributes:
        steps: forwards run.
        computed_tokens: query tokens run through the model: prompts, re-computed tokens, decodes.
        emitted_tokens: tokens committed to requests' outputs.
        step_seconds: wall-clock time inside `Engine.step`.
        native_seconds: the part of it inside the native forward.
        preemptions: times that a request's KV was dropped.
        prefix_hit_tokens: tokens whose KV was found in the prefix cache.
        kv_blocks: blocks of the pool.
        kv_blocks_used: blocks referenced by running requests.
        weight_bytes: packed weights.
        kv_bytes: address space of the KV pool.
    """

    steps: int
    computed_tokens: int
    emitted_tokens: int
    step_seconds: float
    native_seconds: float
    preemptions: int
    prefix_hit_tokens: int
    kv_blocks: int
    kv_blocks_used: int
    weight_bytes: int
    kv_bytes: int
