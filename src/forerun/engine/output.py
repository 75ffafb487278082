"""What a caller gets back: text as it grows, the finished output, and counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

from forerun.engine.pace import Decision
from forerun.engine.rates import SpeculationRates
from forerun.engine.request import FinishReason


class TokenLogprob(NamedTuple):
    """Log-probabilities (natural logarithm) of the model's raw distribution at one output position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most probable tokens, best first, as many as `SamplingParams.logprobs` asked for."""


TokenOrigin = Literal["target", "accepted", "correction", "bonus"]
"""Where a token came from: "accepted" is a draft that the target agreed to; the others are the target's own: in a step
without a draft ("target"), after a rejected draft ("correction"), after a draft accepted to its end ("bonus")."""


class Piece(str):
    """A stretch of text that one step added; a `str` that also carries what belongs to it.

    Attributes:
        token_ids: tokens committed since the last piece; their text may follow later (a character's bytes can be
            spread over tokens, and what might begin a stop string is held back).
        logprobs: one entry per token id if the request asked for them, else empty.
        finish_reason: set on the last piece.
        origins: where each token came from.
        decisions: the choices of draft length since the last piece, if the request is traced.
        sample_index: which of the request's texts it belongs to (`SamplingParams.n`), from 0.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    origins: tuple[TokenOrigin, ...]
    decisions: tuple[Decision, ...]
    sample_index: int

    def __new__(
        cls,
        text: str,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        finish_reason: FinishReason | None = None,
        origins: tuple[TokenOrigin, ...] = (),
        decisions: tuple[Decision, ...] = (),
        sample_index: int = 0,
    ) -> Self:
        self = super().__new__(cls, text)
        self.token_ids = token_ids
        self.logprobs = logprobs
        self.finish_reason = finish_reason
        self.origins = origins
        self.decisions = decisions
        self.sample_index = sample_index
        return self


class DrafterCounts(NamedTuple):
    """What one drafter did.

    drafts: pairs of (request, step) in which at least one of its nodes was verified.
    proposed: its nodes that were verified (nodes cut off before the forward don't count).
    accepted: those on the path that the target agreed to.
    """

    drafts: int
    proposed: int
    accepted: int


@dataclass(frozen=True, slots=True)
class SpeculationStats(SpeculationRates):
    """Counts of drafting and verification, of one request or of all. A "row" is one request's part of one step.

    Identities: emitted = accepted + decisions - cut. computed = known + proposed, where `known` are tokens that were
    committed before the step (prompt, recomputed and last tokens).
    accepted = sum(accepted_by_position) = sum over by_drafter of accepted; likewise proposed.

    Attributes:
        steps: rows, prompt chunks included.
        decisions: rows whose logits chose a token; each adds one token of the target's own.
        drafted: rows with at least one draft token. Denominator of acceptance by position 0.
        proposed: draft tokens verified, all nodes of trees. Denominator of the draft acceptance rate.
        computed: query tokens run through the target, drafts included.
        accepted: draft tokens that the target agreed to, before a stop cut them off.
        cut: accepted or own tokens that were dropped, because the text ended before them.
        emitted: tokens that these rows added to the output (a fork's begins with its parent's, which aren't counted).
        proposed_by_position: [d] counts draft tokens at depth d (0: right after the committed text).
        accepted_by_position: [d] counts rows that accepted at least d + 1 draft tokens.
        drafted_by_length: [n - 1] counts rows whose draft had n tokens, all nodes of trees; their sum is `drafted`.
        by_drafter: counts by the drafter's name.
        draft_seconds: wall-clock time of proposing and of choosing lengths, in steps with such a row. For a request:
            the whole step's time, shared with whoever ran in it; likewise below.
        forward_seconds: the target's forward pass.
        verify_seconds: choosing tokens and walking the trees.
        schedule_seconds: the rest of the step: planning, filling the batch, committing, text.
        mask_seconds: what of these four went on grammars and wasn't hidden behind the forward: forced text, cutting
            drafts, waiting for masks, following the text.
    """

    steps: int = 0
    decisions: int = 0
    drafted: int = 0
    proposed: int = 0
    computed: int = 0
    accepted: int = 0
    cut: int = 0
    emitted: int = 0
    proposed_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    drafted_by_length: tuple[int, ...] = ()
    by_drafter: Mapping[str, DrafterCounts] = field(default_factory=dict)
    draft_seconds: float = 0.0
    forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    schedule_seconds: float = 0.0
    mask_seconds: float = 0.0


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
        speculation: what drafting and verification did.
    """

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    steps: int
    preemptions: int
    queue_seconds: float
    first_token_seconds: float | None
    total_seconds: float
    speculation: SpeculationStats

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
        sample_index: which of the request's texts it is, from 0.
        others: the request's other texts (`SamplingParams.n`), in order; those of a request that was cancelled before
            its prompt was computed are missing.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    seed: int
    stats: RequestStats
    sample_index: int = 0
    others: tuple[RequestOutput, ...] = ()

    @property
    def samples(self) -> tuple[RequestOutput, ...]:
        """All texts of the request, this one first."""
        return (self, *self.others)


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
        speculation: what drafting and verification did, summed over requests; its seconds are those of the steps, each
            counted once.
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
    speculation: SpeculationStats
