"""What a machine can do at best, and what is reached of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from forerun.errors import PlanError

_LEAST_SHARE, _MOST_US = 1e-6, 1e9
"""Beyond these nothing is a machine, and times overflow."""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What is reached of the peaks, and what a step costs besides.

    bandwidth, compute, link: shares of the peak rates, above 0 to 1. order: how bytes and FLOPs overlap: a phase that
    moves bytes for m seconds and computes for c takes (m^order + c^order)^(1/order), the larger of both at infinity
    (the roofline). step_us: microseconds of a step outside the forward (scheduling, sampling, host); launch_us: of
    every forward, a drafter's too; layer_us: of every layer (launches, synchronisation, small kernels). latency: share
    of the hardware's `link_us` that each collective takes besides its bytes.

    The defaults are round assumptions for an engine that captures its kernels in graphs, not measurements; fit your own
    with `forerun.plan.calibrate`.
    """

    bandwidth: float = 0.8
    compute: float = 0.6
    link: float = 0.7
    order: float = math.inf
    step_us: float = 300.0
    launch_us: float = 30.0
    layer_us: float = 5.0
    latency: float = 1.0

    def __post_init__(self) -> None:
        for name in ("bandwidth", "compute", "link"):
            if not _LEAST_SHARE <= getattr(self, name) <= 1:
                raise PlanError(
                    name, f"{getattr(self, name)} is not allowed; expected a share from {_LEAST_SHARE:g} to 1"
                )
        if not 0 <= self.latency <= 1:
            raise PlanError("latency", f"{self.latency} is not allowed; expected a share from 0 to 1")
        if not self.order >= 1:
            raise PlanError("order", f"{self.order} is not allowed; expected at least 1, or inf for the larger of both")
        for name in ("step_us", "launch_us", "layer_us"):
            if not 0 <= getattr(self, name) <= _MOST_US:
                raise PlanError(name, f"{getattr(self, name)} is not allowed; expected 0 to {_MOST_US:g}")

    @staticmethod
    def ideal() -> Efficiency:
        """Peaks reached, nothing besides, and collectives as soon as their bytes are through: what physics allows."""
        return Efficiency(bandwidth=1, compute=1, link=1, step_us=0, launch_us=0, layer_us=0, latency=0)

    def overlapped(self, memory_seconds: float, compute_seconds: float) -> float:
        """Seconds of a phase that moves bytes and computes."""
        larger, smaller = max(memory_seconds, compute_seconds), min(memory_seconds, compute_seconds)
        if smaller <= 0 or math.isinf(self.order):
            return larger
        return larger * float((1 + (smaller / larger) ** self.order) ** (1 / self.order))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What an `Efficiency` was fitted to, and so where it may be believed.

    model: whose steps were timed. batch, queries, context: the least and the largest of each (`steptime.Load`). points:
    step times behind the fit. error_max: largest deviation of the fit from one of them, as a share of it. sha256, cpu,
    threads, date: of the model's file, the processor, its threads and the measurement, where they are known.
    """

    model: str
    batch: tuple[float, float]
    queries: tuple[float, float]
    context: tuple[float, float]
    points: int
    error_max: float
    sha256: str = ""
    cpu: str = ""
    threads: int = 0
    date: str = ""

    def __post_init__(self) -> None:
        for name in ("batch", "queries", "context"):
            ends = tuple(getattr(self, name))
            if len(ends) != 2 or not all(isinstance(end, int | float) for end in ends) or not ends[0] <= ends[1]:
                raise PlanError(f"measured: {name}", f"{list(ends)} is not allowed; expected the least and the largest")
            object.__setattr__(self, name, ends)

    @property
    def ranges(self) -> str:
        """The ranges in words."""
        batch, queries, context = (_range(*ends) for ends in (self.batch, self.queries, self.context))
        return f"{self.model}, batch {batch}, {queries} new tokens each, context {context}"

    def beyond(self, *, batch: float, queries: float, context: float, model: str | None = None) -> list[str]:
        """What of a step lies outside of what was measured, one phrase each; empty: nothing. None: any model."""
        found = [] if model in (None, self.model) else [f"model {model} (measured {self.model})"]
        for name, value in (("batch", batch), ("queries", queries), ("context", context)):
            least, largest = getattr(self, name)
            if not least <= value <= largest:
                found.append(f"{name} {value:g} (measured {_range(least, largest)})")
        return found


def _range(least: float, largest: float) -> str:
    return f"{least:g}" if least == largest else f"{least:g} to {largest:g}"


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One accelerator (or the CPU of a machine) by its data sheet.

    flops: dense FLOP/s by the type of the operands ("bf16", "fp8", "int8", "fp4", "f32"); a missing one can't be
    computed in, only stored. bandwidth: of its memory, bytes/s. memory: bytes. link: bytes/s to the other accelerators
    of a tensor-parallel group, one direction; 0: none. link_us: microseconds that a collective takes at least. host:
    bytes/s to the host's memory, for swapping. sources: where each number is from, by field. efficiency: what is
    reached of it, where that was measured; None: the general defaults. measured: by which step times.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: float
    link: float = 0.0
    link_us: float = 0.0
    host: float = 0.0
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    efficiency: Efficiency | None = None
    measured: Measured | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, float | int):
                continue
            needed = item.name in ("bandwidth", "memory")
            if not math.isfinite(value) or value < 0 or (needed and value == 0):
                least = "above 0" if needed else "at least 0"
                raise PlanError(f"{self.name}: {item.name}", f"{value} is not allowed; expected {least}")
        if not self.flops or not all(0 < rate < math.inf for rate in self.flops.values()):
            raise PlanError(f"{self.name}: flops", "expected at least one data type with a rate above 0")

    def rate(self, dtype: str) -> float:
        """FLOP/s with operands of that type. Raises PlanError if the machine can't compute in it."""
        rate = self.flops.get("bf16" if dtype == "f16" else dtype)
        if rate is None:
            raise PlanError(
                "activations", f"{self.name} doesn't compute in {dtype}; expected one of {', '.join(self.flops)}"
            )
        return rate

    def ridge(self, dtype: str = "bf16") -> float:
        """FLOP per byte above which arithmetic, not memory, is the limit."""
        return self.rate(dtype) / self.bandwidth
