from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import pytest

from forerun.engine.request import Request, RequestState, StepPlan
from forerun.engine.scheduler import ScheduleError, Scheduler
from forerun.errors import CapacityError, ConfigurationError, InvalidRequestError
from forerun.kv import BlockPool, BlockTable, KVIntegrityError, PrefixCache


@dataclass(frozen=True)
class Params:
    max_tokens: int | None


def scheduler(n_blocks: int = 8, *, cache: bool = False, **more: int) -> Scheduler:
    pool = BlockPool(n_blocks, 4)
    settings = {"max_step_tokens": 16, "max_rows": 4, "max_model_len": 64} | more
    return Scheduler(pool, PrefixCache(pool) if cache else None, **settings)


def submit(scheduler: Scheduler, name: str, n_prompt: int, max_tokens: int | None = 8) -> Request:
    request = Request(name, [ord(name[0])] * n_prompt, Params(max_tokens))
    scheduler.add(request)
    return request


def advance(scheduler: Scheduler, wishes: dict[Request, int] | None = None) -> StepPlan:
    plan = scheduler.plan(wishes)
    for row in plan.rows:
        scheduler.commit(row, [7] if row.samples else [])
    return plan


def shares(plan: StepPlan) -> list[tuple[str, int, int, int, bool]]:
    return [(r.request.request_id, r.start, r.count, r.draft_count, r.samples) for r in plan.rows]


def test_budget_goes_to_decodes_then_prefill_then_admission_then_drafts() -> None:
    s = scheduler(32, max_step_tokens=10)
    a = submit(s, "a", 3)
    assert shares(advance(s)) == [("a", 0, 3, 0, True)]
    b, c = submit(s, "b", 12), submit(s, "c", 5)
    assert shares(advance(s, {a: 4})) == [("a", 3, 1, 0, True), ("b", 0, 9, 0, False)]
    assert shares(advance(s, {a: 4})) == [
        ("a", 4, 1, 1, True),
        ("b", 9, 3, 0, True),
        ("c", 0, 5, 0, True),
    ]
    # Seven tokens are left: a short wish is met and the rest is shared.
    assert [row.draft_count for row in advance(s, {a: 1, b: 9, c: 9}).rows] == [1, 3, 3]
    assert [row.draft_count for row in advance(s, {b: 4}).rows] == [0, 4, 0]


def test_drafts_never_preempt_and_end_before_the_limit() -> None:
    s = scheduler(3)
    a, b = submit(s, "a", 4, 4), submit(s, "b", 1, 8)
    advance(s)
    assert s.pool.n_free == 1
    plan = advance(s, {a: 9, b: 9})
    assert shares(plan) == [("a", 4, 1, 2, True), ("b", 1, 1, 2, True)]
    assert plan.preempted == ()
    plan = advance(s, {a: 9, b: 9})
    # One of two tokens that a may still commit is the target's own.
    assert shares(plan) == [("a", 5, 1, 1, True), ("b", 2, 1, 1, True)]


def test_latest_arrived_is_preempted_and_returns_first() -> None:
    s = scheduler(4, max_step_tokens=32)
    a, b, c = submit(s, "a", 4, 9), submit(s, "b", 3, 9), submit(s, "c", 3, 9)
    advance(s)
    assert s.running == [a, b]
    advance(s)
    plan = advance(s)
    assert (plan.preempted, s.running, list(s.waiting)) == ((), [a, b], [c])
    while not plan.preempted:
        plan = advance(s)
    assert (plan.preempted, list(s.waiting)) == ((b,), [b, c])
    assert (b.preemptions, b.num_computed, b.state) == (1, 0, RequestState.WAITING)
    kept = b.tokens.copy()
    s.finish(a, "length")
    assert shares(advance(s))[0] == ("b", 0, len(kept), 0, True)
    assert b.tokens == [*kept, 7]


def test_prefix_hits_spare_prefill_and_are_counted() -> None:
    s = scheduler(16, cache=True)
    a = submit(s, "a", 10)
    advance(s)
    b = submit(s, "a2", 10)
    assert shares(advance(s))[1] == ("a2", 8, 2, 0, True)
    assert (a.prefix_hit_tokens, b.prefix_hit_tokens) == (0, 8)
    assert a.table is not None
    assert b.table is not None
    assert a.table.blocks[:2] == b.table.blocks[:2]
    # Output is cached, too, and what a finished request leaves counts as free.
    for _ in range(6):
        advance(s)
    s.finish(a, "stop")
    s.finish(b, "stop")
    assert s.pool.n_free == 16
    follow_up = Request("f", [*a.tokens, 1], Params(4))
    s.add(follow_up)
    assert shares(advance(s))[0][1] == 16


