"""Calibration: known machines are found again, what can't be told is said, and nothing is extrapolated in silence."""

from __future__ import annotations

import itertools
import math
import os
import random
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun.errors import PlanError
from forerun.plan.calibrate import Fit, calibrate, calibrate_machine, error_max, error_mean
from forerun.plan.calibrate_data import Machine, Measurement, check_consistent, spread_over
from forerun.plan.calibrate_fit import criterion, least_squares, told_apart
from forerun.plan.calibrate_save import hardware_toml, save_hardware
from forerun.plan.catalog import PlanCatalog, hardware_of, local_path
from forerun.plan.deployment import Deployment
from forerun.plan.formats import WeightFormats
from forerun.plan.hardware import Efficiency, Hardware, Measured
from forerun.plan.shapes import Experts, ModelShape
from forerun.plan.steptime import Load, forward_time

GPU = Hardware(name="gpu", flops={"bf16": 1e15, "fp8": 2e15}, bandwidth=3e12, memory=80e9, link=4e11, link_us=10)
DENSE = ModelShape(
    name="dense", hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, vocab=128256, intermediate=14336
)
SPARSE = replace(DENSE, name="sparse", experts=Experts(n=64, active=4, intermediate=1024))
CODER = ModelShape(
    name="coder", hidden=1536, layers=28, heads=12, kv_heads=2, head_dim=128, vocab=151936, intermediate=8960,
    qkv_bias=True, formats=WeightFormats(linear="4.9275bits", head="6.625bits", embedding="q4_k"),
)  # fmt: skip
AVX2 = {1: 37.8, 2: 39.9, 3: 43.9, 4: 50.5, 5: 62.4, 8: 95.0, 16: 171.2, 32: 349.0}
"""Milliseconds of a forward by its tokens, as the README has them, of the 1.5B."""
AVX512 = {1: 18.4, 2: 19.2, 4: 23.8, 5: 27.1, 8: 40.1, 16: 80.0, 32: 163.0}
"""The same of a prototype of the linear layers."""
MACHINE = Machine("coder", "0", 1e9, "a processor", 2, "forerun bench step", 24.3e9, 260.0)
LOADS = [Load(batch, queries, context) for batch in (1, 8, 64, 512) for queries in (1, 16) for context in (0, 1000)]


def timed(
    shape: ModelShape, where: Deployment, loads: Sequence[Load] = LOADS, noise: float = 0.0, seed: int = 0
) -> list[Measurement]:
    """Steps as the planner itself has them, with lognormal noise."""
    rng = random.Random(seed)
    return [
        Measurement(
            load,
            (forward_time(shape.network, where, load).seconds + where.eff.step_us * 1e-6)
            * math.exp(rng.gauss(0, noise)),
            f"[{i}]",
        )
        for i, load in enumerate(loads)
    ]


def forwards(times: dict[int, float]) -> list[Measurement]:
    return [Measurement(Load(1, rows, 128), ms / 1e3, f"rows {rows}") for rows, ms in times.items()]


def machine_fit(times: dict[int, float], **settings: Any) -> Fit:
    return calibrate_machine(CODER.network, MACHINE, forwards(times), memory=8e9, **settings)


def fitted(shape: ModelShape, truth: Efficiency, given: Efficiency, **settings: Any) -> Fit:
    """What is found of `truth` by somebody who starts from `given`."""
    times = timed(shape, Deployment(hardware=GPU, efficiency=truth), **settings)
    return calibrate(shape.network, Deployment(hardware=GPU, efficiency=given), times)


