"""Continuous batching: which requests run in a step, over which tokens, in which KV slots.

One token budget a step is shared by decodes, prefill chunks, admissions and drafts (chunked prefill
as in Sarathi-Serve, Agrawal et al. 2024, arXiv:2403.02310). When the pool is full, the requests
that arrived last are preempted and later computed again (recompute preemption as in vLLM).

Why every request finishes: blocks are taken only from requests further back in the running list, so
its first one is never preempted; if need be it gets every block, and a request that could not fit
the empty pool was refused when it came. Each step thus computes at least one token of the first
request, until its turn is over. Admission is in arrival order, and preempted requests go first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from forerun.engine.request import (
    FinishReason,
    Request,
    RequestParams,
    RequestState,
    RowPlan,
    StepPlan,
    token_limit,
)
from forerun.errors import CapacityError, ConfigurationError, ForerunError, InvalidRequestError
from forerun.kv import (
    BlockCopy,
    BlockPool,
    BlockTable,
    KVIntegrityError,
    PoolExhausted,
    PrefixCache,
)


class ScheduleError(ForerunError, RuntimeError):
    """The engine broke the order plan, commit or finish, plan: its fault, never a request's."""


class _Chunk(NamedTuple):
    """A row before the drafts are dealt out."""

    request: Request
    table: BlockTable
    start: int
    n_known: int
    samples: bool


