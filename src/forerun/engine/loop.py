"""The loop: plan, draft, forward, verify, commit."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from forerun.draft.base import NO_DRAFT, DraftTree
from forerun.engine.batch import StepBatch
from forerun.engine.choose import Choice, Chooser, Walk
from forerun.engine.live import LiveRequest
from forerun.engine.output import Piece, RequestOutput
from forerun.engine.request import FinishReason, RowPlan
from forerun.engine.scheduler import Scheduler
from forerun.engine.speculate import Speculator
from forerun.engine.tally import StepSeconds, Tally
from forerun.errors import ForerunError, NumericalError
from forerun.models.executor import Executor


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
    ) -> None:
        self.scheduler = scheduler
        self.batch = batch
        self.executor = executor
        self.chooser = chooser
        self.speculator = speculator
        self.live: dict[str, LiveRequest] = {}
        self.lock = threading.RLock()
        self.tally = Tally()
        self.steps = self.preemptions = 0
        self.step_seconds = 0.0
        self._argmax = np.zeros(executor.tape.max_outputs, dtype=np.int32)
        self._stepping = False
        self._doomed: list[LiveRequest] = []  # cancelled within a step, by the thread that runs it

    def step(self) -> bool:
        """Runs one step for whoever has work; returns whether there was any."""
        with self.lock, _Uninterrupted():
            if self._stepping:
                raise ForerunError(
                    "a step is running in this thread; what runs within it, such as a drafter, can't run another"
                )
            if not self.scheduler.has_work:
                return False
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
                    self.cancel(self._doomed.pop())
            return True

    def _abandon(self) -> None:
        """Nothing that a broken step wrote is trusted: its requests wait, to be computed again."""
        self.scheduler.abandon()
        for request in self.scheduler.waiting:
            self.batch.leave(request)

    def _step(self, began: float) -> None:
        speculator, scheduler = self.speculator, self.scheduler
        # plan
        wishes = speculator.wishes(self.live[r.request_id] for r in scheduler.running) if speculator else None
        plan = scheduler.plan(wishes)
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
        loaded = time.perf_counter()
        logits = self.executor.forward(step, n_logits, best)
        forwarded = time.perf_counter()
        # verify
        self.chooser.sampled([w for w in walks.values() if w.output < n_logits], logits)
        self.chooser.greedy([w for w in walks.values() if w.output >= n_logits], best)
        verified = time.perf_counter()
        # commit
        for i, row in enumerate(rows):
            walk = walks.get(i)
            self._commit(row, lives[i], trees[i], walk.choice() if walk else None, verified)
        self.steps += 1
        seconds = StepSeconds(
            draft=drafted - planned,
            forward=forwarded - loaded,
            verify=verified - forwarded,
            schedule=(planned - began) + (loaded - drafted) + (time.perf_counter() - verified),
        )
        self.tally.seconds(seconds)
        for live in lives:
            live.tally.seconds(seconds)
        if speculator:
            speculator.step(len(step.tokens), seconds)

    def _commit(self, row: RowPlan, live: LiveRequest, tree: DraftTree, choice: Choice | None, now: float) -> None:
        if choice is None:
            self.scheduler.commit(row, ())
            self._count(row, live, tree, choice, 0)
            return
        if tree and self.speculator:
            self.speculator.verdict(live, tree, choice.path)
        if not choice.tokens:
            self._count(row, live, tree, choice, 0)
            where = not_numbers(len(live.request.tokens))
            live.fail(NumericalError(f"request {live.request.request_id!r}: {where}"))
            self.finish(live, "error", now)
            return
        try:
            kept, reason = live.accept(choice, tree, now)
            self._settle(row, choice.path[: kept - 1])
            self.scheduler.commit(row, choice.tokens[:kept])
            self._count(row, live, tree, choice, kept)
            if reason is not None:
                self.finish(live, reason, now)
        except BaseException as error:
            # Half taken in, it can't go on; but what ended before the interruption stays as it ended.
            if not live.request.finished:
                live.fail(ForerunError(
                    f"request {live.request.request_id!r}: {type(error).__name__} while its text was taken in; submit "
                    "it again"
                ))  # fmt: skip
                self.finish(live, "error", now)
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
        self.scheduler.finish(live.request, reason)
        self.batch.leave(live.request)
        self.live.pop(live.request.request_id, None)
        live.ended(now)
        if self.speculator:
            self.speculator.free(live)

    def next_piece(self, live: LiveRequest) -> Piece | None:
        """The request's next piece, stepping as needed; None after the last."""
        while True:
            with self.lock:
                piece = live.take_piece()
                if piece is not None:
                    return piece
                if live.request.finished:
                    live.raise_error()
                    return None
            self.advance(live)

    def advance(self, live: LiveRequest) -> None:
        """One step, unless the request has ended."""
        with self.lock:
            if not live.request.finished:
                self.step()

    def cancel(self, live: LiveRequest) -> None:
        """Ends a request that nobody waits for; within a step, right after it."""
        with self.lock:
            if live.request.finished:
                return
            if self._stepping:
                # A generator that is collected, or a signal's handler, within this very thread's step.
                self._doomed.append(live)
            else:
                self.finish(live, "cancelled", time.perf_counter())


class RequestHandle:
    """A submitted request. Iterate for its pieces, or ask for the `result`; both drive the engine as needed."""

    def __init__(self, loop: Loop, live: LiveRequest) -> None:
        self._loop = loop
        self._live = live

    @property
    def live(self) -> LiveRequest:
        """The engine's own view of the request."""
        return self._live

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._live.request.request_id

    def __iter__(self) -> Iterator[Piece]:
        while True:
            piece = self._loop.next_piece(self._live)
            if piece is None:
                return
            yield piece

    def result(self) -> RequestOutput:
        """The finished output. Raises what ended the request, if it was an error."""
        while not self._live.request.finished:
            self._loop.advance(self._live)
        with self._loop.lock:  # another thread may be in the midst of the step that ends it
            return self._live.output()

    def cancel(self) -> None:
        """Ends the request now and frees its memory; other requests are not touched. A finished one stays as it is."""
        self._loop.cancel(self._live)


def not_numbers(position: int) -> str:
    """What to say when the scores of the token at `position` are not numbers."""
    return (
        f"the model's scores are not numbers at position {position}: the weights are damaged or the activations "
        "overflow; download the model again, or use another one"
    )
