"""The books of the scheduler: which requests are live, which of them run and which wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from forerun.engine.request import FinishReason, Request, RequestParams, RequestState, token_limit
from forerun.errors import CapacityError, ForerunError, InvalidRequestError
from forerun.kv import BlockPool, BlockTable, KVIntegrityError, PrefixCache


class ScheduleError(ForerunError, RuntimeError):
    """The engine broke the order plan, commit or finish, plan: its fault, never a request's."""


class RequestQueues:
    """Requests that run, in order of arrival, and requests that wait, next one first. No budget and no plan.

    Args:
        pool: KV blocks, shared with `prefix_cache`.
        prefix_cache: None turns prefix reuse off.
        max_rows: requests that run at once.
        max_model_len: positions that the model supports.
    """

    def __init__(self, pool: BlockPool, prefix_cache: PrefixCache | None, *, max_rows: int, max_model_len: int) -> None:
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.max_rows = max_rows
        self.max_model_len = max_model_len
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._live: dict[str, Request] = {}
        self._arrivals = 0
        # The head of the queue that did not fit, with the blocks left and the registrations of the
        # cache then: a second look is of no use before one of them has grown.
        self._blocked: tuple[Request, int, int] | None = None

    @property
    def has_work(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self._running or self._waiting)

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold KV, in arrival order (live view)."""
        return self._running

    @property
    def waiting(self) -> Iterator[Request]:
        """Requests in the queue, next one first."""
        return iter(self._waiting)

    @property
    def n_waiting(self) -> int:
        """Requests in the queue; from any thread."""
        return len(self._waiting)

    def get(self, request_id: str) -> Request | None:
        """The live request of that id, or None."""
        return self._live.get(request_id)

    def add(self, request: Request) -> None:
        """Queue a new request and set its `limit` and `arrival`.

        Raises:
            CapacityError: it can never fit the context or the pool, even alone.
            InvalidRequestError: empty prompt, negative max_tokens, an id in use, or a request used
                before.
        """
        self._check_new(request)
        request.limit = token_limit(request, self.max_model_len, self.pool.capacity_tokens)
        request.arrival = self._arrivals
        self._arrivals += 1
        self._live[request.request_id] = request
        self._waiting.append(request)

    def _check_new(self, request: Request) -> None:
        if request.request_id in self._live:
            raise InvalidRequestError(f"a request with id {request.request_id!r} is still live; use another id")
        if request.arrival >= 0 or request.state is not RequestState.WAITING:
            raise InvalidRequestError(f"request {request.request_id!r} was submitted before; make a new Request")

    def _requeue(self, request: Request) -> None:
        """Drop the KV of a request that has left the running list, and let it wait at the front."""
        table_of(request).free()
        request.table = None
        request.num_computed = 0
        request.planned = None
        request.state = RequestState.WAITING
        request.preemptions += 1
        self._waiting.appendleft(request)

    def finish(self, request: Request, reason: FinishReason) -> bool:
        """End a request and free its KV (full blocks stay in the prefix cache).

        Returns False, changing nothing, when it had already ended: the first reason stands.

        Raises:
            ScheduleError: the request was never added here.
        """
        if request.state is RequestState.FINISHED:
            return False
        if self._live.pop(request.request_id, None) is not request:
            raise ScheduleError(f"{request!r} doesn't belong to this scheduler; add it first")
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
            table_of(request).free()
            request.table = None
        else:
            self._waiting.remove(request)
        self._blocked = None
        request.planned = None
        request.held = False
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        return True

    def cancel(self, request: Request) -> bool:
        """`finish` with reason "cancelled"; also allowed between plan and commit."""
        return self.finish(request, "cancelled")

    def abandon(self) -> None:
        """End a step whose forward failed or was interrupted: nothing that it wrote is trusted.

        Requests with a row that is neither committed nor finished, or with slots from a plan that was
        never finished, go back to the front of the queue, to be computed again.
        """
        for request in reversed([r for r in self._running if r.planned or table_of(r).n_tokens != r.num_computed]):
            self._running.remove(request)
            self._requeue(request)

    def fork(self, request: Request, request_id: str, params: RequestParams | None = None) -> Request:
        """A new request that continues from the same tokens and shares the KV blocks.

        The fork of a held request is held. Without a free row it waits first in the queue, and its KV is
        recomputed or found in the prefix cache; the fork of a waiting request waits behind it. Counters
        start at 0.

        Raises:
            ScheduleError: the request isn't live, or is in the middle of a step.
            CapacityError, InvalidRequestError: as for `add`.
        """
        self._check_parent(request, "forked")
        child = Request(request_id, request.tokens, params or request.params, salt=request.salt)
        child.n_prompt = request.n_prompt
        child.held = request.held
        self._check_new(child)
        child.limit = token_limit(child, self.max_model_len, self.pool.capacity_tokens)
        if request.n_output and child.at_limit:
            raise CapacityError(
                f"request {request_id!r} would start with {request.n_output} output tokens, its "
                f"whole "
                f"max_tokens; raise max_tokens"
            )
        self._join(request, child, request.num_computed)
        return child

    def branch(self, request: Request, request_id: str, params: RequestParams | None = None) -> Request:
        """A new request with the same prompt and no output, which shares the KV of the prompt.

        The prompt's last token is computed once more, because the branch chooses its first token from the
        scores after it. Where it waits without a free row is as for `fork`.

        Raises:
            ScheduleError: the request isn't live, is in the middle of a step, or runs and its prompt isn't
                computed yet.
            CapacityError, InvalidRequestError: as for `add`.
        """
        self._check_parent(request, "branched")
        if request.state is RequestState.RUNNING and request.num_computed < request.n_prompt:
            raise ScheduleError(f"{request!r} can be branched once its prompt is computed")
        child = Request(request_id, request.prompt_ids, params or request.params, salt=request.salt)
        self._check_new(child)
        child.limit = token_limit(child, self.max_model_len, self.pool.capacity_tokens)
        self._join(request, child, request.n_prompt - 1)
        return child

    def _check_parent(self, request: Request, verb: str) -> None:
        if self._live.get(request.request_id) is not request or request.planned is not None:
            raise ScheduleError(f"{request!r} can be {verb} only while live and between two steps")

    def _join(self, request: Request, child: Request, n_shared: int) -> None:
        """Make `child` live beside `request`, with the KV of its first `n_shared` tokens if there's a row for it."""
        child.arrival = request.arrival
        self._live[child.request_id] = child
        if request.state is RequestState.RUNNING and len(self._running) < self.max_rows:
            child.table = table_of(request).fork()
            child.table.truncate(n_shared)
            child.num_computed = n_shared
            child.state = RequestState.RUNNING
            self._running.insert(self._running.index(request) + 1, child)
        elif request.state is RequestState.RUNNING:
            self._waiting.appendleft(child)
        else:
            self._waiting.insert(self._waiting.index(request) + 1, child)

    def check_integrity(self, others: Iterable[BlockTable] = ()) -> None:
        """Verify pool, cache, tables and queues; `others` are tables that the caller holds besides.

        Raises:
            KVIntegrityError: saying what is wrong.
        """
        tables = [table_of(request) for request in self._running]
        self.pool.check_integrity([*tables, *others])
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity()
        for request, table in zip(self._running, tables, strict=True):
            planned = request.planned
            slots = request.num_computed
            if request.held and (planned is not None or slots != len(request.tokens)):
                raise KVIntegrityError(f"{request!r} is held, but not all of its KV is in place")
            if planned is not None:
                slots += planned.count + planned.draft_count
            if table.n_tokens != slots or len(table.blocks) != self.pool.blocks_for(slots):
                raise KVIntegrityError(
                    f"{request!r} should have {slots} slots, but its table has {table.n_tokens} in "
                    f"{len(table.blocks)} blocks"
                )
            if request.state is not RequestState.RUNNING:
                raise KVIntegrityError(f"{request!r} is in the running list")
        for request in self._waiting:
            if request.state is not RequestState.WAITING or request.table is not None:
                raise KVIntegrityError(f"{request!r} is in the queue, but holds KV or isn't waiting")
        if len(self._live) != len(self._running) + len(self._waiting):
            raise KVIntegrityError("a live request is neither running nor waiting")


def table_of(request: Request) -> BlockTable:
    """The block table of a running request."""
    table = request.table
    if table is None:
        raise KVIntegrityError(f"{request!r} has no block table, but it should be running")
    return table
