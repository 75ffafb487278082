"""The scheduler under a toy model whose KV is checked by content: see reference.toy."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from forerun.engine.request import Request, RequestState, RowPlan, StepPlan
from forerun.engine.scheduler import ScheduleError, Scheduler
from forerun.kv import BlockPool, BlockTable, PrefixCache, prefix
from reference.toy import EOS, VOCAB, Params, ToyExecutor, alone, next_token, states, step_state


@dataclass(frozen=True)
class Job:
    arrives: int
    prompt: tuple[int, ...]
    params: Params
    salt: str | None = None


@dataclass(frozen=True)
class Setup:
    jobs: tuple[Job, ...]
    block_size: int = 4
    spare_blocks: int = 0
    max_rows: int = 4
    spare_budget: int = 4
    max_model_len: int = 64
    cache: bool = True
    max_draft: int = 0
    cancels: bool = False
    forks: bool = False
    failures: bool = False
    seed: int = 0


@dataclass
class Simulation:
    """Runs a Setup to its end and checks every promise of the scheduler on the way."""

    setup: Setup
    hasher: Callable[[int, tuple[int, ...]], int] = prefix.chain_hash
    steps: int = 0
    computed: int = 0
    lost: int = 0
    admitted: list[Request] = field(default_factory=list)
    done: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        setup = self.setup
        self.rng = random.Random(setup.seed)
        size = setup.block_size
        slots = [
            max(
                len(job.prompt),
                min(len(job.prompt) + (job.params.max_tokens or 0), setup.max_model_len) - 1,
            )
            for job in setup.jobs
        ]
        self.pool = BlockPool(-(-max(slots) // size) + setup.spare_blocks, size)
        self.cache = PrefixCache(self.pool, hasher=self.hasher) if setup.cache else None
        self.scheduler = Scheduler(
            self.pool,
            self.cache,
            max_step_tokens=setup.max_rows + setup.spare_budget,
            max_rows=setup.max_rows,
            max_model_len=setup.max_model_len,
        )
        self.executor = ToyExecutor(self.pool)
        self.requests: list[Request] = []
        self.resume: dict[Request, int] = {}

    def run(self) -> Simulation:
        pending = sorted(self.setup.jobs, key=lambda job: job.arrives)
        while pending or self.scheduler.has_work:
            while pending and (pending[0].arrives <= self.steps or not self.scheduler.has_work):
                job = pending.pop(0)
                request = Request(f"r{len(self.requests)}", job.prompt, job.params, salt=job.salt)
                self.scheduler.add(request)
                self.requests.append(request)
            self.step()
            self.between_steps()
            self.check()
        assert self.scheduler.plan().rows == ()
        assert self.pool.n_free == self.pool.n_blocks
        self.pool.check_integrity([])
        return self

    def check(self) -> None:
        self.scheduler.check_integrity()
        n_slots = sum(request.limit for request in self.requests)
        disturbances = 1 + sum(request.preemptions for request in self.requests) * self.setup.failures
        assert self.steps <= n_slots * disturbances, "no progress"

    def step(self) -> None:
        scheduler, rng = self.scheduler, self.rng
        self.steps += 1
        before = list(scheduler.running)
        queue = list(scheduler.waiting)
        wishes = {request: rng.randint(0, self.setup.max_draft) for request in [*before, *queue]}
        plan = scheduler.plan(wishes if self.setup.max_draft else None)
        self.check_plan(plan, before, queue)
        scheduler.check_integrity()
        self.maybe_cancel(0.05)
        self.executor.copy(plan)
        written: set[int] = set()
        failed_after = rng.randint(0, 12) if self.setup.failures else len(plan.rows)
        for row in plan.rows[:failed_after]:
            self.run_row(row, written)
        if failed_after < len(plan.rows):
            scheduler.abandon()
            assert all(row.request.planned is None for row in plan.rows)

    def check_plan(self, plan: StepPlan, before: list[Request], queue: list[Request]) -> None:
        scheduler, rows = self.scheduler, plan.rows
        running = list(scheduler.running)
        assert rows
        assert plan.n_tokens <= scheduler.max_step_tokens
        assert len({row.request for row in rows}) == len(rows) <= len(running) <= scheduler.max_rows
        # The oldest always advances, and victims are those that came last.
        assert (running[0] is before[0]) if before else (running[0] is queue[0])
        assert running[0] in [row.request for row in rows]
        stayed = len(before) - len(plan.preempted)
        assert list(reversed(plan.preempted)) == before[stayed:]
        assert running[:stayed] == before[:stayed]
        # Admission is in queue order, none skipped, and a preempted request is the next.
        entered = running[stayed:]
        assert entered == queue[: len(entered)]
        assert list(scheduler.waiting) == [*before[stayed:], *queue[len(entered) :]]
        self.admitted += [request for request in entered if request not in self.admitted]
        for request in plan.preempted:
            assert (request.state, request.table) == (RequestState.WAITING, None)
            self.lost += self.resume[request]
        for row in rows:
            request = row.request
            assert request.state is RequestState.RUNNING
            if request in entered:
                assert row.start % self.pool.block_size == 0
                assert row.start == 0 or self.cache is not None
                self.resume[request] = row.start
            # Each token is computed exactly once since the last admission.
            assert row.start == self.resume[request] < len(request.tokens)
            end = row.start + row.count
            assert row.samples == (end == len(request.tokens))
            assert row.samples or row.draft_count == 0
            top = min(max(request.n_prompt, request.limit - 1), scheduler.max_model_len)
            assert row.count >= 1
            assert end + row.draft_count <= top

    def run_row(self, row: RowPlan, written: set[int]) -> None:
        request = row.request
        if request.finished:
            self.scheduler.commit(row, [1])
            return
        drafts = self.draft(request, self.rng.randint(0, row.draft_count))
        targets = self.executor.forward(row, drafts, written)
        tokens: list[int] = []
        if row.samples:
            targets = targets[row.count - 1 :]
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == targets[accepted]:
                accepted += 1
            tokens = targets[: accepted + 1]
            if request.params.stop_at_eos and EOS in tokens:
                tokens = tokens[: tokens.index(EOS) + 1]
        steps = request.steps
        self.scheduler.commit(row, tokens)
        assert request.steps == steps + 1
        self.resume[request] = row.start + row.count + max(0, len(tokens) - 1)
        self.computed += self.resume[request] - row.start
        assert request.num_computed == self.resume[request]
        with pytest.raises(ScheduleError, match="not of the current plan"):
            self.scheduler.commit(row, tokens)
        if request.params.stop_at_eos and EOS in tokens:
            self.end(request, "stop")
        elif request.at_limit:
            self.end(request, "length")

    def draft(self, request: Request, n: int) -> list[int]:
        """Mostly what the model will say, so that long acceptance and rejection both occur."""
        state = states(request.tokens, request.salt)[-1]
        drafts = []
        for _ in range(n):
            right = next_token(state)
            drafts.append(right if self.rng.random() < 0.75 else self.rng.randrange(VOCAB))
            state = step_state(state, drafts[-1])
        return drafts

    def end(self, request: Request, reason: str) -> None:
        expected = alone(request.prompt_ids, request.limit, request.params, request.salt)
        assert request.output_ids == expected
        assert self.scheduler.finish(request, reason)
        assert not self.scheduler.finish(request, "error")
        assert (request.finish_reason, request.table) == (reason, None)
        self.done.append(request)

    def maybe_cancel(self, chance: float) -> None:
        live = [*self.scheduler.running, *self.scheduler.waiting]
        if self.setup.cancels and live and self.rng.random() < chance:
            request = self.rng.choice(live)
            assert self.scheduler.cancel(request)
            assert request.finish_reason == "cancelled"
            assert self.scheduler.get(request.request_id) is None

    def between_steps(self) -> None:
        self.maybe_cancel(0.1)
        live = [*self.scheduler.running, *self.scheduler.waiting]
        if self.setup.forks and live and len(self.requests) < 12 and self.rng.random() < 0.2:
            parent = self.rng.choice(live)
            child = self.scheduler.fork(parent, f"r{len(self.requests)}")
            self.resume[child] = child.num_computed
            self.requests.append(child)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    common = draw(st.lists(st.integers(0, 1), max_size=16))
    jobs = draw(
        st.lists(
            st.builds(
                Job,
                arrives=st.integers(0, 25),
                prompt=st.builds(
                    lambda n, own: (*common[:n], *own),
                    st.integers(0, 16),
                    st.lists(st.integers(0, 1), min_size=1, max_size=12),
                ),
                params=st.builds(Params, st.integers(1, 16), st.booleans()),
                salt=st.sampled_from([None, None, "salt"]),
            ),
            min_size=1,
            max_size=8,
        )
    )
    return Setup(
        jobs=tuple(jobs),
        block_size=draw(st.sampled_from([1, 2, 4, 5])),
        spare_blocks=draw(st.integers(0, 12)),
        max_rows=draw(st.integers(1, 5)),
        spare_budget=draw(st.sampled_from([0, 1, 3, 8, 30])),
        max_model_len=draw(st.sampled_from([29, 40, 64])),
        cache=draw(st.booleans()),
        max_draft=draw(st.sampled_from([0, 0, 3, 6])),
        seed=draw(st.integers(0, 2**32)),
    )


@settings(max_examples=50, deadline=None)
@given(setups())
def test_any_mix_finishes_in_bounded_steps_with_the_right_text(setup: Setup) -> None:
    simulation = Simulation(setup).run()
    assert len(simulation.done) == len(setup.jobs)
    assert simulation.admitted == simulation.requests
    # All but the last token is computed, once, but for preemption and cached prefixes.
    once = sum(len(request.tokens) - 1 for request in simulation.done)
    hits = sum(request.prefix_hit_tokens for request in simulation.done)
    assert simulation.computed == once - hits + simulation.lost
    assert hits == (simulation.cache.stats.hit_tokens if simulation.cache else 0)


@settings(max_examples=50, deadline=None)
@given(setups(), st.booleans(), st.booleans(), st.booleans())
def test_cancel_fork_and_failure_at_any_time(setup: Setup, cancels: bool, forks: bool, failures: bool) -> None:
    Simulation(replace(setup, cancels=cancels, forks=forks, failures=failures)).run()


@settings(max_examples=20, deadline=None)
@given(setups())
def test_hash_collisions_change_nothing(setup: Setup) -> None:
    Simulation(replace(setup, cache=True), hasher=lambda _parent, tokens: sum(tokens)).run()


def _commit_without_truncation(self: Scheduler, row: RowPlan, tokens: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockTable, "truncate", lambda _self, _n: None)
        _commit(self, row, tokens)


def _commit_one_too_many(self: Scheduler, row: RowPlan, tokens: list[int]) -> None:
    _commit(self, row, tokens)
    request = row.request
    if request.table is not None and len(tokens) > 1:
        request.num_computed += 1
        request.table.append_slots(1)


def _requeue_at_the_back(self: Scheduler, request: Request) -> None:
    _requeue(self, request)
    self._waiting.rotate(-1)


def _requeue_without_freeing(self: Scheduler, request: Request) -> None:
    request.table = BlockTable(self.pool)
    _requeue(self, request)


def _evict_first(self: Scheduler, behind: int, table: BlockTable, *more: object) -> object:
    self._running[-1], self._running[0] = self._running[0], self._running[-1]
    return _make_room(self, behind, table, *more)  # type: ignore[arg-type]


def _whole_prompt(self: PrefixCache, tokens: Sequence[int], salt: str | None = None) -> object:
    return _lookup(self, [*tokens, 0], salt)


def _stale_mirror(self: BlockTable) -> int:
    first = min(len(self.blocks), self._dirty_from + 1)
    self._dirty_from = len(self.blocks)
    return first


_commit = Scheduler.commit
_requeue = Scheduler._requeue
_make_room = Scheduler._make_room
_lookup = PrefixCache.lookup

FAULTS: dict[str, tuple[object, str, object]] = {
    "no copy-on-write": (BlockPool, "is_writable", lambda _self, _block: True),
    "copies are not applied": (ToyExecutor, "copy", lambda _self, _plan: None),
    "rejected drafts keep their slots": (Scheduler, "commit", _commit_without_truncation),
    "one slot too many counts as computed": (Scheduler, "commit", _commit_one_too_many),
    "preempted requests go last": (Scheduler, "_requeue", _requeue_at_the_back),
    "preempted requests keep their blocks": (Scheduler, "_requeue", _requeue_without_freeing),
    "the oldest is preempted": (Scheduler, "_make_room", _evict_first),
    "the whole prompt is a hit": (PrefixCache, "lookup", _whole_prompt),
    "hits are not verified": (prefix, "_same", lambda *_: True),
    "the mirror misses a change": (BlockTable, "take_dirty", _stale_mirror),
    "eviction leaves the entry": (PrefixCache, "_evicted", lambda _self, _block: None),
}


def fixed_schedules() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        jobs = tuple(
            Job(
                rng.randint(0, 9),
                (*[1] * rng.randint(0, 9), *[rng.randint(0, 1)] * rng.randint(1, 6)),
                Params(rng.randint(4, 16)),
            )
            for _ in range(6)
        )
        setup = Setup(jobs, spare_blocks=rng.randint(0, 6), max_draft=4, forks=True, seed=seed)
        Simulation(setup, hasher=lambda parent, tokens: (parent + sum(tokens)) % 8).run()


def test_the_schedules_for_planted_faults_pass_without_one() -> None:
    fixed_schedules()


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_the_simulation_catches(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, name, planted = FAULTS[fault]
    monkeypatch.setattr(target, name, planted)
    with pytest.raises((AssertionError, ScheduleError, ValueError, KeyError)):
        fixed_schedules()