@pytest.mark.parametrize("shape", [DENSE, SPARSE], ids=lambda shape: shape.name)
@pytest.mark.parametrize(
    ("truth", "names"),
    [
        (Efficiency(bandwidth=0.71, compute=0.43), ("bandwidth", "compute")),
        (Efficiency(bandwidth=0.71, compute=0.43, step_us=2500), ("bandwidth", "compute", "overhead")),
        (Efficiency(bandwidth=0.93, compute=0.2, order=2.5), ("bandwidth", "compute", "order")),
        (Efficiency(bandwidth=0.9, compute=0.15, order=2, step_us=0), ("bandwidth", "compute", "overhead", "order")),
    ],
)
def test_a_known_machine_is_found_again(shape: ModelShape, truth: Efficiency, names: tuple[str, ...]) -> None:
    fit = fitted(shape, truth, Efficiency())
    found = fit.deployment.eff
    assert set(names) <= set(fit.fitted)
    assert found.bandwidth == pytest.approx(truth.bandwidth, rel=2e-3)
    assert found.compute == pytest.approx(truth.compute, rel=2e-3)
    assert found.step_us == pytest.approx(truth.step_us, abs=10)
    assert 1 / found.order == pytest.approx(1 / truth.order, abs=5e-3)
    assert error_max(fit.points) < 2e-3


def test_the_same_with_noise() -> None:
    """Twenty seeds of 5%: the mean of what is found is the truth, and no seed is far off."""
    truth = Efficiency(bandwidth=0.75, compute=0.5, step_us=1000)
    found = [fitted(DENSE, truth, Efficiency(), noise=0.05, seed=seed).deployment.eff for seed in range(20)]
    for name in ("bandwidth", "compute"):
        shares = [getattr(eff, name) for eff in found]
        assert np.mean(shares) == pytest.approx(getattr(truth, name), rel=0.04)
        assert all(abs(share / getattr(truth, name) - 1) < 0.2 for share in shares)
    fit = fitted(DENSE, truth, Efficiency(), noise=0.05)
    assert 0.02 < error_mean(fit.points) < 0.07


def test_no_other_rates_fit_better() -> None:
    """Against every point of a fine grid."""
    truth = Deployment(hardware=GPU, efficiency=Efficiency(bandwidth=0.6, compute=0.35, order=2))
    times = timed(DENSE, truth, noise=0.1, seed=3)[:4] + timed(DENSE, truth, noise=0.1, seed=4)[-4:]
    given = Efficiency(order=2)
    fit = calibrate(DENSE.network, Deployment(hardware=GPU, efficiency=given), times)

    def squares(eff: Efficiency) -> float:
        where = Deployment(hardware=GPU, efficiency=eff)
        return sum(
            math.log((forward_time(DENSE.network, where, item.load).seconds + eff.step_us * 1e-6) / item.seconds) ** 2
            for item in times
        )

    assert {"bandwidth", "compute"} <= set(fit.fitted)
    least = min(
        squares(replace(given, bandwidth=bandwidth, compute=compute))
        for bandwidth, compute in itertools.product(np.linspace(0.4, 0.8, 41), np.linspace(0.2, 0.6, 41))
    )
    assert squares(fit.deployment.eff) <= least


def test_an_overhead_or_an_order_is_fitted_only_where_it_helps() -> None:
    """Noise alone, and enough points: the plain roofline that made the times stays one."""
    truth = Efficiency(bandwidth=0.75, compute=0.5)
    more = [fitted(DENSE, truth, truth, noise=0.05, seed=seed).fitted for seed in range(20)]
    assert sum(len(names) > 2 for names in more) <= 8
    fit = fitted(DENSE, truth, truth, noise=0.05, seed=more.index(("bandwidth", "compute")))
    assert fit.held == {
        "overhead": "300 us: with it the fit is no better",
        "order": "inf: with it the fit is no better",
    }


@pytest.mark.parametrize(("times", "most"), [(AVX2, 0.08), (AVX512, 0.08)], ids=["avx2", "avx512"])
def test_two_points_of_a_processor_predict_the_others(times: dict[int, float], most: float) -> None:
    """Forwards of 1 and 16 tokens, against the equation written out: (m^3 + (n c)^3)^(1/3)."""
    times = {rows: ms for rows, ms in times.items() if rows <= 16}
    fit = machine_fit(times, points=2)
    c = ((times[16] ** 3 - times[1] ** 3) / (16**3 - 1)) ** (1 / 3)
    m = (times[1] ** 3 - c**3) ** (1 / 3)
    for point in fit.points:
        rows = point.load.queries
        assert point.predicted_seconds * 1e3 == pytest.approx((m**3 + (rows * c) ** 3) ** (1 / 3), rel=0.01)
        assert point.used == (rows in (1, 16))
    assert error_max(fit.used) < 1e-6
    assert error_max(fit.kept_back) < most
    assert fit.fitted == ("bandwidth", "compute")
    assert fit.held["order"] == "3: 2 different steps are too few to tell it"


