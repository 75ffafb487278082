"""Requests that wait for each other: hold, extend, fork and branch under a toy model (reference.toy).

A group works as beam search does: who has its scores is held; when all have, some die, the others are extended, and
further children are forked. What a group writes is a function of its seed alone, so it is compared with what it writes
when it has the engine to itself, in a large pool.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from forerun.engine.queues import RequestQueues
from forerun.engine.request import Request, RequestState, RowPlan
from forerun.engine.scheduler import ScheduleError, Scheduler
from forerun.errors import CapacityError, InvalidRequestError
from forerun.kv import BlockPool, KVIntegrityError, PrefixCache
from reference.toy import VOCAB, Params, ToyExecutor, alone


@dataclass
class Group:
    """Sequences that advance together, `width` of them from the first choice on."""

    name: str
    prompt: tuple[int, ...]
    width: int
    max_tokens: int
    seed: int
    members: list[Request] = field(default_factory=list)
    scores: dict[Request, int] = field(default_factory=dict)
    rounds: int = 0
    forked: int = 0
    ended: bool = False

    def submit(self, scheduler: Scheduler) -> None:
        first = Request(self.name, self.prompt, Params(self.max_tokens))
        scheduler.add(first)
        self.members = [first]

    def take(self, scheduler: Scheduler, row: RowPlan, score: int) -> None:
        """Holds a row with what the model said, the same as before if it was computed again; chooses when all have."""
        scheduler.hold(row)
        assert self.scores.setdefault(row.request, score) == score
        if len(self.scores) == len(self.members):
            self.choose(scheduler)

    def choose(self, scheduler: Scheduler) -> None:
        rng = random.Random(hash((self.seed, self.rounds)))
        self.rounds += 1
        if self.members[0].n_output + 1 == self.max_tokens:
            self.end(scheduler)
            return
        children = sorted(rng.choices(range(len(self.members)), k=self.width))
        scores = [self.scores[member] for member in self.members]
        members: list[Request | None] = [None] * self.width
        for index, member in enumerate(self.members):
            if index not in children:
                scheduler.finish(member, "stop")
        for place, index in enumerate(children):
            if children.index(index) != place:
                self.forked += 1
                members[place] = scheduler.fork(self.members[index], f"{self.name}.{self.forked}")
        for place, index in enumerate(children):
            member = members[place] or self.members[index]
            scheduler.extend(member, (scores[index] + place) % VOCAB)
            members[place] = member
        self.members = [member for member in members if member is not None]
        self.scores.clear()

    def end(self, scheduler: Scheduler) -> None:
        for member in self.members:
            scheduler.finish(member, "length")
        self.ended = True

    @property
    def written(self) -> list[list[int]]:
        return [member.output_ids for member in self.members]


@dataclass(frozen=True)
class Mix:
    """Groups (arrival, width, prompt, max_tokens) and single requests (arrival, prompt, max_tokens) in one pool."""

    groups: tuple[tuple[int, int, tuple[int, ...], int], ...]
    singles: tuple[tuple[int, tuple[int, ...], int], ...] = ()
    block_size: int = 4
    spare_blocks: int = 0
    max_rows: int = 4
    spare_budget: int = 4
    cache: bool = True
    max_draft: int = 0
    failures: bool = False
    cancels: bool = False
    seed: int = 0


def run(mix: Mix) -> list[Group]:
    """Runs a mix to its end; raises AssertionError when a promise is broken."""
    rng = random.Random(mix.seed)
    slots = [len(p) + n - 1 for _, _, p, n in mix.groups] + [len(p) + n - 1 for _, p, n in mix.singles]
    pool = BlockPool(-(-max(slots) // mix.block_size) + mix.spare_blocks, mix.block_size)
    scheduler = Scheduler(
        pool,
        PrefixCache(pool) if mix.cache else None,
        max_step_tokens=mix.max_rows + mix.spare_budget,
        max_rows=mix.max_rows,
        max_model_len=64,
    )
    executor = ToyExecutor(pool)
    groups = [Group(f"g{i}", p, w, n, mix.seed + i) for i, (_, w, p, n) in enumerate(mix.groups)]
    singles = [Request(f"s{i}", p, Params(n)) for i, (_, p, n) in enumerate(mix.singles)]
    pending: list[tuple[int, Callable[[], None]]] = []
    for group, (arrives, *_) in zip(groups, mix.groups, strict=True):
        pending.append((arrives, lambda group=group: group.submit(scheduler)))  # type: ignore[misc]
    for single, (arrives, *_) in zip(singles, mix.singles, strict=True):
        pending.append((arrives, lambda single=single: scheduler.add(single)))  # type: ignore[misc]
    pending.sort(key=lambda entry: entry[0])
    steps = waited = 0
    # Whoever computes its last token has something to show for it, so that this happens as often as there are tokens.
    most = 64 * (1 + sum(w * n for _, w, _, n in mix.groups) + sum(n for *_, n in mix.singles))
    while pending or scheduler.has_work:
        while pending and (pending[0][0] <= steps or not scheduler.has_work):
            pending.pop(0)[1]()
        steps += 1
        assert steps <= most * (1 + 20 * mix.failures), "no progress"
        wishes = {request: rng.randint(0, mix.max_draft) for request in scheduler.running}
        plan = scheduler.plan(wishes if mix.max_draft else None)
        assert plan.rows
        assert len(scheduler.running) <= mix.max_rows
        assert not any(row.request.held for row in plan.rows)
        advancing = next((request for request in scheduler.running if not request.held), None)
        assert advancing in [row.request for row in plan.rows], "the first that isn't held must advance"
        scheduler.check_integrity()
        executor.copy(plan)
        written: set[int] = set()
        lost = rng.randint(0, 12) if mix.failures else len(plan.rows)
        waited = 0 if any(row.samples for row in plan.rows[:lost]) else waited + (not mix.failures)
        assert waited <= 64, "nobody's last token is computed"
        for row in plan.rows[:lost]:
            request = row.request
            if request.finished:
                continue
            target = executor.forward(row, [], written)[-1]
            mine = next((group for group in groups if request in group.members), None)
            if not row.samples:
                scheduler.commit(row, [])
            elif mine is not None:
                mine.take(scheduler, row, target)
            else:
                scheduler.commit(row, [target])
                if request.at_limit:
                    scheduler.finish(request, "length")
        if lost < len(plan.rows):
            scheduler.abandon()
        scheduler.check_integrity()
        if mix.cancels and rng.random() < 0.1:
            group = rng.choice(groups)
            if group.members and not group.ended:
                for member in group.members:
                    scheduler.cancel(member)
                group.ended = True
                group.members = []
    assert pool.n_free == pool.n_blocks
    pool.check_integrity([])
    for single in singles:
        assert single.output_ids == alone(single.prompt_ids, single.limit, Params(None), None)
    assert all(group.ended for group in groups)
    return groups


def check(mix: Mix) -> None:
    """Runs a mix, and compares what its groups write with what they write alone in a pool without bounds."""
    for group, job in zip(run(mix), mix.groups, strict=True):
        if not group.members:
            continue
        quiet = Mix((job,), block_size=8, spare_blocks=200, max_rows=16, spare_budget=60, cache=False)
        [expected] = run(replace(quiet, seed=group.seed))
        assert group.written == expected.written


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)


@st.composite
def mixes(draw: st.DrawFn) -> Mix:
    group = st.tuples(st.integers(0, 9), st.integers(1, 6), prompts, st.integers(1, 9))
    single = st.tuples(st.integers(0, 20), prompts, st.integers(1, 12))
    return Mix(
        groups=tuple(draw(st.lists(group, min_size=1, max_size=3))),
        singles=tuple(draw(st.lists(single, max_size=4))),
        block_size=draw(st.sampled_from([1, 2, 4, 5])),
        spare_blocks=draw(st.integers(0, 12)),
        max_rows=draw(st.integers(1, 6)),
        spare_budget=draw(st.sampled_from([0, 1, 3, 8, 30])),
        cache=draw(st.booleans()),
        max_draft=draw(st.sampled_from([0, 0, 3])),
        seed=draw(st.integers(0, 2**32)),
    )


@settings(max_examples=120, deadline=None)
@given(mixes())
def test_every_group_and_every_request_finishes_with_what_it_writes_alone(mix: Mix) -> None:
    check(mix)


@settings(max_examples=60, deadline=None)
@given(mixes(), st.booleans(), st.booleans())
def test_cancelled_and_failed_at_any_time(mix: Mix, failures: bool, cancels: bool) -> None:
    check(replace(mix, failures=failures, cancels=cancels))


TIGHT = Mix(
    groups=((0, 4, (1, 0, 1, 1, 0), 8), (1, 3, (1, 0, 1, 1, 0, 1), 7)),
    singles=((0, (1, 1), 9), (3, (0, 1, 1, 0, 0, 0, 1), 5)),
    block_size=2,
)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 8])
@pytest.mark.parametrize("spare", [0, 1, 3, 9])
def test_a_pool_that_holds_one_beam_serves_several_groups(max_rows: int, spare: int) -> None:
    for seed in range(8):
        check(replace(TIGHT, max_rows=max_rows, spare_blocks=spare, seed=seed))


def _held_keep_their_blocks(self: Scheduler, behind: int, *more: object) -> object:
    return _make_room(self, behind, *more[:3])  # type: ignore[arg-type]


def _held_block_the_queue(self: Scheduler, _prefills: object, left: int, _preempted: object) -> int:
    del self
    return left


def _preempted_forget_that_they_are_held(self: RequestQueues, request: Request) -> None:
    request.held = False
    _requeue(self, request)


def _hold_without_registering_its_slots(self: Scheduler, row: RowPlan) -> None:
    _hold(self, row)
    row.request.num_computed -= 1


def _fork_shares_one_token_more(self: RequestQueues, request: Request, child: Request, n_shared: int) -> None:
    _join(self, request, child, n_shared)
    if child.table is not None:
        child.num_computed += 1
        child.table.append_slots(1)


def _never_planned_again(self: Scheduler, request: Request, token: int) -> None:
    _extend(self, request, token)
    request.held = True


_make_room, _requeue, _hold = Scheduler._make_room, RequestQueues._requeue, Scheduler.hold
_join, _extend = RequestQueues._join, Scheduler.extend

FAULTS: dict[str, tuple[object, str, object]] = {
    "held requests keep their blocks from the first": (Scheduler, "_make_room", _held_keep_their_blocks),
    "held requests keep the queue from their rows": (Scheduler, "_make_way", _held_block_the_queue),
    "preemption forgets that a request is held": (Scheduler, "_requeue", _preempted_forget_that_they_are_held),
    "hold counts one token too few": (Scheduler, "hold", _hold_without_registering_its_slots),
    "a fork shares one token too many": (Scheduler, "_join", _fork_shares_one_token_more),
    "extend leaves it held": (Scheduler, "extend", _never_planned_again),
    "no copy-on-write": (BlockPool, "is_writable", lambda _self, _block: True),
    "copies are not applied": (ToyExecutor, "copy", lambda _self, _plan: None),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_the_mixes_catch(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, name, planted = FAULTS[fault]
    monkeypatch.setattr(target, name, planted)
    with pytest.raises((AssertionError, ScheduleError, KVIntegrityError, ValueError)):
        for seed in range(10):
            for max_rows in (1, 2, 8):
                for spare in (0, 3):
                    check(replace(TIGHT, max_rows=max_rows, spare_blocks=spare, seed=seed))


def small(n_blocks: int = 8, **more: int) -> Scheduler:
    pool = BlockPool(n_blocks, 4)
    return Scheduler(pool, None, **({"max_step_tokens": 16, "max_rows": 4, "max_model_len": 64} | more))


def submitted(scheduler: Scheduler, name: str, n_prompt: int, max_tokens: int = 8) -> Request:
    request = Request(name, [ord(name[0])] * n_prompt, Params(max_tokens))
    scheduler.add(request)
    return request


def test_a_held_request_waits_until_it_is_extended() -> None:
    s = small()
    a, b = submitted(s, "a", 5), submitted(s, "b", 3)
    for row in s.plan().rows:
        s.hold(row) if row.request is a else s.commit(row, [7])
    assert (a.held, a.num_computed, a.n_output, a.steps) == (True, 5, 0, 1)
    s.check_integrity()
    for row in s.plan().rows:
        assert row.request is b
        s.commit(row, [7])
    s.extend(a, 9)
    assert (a.held, a.output_ids) == (False, [9])
    assert [(r.request, r.start, r.count) for r in s.plan().rows] == [(a, 5, 1), (b, 4, 1)]


def test_a_held_request_that_was_preempted_is_extended_all_the_same() -> None:
    s = small(4)
    a, b = submitted(s, "a", 8, 9), submitted(s, "b", 3, 3)
    for row in s.plan().rows:
        s.commit(row, [7]) if row.request is a else s.hold(row)
    while not (plan := s.plan()).preempted:
        for row in plan.rows:
            s.commit(row, [7])
    assert plan.preempted == (b,)
    assert (b.held, b.state, b.table) == (True, RequestState.WAITING, None)
    s.finish(a, "stop")
    c = submitted(s, "c", 4)
    assert [row.request for row in s.plan().rows] == [c]
    s.commit(c.planned, [7])  # type: ignore[arg-type]
    s.extend(b, 9)
    assert [(r.request, r.start, r.count) for r in s.plan().rows] == [(c, 4, 1), (b, 0, 4)]


def test_a_branch_computes_the_last_token_of_the_prompt_and_shares_the_rest() -> None:
    s = small(max_rows=2)
    a = submitted(s, "a", 10)
    for _ in range(3):
        [row] = s.plan().rows
        s.commit(row, [7])
    free = s.pool.n_free
    b, c = s.branch(a, "b", Params(4)), s.branch(a, "c")
    assert (b.state, b.num_computed, b.output_ids, b.limit) == (RequestState.RUNNING, 9, [], 14)
    assert (c.state, list(s.waiting)) == (RequestState.WAITING, [c])
    assert s.pool.n_free == free
    assert a.table is not None
    assert b.table is not None
    assert a.table.blocks[:3] == b.table.blocks
    s.check_integrity()
    plan = s.plan()
    assert [(r.request, r.start, r.count, r.samples) for r in plan.rows] == [(a, 12, 1, True), (b, 9, 1, True)]
    # The block with the rest of the prompt also holds what a wrote.
    assert [copy.n_tokens for copy in plan.copies] == [1]
    for row in plan.rows:
        s.commit(row, [7])
    s.check_integrity()
    one = submitted(s2 := small(), "o", 1)
    s2.commit(s2.plan().rows[0], [7])
    assert s2.branch(one, "p").num_computed == 0


def test_misuse_of_groups_is_refused() -> None:
    s = small(max_step_tokens=4)
    a = submitted(s, "a", 6, 2)
    [row] = s.plan().rows
    with pytest.raises(ScheduleError, match="can be held only where its scores choose a token"):
        s.hold(row)
    with pytest.raises(ScheduleError, match="can be branched only while live and between two steps"):
        s.branch(a, "b")
    s.commit(row, [])
    with pytest.raises(ScheduleError, match="can be branched once its prompt is computed"):
        s.branch(a, "b")
    with pytest.raises(ScheduleError, match="isn't held"):
        s.extend(a, 1)
    [row] = s.plan().rows
    s.hold(row)
    with pytest.raises(ScheduleError, match="not of the current plan"):
        s.hold(row)
    with pytest.raises(ScheduleError, match="every one is held; extend or finish one"):
        s.plan()
    with pytest.raises(InvalidRequestError, match="still live"):
        s.branch(a, "a")
    with pytest.raises(CapacityError, match="the whole pool holds 32"):
        s.branch(a, "b", Params(40))
    assert s.get("b") is None
    s.extend(a, 1)
    [row] = s.plan().rows
    s.hold(row)
    s.extend(a, 1)
    assert a.at_limit
    a.held = True
    with pytest.raises(ScheduleError, match="at its limit of 8 tokens; finish it"):
        s.extend(a, 1)
    a.held = False
    s.finish(a, "length")
    s.hold(row)
    assert s.pool.n_free == s.pool.n_blocks


def test_check_integrity_sees_a_held_request_without_its_kv() -> None:
    s = small()
    a = submitted(s, "a", 3)
    s.commit(s.plan().rows[0], [7])
    a.held = True
    with pytest.raises(KVIntegrityError, match="is held, but not all of its KV is in place"):
        s.check_integrity()
