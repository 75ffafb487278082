"""The achievable fractions of a machine from measured step times (docs/plan-calibrate.md has the equations).

A step's bytes and FLOPs follow from the model; what is fitted is how fast they pass: the effective bandwidth and the
effective compute rate always, a fixed overhead and the order of the overlap where the points allow and reward it. The
fit minimises the squared logarithms of predicted over measured time, so that a short step counts as much as a long one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from forerun.errors import PlanError
from forerun.plan.calibrate_data import Machine, Measurement, check_consistent, spread_over
from forerun.plan.calibrate_fit import Solution, Vector, criterion, least_squares, told_apart
from forerun.plan.deployment import Deployment
from forerun.plan.hardware import Efficiency, Hardware, Measured
from forerun.plan.network import Network
from forerun.plan.shapes import Model, as_network
from forerun.plan.steptime import Load, forward_time

PARAMETERS = ("bandwidth", "compute", "overhead", "order")
"""What can be fitted: shares of both peaks, microseconds beside the layers, order of the overlap."""
LOCAL_ORDER = 3.0
"""Of the overlap on a CPU that runs this project's engine, where the points don't say."""
LOCAL_LAYER_US = 5.0
"""Microseconds of a layer there: barriers between its operations, and its small ones."""
PULL = 1e-3
"""A rate that is off its start by a factor of e weighs as much as a time that is off by 0.1%."""
FASTER_THAN_PEAK = 1.02
"""A measured step may be that much faster than its bytes and FLOPs at full peaks allow."""


class FitPoint(NamedTuple):
    """One measured step and what the fit says of it. used: the fit was made from it, not only compared with it."""

    name: str
    load: Load
    seconds: float
    predicted_seconds: float
    used: bool

    @property
    def error(self) -> float:
        """Predicted less measured, as a share of what was measured."""
        return self.predicted_seconds / self.seconds - 1


@dataclass(frozen=True)
class Fit:
    """What step times say about a deployment.

    deployment: its hardware has the fitted efficiency and the ranges behind it. forwards: the times are of forwards
    alone, as `forerun bench step` takes them; otherwise of whole steps. fitted: of `PARAMETERS`. held: the others, each
    with its value and why it wasn't fitted.
    """

    network: Network
    deployment: Deployment
    points: tuple[FitPoint, ...]
    forwards: bool
    fitted: tuple[str, ...]
    held: Mapping[str, str]

    @property
    def measured(self) -> Measured:
        """The ranges that the fit saw."""
        found = self.deployment.hardware.measured
        assert found is not None, "a fit's hardware has them"
        return found

    @property
    def used(self) -> tuple[FitPoint, ...]:
        """Points that the fit was made from."""
        return tuple(point for point in self.points if point.used)

    @property
    def kept_back(self) -> tuple[FitPoint, ...]:
        """Points that it was only compared with."""
        return tuple(point for point in self.points if not point.used)

    def predicted_seconds(self, load: Load) -> float:
        """A step of that load, or its forward, as was measured. `covers` says whether to believe it."""
        seconds = forward_time(self.network, self.deployment, load).seconds
        return seconds if self.forwards else seconds + self.deployment.eff.step_us * 1e-6

    def covers(self, load: Load) -> bool:
        """Whether a step lies within what was measured, in each of batch, new tokens and context."""
        return not self.measured.beyond(batch=load.batch, queries=load.queries, context=load.context)


def error_max(points: Sequence[FitPoint]) -> float:
    """The largest deviation, without its sign. 0 without points."""
    return max((abs(point.error) for point in points), default=0.0)


def error_mean(points: Sequence[FitPoint]) -> float:
    """The mean deviation, without signs. 0 without points."""
    return sum(abs(point.error) for point in points) / max(len(points), 1)


def calibrate(
    network: Model, deployment: Deployment, measurements: Sequence[Measurement], *, points: int | None = None
) -> Fit:
    """Fits the shares that `deployment` reaches of its peaks to measured steps of `network`.

    What isn't fitted keeps the deployment's value. points: fit to so many of them (`spread_over`), compare with all.

    Raises:
        PlanError: times that contradict each other, or the peaks.
    """
    network, chosen = as_network(network), _chosen(measurements, points)
    _check_possible(network, deployment, measurements)
    hardware, eff = deployment.hardware, deployment.eff
    problem = _Problem(network, deployment, chosen, overhead=eff.step_us * 1e-6)
    limits = {"bandwidth": hardware.bandwidth, "compute": deployment.peak}
    start = {name: limits[name] * getattr(eff, name) for name in limits}
    found = _fitted(problem, start, limits, eff.order)
    fraction = {name: min(found.values[name] / limits[name], 1.0) for name in limits}
    fitted = replace(eff, **fraction, order=found.order, step_us=found.values["overhead"] * 1e6)
    held = {
        "bandwidth": f"{eff.bandwidth:.0%} of the peak",
        "compute": f"{eff.compute:.0%} of the peak",
        "overhead": f"{eff.step_us:g} us",
        "order": f"{eff.order:g}",
    }
    sources = MappingProxyType({**hardware.sources, "efficiency": f"fitted to measured steps of {network.name}"})
    where = replace(deployment, hardware=replace(hardware, efficiency=fitted, sources=sources), efficiency=None)
    return _fit(network, where, measurements, chosen, found, held, forwards=False)


def calibrate_machine(
    network: Model,
    machine: Machine,
    measurements: Sequence[Measurement],
    *,
    memory: float,
    activations: str = "bf16",
    kv: str = "bf16",
    order: float = LOCAL_ORDER,
    layer_us: float = LOCAL_LAYER_US,
    points: int | None = None,
    date: str = "",
) -> Fit:
    """Makes the hardware `local` from what `forerun bench step` measured there.

    Its bandwidth is the measured read bandwidth, or what the fit reached if that was more. A processor has no data
    sheet's rate of arithmetic here, so the fitted one is its peak, and the share reached of it is 1. memory: of the
    machine, bytes. order, layer_us: as long as nothing else is fitted.

    Raises:
        PlanError: the model isn't the one that was timed, the times contradict each other, or they can't tell bandwidth
            and compute apart.
    """
    network = as_network(network)
    _check_same_model(network, machine)
    chosen = _chosen(measurements, points)
    held_eff = Efficiency(order=order, layer_us=layer_us, launch_us=0, step_us=machine.step_us)
    blank = Hardware(name="local", flops={activations: 1.0}, bandwidth=machine.read_bandwidth, memory=memory)
    where = Deployment(hardware=blank, activations=activations, kv=kv, efficiency=held_eff)
    problem = _Problem(network, where, chosen, overhead=0.0)
    most = max(range(len(chosen)), key=lambda i: chosen[i].load.queries)
    start = {
        "bandwidth": machine.read_bandwidth,
        "compute": float(problem.flops[most].sum()) / chosen[most].seconds,
    }
    found = _fitted(problem, start, {}, order)
    if not {"bandwidth", "compute"} <= set(found.fitted):
        rows = ", ".join(str(tokens) for tokens in sorted({item.load.queries for item in chosen}))
        raise PlanError(
            "rows",
            f"bandwidth and compute can't be told apart by forwards of {rows} tokens; measure few and many, such as "
            "--rows 1,2,4,8,16",
        )
    reached, rate = found.values["bandwidth"], found.values["compute"]
    peak = max(machine.read_bandwidth, reached)
    read = f"read bandwidth of {machine.cpu}, {machine.threads} threads, beside the forwards"
    if reached > machine.read_bandwidth:
        read = f"what the forwards reached; more than the {machine.read_bandwidth / 1e9:.1f} GB/s measured beside them"
    hardware = Hardware(
        name="local",
        flops={activations: rate},
        bandwidth=peak,
        memory=memory,
        sources=MappingProxyType({
            "bandwidth": read,
            "flops": f"fitted; mostly from forwards of {chosen[most].load.queries} tokens of {network.name}",
            "memory": "of the machine",
            "efficiency": f"fitted to: {machine.command}",
        }),
        efficiency=replace(
            held_eff, bandwidth=reached / peak, compute=1, order=found.order, launch_us=found.values["overhead"] * 1e6
        ),
    )  # fmt: skip
    held = {"overhead": "0 us", "order": f"{order:g}"}
    where = replace(where, hardware=hardware, efficiency=None)
    fit = _fit(network, where, measurements, chosen, found, held, forwards=True)
    known = replace(fit.measured, sha256=machine.sha256, cpu=machine.cpu, threads=machine.threads, date=date)
    return replace(fit, deployment=replace(where, hardware=replace(hardware, measured=known)))


class _Found(NamedTuple):
    """values: effective bandwidth and compute in units a second, seconds of overhead. reasons: of what isn't fitted."""

    values: Mapping[str, float]
    order: float
    fitted: tuple[str, ...]
    reasons: Mapping[str, str]