def test_without_the_order_the_same_points_are_missed() -> None:
    """What a fit that forgets it would look like."""
    times = {rows: ms for rows, ms in AVX2.items() if rows <= 16}
    assert error_max(machine_fit(times, points=2, order=math.inf).kept_back) > 0.13
    assert error_max(machine_fit(times, points=2, order=1).kept_back) > 0.25


def test_the_hardware_of_a_machine_says_what_was_reached() -> None:
    fit = machine_fit(AVX2, date="2026-11-30")
    hardware = fit.deployment.hardware
    assert hardware.name == "local"
    assert hardware.measured == Measured(
        model="coder", batch=(1, 1), queries=(1, 32), context=(128, 128), points=8, error_max=error_max(fit.points),
        sha256="0", cpu="a processor", threads=2, date="2026-11-30",
    )  # fmt: skip
    assert hardware.efficiency is not None
    assert hardware.efficiency.compute == 1
    assert hardware.efficiency.step_us == 260
    # These forwards read faster than the bandwidth that was measured beside them.
    assert hardware.bandwidth > MACHINE.read_bandwidth
    assert hardware.efficiency.bandwidth == 1
    assert "more than the 24.3 GB/s" in hardware.sources["bandwidth"]
    fast = calibrate_machine(CODER.network, replace(MACHINE, read_bandwidth=60e9), forwards(AVX2), memory=8e9)
    assert fast.deployment.hardware.bandwidth == 60e9
    assert fast.deployment.eff.bandwidth == pytest.approx(hardware.bandwidth / 60e9, rel=1e-3)
    assert [p.predicted_seconds for p in fast.points] == pytest.approx([p.predicted_seconds for p in fit.points], 1e-3)


def test_predictions_are_those_of_the_planner() -> None:
    """A fit's own numbers are what every other command computes with the same hardware."""
    for fit, besides in ((machine_fit(AVX2), 0.0), (fitted(DENSE, Efficiency(order=3), Efficiency()), 1.0)):
        where = Deployment(hardware=fit.deployment.hardware)
        for point in fit.points:
            seconds = forward_time(fit.network, where, point.load).seconds + besides * where.eff.step_us * 1e-6
            assert point.predicted_seconds == seconds == fit.predicted_seconds(point.load)


def test_it_remembers_what_it_saw() -> None:
    fit = calibrate(DENSE.network, Deployment(hardware=GPU), timed(DENSE, Deployment(hardware=GPU)))
    assert (fit.measured.batch, fit.measured.queries, fit.measured.context) == ((1, 512), (1, 16), (0, 1000))
    assert fit.covers(Load(1, 1, 0))
    assert fit.covers(Load(512, 16, 1000))
    for load in (Load(513, 1, 200), Load(1, 17, 200), Load(1, 1, 1001)):
        assert not fit.covers(load)
    few = calibrate(DENSE.network, Deployment(hardware=GPU), timed(DENSE, Deployment(hardware=GPU)), points=2)
    assert few.measured.points == 2
    where = fit.deployment
    assert forward_time(DENSE.network, where, Load(513, 1, 1001)).beyond_measured == [
        "batch 513 (measured 1 to 512)",
        "context 1001 (measured 0 to 1000)",
    ]
    assert forward_time(DENSE.network, where, Load(8, 2, 500)).beyond_measured == []
    other = replace(DENSE, name="other").network
    assert forward_time(other, where, Load(8, 2, 500)).beyond_measured == ["model other (measured dense)"]
    # Somebody's own efficiency isn't the measured one.
    own = replace(where, efficiency=Efficiency())
    assert forward_time(DENSE.network, own, Load(513, 1, 1001)).beyond_measured == []