class Scheduler:
    """Plans steps over one `BlockPool`. Single-threaded: the engine loop calls it.

    A step is `plan`, then for each row of the plan `commit` or `finish` (in any order), then the
    next `plan`; `abandon` ends a step that failed. `add`, `cancel` and `finish` are allowed at any
    time.

    Args:
        pool: KV blocks, shared with `prefix_cache`.
        prefix_cache: None turns prefix reuse off.
        max_step_tokens: query tokens of a step over all rows, drafts included; at least `max_rows`,
            so that decodes can't starve a prefill.
        max_rows: requests that run at once.
        max_model_len: positions that the model supports; no slot is ever planned past them.

    Raises:
        ConfigurationError: a setting is out of range.
    """

    def __init__(
        self,
        pool: BlockPool,
        prefix_cache: PrefixCache | None,
        *,
        max_step_tokens: int,
        max_rows: int,
        max_model_len: int,
    ) -> None:
        if max_rows < 1:
            raise ConfigurationError(f"max_rows must be at least 1, got {max_rows}")
        if max_step_tokens < max_rows:
            raise ConfigurationError(
                f"max_step_tokens ({max_step_tokens}) must be at least max_rows ({max_rows}), so "
                f"that every "
                f"row can advance; raise the former or lower the latter"
            )
        if max_model_len < 1:
            raise ConfigurationError(f"max_model_len must be at least 1, got {max_model_len}")
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.max_step_tokens = max_step_tokens
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

    def plan(self, draft_lengths: Mapping[Request, int] | None = None) -> StepPlan:
        """Choose the rows of the next step and give them slots.

        The budget goes to running decodes (one token each), then running prefill chunks, then
        admissions in arrival order, and what is left to drafts, evenly. `draft_lengths` are wishes:
        they are cut to the budget, the free blocks and the request's limit, and never preempt
        anyone. No rows means no work.

        Raises:
            ScheduleError: a row of the last plan was neither committed nor finished, or a request
                at its limit was not finished.
        """
        copies: list[BlockCopy] = []
        preempted: list[Request] = []
        decodes: list[_Chunk] = []
        prefills: list[_Chunk] = []
        left = self._plan_running(decodes, prefills, copies, preempted)
        # Whoever was just preempted must not come back at the expense of the one that took its
        # blocks.
        if self._waiting and left > 0 and not preempted:
            left = self._admit(prefills, left)
        chunks = decodes + prefills
        drafts = (
            self._deal_drafts(chunks, draft_lengths, left, copies) if draft_lengths and left > 0 else [0] * len(chunks)
        )
        if not chunks and self.has_work:
            raise ScheduleError(
                "no request can advance, because tables outside the scheduler hold the KV pool's blocks; free them"
            )
        rows: list[RowPlan] = []
        for (request, _, start, count, samples), n_drafts in zip(chunks, drafts, strict=True):
            row = RowPlan(request, start, count, n_drafts, samples)
            request.planned = row
            rows.append(row)
        return StepPlan(tuple(rows), tuple(copies), tuple(preempted))

    def _plan_running(
        self,
        decodes: list[_Chunk],
        prefills: list[_Chunk],
        copies: list[BlockCopy],
        preempted: list[Request],
    ) -> int:
        """Give running requests their tokens; returns the budget that is left.

        Blocks go by age, so one pass in arrival order suffices: a victim is always behind the
        request that takes its blocks and has no row yet. Budget goes to decodes first, so theirs is
        set aside.
        """
        running = self._running
        n_decodes = 0
        for request in running:
            known = len(request.tokens) - request.num_computed
            if request.planned is not None or known < 1 or (request.n_output > 0 and request.at_limit):
                raise ScheduleError(_misuse(request))
            n_decodes += known == 1
        left = self.max_step_tokens - n_decodes
        index = 0
        while index < len(running):
            request = running[index]
            index += 1
            table = _table(request)
            start = request.num_computed
            known = len(request.tokens) - start
            count = 1 if known == 1 else min(known, left)
            if count == 0:
                continue
            try:
                copy = table.append_slots(count)
            except PoolExhausted:
                count, freed = self._make_room(index, table, count, preempted)
                left += freed
                if count == 0:
                    left += known == 1
                    continue
                copy = table.append_slots(count)
            if copy is not None:
                copies.append(copy)
            if known == 1:
                decodes.append(_Chunk(request, table, start, 1, True))
            else:
                prefills.append(_Chunk(request, table, start, count, count == known))
                left -= count
        return left

    def _make_room(self, behind: int, table: BlockTable, count: int, preempted: list[Request]) -> tuple[int, int]:
        """Preempt from the end of the running list down to `behind`, until `table` has room.

        Returns the tokens that fit now (0 when nobody younger is left: the request keeps its KV and
        waits for a step), and the budget that the preempted decodes had set aside.
        """
        running = self._running
        freed = 0
        fits = table.room(count)
        while fits == 0 and len(running) > behind:
            victim = running.pop()
            freed += len(victim.tokens) - victim.num_computed == 1
            self._requeue(victim)
            preempted.append(victim)
            fits = table.room(count)
        return fits, freed

    def _requeue(self, request: Request) -> None:
        """Drop the KV of a request that has left the running list, and let it wait at the front."""
        _table(request).free()
        request.table = None
        request.num_computed = 0
        request.planned = None
        request.state = RequestState.WAITING
        request.preemptions += 1
        self._waiting.appendleft(request)

    def _admit(self, prefills: list[_Chunk], left: int) -> int:
        """Admit waiting requests in order while rows, budget and blocks last; returns what is left.

        A request is admitted when all its known tokens fit beside what running prefills have yet to
        take and one block of growth for each running row; otherwise it'd soon be preempted, or
        preempt others.
        """
        pool, cache, running, waiting = self.pool, self.prefix_cache, self._running, self._waiting
        if len(running) >= self.max_rows:
            return left
        slack = pool.n_free - len(running)
        for request in running:
            slack -= pool.blocks_for(len(request.tokens)) - len(_table(request).blocks)
        cached = cache.registrations if cache is not None else 0
        while waiting and left > 0 and len(running) < self.max_rows:
            request = waiting[0]
            seen = self._blocked
            if seen and running and request is seen[0] and slack <= seen[1] and cached == seen[2]:
                return left
            known = len(request.tokens)
            match = cache.lookup(request.tokens, request.salt) if cache is not None else None
            need = pool.blocks_for(known)
            if match is not None:
                # A block in use by others costs nothing; an unreferenced one is taken out of the
                # free ones.
                need -= sum(pool.refcount(block) > 0 for block in match.blocks)
            if need > slack:
                self._blocked = (request, slack, cached)
                return left
            waiting.popleft()
            self._blocked = None
            table = BlockTable(pool)
            if cache is not None:
                cache.attach(table, request.tokens, request.salt, match=match)
            start = table.n_tokens
            count = min(known - start, left)
            table.append_slots(count)
            request.table = table
            request.num_computed = start
            request.prefix_hit_tokens += start
            request.state = RequestState.RUNNING
            running.append(request)
            prefills.append(_Chunk(request, table, start, count, start + count == known))
            left -= count
            slack -= need + 1
        return left

    def _deal_drafts(
        self,
        chunks: list[_Chunk],
        wishes: Mapping[Request, int],
        left: int,
        copies: list[BlockCopy],
    ) -> list[int]:
        """Draft length of each chunk: its wish, cut to limit, share of the budget and blocks."""
        drafts = [0] * len(chunks)
        wanting: list[tuple[int, int]] = []
        for index, chunk in enumerate(chunks):
            request = chunk.request
            if chunk.samples:
                # One token beyond the accepted drafts is the target's own, so a draft of the last
                # token that the limit allows could never be used.
                wish = min(wishes.get(request, 0), request.limit - len(request.tokens) - 1)
                if wish > 0:
                    wanting.append((wish, index))
        wanting.sort()
        for n_before, (wish, index) in enumerate(wanting):
            table = chunks[index].table
            count = table.room(min(wish, left // (len(wanting) - n_before)))
            if count > 0:
                copy = table.append_slots(count)
                if copy is not None:
                    copies.append(copy)
                drafts[index] = count
                left -= count
        return drafts

    def trim(self, row: RowPlan, draft_count: int) -> RowPlan:
        """Give back draft slots that the plan granted and the drafter didn't use; returns the row as it now is.

        Raises:
            ScheduleError: the row isn't of the request's current plan, or has fewer draft slots.
        """
        request = row.request
        if draft_count == row.draft_count:
            return row
        if request.planned is not row or not 0 <= draft_count < row.draft_count:
            raise ScheduleError(
                f"{request!r}: can't trim {row.draft_count} draft slots to {draft_count}, or the row isn't planned"
            )
        _table(request).truncate(row.start + row.count + draft_count)
        trimmed = replace(row, draft_count=draft_count)
        request.planned = trimmed
        return trimmed

    def commit(self, row: RowPlan, tokens: Sequence[int]) -> None:
        """Record the outcome of a row after the forward.

        `tokens` are the ones to append, in order: the accepted drafts, then the target's own token;
        or only the first of these when a stop falls inside. Empty for a row that doesn't sample.
        The KV of all but the last is in place, so the table is cut to them, and blocks that are
        full are registered in the prefix cache. Does nothing when the request was finished
        meanwhile.

        Raises:
            ScheduleError: the row isn't of the request's current plan, or the number of tokens is
                impossible.
        """
        request = row.request
        if request.state is RequestState.FINISHED:
            return
        if request.planned is not row:
            raise ScheduleError(f"{request!r}: committed a row that is not of the current plan")
        n = len(tokens)
        room = min(row.draft_count + 1, request.limit - len(request.tokens)) if row.samples else 0
        if n > room or (n == 0 and room > 0):
            raise ScheduleError(f"{request!r}: {n} tokens committed, but the row allows {min(1, room)} to {room}")
        request.planned = None
        request.steps += 1
        computed = row.start + row.count
        if n:
            request.tokens.extend(tokens)
            computed += n - 1
        request.num_computed = computed
        table = _table(request)
        if table.n_tokens != computed:
            table.truncate(computed)
        cache = self.prefix_cache
        if cache is not None and computed // self.pool.block_size > table.n_cached:
            cache.register(table, request.tokens, request.salt)

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
            _table(request).free()
            request.table = None
        else:
            self._waiting.remove(request)
        self._blocked = None
        request.planned = None
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
        for request in reversed([r for r in self._running if r.planned or _table(r).n_tokens != r.num_computed]):
            self._running.remove(request)
            self._requeue(request)

    def fork(self, request: Request, request_id: str, params: RequestParams | None = None) -> Request:
        """A new request that continues from the same tokens and shares the KV blocks.

        Without a free row it waits first in the queue, and its KV is recomputed or found in the
        prefix cache; the fork of a waiting request waits behind it. Counters start at 0.

        Raises:
            ScheduleError: the request isn't live, or is in the middle of a step.
            CapacityError, InvalidRequestError: as for `add`.
        """
        if self._live.get(request.request_id) is not request or request.planned is not None:
            raise ScheduleError(f"{request!r} can be forked only while live and between two steps")
        child = Request(request_id, request.tokens, params or request.params, salt=request.salt)
        child.n_prompt = request.n_prompt
        self._check_new(child)
        child.limit = token_limit(child, self.max_model_len, self.pool.capacity_tokens)
        if request.n_output and child.at_limit:
            raise CapacityError(
                f"request {request_id!r} would start with {request.n_output} output tokens, its "
                f"whole "
                f"max_tokens; raise max_tokens"
            )
        child.arrival = request.arrival
        self._live[request_id] = child
        if request.state is RequestState.RUNNING and len(self._running) < self.max_rows:
            child.table = _table(request).fork()
            child.num_computed = request.num_computed
            child.state = RequestState.RUNNING
            self._running.insert(self._running.index(request) + 1, child)
        elif request.state is RequestState.RUNNING:
            self._waiting.appendleft(child)
        else:
            self._waiting.insert(self._waiting.index(request) + 1, child)
        return child

    def check_integrity(self, others: Iterable[BlockTable] = ()) -> None:
        """Verify pool, cache, tables and queues; `others` are tables that the caller holds besides.

        Raises:
            KVIntegrityError: saying what is wrong.
        """
        tables = [_table(request) for request in self._running]
        self.pool.check_integrity([*tables, *others])
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity()
        for request, table in zip(self._running, tables, strict=True):
            planned = request.planned
            slots = request.num_computed
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


def _table(request: Request) -> BlockTable:
    table = request.table
    if table is None:
        raise KVIntegrityError(f"{request!r} has no block table, but it should be running")
    return table


def _misuse(request: Request) -> str:
    if request.planned is not None:
        fault, remedy = "still has a row of the last plan", "commit it or finish or abandon it"
    else:
        fault, remedy = f"is at its limit of {request.limit} tokens", "finish it"
    return f"{request!r} {fault}; {remedy} before planning again"
