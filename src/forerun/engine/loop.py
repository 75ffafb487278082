"""The loop: plan, draft, forward, verify, commit."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from forerun.constrain.compiler import Grammar
from forerun.draft.base import NO_DRAFT, DraftTree
from forerun.engine.awaited import AwaitedGrammars, wait_for_one
from forerun.engine.batch import StepBatch
from forerun.engine.beams import LiveBeam
from forerun.engine.choose import Choice, Chooser, Walk
from forerun.engine.fairness import PromptShare
from forerun.engine.live import LiveRequest
from forerun.engine.masks import StepMasks, grammar_failed
from forerun.engine.request import FinishReason, RequestState, RowPlan, token_limit
from forerun.engine.scheduler import Scheduler
from forerun.engine.speculate import Speculator
from forerun.engine.tally import StepSeconds, Tally
from forerun.errors import ConstraintError, ForerunError
from forerun.models.executor import Executor
from forerun.sample.params import SamplingParams

_GRAMMAR_WAIT = 0.05  # seconds


class _Uninterrupted:
    """Ctrl-C takes effect after the step, not in the midst of its books.

    Only where Python's own handler is in place and this is the main thread, which alone may change handlers. The native
    forward, where nearly all of the time goes, can't be interrupted anyway.
    """

    def __enter__(self) -> None:
        self._pending = False
        self._deferring = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._deferring:
            signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        if self._deferring:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._pending:
                raise KeyboardInterrupt

    def _note(self, *_: object) -> None:
        self._pending = True


class Loop:
    """Steps a model over the live requests. One step at a time, under `lock`.

    Attributes:
        live: requests that haven't ended, by id.
        awaited: those of them that aren't scheduled yet, because their grammar is being compiled.
        tally: counts of all requests together.
        steps, step_seconds, preemptions: totals.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        batch: StepBatch,
        executor: Executor,
        chooser: Chooser,
        speculator: Speculator | None,
        masks: StepMasks,
        prompt_share: PromptShare | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.batch = batch
        self.executor = executor
        self.chooser = chooser
        self.speculator = speculator
        self.masks = masks
        self.prompt_share = prompt_share
        self.live: dict[str, LiveRequest] = {}
        self.awaited = AwaitedGrammars()
        self.lock = threading.RLock()
        self.tally = Tally()
        self.steps = self.preemptions = 0
        self.step_seconds = 0.0
        self._argmax = np.zeros(executor.tape.max_outputs, dtype=np.int32)
        self._stepping = False
        self._doomed: list[LiveRequest] = []  # cancelled within a step, by the thread that runs it

    def step(self) -> bool:
        """Runs one step for whoever has work; returns whether there was any.

        Where all that live wait for their grammars, it waits a moment for one.
        """
        with self.lock, _Uninterrupted():
            if self._stepping:
                raise ForerunError(
                    "a step is running in this thread; what runs within it, such as a drafter, can't run another"
                )
            self._admit()
            if self.scheduler.has_work:
                self._timed_step()
                return True
            futures = self.awaited.futures
        with _Uninterrupted():  # else what waits on a grammar is left in a state in which it can't be told
            wait_for_one(futures, _GRAMMAR_WAIT)
        return bool(futures)

    def _timed_step(self) -> None:
        began = time.perf_counter()
        self._stepping = True
        try:
            self._step(began)
        except BaseException:
            self._abandon()
            raise
        finally:
            self.step_seconds += time.perf_counter() - began
            self._stepping = False
            while self._doomed:
                self.cancel(*self._doomed.pop().group)  # those that branched off since, too

    def submit(self, live: LiveRequest, grammar: Future[Grammar] | None) -> None:
        """Queues a request, or lets it wait for its grammar first.

        What it can't be served for is raised now, even where it isn't scheduled yet.
        """
        try:
            with _Uninterrupted():
                self._queue(live, grammar)
        except BaseException:
            self.cancel(live)  # nobody gets to know of it
            raise

    def _queue(self, live: LiveRequest, grammar: Future[Grammar] | None) -> None:
        if grammar is not None:
            token_limit(live.request, self.scheduler.max_model_len, self.scheduler.pool.capacity_tokens)
            if grammar.done():
                live.constrain(grammar.result())
                grammar = None
        if grammar is None:
            self.scheduler.add(live.request)
        else:
            self.awaited.add(live, grammar)
        self.live[live.request.request_id] = live

    def fork(self, parent: LiveRequest, name: str, params: SamplingParams, seed: int) -> LiveRequest:
        """A request that goes on from another's tokens. Raises what `Scheduler.fork` raises."""
        try:
            with _Uninterrupted():
                child = parent.fork(self.scheduler.fork(parent.request, name, params), params, seed)
                self.live[name] = child
                if self.speculator:
                    self.speculator.fork(parent, child)
        except BaseException:
            self._disown(name)
            raise
        return child

    def _disown(self, name: str) -> None:
        """Ends a request whose beginning failed half-way."""
        live, request = self.live.get(name), self.scheduler.get(name)
        if live is not None:
            self.cancel(live)
        elif request is not None:
            self.scheduler.finish(request, "cancelled")

    def _admit(self) -> None:
        """Queues the requests whose grammars have become ready."""
        for live, grammar in self.awaited.ready():
            try:
                live.constrain(grammar.result())
                self.scheduler.add(live.request)
            except BaseException as error:
                live.fail(error if isinstance(error, ForerunError) else grammar_failed(live.request.request_id, error))
                self.finish(live, "error", time.perf_counter())
                if not isinstance(error, Exception):
                    raise

    def _abandon(self) -> None:
        """Nothing that a broken step wrote is trusted: its requests wait, to be computed again."""
        try:
            self.masks.finish()
        finally:
            self.scheduler.abandon()
            for request in self.scheduler.waiting:
                self.batch.leave(request)

    def _step(self, began: float) -> None:
        speculator, scheduler = self.speculator, self.scheduler
        # plan
        wishes = speculator.wishes(self._next_up()) if speculator else None
        share = self.prompt_share
        plan = scheduler.plan(wishes, None if share is None else share.tokens)
        for request in plan.preempted:
            self.batch.leave(request)
            self.preemptions += 1
        for copy in plan.copies:
            self.executor.kv.copy_block(copy.src_block, copy.dst_block)
        rows: Sequence[RowPlan] = plan.rows
        lives = [self.live[row.request.request_id] for row in rows]
        for live in lives:
            live.started(began)
        # draft
        planned = time.perf_counter()
        trees: Sequence[DraftTree] = [NO_DRAFT] * len(rows)
        if wishes:
            assert speculator is not None
            trees = speculator.draft(rows, lives)
            rows = [scheduler.trim(row, len(tree)) for row, tree in zip(rows, trees, strict=True)]
        drafted = time.perf_counter()
        # forward: rows whose logits are needed come first; the others only need the largest.
        deciding = [i for i, row in enumerate(rows) if row.samples]
        deciding.sort(key=lambda i: not lives[i].needs_logits)
        step = self.batch.load(rows, trees, deciding)
        walks: dict[int, Walk] = {}
        n_logits = n_outputs = 0
        for i in deciding:
            walks[i] = Walk(lives[i], trees[i], n_outputs)
            n_outputs += 1 + len(trees[i])
            if lives[i].needs_logits:
                n_logits = n_outputs
        best = self._argmax[:n_outputs]
        uncertain = [w for w in walks.values() if w.output < n_logits]
        loaded = time.perf_counter()
        try:
            self.masks.begin(uncertain)
            logits = self.executor.forward(step, n_logits, best)
            forwarded = time.perf_counter()
        finally:
            self.masks.finish()
        # verify
        sampled = [w for w in uncertain if w.error is None and not isinstance(w.live, LiveBeam)]
        self.chooser.sampled(sampled, logits, self.masks.words)
        for walk in uncertain:
            if isinstance(walk.live, LiveBeam):
                walk.live.read(walk, logits, self.masks.words)
        self.chooser.greedy([w for w in walks.values() if w.output >= n_logits], best)
        verified = time.perf_counter()
        # commit
        for i, row in enumerate(rows):
            self._commit(row, lives[i], trees[i], walks.get(i), verified)
        self.steps += 1
        seconds = StepSeconds(
            draft=drafted - planned,
            forward=forwarded - loaded,
            verify=verified - forwarded,
            schedule=(planned - began) + (loaded - drafted) + (time.perf_counter() - verified),
            masks=self.masks.seconds + sum(live.grammar_seconds for live in lives),
        )
        self.tally.seconds(seconds)
        for live in lives:
            live.tally.seconds(seconds)
            live.grammar_seconds = 0.0
        if share is not None:
            n_prompt = sum(row.count for row in rows if row.count > 1 or not row.samples)
            share.observe(len(step.tokens), n_prompt, seconds.forward)
        if speculator:
            speculator.step(len(step.tokens), seconds)

    def _next_up(self) -> Iterator[LiveRequest]:
        """Whoever may have a row in the next step."""
        scheduler = self.scheduler
        queue = itertools.islice(scheduler.waiting, max(scheduler.max_rows - len(scheduler.running), 0))
        return (self.live[request.request_id] for request in itertools.chain(scheduler.running, queue))

    def _commit(self, row: RowPlan, live: LiveRequest, tree: DraftTree, walk: Walk | None, now: float) -> None:
        if walk is None:
            self.scheduler.commit(row, ())
            self._count(row, live, tree, None, 0)
            return
        if isinstance(live, LiveBeam):
            self.scheduler.hold(row)
            self._count(row, live, tree, None, 0)
            live.search.held(self, now)
            return
        choice = walk.choice()
        if tree and self.speculator:
            self.speculator.verdict(live, tree, choice.path)
        if walk.error is not None:
            self._count(row, live, tree, choice, 0)
            live.fail(walk.error)
            self.finish(live, "error", now)
            return
        try:
            kept, reason = live.accept(choice, tree, now)
            self._settle(row, choice.path[: kept - 1])
            self.scheduler.commit(row, choice.tokens[:kept])
            self._branch(live)
            self._count(row, live, tree, choice, kept)
            if reason is not None:
                self.finish(live, reason, now)
        except ConstraintError as error:
            live.fail(error)
            self.finish(live, "error", now)
        except BaseException as error:
            # Half taken in, it can't go on; but what ended before the interruption stays as it ended.
            if not live.request.finished:
                live.fail(ForerunError(
                    f"request {live.request.request_id!r}: {type(error).__name__} while its text was taken in; submit "
                    "it again"
                ))  # fmt: skip
            self.finish(live, "error", now)
            raise

    def _branch(self, live: LiveRequest) -> None:
        """Once a request's prompt is computed, its other texts (`SamplingParams.n`) go on from there."""
        while live.n_missing:
            index = len(live.group)
            name = f"{live.request.request_id}/{index}"
            while name in self.live:
                name += "'"
            try:
                twin = live.branch(self.scheduler.branch(live.request, name, live.params), index)
                self.live[name] = twin
                live.group.append(twin)
            except BaseException:
                self._disown(name)
                raise

    def _count(self, row: RowPlan, live: LiveRequest, tree: DraftTree, choice: Choice | None, kept: int) -> None:
        """Counts a row, once nothing of it can fail any more: an interrupted step is done again and counts once."""
        for tally in (live.tally, self.tally):
            tally.row(row.count)
            if tree and choice is not None:
                tally.draft(tree, len(choice.path))
            if kept and choice is not None:
                tally.decision(len(choice.path) + 1, kept)

    def _settle(self, row: RowPlan, path: Sequence[int]) -> None:
        """Moves the KV of accepted nodes to where the sequence wants it."""
        first, size = row.start + row.count, self.scheduler.pool.block_size
        for depth, node in enumerate(path):
            if node != depth:
                table = row.request.table
                assert table is not None, "a row that is committed has a block table"
                source, target = table.slot(first + node), table.slot(first + depth)
                self.executor.kv.move_slot(*divmod(source, size), *divmod(target, size))

    def finish(self, live: LiveRequest, reason: FinishReason, now: float) -> None:
        """Ends a request and frees what it holds."""
        if self.scheduler.get(live.request.request_id) is live.request:
            self.scheduler.finish(live.request, reason)
        elif not live.request.finished:
            self.awaited.drop(live)
            live.request.state = RequestState.FINISHED
            live.request.finish_reason = reason
        if self.live.get(live.request.request_id) is live:
            del self.live[live.request.request_id]
        self.batch.leave(live.request)
        live.ended(now)
        if self.speculator:
            self.speculator.free(live)

    def cancel(self, *lives: LiveRequest) -> None:
        """Ends requests that nobody waits for; within a step, right after it."""
        with self.lock, _Uninterrupted():
            for live in lives:
                if live.request.finished:
                    continue
                if self._stepping:
                    # A generator that is collected, or a signal's handler, within this very thread's step.
                    self._doomed.append(live)
                else:
                    self.finish(live, "cancelled", time.perf_counter())