def test_points_that_all_wait_for_memory_say_nothing_of_compute() -> None:
    """Their bandwidth is found; the rest stays, and the fit says so."""
    truth = Deployment(hardware=GPU, efficiency=Efficiency(bandwidth=0.55))
    times = timed(DENSE, truth, [Load(1, 1, context) for context in (100, 1000, 10_000, 50_000)])
    fit = calibrate(DENSE.network, Deployment(hardware=GPU, efficiency=Efficiency(compute=0.5)), times)
    assert fit.fitted == ("bandwidth",)
    assert fit.deployment.eff.bandwidth == pytest.approx(0.55)
    assert fit.deployment.eff.compute == 0.5
    assert fit.held["compute"].startswith("50% of the peak: these points can't tell it from the rest")


def test_points_that_all_compute_say_nothing_of_bandwidth() -> None:
    truth = Deployment(hardware=GPU, efficiency=Efficiency(compute=0.25))
    times = timed(DENSE, truth, [Load(4, tokens, 0) for tokens in (1000, 2000, 4000)])
    fit = calibrate(DENSE.network, Deployment(hardware=GPU), times)
    assert fit.fitted == ("compute",)
    assert fit.deployment.eff.compute == pytest.approx(0.25)
    assert fit.deployment.eff.bandwidth == Efficiency().bandwidth


def test_a_machine_far_from_what_was_assumed_is_found() -> None:
    """Assumed: every step waits for memory, whatever its arithmetic does. True: every step computes."""
    truth = Deployment(hardware=GPU, efficiency=Efficiency(compute=0.01))
    fit = calibrate(
        DENSE.network, Deployment(hardware=GPU), timed(DENSE, truth, [Load(batch, 1, 0) for batch in (8, 16, 32)])
    )
    assert fit.deployment.eff.compute == pytest.approx(0.01, rel=1e-3)
    assert error_max(fit.points) < 1e-3


def test_what_moves_the_times_less_than_they_are_known_is_not_fitted() -> None:
    """Nearly all of these steps wait for memory: the order that would make the fit exact is not believed."""
    loads = [Load(batch, queries, context) for batch in (1, 4, 16, 64) for queries in (1, 4) for context in (200, 2000)]
    fit = fitted(SPARSE, Efficiency(bandwidth=0.93, compute=0.2, order=2.5), Efficiency(), loads=loads)
    assert "order" not in fit.fitted
    assert error_max(fit.points) < 0.04


@pytest.mark.parametrize("count", [1, 3])
def test_one_point_tells_one_number(count: int) -> None:
    """Taken once, or several times."""
    times = timed(DENSE, Deployment(hardware=GPU, efficiency=Efficiency(bandwidth=0.5)), [Load(2, 1, 500)] * count)
    fit = calibrate(DENSE.network, Deployment(hardware=GPU), times)
    assert fit.fitted == ("bandwidth",)
    assert set(fit.held) == {"compute", "overhead", "order"}
    assert fit.deployment.eff.bandwidth == pytest.approx(0.5)


def test_repeated_points_are_averaged() -> None:
    """Two times of one step that differ a little: the fit lies in their geometric middle."""
    load = Load(2, 1, 500)
    fit = calibrate(
        DENSE.network,
        Deployment(hardware=GPU, efficiency=Efficiency(bandwidth=0.9)),
        [Measurement(load, 8e-3), Measurement(load, 10e-3)],
    )
    assert [point.predicted_seconds for point in fit.points] == pytest.approx([math.sqrt(80) * 1e-3] * 2)


@pytest.mark.parametrize(
    ("times", "field", "words"),
    [
        ([(Load(4, 1, 100), 9e-3), (Load(4, 1, 100), 20e-3)], "p1", "contradicts p0"),
        ([(Load(4, 1, 100), 9e-3), (Load(2, 1, 100), 20e-3)], "p1", "contradicts p0"),
        ([(Load(4, 1, 100), -9e-3)], "p0", "expected a number above 0"),
        ([(Load(4, 1, 100), math.nan)], "p0", "expected a number above 0"),
        ([(Load(4, 1, 100), 2e-3)], "p0", "less than the"),
        ([(Load(0, 1, 100), 9e-3)], "batch", "whole number from 1"),
        ([], "file", "no step times"),
    ],
)
def test_times_that_cannot_be_are_refused(times: list[tuple[Load, float]], field: str, words: str) -> None:
    measurements = [Measurement(load, seconds, f"p{i}") for i, (load, seconds) in enumerate(times)]
    with pytest.raises(PlanError, match=words) as caught:
        calibrate(DENSE.network, Deployment(hardware=GPU), measurements)
    assert caught.value.field == field


