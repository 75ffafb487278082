from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forerun.engine.steptime import DraftCost, StepTimes, measure_samples, step_times, table_of
from forerun.models.executor import Executor
from forerun.models.source import open_model
from forerun.ops import StepInput
from reference.pacing import AVX2
from reference.tiny import TinySpec, write_tiny_gguf


def ratio(times: StepTimes, n: int) -> float:
    return times.seconds(n) / times.seconds(1)


@pytest.mark.parametrize("table", [{}, {2: 1.0}, {1: 0.0}, {1: 1.0, 2: math.nan}, {1: math.inf}, {1: 1.0, 4: -1.0}])
def test_a_table_without_a_first_size_or_with_impossible_times_is_refused(table: dict[int, float]) -> None:
    with pytest.raises(ValueError, match=r"step"):
        StepTimes(table)


def test_between_sizes_it_is_linear_and_behind_them_it_goes_on() -> None:
    times = StepTimes({1: 0.010, 4: 0.016, 8: 0.026, 16: 0.050})
    assert times.seconds(1) == pytest.approx(0.010)
    assert times.seconds(2) == pytest.approx(0.012)
    assert times.seconds(6) == pytest.approx(0.021)
    for n in (24, 100, 300, 4096, 10_000):
        assert times.seconds(n) == pytest.approx(0.050 + (n - 16) * 0.003)
    assert times.seconds(0) == times.seconds(1)
    assert [t * times.level for t in times.shape(6, 3)] == pytest.approx([times.seconds(n) for n in (6, 7, 8, 9)])
    assert times.shape(250, 20) == pytest.approx([times.seconds(n) / times.level for n in range(250, 271)])
    alone = StepTimes({1: 0.02})
    assert alone.seconds(3) == pytest.approx(0.06)


def test_a_time_above_that_of_a_larger_size_was_noise() -> None:
    times = StepTimes({1: 1.0, 2: 1.2, 4: 9.0, 8: 2.6})
    assert times.seconds(4) == pytest.approx(2.6)
    assert times.seconds(2) == pytest.approx(1.2)


def test_a_busy_neighbour_moves_the_level_and_not_the_shape() -> None:
    times = StepTimes({n: 0.02 * t for n, t in AVX2.items()})
    before = times.shape(1, 31)
    for _ in range(60):
        times.observe(1, 0.04)  # only ever one size: nothing says how others compare
    assert times.seconds(1) == pytest.approx(0.04, rel=0.02)
    assert times.shape(1, 31) == before
    for step in range(200):
        n = (1, 5, 9, 2)[step % 4]
        times.observe(n, 3 * 0.02 * StepTimes(AVX2).seconds(n))
    assert times.seconds(1) == pytest.approx(0.06, rel=0.1)
    for n in (2, 5, 9):
        assert ratio(times, n) == pytest.approx(StepTimes(AVX2).seconds(n), rel=0.05)


def test_two_sizes_seen_close_together_correct_the_shape() -> None:
    times = StepTimes({1: 0.02, 8: 0.02 * 2.6, 16: 0.02 * 4.8})
    for _ in range(80):
        times.observe(1, 0.03)
        times.observe(8, 0.03 * 4.0)  # a long context: each query token has become dearer
    assert ratio(times, 8) == pytest.approx(4.0, rel=0.08)
    assert ratio(times, 16) >= ratio(times, 8)


def test_a_stall_counts_little() -> None:
    times = StepTimes({n: 0.02 * t for n, t in AVX2.items()})
    for n in (1, 5) * 10:
        times.observe(n, 0.02 * StepTimes(AVX2).seconds(n))
    level, shape = times.seconds(1), times.shape(1, 20)
    times.observe(5, 2.0)
    assert times.seconds(1) < 1.08 * level
    assert max(b / a for a, b in zip(shape, times.shape(1, 20), strict=True)) < 1.05


def test_the_first_step_sets_the_level() -> None:
    times = StepTimes({n: 0.02 * t for n, t in AVX2.items()})
    times.observe(1, 0.2)
    assert times.seconds(1) == pytest.approx(0.2)


def test_prompt_chunks_correct_their_own_sizes() -> None:
    times = StepTimes({n: 0.02 * t for n, t in AVX2.items()})
    times.observe(1, 0.02)
    truth = times.seconds(512) * 0.5
    small = times.seconds(8)
    for _ in range(40):
        times.observe(512, truth)
        times.observe(1, 0.02)
    assert times.seconds(512) == pytest.approx(truth, rel=0.1)
    assert times.seconds(8) == pytest.approx(small, rel=0.1)


@pytest.mark.parametrize(("n", "seconds"), [(0, 1.0), (-3, 1.0), (4, 0.0), (4, -1.0), (4, math.nan), (4, math.inf)])
def test_what_is_no_time_is_ignored(n: int, seconds: float) -> None:
    times = StepTimes(AVX2)
    times.observe(n, seconds)
    assert times.shape(1, 40) == StepTimes(AVX2).shape(1, 40)
    assert times.level == 1.0


