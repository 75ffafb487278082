"""Compiles constraints off the loop: in background threads of low priority, once per content, within limits.

A compile holds no lock that decoding needs: llguidance builds a grammar without the GIL, and the threads run at the
lowest priority that the system has, so that they take what decoding leaves.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from numpy.typing import NDArray

from forerun.constrain.state import DeadEndError, GrammarState, reason
from forerun.constrain.vocabulary import GrammarVocabulary
from forerun.errors import ConfigurationError, ConstraintError, InvalidConstraintError

if TYPE_CHECKING:
    from forerun.constrain.spec import Constraint
    from forerun.models.tokenizer import Tokenizer

LARGE: Final = 32_768
"""Characters beyond which a constraint is checked in the background, too, and not while it is submitted."""

MAX_STUCK: Final = 4
"""Compiles past their time that may still be running; while there are as many, nothing new is compiled."""

MAX_FAILURES: Final = 100
"""Constraints remembered as impossible to compile."""

TRIAL_TOKENS: Final = 6
MAX_FORCED: Final = 1_000
"""Tokens, or runs of so many forced ones, that are read to find out whether a grammar is within its limits."""

_PATIENCE: Final = 6.0
"""Times `timeout_seconds` by the clock, for a compile that gets little of the processor."""

_SWITCH_SECONDS: Final = 0.0005
"""How long Python code of a compile may keep the interpreter from another thread that wants it; usual are 5 ms."""

_CLOSE_SECONDS: Final = 1.0
"""How long a compile that runs may go on when its compiler is closed, or the interpreter ends."""


def limits() -> LLParserLimits:
    """What one grammar, and one step in it, may cost.

    Compiling: llguidance's own limits; an enum of 20,000 texts in 4 MB passes, and so do 5,000 required properties.
    A step: at most 2,000 open ways to go on (4 for each optional property of an object) and 10,000 looked at for one
    mask, so that an ambiguous grammar can't hold up the loop for long; MaskBench's schemas need fewer than 200 and
    2,000. A text: 100,000 states of its lexer, of 1 to 2 kB; those schemas need fewer than 5,000.
    """
    return LLParserLimits(step_max_items=10_000, max_lexer_states=100_000, verbose_errors=False)


def estimated_bytes(grammar: str) -> int:
    """What a compiled grammar holds, estimated from its text.

    From the growth of resident memory over 12 to 60 grammars in a fresh process: 16 bytes a character for enums of long
    texts, 5 kB for a property of an object, 160 to 190 kB for schemas of 5,000 characters.
    """
    return 50_000 + 16 * len(grammar) + 4_000 * grammar.count("{")


@dataclass(frozen=True)
class CompilerStats:
    """What a compiler did so far, and what it holds."""

    compiled: int
    """Grammars compiled."""
    compile_seconds: float
    """Wall-clock time of compiling them."""
    failed: int
    """Constraints that couldn't be compiled, or not in time."""
    hits: int
    """Submissions that found their grammar compiled already."""
    joined: int
    """Submissions that found their grammar being compiled."""
    evicted: int
    """Grammars given up for others by the memory cap."""
    cached: int
    """Grammars held now."""
    cached_bytes: int
    """Their memory, estimated."""
    pending: int
    """Grammars waiting or being compiled."""


class Grammar:
    """A compiled constraint: immutable, shared by the requests that have it."""

    def __init__(
        self, vocabulary: GrammarVocabulary, matcher: LLMatcher, *, is_json: bool, compile_seconds: float, n_bytes: int
    ) -> None:
        self.vocabulary: Final = vocabulary
        self.is_json: Final = is_json
        self.compile_seconds: Final = compile_seconds
        self.n_bytes: Final = n_bytes
        """Its memory, estimated."""
        self._matcher: Final = matcher

    def start(self) -> GrammarState:
        """Where a new text stands: at its beginning."""
        return GrammarState(self, self.matcher())

    def matcher(self) -> LLMatcher:
        """A matcher at the beginning; the caller's own."""
        return self._matcher.deep_copy()


class _Job:
    """A constraint to compile, and who waits for it."""

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self.futures: list[Future[Grammar]] = []
        self.late = False
        self.clock: int | None = None
        """The processor time of its thread, where the system has such a clock."""

    def wanted(self) -> bool:
        return any(not future.cancelled() for future in self.futures)


