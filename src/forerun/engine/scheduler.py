"""Continuous batching: which requests run in a step, over which tokens, in which KV slots.

One token budget a step is shared by decodes, prefill chunks, admissions and drafts (chunked prefill
as in Sarathi-Serve, Agrawal et al. 2024, arXiv:2403.02310). When the pool is full, the requests
that arrived last are preempted and later computed again (recompute preemption as in vLLM).

Why every request finishes: blocks are taken only from requests further back in the running list, so
its first one is never preempted; if need be it gets every block, and a request that could not fit
the empty pool was refused when it came. Each step thus computes at least one token of the first
request, until its turn is over. Admission is in arrival order, and preempted requests go first.

Requests of a group (the beams of a beam search) wait for each other: who has its scores is held until
its next token is settled (`hold`, `extend`). What a held request has to say is known, so its KV is worth
only the time to compute it again. "First" above therefore means the first that isn't held: it may take
the blocks of held requests ahead of it, too, and where only held ones run, they make way for the queue,
in which held ones are passed over. Until somebody's last token is computed, nobody is extended and the
first stays the first; so somebody's is, within as many steps as the first has tokens, and what comes of
it, a token or a beam's scores, isn't lost by preemption. A group thus needs room for one of its requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from forerun.engine.queues import RequestQueues, ScheduleError, table_of
from forerun.engine.request import Request, RequestState, RowPlan, StepPlan
from forerun.errors import ConfigurationError
from forerun.kv import BlockCopy, BlockPool, BlockTable, PoolExhausted, PrefixCache

__all__ = ["ScheduleError", "Scheduler"]


class _Chunk(NamedTuple):
    """A row before the drafts are dealt out."""

    request: Request
    table: BlockTable
    start: int
    n_known: int
    samples: bool


class Scheduler(RequestQueues):
    """Plans steps over one `BlockPool`. Single-threaded: the engine loop calls it.

    A step is `plan`, then for each row of the plan `commit`, `hold` or `finish` (in any order), then the
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
        super().__init__(pool, prefix_cache, max_rows=max_rows, max_model_len=max_model_len)
        self.max_step_tokens = max_step_tokens

    def plan(
        self,
        draft_lengths: Mapping[Request, int] | None = None,
        prompt_share: Callable[[int, int], int] | None = None,
    ) -> StepPlan:
        """Choose the rows of the next step and give them slots.

        The budget goes to running decodes (one token each), then running prefill chunks, then
        admissions in arrival order, and what is left to drafts, evenly. `draft_lengths` are wishes:
        they are cut to the budget, the free blocks and the request's limit, and never preempt
        anyone. `prompt_share` says how many tokens of prompts may go beside so many decodes, given
        how many the budget would have; at least one. No rows means no work.

        Raises:
            ScheduleError: a row of the last plan was neither committed nor finished, or a request
                at its limit was not finished.
        """
        copies: list[BlockCopy] = []
        preempted: list[Request] = []
        decodes: list[_Chunk] = []
        prefills: list[_Chunk] = []
        share = None if prompt_share is None else self._share(prompt_share)
        left = self._plan_running(decodes, prefills, copies, preempted, share)
        # Whoever was just preempted must not come back at the expense of the one that took its
        # blocks.
        if self._waiting and left > 0 and not preempted:
            left = self._admit(prefills, left)
            if not decodes and not prefills:
                left = self._make_way(prefills, left, preempted)
        chunks = decodes + prefills
        left = self.max_step_tokens - sum(chunk.n_known for chunk in chunks)
        drafts = (
            self._deal_drafts(chunks, draft_lengths, left, copies) if draft_lengths and left > 0 else [0] * len(chunks)
        )
        if not chunks and self.has_work:
            raise ScheduleError(
                "no request can advance: every one is held; extend or finish one of them"
                if all(request.held for request in self._live.values())
                else "no request can advance, because tables outside the scheduler hold the KV pool's blocks; free them"
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
        share: int | None,
    ) -> int:
        """Give running requests their tokens; returns the budget that is left.

        Blocks go by age, so one pass in arrival order suffices: a victim is always behind the
        request that takes its blocks and has no row yet. Budget goes to decodes first, so theirs is
        set aside.
        """
        running = self._running
        n_decodes = 0
        for request in running:
            if request.held:
                continue
            known = len(request.tokens) - request.num_computed
            if request.planned is not None or known < 1 or (request.n_output > 0 and request.at_limit):
                raise ScheduleError(_misuse(request))
            n_decodes += known == 1
        left = self.max_step_tokens - n_decodes
        if share is not None:
            left = min(left, share)
        index = 0
        first = True
        while index < len(running):
            request = running[index]
            index += 1
            if request.held:
                continue
            held_ahead, first = (index - 1 if first else 0), False
            table = table_of(request)
            start = request.num_computed
            known = len(request.tokens) - start
            count = 1 if known == 1 else min(known, left)
            if count == 0:
                continue
            try:
                copy = table.append_slots(count)
            except PoolExhausted:
                count, freed = self._make_room(index, table, count, preempted, held_ahead)
                left += freed
                index = min(index, len(running))
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

    def _share(self, prompt_share: Callable[[int, int], int]) -> int | None:
        """Tokens of prompts that may go beside this step's decodes; None without decodes, or without prompts."""
        known = [len(request.tokens) - request.num_computed for request in self._running if not request.held]
        n_decodes = known.count(1)
        if not n_decodes or (n_decodes == len(known) and not self._waiting):
            return None
        return max(1, prompt_share(n_decodes, self.max_step_tokens - n_decodes))

    def _make_room(
        self, behind: int, table: BlockTable, count: int, preempted: list[Request], held_ahead: int = 0
    ) -> tuple[int, int]:
        """Preempt from the end of the running list down to `behind`, until `table` has room.

        When that isn't enough, the `held_ahead` held requests before the one that asks follow, nearest
        first. Returns the tokens that fit now (0 when nobody is left: the request keeps its KV and waits
        for a step), and the budget that the preempted decodes had set aside.
        """
        running = self._running
        freed = 0
        fits = table.room(count)
        while fits == 0 and len(running) > behind:
            victim = running.pop()
            freed += len(victim.tokens) - victim.num_computed == 1
            self._preempt(victim, preempted)
            fits = table.room(count)
        while fits == 0 and held_ahead > 0:
            held_ahead -= 1
            self._preempt(running.pop(held_ahead), preempted)
            fits = table.room(count)
        return fits, freed

    def _make_way(self, prefills: list[_Chunk], left: int, preempted: list[Request]) -> int:
        """Preempt held requests, last one first, until one that isn't held is admitted; returns the budget left."""
        running = self._running
        if all(request.held for request in self._waiting) or not all(request.held for request in running):
            return left
        while running and not prefills:
            self._preempt(running.pop(), preempted)
            left = self._admit(prefills, left)
        return left

    def _preempt(self, victim: Request, preempted: list[Request]) -> None:
        self._requeue(victim)
        preempted.append(victim)

    def _admit(self, prefills: list[_Chunk], left: int) -> int:
        """Admit waiting requests that aren't held in order while rows, budget and blocks last; returns what is left.

        A request is admitted when all its known tokens fit beside what running prefills have yet to
        take and one block of growth for each running row; otherwise it'd soon be preempted, or
        preempt others.
        """
        pool, cache, running, waiting = self.pool, self.prefix_cache, self._running, self._waiting
        if len(running) >= self.max_rows:
            return left
        slack = pool.n_free - len(running)
        for request in running:
            slack -= pool.blocks_for(len(request.tokens)) - len(table_of(request).blocks)
        cached = cache.registrations if cache is not None else 0
        while left > 0 and len(running) < self.max_rows:
            head = next((request for request in waiting if not request.held), None)
            if head is None:
                return left
            request = head
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
            waiting.remove(request)
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
        table_of(request).truncate(row.start + row.count + draft_count)
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
        self._check_planned(row)
        n = len(tokens)
        room = min(row.draft_count + 1, request.limit - len(request.tokens)) if row.samples else 0
        if n > room or (n == 0 and room > 0):
            raise ScheduleError(f"{request!r}: {n} tokens committed, but the row allows {min(1, room)} to {room}")
        request.tokens.extend(tokens)
        self._computed(row, row.start + row.count + max(0, n - 1))

    def hold(self, row: RowPlan) -> None:
        """Record a row whose next token isn't settled yet: all its tokens are computed, and none follows.

        The request keeps its KV and isn't planned until `extend`. Does nothing when the request was
        finished meanwhile.

        Raises:
            ScheduleError: the row isn't of the request's current plan, or doesn't sample.
        """
        request = row.request
        if request.state is RequestState.FINISHED:
            return
        self._check_planned(row)
        if not row.samples:
            raise ScheduleError(f"{request!r}: a row can be held only where its scores choose a token; commit it")
        self._computed(row, row.start + row.count)
        request.held = True

    def extend(self, request: Request, token: int) -> None:
        """Settle the next token of a held request, which is planned again from then on.

        One that was preempted while it was held takes its place in the queue.

        Raises:
            ScheduleError: the request isn't held, or is at its limit.
        """
        if not request.held:
            raise ScheduleError(f"{request!r} isn't held, so its tokens come from commit")
        if request.at_limit:
            raise ScheduleError(f"{request!r} is at its limit of {request.limit} tokens; finish it")
        request.tokens.append(token)
        request.held = False

    def _check_planned(self, row: RowPlan) -> None:
        if row.request.planned is not row:
            raise ScheduleError(f"{row.request!r}: committed a row that is not of the current plan")

    def _computed(self, row: RowPlan, n_tokens: int) -> None:
        """The first `n_tokens` tokens are computed, and what the row has slots for beyond them is given back."""
        request = row.request
        request.planned = None
        request.steps += 1
        request.num_computed = n_tokens
        table = table_of(request)
        if table.n_tokens != n_tokens:
            table.truncate(n_tokens)
        cache = self.prefix_cache
        if cache is not None and n_tokens // self.pool.block_size > table.n_cached:
            cache.register(table, request.tokens, request.salt)


def _misuse(request: Request) -> str:
    if request.planned is not None:
        fault, remedy = "still has a row of the last plan", "commit it or finish or abandon it"
    else:
        fault, remedy = f"is at its limit of {request.limit} tokens", "finish it"
    return f"{request!r} {fault}; {remedy} before planning again"