def test_it_never_falls_whatever_is_observed() -> None:
    draw = random.Random(5)
    times = StepTimes(AVX2)
    for _ in range(3000):
        times.observe(draw.choice((1, 2, 3, 5, 7, 8, 9, 13, 16, 20, 32, 40, 70, 200, 512)), 10 ** draw.uniform(-2, 2))
        shape = times.shape(0, 600)
        assert shape[0] > 0
        assert all(a <= b * (1 + 1e-12) for a, b in pairwise(shape))
        assert times.shape(0, 200) == pytest.approx(shape[:201])


def test_draft_cost_finds_both_parts() -> None:
    cost = DraftCost()
    draw = random.Random(1)
    for _ in range(60):
        rows, nodes = draw.randint(1, 8), draw.randint(0, 40)
        cost.observe(rows, nodes, 0.002 * rows + 0.0005 * nodes)
    assert cost.known
    assert cost.per_row == pytest.approx(0.002, rel=0.05)
    assert cost.per_node == pytest.approx(0.0005, rel=0.05)


def test_draft_cost_of_a_lookup_doesnt_grow_with_its_nodes() -> None:
    cost = DraftCost()
    for nodes in (0, 16, 0, 3, 16, 0, 8, 1) * 4:
        cost.observe(1, nodes, 30e-6)
    assert cost.per_row + 16 * cost.per_node == pytest.approx(30e-6, rel=0.1)


def test_draft_cost_forgets_the_prompt_of_a_draft_model() -> None:
    cost = DraftCost()
    cost.observe(1, 2, 3.0)
    assert not cost.known
    for _ in range(4):
        cost.observe(1, 2, 0.014)
    for nodes in (4, 6, 2, 4, 5):
        cost.observe(1, nodes, 0.007 * nodes)
    usual = cost.per_row + 4 * cost.per_node
    assert usual < 3 * 0.028
    for nodes in (4, 6, 2, 4, 5) * 4:
        cost.observe(1, nodes, 0.007 * nodes)
    assert cost.per_node == pytest.approx(0.007, rel=0.1)
    cost.observe(1, 4, 50.0)
    assert cost.per_row + 4 * cost.per_node < 2 * 0.028
    assert cost.per_row >= 0
    assert cost.per_node >= 0


def test_draft_cost_ignores_calls_without_rows() -> None:
    cost = DraftCost()
    cost.observe(0, 4, 1.0)
    cost.observe(1, 4, math.nan)
    cost.observe(1, 4, -1.0)
    assert (cost.per_row, cost.per_node, cost.known) == (0.0, 0.0, False)


class Clockwork:
    """An executor whose forwards take a known time on a clock of its own."""

    def __init__(
        self, unit: float, *, blocks: int = 64, max_tokens: int = 512, max_outputs: int = 64, max_positions: int = 512
    ) -> None:
        self.unit = unit
        self.max_positions = max_positions
        self.now = 0.0
        self.sizes: list[int] = []
        self.drift: Callable[[int], float] = lambda _: 1.0
        self.tape = SimpleNamespace(max_tokens=max_tokens, max_outputs=max_outputs, threads=2, isa="avx2")
        self.kv = SimpleNamespace(blocks=blocks)

    def clock(self) -> float:
        return self.now

    def forward(self, step: StepInput, n_logits: int, argmax: np.ndarray[Any, Any]) -> None:
        n = len(step.tokens)
        assert n_logits == 0
        assert len(step.output) == len(argmax) == n
        assert n <= len(step.tables[0]) * 16 <= self.kv.blocks * 16
        slow = 1.0 if len(self.sizes) % 5 else 1.5
        self.sizes.append(n)
        self.now += self.unit * slow * self.drift(len(self.sizes)) * (0.8 + 0.2 * n)


def measure(executor: Clockwork, budget: float = 2.0) -> dict[int, float]:
    samples: dict[int, list[float]] = {}
    measure_samples(executor, samples, budget=budget, clock=executor.clock)  # type: ignore[arg-type]
    return table_of(samples)


def test_a_time_is_the_median_of_its_ratios_to_a_single_token() -> None:
    executor = Clockwork(0.001)
    seconds = measure(executor)
    assert list(seconds) == [1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 25, 32, 64]
    for n, t in seconds.items():
        assert t == pytest.approx(0.001 * (0.8 + 0.2 * n))
    assert executor.now < 2.1


def test_a_machine_that_slows_down_while_it_is_measured_changes_no_ratio() -> None:
    """Four times as slow after a while, as when a neighbour starts; a least time by size would mix both."""
    executor = Clockwork(0.001)
    executor.drift = lambda calls: 4.0 if calls > 9 else 1.0
    for n, t in measure(executor).items():
        assert t == pytest.approx(0.001 * (0.8 + 0.2 * n))


