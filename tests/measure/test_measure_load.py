"""The figures of a load, its schedules, and comparisons with an earlier run."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("httpx", reason="httpx is not installed (pip install 'forerun[bench]')")

from forerun.errors import InvalidRequestError
from forerun.measure import load as measure
from forerun.measure.load import Arrival, Exchange, Load, LoadSetup, Targets, Times
from forerun.measure.load_client import Order
from forerun.measure.load_compare import Comparison, Earlier, differences
from forerun.measure.load_run import chosen_tasks, poisson_times, run_closed, run_open
from forerun.measure.tasks import Task

LOAD = Load("ab", None, "chat", "closed", None, 1, 1, 0, 16, 0.0, 0, {})
SETUP = LoadSetup("http://h/v1", "m", None, "unknown", "c", "d", "t", "forerun bench serve")
TASK = Task("t", "chat", "Hi", None)
ORDER = Order.of(TASK, "chat", "m", max_tokens=8, temperature=0, seed=0, extra={})


def report(*exchanges: Exchange, **options: Any) -> measure.LoadReport:
    return measure.report_of(exchanges, SETUP, dataclasses.replace(LOAD, requests=len(exchanges)), **options)


def exchange(times: Sequence[float], tokens: int | None = None, **fields: Any) -> Exchange:
    """A request sent at 0 whose text arrives at the given times."""
    values: dict[str, Any] = {"due": None, "sent": 0.0, "ended": times[-1] if times else 0.0, "prompt_tokens": 3}
    arrivals = tuple(Arrival(at, None) for at in times)
    return Exchange(
        "t", "chat", **{**values, "arrivals": arrivals, "n_events": len(times), "output_tokens": tokens, **fields}
    )


def test_time_between_events_is_not_time_per_token() -> None:
    """A chunk every 8.72 ms at some 292 tokens/s is 3.42 ms per token."""
    gap, tokens_each = 8.72e-3, 8.72 / 3.42
    n = 200
    one = exchange([0.1 + gap * i for i in range(n)], tokens=1 + round((n - 1) * tokens_each))
    found = report(one)
    assert found.between_events_ms is not None
    assert found.between_tokens_ms is not None
    assert found.token_ms is not None
    assert found.between_events_ms.p50 == pytest.approx(8.72)
    assert found.between_tokens_ms.p50 == pytest.approx(3.42, rel=0.01)
    assert found.token_ms.mean == pytest.approx(3.42, rel=0.01)
    assert found.between_tokens_ms.count == one.output_tokens - 1 if one.output_tokens else False
    assert found.gap_tokens == "spread"


def test_counting_events_as_tokens_would_be_noticed() -> None:
    one = exchange([1.0, 2.0, 3.0], tokens=9)
    right = report(one)
    wrong = report(dataclasses.replace(one, output_tokens=one.n_events))
    assert right.output_tokens_per_s == pytest.approx(9 / 3)
    assert right.between_tokens_ms is not None
    assert right.between_tokens_ms.mean == pytest.approx(2000 / 8)
    assert right.between_events_ms is not None
    assert right.between_events_ms.mean == pytest.approx(1000)
    assert wrong.output_tokens_per_s != right.output_tokens_per_s
    assert wrong.between_tokens_ms != right.between_tokens_ms


def test_tokens_of_gaps_as_told() -> None:
    arrivals = (Arrival(1.0, 2), Arrival(2.0, 3), Arrival(5.0, 6), Arrival(5.5, 6))
    found = report(exchange([1.0], tokens=6, arrivals=arrivals, n_events=4, ended=6.0))
    # One token took 1 s, three took 1 s each; a gap without tokens is none between tokens.
    assert found.gap_tokens == "told"
    assert found.between_tokens_ms == Times(4, 1000.0, 1000.0, 1000.0, 1000.0)
    assert found.between_events_ms is not None
    assert found.between_events_ms.count == 3
    # From the first text, which had two tokens, to the last.
    assert found.token_ms is not None
    assert found.token_ms.mean == pytest.approx(4500 / 4)


def test_a_stall_stays_visible_where_tokens_are_spread() -> None:
    times = [0.01 * i for i in range(10)]
    found = report(exchange([*times, times[-1] + 2.0], tokens=21))
    assert found.between_tokens_ms == Times(20, pytest.approx(2090 / 20), *map(pytest.approx, (5, 5, 1000)))


def test_figures_of_a_known_schedule() -> None:
    first = exchange([2.0, 3.0, 4.0], tokens=3, due=1.0, sent=1.5, ended=4.5)
    second = exchange([6.0], tokens=1, due=2.0, sent=2.0, ended=6.0)
    broken = exchange([3.0], tokens=2, due=3.0, sent=3.0, ended=8.0, error="cut_off", message="broke")
    found = report(first, second, broken)
    assert found.seconds == 7.0  # from the first that was due to the last end, of an error, too
    assert (found.answered, found.errors, found.examples) == (2, {"cut_off": 1}, {"cut_off": "broke"})
    assert (found.prompt_tokens, found.output_tokens, found.events) == (6, 4, 4)
    assert found.requests_per_s == pytest.approx(2 / 7)
    assert found.output_tokens_per_s == pytest.approx(4 / 7)
    assert found.total_tokens_per_s == pytest.approx(10 / 7)
    # From due, not from sent: 1 s and 4 s.
    assert found.first_token_ms == Times(2, 2500.0, 2500.0, pytest.approx(3700.0), pytest.approx(3970.0))
    assert found.end_to_end_ms is not None
    assert found.end_to_end_ms.mean == pytest.approx(1000 * (3.5 + 4.0) / 2)
    assert found.token_ms == Times(1, 1000.0, 1000.0, 1000.0, 1000.0)
    assert found.late_ms is not None
    assert (found.late_ms.count, found.late_ms.mean) == (3, pytest.approx(500 / 3))
    assert [result.due_s for result in found.results] == [0.0, 1.0, 2.0]
    assert [result.error for result in found.results] == [None, None, "cut_off"]


def test_latency_from_the_actual_send_would_hide_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    late = exchange([10.5], tokens=1, due=1.0, sent=10.0)
    right = report(late).first_token_ms
    monkeypatch.setattr(Exchange, "began", property(lambda self: self.sent))
    wrong = report(late).first_token_ms
    assert right is not None
    assert wrong is not None
    assert (right.p50, wrong.p50) == (9500.0, 500.0)


def test_without_usage_there_are_no_rates_of_tokens() -> None:
    found = report(exchange([1.0, 2.0], tokens=None), exchange([1.0, 2.0], tokens=2))
    assert (found.without_usage, found.output_tokens_per_s, found.total_tokens_per_s) == (1, None, None)
    assert found.requests_per_s == 1.0
    assert report(exchange([1.0, 2.0])).between_tokens_ms is None
    empty = report(exchange([], tokens=0, ended=1.0))
    assert (empty.first_token_ms, empty.between_tokens_ms, empty.token_ms) == (None, None, None)
    assert empty.output_tokens_per_s == 0.0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), min_size=1, max_size=30))
def test_weighted_quantiles_are_those_of_the_values_repeated(pairs: list[tuple[int, int]]) -> None:
    repeated = sorted(1e3 * value for value, weight in pairs for _ in range(weight))
    found = Times.weighted((value, weight) for value, weight in pairs)
    if not repeated:
        assert found is None
        return
    assert found is not None
    assert found.count == len(repeated)
    assert found.mean == pytest.approx(sum(repeated) / len(repeated))
    for q, value in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        assert value == repeated[max(0, math.ceil(q * len(repeated) - 1e-9) - 1)]


def test_quantiles_are_interpolated() -> None:
    found = Times.of([0.001 * n for n in range(101)])
    assert found == Times(101, pytest.approx(50), pytest.approx(50), pytest.approx(90), pytest.approx(99))
    assert Times.of([]) is None


@pytest.mark.parametrize(
    ("targets", "met"),
    [
        (Targets(ttft_ms=1000), 2),
        (Targets(ttft_ms=999), 1),
        (Targets(tpot_ms=500), 2),
        (Targets(tpot_ms=499), 1),
        (Targets(1000, 499), 1),
        (Targets(10, 500), 0),
    ],
)
def test_goodput(targets: Targets, met: int) -> None:
    slow = exchange([1.0, 2.0], tokens=3)
    single = exchange([0.5], tokens=1, ended=4.0)  # has no time per token, so it can't miss one
    broken = exchange([0.001], tokens=1, error="timeout")
    found = report(slow, single, broken, targets=targets).goodput
    assert found is not None
    assert (found.met, found.share, found.requests_per_s) == (met, pytest.approx(met / 3), pytest.approx(met / 4))


def test_goodput_that_cannot_be_told() -> None:
    unknown = exchange([1.0, 2.0])
    assert report(unknown, targets=Targets(tpot_ms=1)).goodput is None
    known = report(unknown, targets=Targets(ttft_ms=1000)).goodput
    assert known is not None
    assert known.met == 1
    missed = report(unknown, targets=Targets(1, 1)).goodput
    assert missed is not None
    assert missed.met == 0
    assert report(unknown).goodput is None


def test_speculation_counts_are_summed() -> None:
    counts = {"drafted": 2, "proposed": 8, "accepted": 6, "emitted": 10, "decisions": 4}
    found = report(
        exchange([1.0], speculation=counts), exchange([1.0], speculation=counts), exchange([1.0])
    ).speculation
    assert found == measure.Speculation(4, 16, 12, 20, 8)
    assert (found.acceptance, found.tokens_per_decision) == (0.75, 2.5)
    assert report(exchange([1.0])).speculation is None
    assert measure.Speculation(0, 0, 0, 0, 0).acceptance is None


class VirtualTime:
    """A clock that only sleeping moves, by `extra` seconds more than was asked."""

    def __init__(self, extra: Callable[[int], float] = lambda _: 0.0) -> None:
        self.now = 100.0
        self.sleeps = 0
        self._extra = extra

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        # Whoever can run does, before time passes.
        for _ in range(3):
            await asyncio.sleep(0)
        self.now += seconds + self._extra(self.sleeps)
        self.sleeps += 1


def test_an_open_loop_counts_from_when_a_request_was_due() -> None:
    """A client that oversleeps by 5 s adds that to the latencies of every request that was due meanwhile."""
    time = VirtualTime(lambda sleep: 5.0 if sleep == 1 else 0.0)
    found: list[Exchange] = []

    async def ask(_: Order, due: float | None) -> Exchange:
        now = time.clock()
        return exchange([now + 0.25], tokens=1, due=due, sent=now, ended=now + 0.25)

    times = [0.0, 1.0, 2.0, 3.0, 10.0]
    asyncio.run(run_open([ORDER] * 5, times, ask, found.append, clock=time.clock, sleep=time.sleep))
    assert [each.due for each in found] == [100.0, 101.0, 102.0, 103.0, 110.0]
    assert [each.first_seconds for each in found] == [0.25, 0.25, 5.25, 4.25, 0.25]
    assert [each.sent - (each.due or 0) for each in found] == [0, 0, 5, 4, 0]


def test_an_open_loop_waits_for_nobody() -> None:
    running = most = 0
    gate: asyncio.Event | None = None
    time = VirtualTime()
    found: list[Exchange] = []

    async def ask(_: Order, due: float | None) -> Exchange:
        nonlocal running, most, gate
        assert due is not None
        gate = gate or asyncio.Event()
        running += 1
        most = max(most, running)
        if running == 20:
            gate.set()
        await gate.wait()
        return exchange([1.0])

    async def drive() -> None:
        times = [float(n) for n in range(20)]
        async with asyncio.timeout(30):
            await run_open([ORDER] * 20, times, ask, found.append, clock=time.clock, sleep=time.sleep)

    asyncio.run(drive())
    assert (most, len(found)) == (20, 20)


@pytest.mark.parametrize(("requests", "concurrency"), [(1, 4), (7, 3), (9, 1)])
def test_a_closed_loop_keeps_so_many_running(requests: int, concurrency: int) -> None:
    running, seen, asked = 0, [], []
    orders = [Order(TASK, str(n).encode()) for n in range(requests)]

    async def ask(order: Order, due: float | None) -> Exchange:
        nonlocal running
        assert due is None
        running += 1
        asked.append(order.body)
        seen.append(running)
        await asyncio.sleep(0)
        running -= 1
        return exchange([1.0])

    found: list[Exchange] = []
    asyncio.run(run_closed(orders, concurrency, ask, found.append))
    assert asked == [order.body for order in orders]
    assert max(seen) == min(requests, concurrency)
    assert len(found) == requests


def test_poisson_times() -> None:
    times = poisson_times(20_001, 4.0, seed=3)
    assert times[0] == 0.0
    gaps = sorted(b - a for a, b in pairwise(times))
    assert sum(gaps) / len(gaps) == pytest.approx(0.25, rel=0.03)
    assert median(gaps) == pytest.approx(0.25 * math.log(2), rel=0.05)
    # The distance to the exponential distribution (Kolmogorov-Smirnov, 1% level); even gaps are far from it.
    distance = max(abs((i + 1) / len(gaps) - (1 - math.exp(-4 * gap))) for i, gap in enumerate(gaps))
    assert distance < 1.63 / math.sqrt(len(gaps))
    assert poisson_times(50, 4.0, 3) == times[:50]
    assert poisson_times(50, 4.0, 4) != times[:50]


def test_tasks_are_drawn_over_and_over() -> None:
    tasks = [Task(str(n), "chat", "p", None) for n in range(10)]
    warm, measured = chosen_tasks(tasks, 25, 3, seed=1)
    names = [task.task_id for task in measured]
    assert sorted(names[:10]) == sorted(str(n) for n in range(10))
    assert names[:10] != [str(n) for n in range(10)]
    assert names[10:20] == names[:10]
    assert [task.task_id for task in warm] == names[9:6:-1]
    assert chosen_tasks(tasks, 25, 3, seed=1) == (warm, measured)
    assert chosen_tasks(tasks, 25, 3, seed=2)[1] != measured
    assert chosen_tasks(tasks, 5, 0, seed=1)[0] == []


def test_requests_say_what_was_asked() -> None:
    capped = TASK._replace(max_tokens=5)
    body = json.loads(Order.of(capped, "chat", "m", max_tokens=8, temperature=0, seed=3, extra={"top_k": 4}).body)
    assert body == {
        "top_k": 4, "model": "m", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 5,
        "temperature": 0, "messages": [{"role": "user", "content": "Hi"}],
    }  # fmt: skip
    body = json.loads(Order.of(capped, "completions", "m", max_tokens=2, temperature=0.5, seed=3, extra={}).body)
    assert (body["prompt"], body["max_tokens"], body["seed"]) == ("Hi", 2, 3)


def written(path: Path, found: measure.LoadReport) -> Earlier:
    path.write_text(json.dumps(dataclasses.asdict(found)))
    return Earlier.read(path)


OTHER: dict[str, Any] = {
    "tasks_sha256": "cd", "limit": 2, "api": "completions", "mode": "open", "rate": 2.0, "concurrency": 2,
    "requests": 2, "warmup": 1, "max_tokens": 17, "temperature": 0.5, "seed": 1, "extra": {"top_p": 0.5},
}  # fmt: skip


def test_every_part_of_a_load_is_compared(tmp_path: Path) -> None:
    earlier = written(tmp_path / "then.json", report(exchange([1.0], tokens=1)))
    earlier.check(LOAD)
    assert OTHER.keys() == dataclasses.asdict(LOAD).keys()
    for name, value in OTHER.items():
        with pytest.raises(InvalidRequestError, match=f"{name} was .* and is ") as caught:
            earlier.check(dataclasses.replace(LOAD, **{name: value}))
        assert sum(f"{other} was" in str(caught.value) for other in OTHER) == 1
    # How an answer is made is no part of what is asked.
    earlier.check(dataclasses.replace(LOAD, extra={"speculate": False, "draft_len": 4}))
    # A load from before a field was there differs, too.
    assert differences({}, {"rate": 1}) == ["rate was none and is 1"]
    assert differences({"old": 1}, {}) == ["old was 1 and is none"]


def test_ratios(tmp_path: Path) -> None:
    earlier = written(
        tmp_path / "then.json",
        report(exchange([1.0, 2.0], tokens=3), exchange([1.0, 2.0], tokens=3), targets=Targets(2000)),
    )
    both = [exchange([0.5, 1.0], tokens=3), exchange([2.0, 4.0], tokens=5, error=None)]
    found: Comparison = earlier.compare(report(*both, targets=Targets(2000)))
    rows = {row.name: row for row in found.rows}
    assert (rows["requests_per_s"].then, rows["requests_per_s"].now, rows["requests_per_s"].ratio) == (1.0, 0.5, 0.5)
    assert rows["first_token_ms mean"].ratio == pytest.approx(1.25)
    assert rows["output_tokens_per_s"].ratio == pytest.approx(2 / 3)
    assert rows["goodput requests_per_s (ttft 2000, tpot None ms)"].ratio == pytest.approx(0.5)
    assert any("answers had 3.0 tokens on average then and 4.0 now" in note for note in found.notes)
    # Goodput under another target is another thing.
    other = earlier.compare(report(*both, targets=Targets(1000)))
    assert not any(row.name.startswith("goodput") for row in other.rows)


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    path = tmp_path / "then.json"
    with pytest.raises(InvalidRequestError, match="can't be read"):
        Earlier.read(path)
    for text, words in [("{", "no JSON"), ("[]", "no report of"), ('{"kind": "other"}', "no report of")]:
        path.write_text(text)
        with pytest.raises(InvalidRequestError, match=words):
            Earlier.read(path)
    interrupted = report(exchange([1.0], tokens=1), complete=False)
    with pytest.raises(InvalidRequestError, match="interrupted"):
        written(path, interrupted)
    earlier = written(path, report(exchange([1.0], tokens=1)))
    with pytest.raises(InvalidRequestError, match="interrupted"):
        earlier.compare(interrupted)
    failed = report(exchange([1.0], tokens=1, error="timeout"))
    assert any("1 requests failed now" in note for note in earlier.compare(failed).notes)