class _Problem:
    """Bytes and FLOPs of each phase of each step, and the times measured. overhead: seconds, where it isn't fitted."""

    def __init__(
        self, network: Network, deployment: Deployment, chosen: Sequence[Measurement], *, overhead: float
    ) -> None:
        forwards = [forward_time(network, deployment, item.load) for item in chosen]
        moving = [[part for part in forward.parts if part.flops] for forward in forwards]
        self.bytes = np.array([[part.bytes for part in parts] for parts in moving])
        self.flops = np.array([[part.flops for part in parts] for parts in moving])
        self.fixed = np.array([sum(part.seconds for part in item.parts if not part.flops) for item in forwards])
        self.overhead = overhead
        self.measured = np.array([item.seconds for item in chosen])
        self.n_loads = len({item.load for item in chosen})

    def seconds(self, bandwidth: float, compute: float, overhead: float, order: float) -> Vector:
        """Predicted for each step."""
        memory, arithmetic = self.bytes / bandwidth, self.flops / compute
        larger = np.maximum(memory, arithmetic)
        phases = larger
        if not math.isinf(order):
            phases = larger * (1 + (np.minimum(memory, arithmetic) / larger) ** order) ** (1 / order)
        return np.asarray(phases.sum(axis=1) + self.fixed + overhead)


