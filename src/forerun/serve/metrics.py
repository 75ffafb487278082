"""Counts and times for Prometheus. Names are vLLM's where the meaning is the same, so that dashboards made for it work.

Counts are the engine's own, as they stood after a step; requests are counted as they end. Help texts say over what a
ratio is.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from forerun.engine.engine import Engine
from forerun.serve.driver import Outcome, Record
from forerun.serve.status import History, Moment, moment_of, occupancy

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

_FINISHED: Final[Mapping[Outcome, str]] = {
    "stop": "stop", "length": "length", "cancelled": "abort", "error": "error",
}  # fmt: skip
"""vLLM's words for the ends of requests that it counts."""

_SECONDS: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
)  # fmt: skip
_STEP_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_TOKENS: Final = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
_LENGTHS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 63)
_PHASES: Final = ("draft", "forward", "verify", "schedule")

_SAMPLE_SECONDS: Final = 0.1
"""How often the engine's counts are copied while it runs: that takes as long as a small model's row."""


class Distribution:
    """How often values fell under each bound, and their sum."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Counts a value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds and how many values are at or under each, as Prometheus has them."""
        names = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(names, (float(n) for n in accumulate(self._counts)), strict=True))


class Metrics:
    """What a server has done. A driver's `Observer`; `text` is what a scrape gets, from any thread.

    Attributes:
        history: the last minutes, for the status page.
    """

    def __init__(self, model: str, engine: Engine) -> None:
        self._model = model
        self._engine = engine
        self._registry = CollectorRegistry()
        self._registry.register(_Families(self))
        self._lock = threading.Lock()
        self._moment = moment_of(engine)
        self.history = History(self._moment)
        self._sampled = self._stepped = 0.0  # seconds since 1970
        self._seen = _progress(engine)
        self._outcomes: Counter[Outcome] = Counter(dict.fromkeys(get_args(Outcome), 0))
        self._prompt_tokens = 0
        self._queue_time = Distribution(_SECONDS)
        self._first = Distribution(_SECONDS)
        self._between = Distribution(_SECONDS)
        self._per_token = Distribution(_SECONDS)
        self._end = Distribution(_SECONDS)
        self._prompt_sizes = Distribution(_TOKENS)
        self._output_sizes = Distribution(_TOKENS)
        self._step = Distribution(_STEP_SECONDS)
        self._rows = Distribution(_ROWS)

    def ended(self, record: Record) -> None:
        """Counts a request that ended."""
        with self._lock:
            self._outcomes[record.outcome] += 1
            if record.waited_seconds is not None:
                self._queue_time.add(record.waited_seconds)
            if record.outcome != "rejected":
                self._end.add(record.total_seconds)
            if record.output is None:
                return
            self._prompt_sizes.add(record.output.stats.prompt_tokens)
            for sample in record.output.samples:
                stats = sample.stats
                self._output_sizes.add(stats.output_tokens)
                if stats.first_token_seconds is not None and stats.output_tokens > 1:
                    seconds = stats.total_seconds - stats.first_token_seconds
                    self._per_token.add(seconds / (stats.output_tokens - 1))

    def began(self, seconds: float, prompt_tokens: int) -> None:
        """Counts the first event of a request."""
        with self._lock:
            self._first.add(seconds)
            self._prompt_tokens += prompt_tokens

    def gap(self, seconds: float) -> None:
        """Counts the time between two events of a request."""
        with self._lock:
            self._between.add(seconds)

    def stepped(self, engine: Engine) -> None:
        """Notes what the engine has done, after a step."""
        done, before = _progress(engine), self._seen
        if done.steps == before.steps:
            return
        now = time.time()
        moment = moment_of(engine) if abs(now - self._sampled) >= _SAMPLE_SECONDS else None
        with self._lock:
            self._step.add(done.seconds - before.seconds)
            self._rows.add(done.rows - before.rows)
            self._seen, self._stepped = done, now
            if moment is not None:
                self._sampled = now
                self._keep(moment)

    def refresh(self) -> None:
        """Looks at the engine, unless a step runs; then what was seen a moment ago has to do. From any thread."""
        lock = self._engine.loop.lock
        if not lock.acquire(blocking=False):
            return
        try:
            moment = moment_of(self._engine)
        finally:
            lock.release()
        with self._lock:
            if moment.stats.steps != self._moment.stats.steps:
                self._keep(moment)

    def _keep(self, moment: Moment) -> None:
        self._moment = moment
        self.history.add(moment, self._stepped)

    def text(self) -> bytes:
        """Everything, in Prometheus' text form."""
        self.refresh()
        return generate_latest(self._registry)

    def families(self) -> Iterator[Metric]:
        """Everything, as Prometheus' client has it."""
        with self._lock:  # not while it is written out: the engine's thread waits for it
            found = [
                *self._requests(), *self._times(), *self._tokens(), *self._speculation(), *self._steps(),
                *self._memory(),
            ]  # fmt: skip
        yield from found
        yield from self._grammars()

    def _grammars(self) -> Iterator[Metric]:
        compiler = self._engine.compiler.stats()
        yield self._counter("forerun:grammar_compiles", "Grammars compiled.", compiler.compiled)
        yield self._counter(
            "forerun:grammar_compile_failures", "Constraints that couldn't be compiled, or not in time.",
            compiler.failed,
        )  # fmt: skip
        yield self._counter(
            "forerun:grammar_compile_seconds",
            "Seconds of compiling grammars, beside the steps: over grammar_compiles it is the mean.",
            compiler.compile_seconds,
        )
        yield self._counter(
            "forerun:grammar_cache_hits", "Constrained requests that found their grammar compiled.", compiler.hits
        )

    def _requests(self) -> Iterator[Metric]:
        yield self._counters(
            "vllm:request_success",
            "Requests that ended, by why: stop, length, abort (cancelled, also by a client that went away), error.",
            "finished_reason",
            {name: self._outcomes[outcome] for outcome, name in _FINISHED.items()},
        )
        yield self._counters(
            "forerun:requests",
            "Requests that ended, by outcome: those of request_success, timeout, and rejected, which is refused by the "
            "full queue, the queue's time limit or the engine. What was refused before that isn't among them.",
            "outcome",
            self._outcomes,
        )

    def _times(self) -> Iterator[Metric]:
        yield self._histogram(
            "vllm:request_queue_time_seconds", "From arrival to the first step, of ended requests that had one.",
            self._queue_time,
        )  # fmt: skip
        yield self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first text of a request.", self._first
        )
        yield self._histogram(
            "vllm:inter_token_latency_seconds",
            "Between two steps that added to one request's text, which a reader sees as one event each: accepted "
            "drafts share a step, so it isn't the time of a token.",
            self._between,
        )
        yield self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Time after the first token over the tokens after the first, once for each finished text.", self._per_token,
        )  # fmt: skip
        yield self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the end, of requests that weren't rejected.", self._end
        )

    def _tokens(self) -> Iterator[Metric]:
        stats = self._moment.stats
        yield self._counter(
            "vllm:prompt_tokens", "Prompt tokens of requests that had a first text, cached ones included.",
            self._prompt_tokens,
        )  # fmt: skip
        yield self._counter(
            "vllm:generation_tokens", "Tokens committed to answers (emitted), end tokens included.",
            stats.emitted_tokens,
        )  # fmt: skip
        yield self._counter(
            "forerun:computed_tokens", "Query tokens run through the model: prompts, last tokens, drafts.",
            stats.computed_tokens,
        )  # fmt: skip
        yield self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of each finished request.", self._prompt_sizes
        )
        yield self._histogram(
            "vllm:request_generation_tokens", "Emitted tokens of each finished text.", self._output_sizes
        )

    def _speculation(self) -> Iterator[Metric]:
        counts = self._moment.stats.speculation
        yield self._counter(
            "forerun:decisions",
            "Rows (one request's part of one step) that chose tokens. Emitted = accepted + decisions - cut; emitted "
            "over decisions is tokens per decision.",
            counts.decisions,
        )
        yield self._counter(
            "forerun:cut_tokens", "Accepted or own tokens dropped, because the text ended before them.", counts.cut
        )
        yield self._counter(
            "vllm:spec_decode_num_drafts",
            "Rows with at least one verified draft token: denominator of the acceptance by position.", counts.drafted,
        )  # fmt: skip
        yield self._counter(
            "vllm:spec_decode_num_draft_tokens",
            "Draft tokens verified, all nodes of trees: denominator of the acceptance rate.", counts.proposed,
        )  # fmt: skip
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens",
            "Draft tokens that the model agreed to; its own tokens aren't among them.", counts.accepted,
        )  # fmt: skip
        yield self._counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that accepted at least position + 1 tokens; over num_drafts it is the share that got so far.",
            "position", _by_position(counts.accepted_by_position),
        )  # fmt: skip
        yield self._counters(
            "forerun:spec_decode_num_draft_tokens_per_pos",
            "Draft tokens verified at each depth (0: right after the committed text), all nodes of trees.",
            "position", _by_position(counts.proposed_by_position),
        )  # fmt: skip
        by_drafter = counts.by_drafter
        yield self._counters(
            "forerun:draft_tokens_proposed", "Draft tokens verified, by drafter.",
            "drafter", {name: drafter.proposed for name, drafter in by_drafter.items()},
        )  # fmt: skip
        yield self._counters(
            "forerun:draft_tokens_accepted", "Draft tokens accepted, by drafter; over proposed it is its acceptance.",
            "drafter", {name: drafter.accepted for name, drafter in by_drafter.items()},
        )  # fmt: skip
        lengths = Distribution(_LENGTHS)
        lengths.add(0, counts.decisions - counts.drafted)
        for n, times in enumerate(counts.drafted_by_length, 1):
            lengths.add(n, times)
        yield self._histogram(
            "forerun:draft_length", "Draft tokens chosen and verified, of each row that chose tokens; 0: no draft.",
            lengths,
        )  # fmt: skip

    def _steps(self) -> Iterator[Metric]:
        stats = self._moment.stats
        yield self._counter("forerun:steps", "Steps that ran the model.", stats.steps)
        yield self._counters(
            "forerun:step_seconds", "Seconds of steps by phase; over steps it is the mean of a step.",
            "phase", {phase: getattr(stats.speculation, f"{phase}_seconds") for phase in _PHASES},
        )  # fmt: skip
        yield self._counter(
            "forerun:grammar_mask_seconds",
            "What of step_seconds went on grammars and wasn't hidden behind the forward.",
            stats.speculation.mask_seconds,
        )  # fmt: skip
        yield self._histogram("forerun:step_time_seconds", "Of one step, all phases.", self._step)
        yield self._histogram("forerun:step_rows", "Requests that had a part in a step.", self._rows)

    def _memory(self) -> Iterator[Metric]:
        moment = self._moment
        running, waiting, used = occupancy(self._engine)
        yield self._gauge("vllm:num_requests_running", "Requests that hold KV.", running)
        yield self._gauge(
            "vllm:num_requests_waiting",
            "Requests in the queue, preempted ones and those that wait for a grammar included.",
            waiting,
        )  # fmt: skip
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "KV blocks of running requests over all blocks, 0 to 1.",
            used / moment.stats.kv_blocks,
        )  # fmt: skip
        yield self._gauge("forerun:kv_blocks_used", "KV blocks of running requests.", used)
        yield self._gauge(
            "forerun:kv_blocks", "KV blocks of the pool: denominator of kv_cache_usage_perc.", moment.stats.kv_blocks
        )
        yield self._counter(
            "vllm:num_preemptions", "Times that a request's KV was dropped to make room.", moment.stats.preemptions
        )
        yield self._counter(
            "vllm:prefix_cache_queries", "Tokens that were looked up on admission: denominator of the hits.",
            moment.lookups,
        )  # fmt: skip
        yield self._counter("vllm:prefix_cache_hits", "Tokens of these whose KV was found.", moment.hits)
        yield self._counter(
            "forerun:prefix_cache_evicted_blocks", "Cached KV blocks forgotten because requests needed the room.",
            moment.evictions,
        )  # fmt: skip

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _counters(
        self, name: str, text: str, label: str, values: Mapping[str, float] | Mapping[Outcome, int]
    ) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model_name", label))
        for key, value in values.items():
            family.add_metric((self._model, key), value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _histogram(self, name: str, text: str, values: Distribution) -> Metric:
        family = HistogramMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model,), values.buckets(), values.total)
        return family


class _Families(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterator[Metric]:
        return iter(())  # else registering it would collect before anything is there

    def collect(self) -> Iterator[Metric]:
        return self._metrics.families()


def _by_position(counts: Sequence[int]) -> dict[str, int]:
    return {str(position): count for position, count in enumerate(counts)}


class _Progress(NamedTuple):
    steps: int
    seconds: float
    rows: int


def _progress(engine: Engine) -> _Progress:
    """Steps so far, their seconds, and the rows in them."""
    loop = engine.loop
    return _Progress(loop.steps, loop.step_seconds, loop.tally.steps)