class GrammarCompiler:
    """Turns constraints into grammars for one tokenizer; safe to share among threads.

    Threads exist only while there is something to compile. A grammar that takes more than `timeout_seconds` of
    processor time (or six times as long by the clock) is refused; the compile can't be stopped, but those behind it
    don't wait, and what it yields is kept.
    Grammars are kept by content up to `memory_bytes`, the least recently used go first.
    """

    def __init__(self, tokenizer: Tokenizer, *, memory_bytes: int = 256 << 20, timeout_seconds: float = 10.0) -> None:
        if memory_bytes < 0:
            raise ConfigurationError(f"memory_bytes is {memory_bytes}: expected 0 or more.")
        if not timeout_seconds > 0:
            raise ConfigurationError(f"timeout_seconds is {timeout_seconds}: expected more than 0.")
        self.tokenizer: Final = tokenizer
        self._work: Final = _Work(tokenizer, memory_bytes, timeout_seconds)
        self._finalizer: Final = weakref.finalize(self, self._work.close)
        self._finalizer.atexit = False
        atexit.register(self._work.leave)

    def submit(self, constraint: Constraint) -> Future[Grammar]:
        """Check a constraint now and compile it in the background.

        Raises InvalidConstraintError for what can be seen at once; the future has it for what only compiling shows, and
        for all that is wrong with a constraint of more than `LARGE` characters. One that is in the cache isn't checked
        again, nor warned about.
        Cancelling a future concerns nobody else; a compile that nobody waits for any more doesn't begin.
        """
        if len(constraint.content) <= LARGE and not self._work.knows(constraint.key):
            constraint.check()
        return self._work.submit(constraint)

    def compile(self, constraint: Constraint) -> Grammar:
        """The grammar, waiting for it."""
        return self.submit(constraint).result()

    def prepare(self) -> Future[None]:
        """Build what all grammars of this tokenizer share, now instead of with the first constraint; in the background.

        llguidance holds the GIL for most of it, about a second for 152k tokens: do it before there are requests to
        hold up.
        """
        return self._work.prepare()

    def stats(self) -> CompilerStats:
        """Counts so far and what is held now."""
        return self._work.stats()

    def close(self) -> None:
        """Give up what waits and hold nothing any more. Repeatable; a compile that runs ends by itself."""
        self._finalizer.detach()
        self._work.leave()


