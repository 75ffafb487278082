"""Counts and times for Prometheus. Names are vLLM's where the meaning is the same, so that dashboards made for it work.

Everything is counted in the driver's thread: requests as they end, steps as they pass. Help texts say over what a ratio
is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from forerun.engine.engine import Engine
from forerun.engine.output import SpeculationStats
from forerun.serve.driver import Record

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

_SECONDS: Final = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
_STEP_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
_LENGTHS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 63)
_POSITIONS: Final = 16
"""Draft positions that are told apart; deeper ones count as the last."""


class Metrics:
    """What a server has done. `observe` and `stepped` are the driver's observers; `text` is what a scrape gets."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model}
        self._seen = SpeculationStats()
        self._totals: dict[Counter, float] = {}  # of counters that follow a total of the engine's
        self._requests = self._counter(
            "vllm:request_success", "Requests that ended, by why: stop, length, abort (cancelled), error, timeout, "
            "rejected (before their first step).", ("finished_reason",),
        )  # fmt: skip
        self._queue_time = self._histogram("vllm:request_queue_time_seconds", "From arrival to the first step.")
        self._first = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token's step.")
        self._between = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Time after the first token over the tokens after the first, of each text: several may share a step.",
        )
        self._gap = self._histogram(
            "forerun:inter_event_seconds", "Between two steps that added to one request's text: what a reader sees."
        )
        self._end = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.")
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that ended.")
        self._generated = self._counter("vllm:generation_tokens", "Tokens committed to answers, over all steps.")
        self._computed = self._counter(
            "forerun:computed_tokens", "Query tokens run through the model: prompts, last tokens, drafts."
        )
        self._running = self._gauge("vllm:num_requests_running", "Requests that hold KV.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests in the queue, preempted ones included.")
        self._kv = self._gauge("vllm:kv_cache_usage_perc", "KV blocks of running requests over all blocks, 0 to 1.")
        self._preempted = self._counter("vllm:num_preemptions", "Times that a request's KV was dropped to make room.")
        self._queries = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens that were looked up: denominator of the hits."
        )
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens whose KV was found.")
        self._drafts = self._counter(
            "vllm:spec_decode_num_drafts", "Rows (request, step) with at least one verified draft token."
        )
        self._draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified, all of trees.")
        self._accepted = self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Draft tokens that the model agreed to; its own aren't among them."
        )
        self._by_position = self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that accepted at least position + 1 tokens; over num_drafts it is the rate of that position.",
            ("position",),
        )
        self._proposed_by_position = self._counter(
            "forerun:spec_decode_num_draft_tokens_per_pos", "Draft tokens verified at each depth.", ("position",)
        )
        self._by_drafter = {
            what: self._counter(f"forerun:draft_tokens_{what}", f"Draft tokens {what}, by drafter.", ("drafter",))
            for what in ("proposed", "accepted")
        }
        self._steps = self._counter("forerun:steps", "Steps that had work.")
        self._phases = self._counter(
            "forerun:step_seconds", "Seconds of steps by phase: draft, forward, verify, schedule; masks is the part of "
            "these that grammars took.", ("phase",),
        )  # fmt: skip
        self._step = self._histogram("forerun:step_time_seconds", "Of one step.", _STEP_SECONDS)
        self._rows = self._histogram("forerun:step_rows", "Requests that had a row in a step.", _ROWS)
        self._length = self._histogram(
            "forerun:draft_length", "Draft tokens verified in a step over its rows that chose a token, rounded up.",
            _LENGTHS,
        )  # fmt: skip
        self._compiles = self._counter("forerun:grammar_compiles", "Grammars compiled.")
        self._compile_seconds = self._counter("forerun:grammar_compile_seconds", "Seconds of compiling them.")

    def observe(self, record: Record) -> None:
        """Counts a request that ended."""
        reason = "abort" if record.outcome == "cancelled" else record.outcome
        self._requests.labels(**self._labels, finished_reason=reason).inc()
        self._queue_time.observe(record.waited_seconds)
        self._end.observe(record.total_seconds)
        if record.output is None:
            return
        for sample in record.output.samples:
            stats = sample.stats
            if stats.first_token_seconds is not None:
                self._first.observe(stats.first_token_seconds)
                if stats.output_tokens > 1:
                    seconds = stats.total_seconds - stats.first_token_seconds
                    self._between.observe(seconds / (stats.output_tokens - 1))
        self._prompt.inc(record.output.stats.prompt_tokens)

    def gap(self, seconds: float) -> None:
        """Counts the time between two events of a request."""
        self._gap.observe(seconds)

    def stepped(self, engine: Engine) -> None:
        """Counts what the last step did, as the difference to what was seen before."""
        stats = engine.stats()
        now, before = stats.speculation, self._seen
        if not self._follow(self._steps, stats.steps):
            return
        seconds = 0.0
        for phase in ("draft", "forward", "verify", "schedule"):
            spent = getattr(now, f"{phase}_seconds") - getattr(before, f"{phase}_seconds")
            seconds += spent
            self._phases.labels(**self._labels, phase=phase).inc(max(0.0, spent))
        masks = now.mask_seconds - before.mask_seconds
        self._phases.labels(**self._labels, phase="masks").inc(max(0.0, masks))
        self._step.observe(seconds)
        self._rows.observe(now.steps - before.steps)
        decisions = now.decisions - before.decisions
        if decisions:
            self._length.observe(-(-(now.proposed - before.proposed) // decisions))
        self._generated.inc(now.emitted - before.emitted)
        self._computed.inc(now.computed - before.computed)
        self._drafts.inc(now.drafted - before.drafted)
        self._draft_tokens.inc(now.proposed - before.proposed)
        self._accepted.inc(now.accepted - before.accepted)
        self._positions(self._by_position, now.accepted_by_position, before.accepted_by_position)
        self._positions(self._proposed_by_position, now.proposed_by_position, before.proposed_by_position)
        for name, counts in now.by_drafter.items():
            old = before.by_drafter.get(name)
            for what, counter in self._by_drafter.items():
                added = getattr(counts, what) - (getattr(old, what) if old else 0)
                if added:
                    counter.labels(**self._labels, drafter=name).inc(added)
        self._follow(self._preempted, stats.preemptions)
        if engine.prefix_cache is not None:
            self._follow(self._queries, engine.prefix_cache.stats.lookup_tokens)
            self._follow(self._hits, engine.prefix_cache.stats.hit_tokens)
        compiler = engine.compiler.stats()
        self._follow(self._compiles, compiler.compiled)
        self._follow(self._compile_seconds, compiler.compile_seconds)
        self._running.set(len(engine.scheduler.running))
        self._waiting.set(sum(1 for _ in engine.scheduler.waiting) + len(engine.loop.awaited.futures))
        self._kv.set(stats.kv_blocks_used / stats.kv_blocks)
        self._seen = now

    def text(self) -> bytes:
        """Everything, in Prometheus' text form."""
        return generate_latest(self._registry)

    def _follow(self, counter: Counter, total: float) -> bool:
        """Brings a counter up to a total of the engine's; returns whether it grew."""
        added = total - self._totals.get(counter, 0.0)
        self._totals[counter] = total
        if added > 0:
            counter.inc(added)
        return added > 0

    def _positions(self, counter: Counter, now: Sequence[int], before: Sequence[int]) -> None:
        for position, count in enumerate(now):
            added = count - (before[position] if position < len(before) else 0)
            if added:
                counter.labels(**self._labels, position=str(min(position, _POSITIONS - 1))).inc(added)

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        made = Counter(name, text, ("model_name", *labels), registry=self._registry)
        return made if labels else made.labels(**self._labels)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ("model_name",), registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
        made = Histogram(name, text, ("model_name",), buckets=buckets, registry=self._registry)
        return made.labels(**self._labels)