def _chosen(measurements: Sequence[Measurement], points: int | None) -> tuple[Measurement, ...]:
    for item in measurements:
        item.load.check()
        if not 0 < item.seconds < math.inf:
            raise PlanError(item.name, f"{item.seconds} seconds are not allowed; expected a number above 0")
    if not measurements:
        raise PlanError("file", "there are no step times to fit to")
    check_consistent(measurements)
    return tuple(measurements) if points is None else spread_over(measurements, points)


def _check_possible(network: Network, deployment: Deployment, measurements: Sequence[Measurement]) -> None:
    """Raises PlanError for a step that took less than physics allows."""
    ideal = replace(deployment, efficiency=Efficiency.ideal())
    for item in measurements:
        least = forward_time(network, ideal, item.load).seconds
        if item.seconds * FASTER_THAN_PEAK < least:
            raise PlanError(
                item.name,
                f"{item.seconds * 1e3:g} ms is less than the {least * 1e3:.4g} ms that the step takes at the peaks of "
                f"{deployment.gpus} x {deployment.hardware.name}; check --model, --weights, --gpu, --tensor",
            )


def _check_same_model(network: Network, machine: Machine) -> None:
    """Raises PlanError if the planner's model isn't about as large as the one that was timed."""
    size = network.dense.bytes + sum(mix.layers * mix.n * mix.bytes for mix in network.mixtures)
    if network.head is not None:
        size += network.head.size * network.formats.bytes_of("head")
    if not 0.7 < size / machine.weight_bytes < 1.4:
        raise PlanError(
            "model",
            f"a forward of {network.name} reads {size / 1e6:.0f} MB of weights, but one of {machine.model}, which was "
            f"timed, {machine.weight_bytes / 1e6:.0f} MB; name the same model, and its formats (--weights, --head)",
        )


def _fitted(problem: _Problem, start: Mapping[str, float], limits: Mapping[str, float], order: float) -> _Found:
    """The parameters that the points can tell, chosen by the corrected Akaike criterion, and their values."""
    names = _told(problem, ("bandwidth", "compute"), start, limits, order)
    alike = "these points can't tell it from the rest; measure smaller and larger batches"
    reasons = {name: alike for name in ("bandwidth", "compute") if name not in names}
    best = names, _solved(problem, names, start, limits, order)
    score = criterion(best[1].squares, len(problem.measured), len(names))
    extras = ("overhead", "order")
    few = f"{problem.n_loads} different steps are too few to tell it"
    reasons |= dict.fromkeys(extras, few)
    for more in chain.from_iterable(combinations(extras, n) for n in (1, 2)):
        tried = (*names, *more)
        if problem.n_loads < len(tried) + 2:
            continue
        for name in more:
            if reasons[name] == few:
                reasons[name] = "with it the fit is no better"
        solution = _solved(problem, tried, start, limits, order)
        new = criterion(solution.squares, len(problem.measured), len(tried))
        if new < score and len(told_apart(solution.jacobian)) == len(tried):
            best, score = (tried, solution), new
    names, solution = best
    values = {**start, "overhead": problem.overhead, **_values(names, solution.x, problem)}
    found_order = values.pop("order", order)
    kept = {name: reason for name, reason in reasons.items() if name not in names}
    return _Found(values, found_order, tuple(name for name in PARAMETERS if name in names), kept)


