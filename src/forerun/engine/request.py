"""The state of one request, from submission to its last token, and its share of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal, Protocol

from forerun.errors import CapacityError, InvalidRequestError

if TYPE_CHECKING:
    from forerun.kv import BlockCopy, BlockTable

FinishReason = Literal["stop", "length", "cancelled", "error"]


class RequestState(Enum):
    """Where a request is. WAITING covers both new and preempted requests."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class RequestParams(Protocol):
    """What the scheduler reads of `SamplingParams`; None leaves the length to context and pool."""

    @property
    def max_tokens(self) -> int | None: ...


class Request:
    """One sequence being continued.

    The scheduler owns every field below `params`; the engine reads them, and appends tokens only
    through `Scheduler.commit`.

    Attributes:
        request_id: unique among the live requests of a scheduler.
        params: sampling parameters, of which only `max_tokens` is read here.
        salt: separates the prefix cache of one caller or adapter from another's; None is the common
            one.
        tokens: prompt, then committed output. After preemption the output is computed again from
            here.
        n_prompt: tokens of the prompt.
        num_computed: leading tokens whose KV lies in the pool.
        table: their slots; None unless RUNNING.
        limit: length of `tokens` at which the engine must stop with "length" (set on submission:
            prompt plus max_tokens, cut to context and, for open-ended requests, pool).
        arrival: order of submission, smallest first.
        planned: this step's row between plan and commit, else None.
        held: all its tokens are computed or were once, and it waits for `Scheduler.extend` to say which comes next.
        steps: steps in which the request had a row, prefill chunks included.
        preemptions: times that its KV was dropped to make room.
        prefix_hit_tokens: tokens found in the prefix cache, summed over all admissions.
    """

    __slots__ = (
        "arrival",
        "finish_reason",
        "held",
        "limit",
        "n_prompt",
        "num_computed",
        "params",
        "planned",
        "preemptions",
        "prefix_hit_tokens",
        "request_id",
        "salt",
        "state",
        "steps",
        "table",
        "tokens",
    )

    def __init__(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: RequestParams,
        *,
        salt: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.salt = salt
        self.tokens: list[int] = list(prompt_ids)
        self.n_prompt = len(self.tokens)
        self.num_computed = 0
        self.table: BlockTable | None = None
        self.state = RequestState.WAITING
        self.finish_reason: FinishReason | None = None
        self.limit = 0
        self.arrival = -1
        self.planned: RowPlan | None = None
        self.held = False
        self.steps = 0
        self.preemptions = 0
        self.prefix_hit_tokens = 0

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state.value}, prompt {self.n_prompt}, "
            f"output {self.n_output}, computed {self.num_computed})"
        )

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids of the prompt (a copy)."""
        return self.tokens[: self.n_prompt]

    @property
    def output_ids(self) -> list[int]:
        """Token ids of the committed output (a copy)."""
        return self.tokens[self.n_prompt :]

    @property
    def n_output(self) -> int:
        """Committed output tokens."""
        return len(self.tokens) - self.n_prompt

    @property
    def at_limit(self) -> bool:
        """Whether no further token may be committed; the engine then finishes with "length"."""
        return len(self.tokens) >= self.limit

    @property
    def finished(self) -> bool:
        """Whether the request is done, for whatever reason."""
        return self.state is RequestState.FINISHED


@dataclass(frozen=True, slots=True, eq=False)
class RowPlan:
    """One request's share of a step.

    Attributes:
        request: whose row it is.
        start: index of the first query token; the KV of all tokens before it is in the pool.
        count: known tokens to compute, `request.tokens[start:start + count]`, at least 1.
        draft_count: draft tokens that may follow them; slots for all are in the table.
        samples: whether the row reaches the end of the known tokens, so that its logits choose a
            token.
    """

    request: Request
    start: int
    count: int
    draft_count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one forward computes.

    Attributes:
        rows: decodes first, then prefill chunks, each in arrival order.
        copies: block copies to apply in this order before the forward.
        preempted: requests that lost their KV and their row in this step.
    """

    rows: tuple[RowPlan, ...]
    copies: tuple[BlockCopy, ...]
    preempted: tuple[Request, ...]

    @property
    def n_tokens(self) -> int:
        """Query tokens of all rows, drafts included."""
        return sum(row.count + row.draft_count for row in self.rows)


def token_limit(request: Request, max_model_len: int, capacity: int) -> int:
    """Length of `tokens` at which `request` must stop, given positions and KV slots in all.

    Raises:
        CapacityError: the prompt and its answer can never fit, even alone.
        InvalidRequestError: empty prompt or negative max_tokens.
    """
    name, prompt, max_tokens = request.request_id, request.n_prompt, request.params.max_tokens
    if prompt == 0:
        raise InvalidRequestError(f"request {name!r} has an empty prompt; at least one token is needed to start from")
    if max_tokens is not None and max_tokens < 0:
        raise InvalidRequestError(f"request {name!r}: max_tokens is {max_tokens}, must be 0 or more")
    if prompt + (max_tokens != 0) > max_model_len:
        raise CapacityError(
            f"request {name!r}: the prompt has {prompt} tokens, but the context holds "
            f"{max_model_len} and the answer needs at least one; shorten the prompt or raise the "
            f"context length"
        )
    # The last token is chosen, but never fed back: it needs no slot.
    if max_tokens is None:
        limit = max(min(max_model_len, capacity + 1), prompt + 1)
    else:
        limit = min(prompt + max_tokens, max_model_len)
    slots = max(prompt, limit - 1)
    if slots > capacity:
        fewer = f", or max_tokens to at most {capacity + 1 - prompt}" if prompt <= capacity else ""
        raise CapacityError(
            f"request {name!r} needs KV for {slots} tokens (prompt {prompt}, max_tokens "
            f"{max_tokens}, context {max_model_len}), but the whole pool holds {capacity}: raise "
            f"kv_tokens to at least {slots}, or shorten the prompt{fewer}"
        )
    return limit