class _Work:
    """All that the threads share. It knows nothing of the compiler, so that an abandoned one can be collected."""

    def __init__(self, tokenizer: Tokenizer, memory_bytes: int, timeout_seconds: float) -> None:
        self._tokenizer = tokenizer
        self._memory_bytes = memory_bytes
        self._timeout_seconds = timeout_seconds
        # A compiler may be collected, and so closed, by any thread that holds the lock already.
        self._lock = threading.RLock()
        self._building = threading.Lock()
        self._vocabulary: GrammarVocabulary | None = None
        self._queue: deque[_Job] = deque()
        self._jobs: dict[str, _Job] = {}
        self._cache: OrderedDict[str, Grammar] = OrderedDict()
        self._failures: OrderedDict[str, InvalidConstraintError] = OrderedDict()
        self._cached_bytes = 0
        self._dispatching = False
        self._running: list[threading.Thread] = []
        self._stuck = 0
        self._closed = False
        self._compiled = self._failed = self._hits = self._joined = self._evicted = 0
        self._compile_seconds = 0.0

    def knows(self, key: str) -> bool:
        """Whether a constraint was compiled or refused before, so that it needs no second look."""
        with self._lock:
            return key in self._cache or key in self._failures

    def submit(self, constraint: Constraint) -> Future[Grammar]:
        future: Future[Grammar] = Future()
        key = constraint.key
        with self._lock:
            if self._closed:
                raise InvalidConstraintError("the grammar compiler was closed: make a new engine.")
            grammar = self._cache.get(key)
            if grammar is not None:
                self._cache.move_to_end(key)
                self._hits += 1
                future.set_result(grammar)
                return future
            if (failure := self._failures.get(key)) is not None:
                self._hits += 1
                future.set_exception(_again(failure))
                return future
            job = self._jobs.get(key)
            if job is not None and job.late:
                future.set_exception(self._too_slow())
                return future
            if job is not None:
                self._joined += 1
            else:
                job = self._jobs[key] = _Job(constraint)
                self._queue.append(job)
            job.futures.append(future)
            if not self._dispatching:
                self._dispatching = True
                threading.Thread(target=self._dispatch, name="forerun-grammars", daemon=True).start()
        return future

    def prepare(self) -> Future[None]:
        future: Future[None] = Future()

        def build() -> None:
            future.set_running_or_notify_cancel()
            try:
                self._shared()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        threading.Thread(target=build, name="forerun-vocabulary", daemon=True).start()
        return future

    def stats(self) -> CompilerStats:
        with self._lock:
            return CompilerStats(
                compiled=self._compiled,
                compile_seconds=self._compile_seconds,
                failed=self._failed,
                hits=self._hits,
                joined=self._joined,
                evicted=self._evicted,
                cached=len(self._cache),
                cached_bytes=self._cached_bytes,
                pending=len(self._jobs),
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            waiting = [future for job in self._queue for future in job.futures]
            for job in self._queue:
                self._jobs.pop(job.constraint.key, None)
            self._queue.clear()
            self._cache.clear()
            self._failures.clear()
            self._cached_bytes = 0
        atexit.unregister(self.leave)
        for future in waiting:
            future.cancel()

    def leave(self) -> None:
        """Close, and wait a little for what runs: a thread that comes back from llguidance while the interpreter ends
        would end it badly."""
        self.close()
        with self._lock:
            current = threading.current_thread()
            running = [thread for thread in self._running if thread.ident is not None and thread is not current]
        for thread in running:
            thread.join(_CLOSE_SECONDS)

    def _dispatch(self) -> None:
        """Compile what is queued, one after the other, without waiting for what takes too long."""
        while True:
            with self._lock:
                if not self._queue:
                    self._dispatching = False
                    return
                job = self._queue.popleft()
                if not job.wanted():
                    del self._jobs[job.constraint.key]
                    continue
                crowded = self._stuck >= MAX_STUCK
            try:
                self._shared()  # neither at low priority nor within the constraint's own time
            except Exception as error:
                self._finish(job, error)
                continue
            with self._lock:
                thread = threading.Thread(target=self._run, args=(job,), name="forerun-grammar", daemon=True)
                if not crowded:
                    self._running.append(thread)
            if crowded:
                self._finish(
                    job,
                    InvalidConstraintError(
                        f"{MAX_STUCK} constraints are still being compiled past their time: wait, or simplify them."
                    ),
                )
                continue
            thread.start()
            if not _ends_within(thread, job, self._timeout_seconds):
                self._give_up(job)

    def _run(self, job: _Job) -> None:
        """The thread of one compile."""
        _yield_to_others()
        if hasattr(time, "pthread_getcpuclockid"):
            job.clock = time.pthread_getcpuclockid(threading.get_ident())
        outcome: Grammar | Exception
        interval = sys.getswitchinterval()
        sys.setswitchinterval(min(interval, _SWITCH_SECONDS))
        try:
            if len(job.constraint.content) > LARGE:
                job.constraint.check()
            outcome = self._compile(job.constraint)
        except Exception as error:
            outcome = error
        except BaseException as error:  # a panic of llguidance is none of Exception
            outcome = RuntimeError(f"compiling the constraint failed: {type(error).__name__}: {error}")
            outcome.__cause__ = error
        finally:
            if interval > _SWITCH_SECONDS:
                sys.setswitchinterval(interval)
        self._finish(job, outcome)

    def _give_up(self, job: _Job) -> None:
        with self._lock:
            if self._jobs.get(job.constraint.key) is not job:
                return
            job.late = True
            self._stuck += 1
            self._failed += 1
            futures, job.futures = job.futures, []
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._too_slow())

    def _finish(self, job: _Job, outcome: Grammar | Exception) -> None:
        key = job.constraint.key
        with self._lock:
            self._jobs.pop(key, None)
            self._stuck -= job.late
            if isinstance(outcome, Grammar):
                self._compiled += 1
                self._compile_seconds += outcome.compile_seconds
                if not self._closed:
                    self._keep(key, outcome)
            else:
                self._failed += not job.late
                if isinstance(outcome, InvalidConstraintError) and threading.current_thread() in self._running:
                    # Not the error itself: its traceback holds what its raisers and receivers held.
                    self._failures[key] = _again(outcome)
                    if len(self._failures) > MAX_FAILURES:
                        self._failures.popitem(last=False)
            if threading.current_thread() in self._running:
                self._running.remove(threading.current_thread())
            futures = job.futures
        for future in futures:
            # A callback of one waiter that fails, or a future that its owner has settled, is no matter of the others.
            with contextlib.suppress(Exception):
                if not future.set_running_or_notify_cancel():
                    continue
                if isinstance(outcome, Grammar):
                    future.set_result(outcome)
                else:
                    future.set_exception(outcome)

    def _keep(self, key: str, grammar: Grammar) -> None:
        if grammar.n_bytes > self._memory_bytes:
            return
        self._cache[key] = grammar
        self._cached_bytes += grammar.n_bytes
        while self._cached_bytes > self._memory_bytes:
            _, old = self._cache.popitem(last=False)
            self._cached_bytes -= old.n_bytes
            self._evicted += 1

    def _compile(self, constraint: Constraint) -> Grammar:
        vocabulary = self._shared()
        start = time.perf_counter()
        text = constraint.grammar()
        matcher = LLMatcher(vocabulary.backend, text, log_level=0, limits=limits())
        if matcher.is_error():
            raise constraint.explain(matcher.get_error())
        grammar = Grammar(
            vocabulary,
            matcher,
            is_json=constraint.is_json,
            compile_seconds=time.perf_counter() - start,
            n_bytes=estimated_bytes(text),
        )
        _warm(grammar, matcher)
        return grammar

    def _shared(self) -> GrammarVocabulary:
        with self._building:
            if self._vocabulary is None:
                self._vocabulary = GrammarVocabulary(self._tokenizer)
            return self._vocabulary

    def _too_slow(self) -> InvalidConstraintError:
        return InvalidConstraintError(
            f"the constraint took more than {self._timeout_seconds:g} s to compile: make it smaller, or give the "
            "compiler more time."
        )