def _told(
    problem: _Problem, names: tuple[str, ...], start: Mapping[str, float], limits: Mapping[str, float], order: float
) -> tuple[str, ...]:
    """Those of `names` that the points can tell apart at their best fit."""
    solution = _solved(problem, names, start, limits, order)
    told = told_apart(solution.jacobian)
    return tuple(names[i] for i in sorted(told))


def _solved(
    problem: _Problem, names: tuple[str, ...], start: Mapping[str, float], limits: Mapping[str, float], order: float
) -> Solution:
    """The best fit of some parameters, the others at their start.

    Two beginnings, so that no valley is missed: the start, and the best point of a grid over both rates. Where the
    points leave a choice, a faint pull (`PULL`) takes the rates that are nearest to the start.
    """
    if not names:
        return Solution(np.zeros(0), np.log(_predicted(problem, start, order, {}) / problem.measured), np.zeros((0, 0)))
    middle: list[float] = []
    lower: list[float] = []
    upper: list[float] = []
    for name in names:
        if name in start:
            log = math.log(start[name])
            bounds = log, log - 20, min(log + 20, math.log(limits.get(name, math.inf)))
        elif name == "overhead":
            bounds = min(problem.overhead / float(problem.measured.min()), 1.0), 0.0, 1.0
        else:
            bounds = (min(1 / order, 0.9) if order < math.inf else 0.3), 0.0, 1.0
        for values, value in zip((middle, lower, upper), bounds, strict=True):
            values.append(value)
    begin, least, most = np.array(middle), np.array(lower), np.array(upper)
    rates = [i for i, name in enumerate(names) if name in start]

    def residuals(x: Vector) -> Vector:
        off = np.log(_predicted(problem, start, order, _values(names, x, problem)) / problem.measured)
        return np.concatenate([off, PULL * (x - begin)[rates]])

    grid = [begin]
    for shifts in np.ndindex(*(9,) * len(rates)):
        x = begin.copy()
        x[rates] += math.log(4) * (np.array(shifts) - 5)
        grid.append(np.clip(x, least, most))
    nearest = min(grid, key=lambda x: float(np.square(residuals(x)).sum()))
    found = [least_squares(residuals, x, least, most) for x in (begin, nearest)]
    best = min(found, key=lambda solution: solution.squares)
    n = len(problem.measured)
    return Solution(best.x, best.residuals[:n], best.jacobian[:n])


def _values(names: tuple[str, ...], x: Vector, problem: _Problem) -> dict[str, float]:
    """Parameters of the model from those of the fit: logarithms of rates, overhead in shortest steps, 1 / order."""
    values: dict[str, float] = {}
    for name, value in zip(names, x.tolist(), strict=True):
        if name == "overhead":
            values[name] = value * float(problem.measured.min())
        elif name == "order":
            values[name] = 1 / value if value > 0.01 else math.inf
        else:
            values[name] = math.exp(value)
    return values


def _predicted(problem: _Problem, start: Mapping[str, float], order: float, values: Mapping[str, float]) -> Vector:
    used = {**start, "overhead": problem.overhead, "order": order, **values}
    return problem.seconds(used["bandwidth"], used["compute"], used["overhead"], used["order"])


def _fit(
    network: Network,
    where: Deployment,
    measurements: Sequence[Measurement],
    chosen: Sequence[Measurement],
    found: _Found,
    held: Mapping[str, str],
    *,
    forwards: bool,
) -> Fit:
    used_ones = {id(item) for item in chosen}
    besides = 0.0 if forwards else where.eff.step_us * 1e-6

    def compared(item: Measurement) -> FitPoint:
        seconds = forward_time(network, where, item.load).seconds + besides
        return FitPoint(item.name, item.load, item.seconds, seconds, id(item) in used_ones)

    points = tuple(compared(item) for item in measurements)
    used = [point for point in points if point.used]

    def ends(values: list[float]) -> tuple[float, float]:
        return min(values), max(values)

    measured = Measured(
        model=network.name,
        batch=ends([point.load.batch for point in used]),
        queries=ends([point.load.queries for point in used]),
        context=ends([point.load.context for point in used]),
        points=len(used),
        error_max=error_max(points),
    )
    where = replace(where, hardware=replace(where.hardware, measured=measured))
    reasons = {name: f"{held[name]}: {reason}" for name, reason in found.reasons.items()}
    return Fit(network, where, points, forwards, found.fitted, MappingProxyType(reasons))