def test_a_blocked_head_is_not_looked_up_again_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    s = scheduler(6, cache=True)
    a = submit(s, "a", 8)
    advance(s)
    submit(s, "b", 20, 1)
    looked: list[int] = []
    lookup = PrefixCache.lookup

    def spy(self: PrefixCache, tokens: Sequence[int], salt: str | None = None) -> object:
        looked.append(len(tokens))
        return lookup(self, tokens, salt)

    monkeypatch.setattr(PrefixCache, "lookup", spy)
    for _ in range(3):
        advance(s)
    assert looked == [20]
    s.finish(a, "stop")
    assert shares(advance(s)) == [("b", 0, 16, 0, False)]
    assert looked == [20, 20]


def test_what_can_never_fit_is_refused_at_once() -> None:
    s = scheduler(4)
    with pytest.raises(CapacityError, match=r"at least 17, or shorten .* max_tokens to at most 7"):
        submit(s, "a", 10, 8)
    with pytest.raises(CapacityError, match=r"pool holds 16: raise kv_tokens to at least 40"):
        submit(s, "a", 40, 1)
    with pytest.raises(CapacityError, match=r"prompt has 64 tokens, but the context holds 64"):
        submit(s, "a", 64, 1)
    with pytest.raises(InvalidRequestError, match="empty prompt"):
        submit(s, "a", 0)
    with pytest.raises(InvalidRequestError, match="max_tokens is -1"):
        submit(s, "a", 1, -1)
    assert not s.has_work
    assert submit(s, "a", 10, 7).limit == 17
    with pytest.raises(InvalidRequestError, match="still live"):
        submit(s, "a", 1)
    assert submit(s, "open", 10, None).limit == 17
    assert submit(s, "score", 16, 0).limit == 16
    assert submit(scheduler(99), "b", 60, 99).limit == 64
    used = submit(s, "u", 1)
    s.cancel(used)
    with pytest.raises(InvalidRequestError, match="submitted before"):
        s.add(used)


def test_a_prompt_can_be_computed_without_an_answer() -> None:
    s = scheduler()
    request = submit(s, "a", 20, 0)
    assert shares(s.plan()) == [("a", 0, 16, 0, False)]
    assert request.planned is not None
    s.commit(request.planned, [])
    (row,) = s.plan().rows
    assert row.samples
    s.commit(row, [])
    with pytest.raises(ScheduleError, match="at its limit of 20 tokens; finish it"):
        s.plan()
    s.finish(request, "length")
    assert not s.has_work


def test_misuse_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"max_step_tokens \(3\) must be at least max_rows"):
        scheduler(max_step_tokens=3)
    with pytest.raises(ConfigurationError, match="max_rows"):
        scheduler(max_rows=0)
    with pytest.raises(ConfigurationError, match="max_model_len"):
        scheduler(max_model_len=0)
    s = scheduler()
    a = submit(s, "a", 3, 4)
    (row,) = s.plan({a: 1}).rows
    with pytest.raises(ScheduleError, match="still has a row of the last plan"):
        s.plan()
    with pytest.raises(ScheduleError, match="between two steps"):
        s.fork(a, "b")
    for tokens in ([], [1, 2, 3]):
        with pytest.raises(ScheduleError, match=f"{len(tokens)} tokens committed, .* 1 to 2"):
            s.commit(row, tokens)
    s.commit(row, [1, 2])
    with pytest.raises(ScheduleError, match="doesn't belong"):
        s.finish(Request("x", [1], Params(1)), "stop")
    s.cancel(a)
    submit(s, "c", 3)
    with BlockTable(s.pool) as outside:
        outside.append_slots(32)
        with pytest.raises(ScheduleError, match="outside the scheduler"):
            s.plan()
    assert shares(s.plan()) == [("c", 0, 3, 0, True)]


def test_check_integrity_sees_wrong_books() -> None:
    s = scheduler()
    a = submit(s, "a", 3)
    advance(s)
    a.num_computed += 1
    with pytest.raises(KVIntegrityError, match="should have 4 slots, but its table has 3"):
        s.check_integrity()
    a.num_computed -= 1
    with BlockTable(s.pool) as table:
        table.append_slots(1)
        with pytest.raises(KVIntegrityError, match="0 table entries"):
            s.check_integrity()
        s.check_integrity([table])


def test_a_step_costs_microseconds_whatever_the_context() -> None:
    def best_step(n_prompt: int) -> float:
        pool = BlockPool(8 * (n_prompt + 512) // 16, 16)
        s = Scheduler(pool, PrefixCache(pool), max_step_tokens=8 * n_prompt, max_rows=8, max_model_len=10**6)
        for index in range(8):
            s.add(Request(f"r{index}", [index] * n_prompt, Params(400)))
        advance(s)
        wishes = dict.fromkeys(s.running, 3)
        times = []
        for _ in range(300):
            start = perf_counter()
            advance(s, wishes)
            times.append(perf_counter() - start)
        return min(times)

    short, long = best_step(64), best_step(16384)
    assert short < 500e-6
    assert long < 4 * short + 20e-6