def _ends_within(thread: threading.Thread, job: _Job, seconds: float) -> bool:
    """Waits for a job's thread; False once it has used so much processor time, or waited for it for too long."""
    began = time.monotonic()
    while True:
        thread.join(min(seconds, 0.05))
        if not thread.is_alive():
            return True
        used = time.monotonic() - began
        if job.clock is not None and used < _PATIENCE * seconds:
            with contextlib.suppress(OSError):  # it has just ended
                used = time.clock_gettime(job.clock)
        if used >= seconds:
            return False


def _again(error: InvalidConstraintError) -> InvalidConstraintError:
    return InvalidConstraintError(str(error), keyword=error.keyword, path=error.path)


def _warm(grammar: Grammar, matcher: LLMatcher) -> None:
    """Compute the masks at the beginning and after the text that is forced there: the lexer keeps what they cost.

    Raises InvalidConstraintError where nothing at all may begin a text, or where its first few tokens are too much for
    the limits already.
    """
    trial = grammar.start()
    row = np.empty(trial.words, dtype=np.uint32)
    try:
        trial.mask(row)
        for _ in range(TRIAL_TOKENS):
            tokens = trial.forced(MAX_FORCED) or _first(row & ~grammar.vocabulary.end_bits)
            trial.advance(tokens)
            if not tokens or trial.complete:
                break
            trial.mask(row)
    except ConstraintError as error:
        # A dead end on a way that needn't be taken is no reason to refuse all others.
        if trial.n_tokens == 0 or not isinstance(error, DeadEndError):
            raise InvalidConstraintError(str(error)) from error
    matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    forced = matcher.compute_ff_tokens()
    if forced and matcher.try_consume_tokens(forced) == len(forced):
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    if matcher.is_error() or not matcher.reset():
        raise InvalidConstraintError(f"the constraint can't be begun: {reason(matcher)}.")


def _first(row: NDArray[np.uint32]) -> list[int]:
    """The token of the lowest set bit, if any."""
    words = np.flatnonzero(row)
    if not len(words):
        return []
    word = int(row[words[0]])
    return [32 * int(words[0]) + (word & -word).bit_length() - 1]


def _yield_to_others() -> None:
    """Give this thread the lowest priority, where the system has priorities for threads (Linux): what others leave."""
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        # Next to busy threads, the lowest nice value still gets turns that they notice.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
