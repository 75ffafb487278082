"""What a server does under load: the load, the exchanges it led to, and the figures over them.

Times are those of a client. In an open loop, where requests are sent at times that were drawn before, a latency counts
from the time at which the request should have been sent: a client that falls behind adds to it instead of hiding it. In
a closed loop the next request waits for an answer, so there is no such time, and a slow server gets less load: compare
its rates, not its latencies, with an open one's.

Tokens are what the server's usage says. Events are not counted as tokens: several may share one, and some make none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple

from forerun.engine.rates import SpeculationRates
from forerun.measure.speculate import quantile

KIND: Final = "forerun bench serve"
"""What tells a report of this benchmark from another's."""

Api = Literal["chat", "completions"]
Mode = Literal["open", "closed"]


@dataclass(frozen=True)
class Load:
    """What is asked, and when. Runs can be compared where all of it is the same.

    tasks_sha256: of the task file. limit: tasks of each category. requests: measured ones; warmup: before them.
    rate: requests/s of an open loop. concurrency: requests at a time of a closed one. max_tokens: cap of each answer,
    below which a task's own counts. seed: of the order of tasks, the times of an open loop and, above temperature 0, of
    the answers. extra: further fields of every request.
    """

    tasks_sha256: str
    limit: int | None
    api: Api
    mode: Mode
    rate: float | None
    concurrency: int | None
    requests: int
    warmup: int
    max_tokens: int
    temperature: float
    seed: int
    extra: Mapping[str, Any]


class Arrival(NamedTuple):
    """Events with text that one read brought.

    at: seconds. tokens: of the answer up to and with them, where the server says so with the event.
    """

    at: float
    tokens: int | None


@dataclass(frozen=True)
class Exchange:
    """One request and what came of it. Times are seconds of one clock.

    Attributes:
        due: when it should have been sent; None in a closed loop.
        arrivals: of text, in their order.
        n_events: events with text.
        ended: when the stream or the error ended.
        error: kind of failure, or None: "connect", "timeout", "cut_off" (the stream broke off), "error_event" (an error
            within the stream), "malformed" (no event as they should be), "http_429" and the like. message: of it.
        prompt_tokens, output_tokens: the server's usage; None where it didn't say.
        speculation: its counts in the usage, where it has some.
    """

    task_id: str
    category: str
    due: float | None
    sent: float
    ended: float
    arrivals: tuple[Arrival, ...] = ()
    n_events: int = 0
    error: str | None = None
    message: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    speculation: Mapping[str, int] | None = None
    server: str | None = None

    @property
    def began(self) -> float:
        """From where its latencies count."""
        return self.sent if self.due is None else self.due

    @property
    def first_seconds(self) -> float | None:
        """To the first text."""
        return self.arrivals[0].at - self.began if self.arrivals else None

    @property
    def total_seconds(self) -> float:
        """To the end of the stream."""
        return self.ended - self.began

    @property
    def token_seconds(self) -> float | None:
        """From the first text to the last, per token after the first; None without two arrivals or usage."""
        later = self._later_tokens
        return (self.arrivals[-1].at - self.arrivals[0].at) / later if later else None

    @property
    def _later_tokens(self) -> int | None:
        """Tokens after the first arrival, which has one where the server doesn't say."""
        if len(self.arrivals) < 2 or self.output_tokens is None:
            return None
        return max(0, self.output_tokens - (self.arrivals[0].tokens or 1))

    def gaps(self) -> list[float]:
        """Seconds between arrivals."""
        times = [arrival.at for arrival in self.arrivals]
        return [after - before for before, after in pairwise(times)]

    @property
    def tells_tokens(self) -> bool:
        """Whether the server said with each event how many tokens there are by then."""
        return all(arrival.tokens is not None for arrival in self.arrivals)

    def gap_tokens(self) -> list[float] | None:
        """Tokens of each gap: as told with the events, else those after the first spread evenly; None if unknown."""
        if self.tells_tokens:
            told = [arrival.tokens or 0 for arrival in self.arrivals]
            return [float(after - before) for before, after in pairwise(told)]
        later = self._later_tokens
        return None if not later else [later / (len(self.arrivals) - 1)] * (len(self.arrivals) - 1)