def test_more_work_in_less_time_is_found_wherever_it_stands() -> None:
    """Against all pairs."""
    rng = random.Random(5)
    for _ in range(200):
        items = [
            Measurement(
                Load(rng.randint(1, 4), rng.randint(1, 4), rng.randint(0, 3)), rng.choice([1.0, 1.2, 1.6, 2.0]), str(i)
            )
            for i in range(5)
        ]
        wrong = any(
            a.seconds > 1.5 * b.seconds and all(x <= y for x, y in zip(a.load[:3], b.load[:3], strict=True))
            for a in items
            for b in items
        )
        try:
            check_consistent(items)
        except PlanError:
            assert wrong
        else:
            assert not wrong


def test_a_machine_needs_the_model_that_was_timed_and_rows_that_compute() -> None:
    with pytest.raises(PlanError, match="reads 15009 MB of weights") as caught:
        calibrate_machine(DENSE.network, MACHINE, forwards(AVX2), memory=8e9)
    assert caught.value.field == "model"
    with pytest.raises(PlanError, match="bandwidth and compute can't be told apart") as caught:
        machine_fit({1: 37.8})
    assert caught.value.field == "rows"


def test_points_are_spread_from_the_least_to_the_most() -> None:
    items = forwards(AVX2)
    random.Random(1).shuffle(items)

    def rows(count: int) -> list[int]:
        return [item.load.queries for item in spread_over(items, count)]

    assert rows(2) == [1, 32]
    assert rows(3)[::2] == [1, 32]
    assert rows(8) == rows(100) == sorted(AVX2)
    assert all(len(set(rows(count))) == count for count in range(2, 9))
    with pytest.raises(PlanError, match="at least 2"):
        spread_over(items, 1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_saved_hardware_comes_back_as_it_was(cache: Path) -> None:
    """Every field, to the last bit, through the catalog."""
    hardware = machine_fit(AVX2, date="2026-11-30").deployment.hardware
    save_hardware(hardware, local_path())
    found = PlanCatalog.load().gpu("local")
    assert replace(found, bandwidth=0.5, memory=0.5, flops={"bf16": 1}) == replace(
        hardware, bandwidth=0.5, memory=0.5, flops={"bf16": 1}
    )
    for name in ("bandwidth", "memory"):
        assert getattr(found, name) == pytest.approx(getattr(hardware, name), rel=1e-15)
    assert found.rate("bf16") == pytest.approx(hardware.rate("bf16"), rel=1e-15)
    # A second calibration replaces the first; nothing else lies there.
    save_hardware(replace(hardware, memory=1e9), local_path())
    assert PlanCatalog.load().gpu("local").memory == 1e9
    assert list(cache.rglob("*.*")) == [local_path()]


@pytest.mark.usefixtures("cache")
def test_points_of_catalog_hardware_are_saved_whole() -> None:
    """Link, several rates, an infinite order."""
    fit = fitted(DENSE, Efficiency(bandwidth=0.7), Efficiency())
    save_hardware(fit.deployment.hardware, local_path())
    found = PlanCatalog.load().gpu("local")
    assert found == replace(fit.deployment.hardware, name="local")


@pytest.mark.parametrize("text", ['a "quoted" \\ one', "new\nline\ttab\x00\x7f", "é 中 🦀", "\udc80"])
def test_any_text_is_written_as_toml(text: str) -> None:
    hardware = replace(GPU, sources={"bandwidth": text})
    table = tomllib.loads(hardware_toml(hardware))["hardware"]["local"]
    assert hardware_of("local", table).sources["bandwidth"] == text.replace("\udc80", "?")


def test_a_failed_save_leaves_what_was_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_hardware(GPU, local_path())
    before = local_path().read_text()

    def fail(*_paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(PlanError, match="No space left") as caught:
        save_hardware(replace(GPU, memory=1), local_path())
    assert caught.value.field == "save"
    assert local_path().read_text() == before
    assert list(local_path().parent.iterdir()) == [local_path()]
    (cache / "file").write_text("")
    with pytest.raises(PlanError, match="can't be written"):
        save_hardware(GPU, cache / "file" / "local.toml")


def test_each_end_of_each_range_counts() -> None:
    seen = Measured(model="m", batch=(2, 8), queries=(3, 4), context=(100, 200), points=4, error_max=0)
    within = {"batch": 2, "queries": 4, "context": 150}
    assert seen.beyond(**within) == seen.beyond(**within, model="m") == []
    for name, least, largest in (("batch", 2, 8), ("queries", 3, 4), ("context", 100, 200)):
        for value in (least, largest):
            assert seen.beyond(**{**within, name: value}) == []
        for value in (least - 1, largest + 1):
            assert seen.beyond(**{**within, name: value}) == [f"{name} {value} (measured {least} to {largest})"]


def test_measured_ranges_are_checked() -> None:
    for bad in ((2, 1), (1,), ("1", 2), (math.nan, 1)):
        with pytest.raises(PlanError, match="least and the largest"):
            Measured(model="m", batch=bad, queries=(1, 1), context=(0, 0), points=1, error_max=0)  # type: ignore[arg-type]


def test_least_squares_finds_what_algebra_finds() -> None:
    """A linear problem, and the same within bounds against a grid."""
    rng = np.random.default_rng(1)
    matrix, right = rng.normal(size=(12, 3)), rng.normal(size=12)
    residuals: Callable[[Any], Any] = lambda x: matrix @ x - right  # noqa: E731
    free = least_squares(residuals, np.zeros(3), np.full(3, -9.0), np.full(3, 9.0))
    assert free.x == pytest.approx(np.linalg.lstsq(matrix, right, rcond=None)[0], abs=1e-6)
    assert free.jacobian == pytest.approx(matrix, abs=1e-6)
    bound = float(free.x[0]) - 0.2
    within = least_squares(residuals, np.zeros(3), np.full(3, -9.0), np.array([bound, 9, 9]))
    assert within.x[0] == bound
    rest = np.linalg.lstsq(matrix[:, 1:], right - bound * matrix[:, 0], rcond=None)[0]
    assert within.x[1:] == pytest.approx(rest, abs=1e-6)


def test_least_squares_walks_a_bent_valley() -> None:
    """Rosenbrock's function, from its usual start."""
    found = least_squares(
        lambda x: np.array([10 * (x[1] - x[0] ** 2), 1 - x[0]]), np.array([-1.2, 1]), np.full(2, -5.0), np.full(2, 5.0)
    )
    assert found.x == pytest.approx([1, 1], abs=1e-6)


def test_parameters_are_told_apart_by_what_only_they_can_do() -> None:
    ones, ramp = np.ones(10), np.linspace(0, 1, 10)
    assert told_apart(np.column_stack([ones, ones])) == [0]
    assert told_apart(np.column_stack([ramp, ones])) == [1, 0]
    assert told_apart(np.column_stack([ramp, ones, ones + ramp])) in ([2, 1], [2, 0])
    assert told_apart(np.column_stack([ones, ones + 0.01 * ramp])) == [1]
    assert told_apart(np.column_stack([ones, np.zeros(10)])) == [0]


def test_the_criterion_charges_for_parameters() -> None:
    """By hand: 10 ln(.04) + 4 + 12/7 for two parameters and ten points."""
    assert criterion(0.4, 10, 2) == pytest.approx(10 * math.log(0.04) + 4 + 12 / 7)
    assert criterion(0.4, 10, 3) > criterion(0.4, 10, 2)
    assert criterion(0.0, 4, 3) == math.inf
    assert criterion(0.0, 10, 2) == criterion(1e-6, 10, 2), "residuals below what can be measured are all alike"