@pytest.mark.parametrize("unit", [0.02, 0.05, 0.2, 0.9, 5.0])
def test_a_slow_model_is_measured_at_fewer_sizes(unit: float) -> None:
    executor = Clockwork(unit)
    seconds = measure(executor)
    assert executor.now <= max(4 * 2.0 + unit, 3 * unit)
    assert min(seconds) == 1
    if unit <= 0.05:
        assert {1, 2, 4, 8, 16} <= set(seconds)
    StepTimes(seconds)


def test_measuring_stays_within_the_engine_that_it_measures() -> None:
    assert max(measure(Clockwork(0.001, blocks=1))) == 16
    assert max(measure(Clockwork(0.001, max_outputs=8))) == 8
    assert max(measure(Clockwork(0.001, max_tokens=5))) == 5
    assert max(measure(Clockwork(0.001, max_positions=40))) == 32


def fetch(executor: Clockwork, cache: Path | None) -> StepTimes:
    return step_times(executor, "f" * 32, cache, budget=5.0)  # type: ignore[arg-type]


def test_a_second_start_reads_what_the_first_one_measured(tmp_path: Path) -> None:
    first = Clockwork(0.001)
    times = fetch(first, tmp_path)
    assert first.sizes
    second = Clockwork(0.001)
    assert fetch(second, tmp_path).seconds(1) == times.seconds(1)
    assert second.sizes == []


@pytest.mark.parametrize(
    "change",
    [
        lambda _: "",
        lambda text: text[: len(text) // 2],
        lambda _: "[]",
        lambda _: "null",
        lambda _: "\xff\x00",
        lambda text: json.dumps({**json.loads(text), "version": 0}),
        lambda text: json.dumps({**json.loads(text), "processor": "another one"}),
        lambda text: json.dumps({**json.loads(text), "kernels": 1}),
        lambda text: json.dumps({**json.loads(text), "fingerprint": "0" * 32}),
        lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "isa"}),
        lambda text: json.dumps({**json.loads(text), "samples": {}}),
        lambda text: json.dumps({**json.loads(text), "samples": {"1": "soon"}}),
        lambda text: json.dumps({**json.loads(text), "samples": {"1": [-1.0]}}),
        lambda text: json.dumps({**json.loads(text), "samples": {"1": [float("nan")]}}),
        lambda text: json.dumps({**json.loads(text), "samples": {"1": [1.0], "2": []}}),
        lambda text: json.dumps({**json.loads(text), "samples": {"2": [1.0]}}),
        lambda text: json.dumps({**json.loads(text), "samples": [1.0]}),
        lambda text: text + " " * (1 << 16),
    ],
)
def test_a_damaged_or_foreign_file_is_measured_again(tmp_path: Path, change: Any) -> None:
    fetch(Clockwork(0.001), tmp_path)
    (path,) = (tmp_path / "steptime").iterdir()
    path.write_text(change(path.read_text()), encoding="latin-1")
    again = Clockwork(0.001)
    fetch(again, tmp_path)
    assert again.sizes
    last = Clockwork(0.001)
    fetch(last, tmp_path)
    assert last.sizes == []


def test_a_table_of_few_samples_is_completed_by_later_starts(tmp_path: Path) -> None:
    """A first start without time leaves a guess; later ones add a little each, and then stop."""
    starts = [Clockwork(0.001) for _ in range(40)]
    for executor in starts:
        step_times(executor, "f" * 32, tmp_path, budget=0.2)  # type: ignore[arg-type]
    measured = [len(executor.sizes) for executor in starts]
    assert measured[0] > 0
    assert measured[-1] == 0
    assert fetch(Clockwork(0.001), tmp_path).seconds(8) > 0


def test_other_threads_or_instructions_have_their_own_table(tmp_path: Path) -> None:
    fetch(Clockwork(0.001), tmp_path)
    for name, value in (("threads", 1), ("isa", "portable")):
        executor = Clockwork(0.001)
        setattr(executor.tape, name, value)
        fetch(executor, tmp_path)
        assert executor.sizes
    assert len(list((tmp_path / "steptime").iterdir())) == 3


def test_a_cache_that_cant_be_used_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    for cache in (blocked, None):
        executor = Clockwork(0.001)
        assert fetch(executor, cache).seconds(1) > 0
        assert executor.sizes


def test_a_real_model_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, TinySpec("llama", layers=1))
    with open_model(path) as source:
        executor = Executor(source, kv_blocks=4, max_positions=64, max_tokens=64, max_outputs=64, threads=1, cache=None)
    times = step_times(executor, "tiny", tmp_path, budget=20.0)
    assert times.seconds(1) > 0
    again = step_times(executor, "tiny", tmp_path, budget=20.0)
    assert [again.seconds(n) for n in (1, 3, 8)] == [times.seconds(n) for n in (1, 3, 8)]  # read, not measured
    assert [p.name for p in (tmp_path / "steptime").iterdir()] == [f"tiny-{executor.tape.isa}-1.json"]