@dataclass(frozen=True)
class Times:
    """Milliseconds over `count` of something."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times | None:
        """Of times that count the same; quantiles are interpolated. None if there are none."""
        if not seconds:
            return None
        ms = [1e3 * second for second in seconds]
        return cls(len(ms), sum(ms) / len(ms), *(quantile(ms, q) for q in (0.5, 0.9, 0.99)))

    @classmethod
    def weighted(cls, pairs: Iterable[tuple[float, float]]) -> Times | None:
        """Of (seconds, weight): a quantile q is the least time that at least q of the weight doesn't exceed."""
        ordered = sorted((1e3 * seconds, weight) for seconds, weight in pairs if weight > 0)
        total = sum(weight for _, weight in ordered)
        if not total:
            return None
        found = (_weighted_quantile(ordered, q * total) for q in (0.5, 0.9, 0.99))
        return cls(round(total), sum(ms * weight for ms, weight in ordered) / total, *found)


def _weighted_quantile(ordered: Sequence[tuple[float, float]], wanted: float) -> float:
    reached = 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= wanted * (1 - 1e-12):
            return value
    return ordered[-1][0]


@dataclass(frozen=True)
class Targets:
    """Latencies that a request should meet, in milliseconds: to the first token, and per token after it."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def met(self, exchange: Exchange) -> bool | None:
        """Whether it meets both. An error never does; None where it can't be told, without usage."""
        if exchange.error is not None:
            return False
        first, each = exchange.first_seconds, exchange.token_seconds
        if self.ttft_ms is not None and (first is None or 1e3 * first > self.ttft_ms):
            return False
        if self.tpot_ms is None:
            return True
        if exchange.output_tokens is None:
            return None
        return each is None or 1e3 * each <= self.tpot_ms


@dataclass(frozen=True)
class Goodput:
    """Requests that met the targets: how many, their share of all measured ones, errors included, and per second."""

    targets: Targets
    met: int
    share: float
    requests_per_s: float


@dataclass(frozen=True)
class Speculation(SpeculationRates):
    """Sums over the answers whose usage has them, as docs/counting.md defines the counts."""

    drafted: int
    proposed: int
    accepted: int
    emitted: int
    decisions: int


@dataclass(frozen=True)
class Result:
    """One measured request, in milliseconds from `due_s`, seconds after the first; names as in `Exchange`."""

    task_id: str
    category: str
    due_s: float
    late_ms: float
    first_token_ms: float | None
    token_ms: float | None
    end_to_end_ms: float
    prompt_tokens: int | None
    output_tokens: int | None
    events: int
    finish_reason: str | None
    error: str | None


@dataclass(frozen=True)
class LoadSetup:
    """What was measured, and how to do it again.

    server: its Server header, if it sends one. hardware: the server's, which a client can't know.
    """

    url: str
    model: str
    server: str | None
    hardware: str
    client: str
    date: str
    tasks_file: str
    command: str


@dataclass(frozen=True)
class LoadReport:
    """A run. Latencies are over answers without error, rates over `seconds`: from the first request's time to the last
    end.

    Attributes:
        complete: False if it was interrupted; then only what was finished counts, and `unfinished` requests don't.
        errors: number by kind. examples: a message of each.
        without_usage: answers whose server didn't say how many tokens they have. With any, rates of tokens are None.
        between_tokens_ms: over tokens after the first: a gap's time over its tokens, as many times as it has tokens.
        gap_tokens: "told" by the server with each event, "spread" evenly over an answer's gaps, or "mixed".
        between_events_ms: over gaps between reads that brought text: what a reader sees.
        token_ms: over answers: time from the first text to the last, per token after the first.
        late_ms: how much later than due requests were sent; None in a closed loop.
    """

    kind: str
    setup: LoadSetup
    load: Load
    complete: bool
    unfinished: int
    seconds: float
    answered: int
    errors: Mapping[str, int]
    examples: Mapping[str, str]
    without_usage: int
    prompt_tokens: int
    output_tokens: int
    events: int
    requests_per_s: float
    output_tokens_per_s: float | None
    total_tokens_per_s: float | None
    first_token_ms: Times | None
    between_tokens_ms: Times | None
    gap_tokens: str | None
    between_events_ms: Times | None
    token_ms: Times | None
    end_to_end_ms: Times | None
    late_ms: Times | None
    goodput: Goodput | None
    speculation: Speculation | None
    results: tuple[Result, ...]


def report_of(
    exchanges: Sequence[Exchange],
    setup: LoadSetup,
    load: Load,
    *,
    targets: Targets | None = None,
    complete: bool = True,
) -> LoadReport:
    """The figures over exchanges that are over; there must be one at least."""
    answers = [exchange for exchange in exchanges if exchange.error is None]
    failed = [exchange for exchange in exchanges if exchange.error is not None]
    start = min(exchange.began for exchange in exchanges)
    # Not zero, whatever the clock's resolution.
    seconds = max(max(exchange.ended for exchange in exchanges) - start, 1e-9)
    without = sum(answer.output_tokens is None for answer in answers)
    prompt = sum(answer.prompt_tokens or 0 for answer in answers)
    output = sum(answer.output_tokens or 0 for answer in answers)
    dues = [exchange.sent - exchange.due for exchange in exchanges if exchange.due is not None]
    return LoadReport(
        kind=KIND,
        setup=setup,
        load=load,
        complete=complete,
        unfinished=load.requests - len(exchanges),
        seconds=seconds,
        answered=len(answers),
        errors=dict(Counter(exchange.error or "" for exchange in failed).most_common()),
        examples={exchange.error or "": exchange.message for exchange in reversed(failed)},
        without_usage=without,
        prompt_tokens=prompt,
        output_tokens=output,
        events=sum(answer.n_events for answer in answers),
        requests_per_s=len(answers) / seconds,
        output_tokens_per_s=None if without else output / seconds,
        total_tokens_per_s=None if without else (prompt + output) / seconds,
        first_token_ms=_times(answers, lambda answer: answer.first_seconds),
        between_tokens_ms=_between_tokens(answers),
        gap_tokens=_gap_tokens(answers),
        between_events_ms=Times.of([gap for answer in answers for gap in answer.gaps()]),
        token_ms=_times(answers, lambda answer: answer.token_seconds),
        end_to_end_ms=_times(answers, lambda answer: answer.total_seconds),
        late_ms=Times.of(dues),
        goodput=None if targets is None else _goodput(exchanges, targets, seconds),
        speculation=_speculation(answers),
        results=tuple(_result(exchange, start) for exchange in sorted(exchanges, key=lambda each: each.began)),
    )


def _times(answers: Sequence[Exchange], of: Callable[[Exchange], float | None]) -> Times | None:
    return Times.of([seconds for answer in answers if (seconds := of(answer)) is not None])


def _between_tokens(answers: Sequence[Exchange]) -> Times | None:
    pairs: list[tuple[float, float]] = []
    for answer in answers:
        tokens = answer.gap_tokens()
        if tokens is not None:
            pairs += [(gap / n, n) for gap, n in zip(answer.gaps(), tokens, strict=True) if n > 0]
    return Times.weighted(pairs)


def _gap_tokens(answers: Sequence[Exchange]) -> str | None:
    kinds = {"told" if answer.tells_tokens else "spread" for answer in answers if answer.gap_tokens()}
    return "mixed" if len(kinds) > 1 else next(iter(kinds), None)


def _goodput(exchanges: Sequence[Exchange], targets: Targets, seconds: float) -> Goodput | None:
    verdicts = [targets.met(exchange) for exchange in exchanges]
    if None in verdicts:
        return None
    met = sum(map(bool, verdicts))
    return Goodput(targets, met, met / len(exchanges), met / seconds)


def _speculation(answers: Sequence[Exchange]) -> Speculation | None:
    counts = [answer.speculation for answer in answers if answer.speculation is not None]
    if not counts:
        return None
    return Speculation(
        *(sum(each.get(name, 0) for each in counts) for name in Speculation.__dataclass_fields__)
    )  # fmt: skip


def _result(exchange: Exchange, start: float) -> Result:
    first, each = exchange.first_seconds, exchange.token_seconds
    return Result(
        task_id=exchange.task_id,
        category=exchange.category,
        due_s=exchange.began - start,
        late_ms=1e3 * (exchange.sent - exchange.began),
        first_token_ms=None if first is None else 1e3 * first,
        token_ms=None if each is None else 1e3 * each,
        end_to_end_ms=1e3 * exchange.total_seconds,
        prompt_tokens=exchange.prompt_tokens,
        output_tokens=exchange.output_tokens,
        events=exchange.n_events,
        finish_reason=exchange.finish_reason,
        error=exchange.error,
    )
