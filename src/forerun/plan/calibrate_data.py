"""Measured step times: a JSON of points, or the report of `forerun bench step --json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from forerun.errors import PlanError
from forerun.plan.steptime import MOST, Load

KEYS = ("batch", "tokens", "context", "milliseconds")
"""Of a point. tokens: new ones of each sequence."""
MOST_POINTS = 400
MOST_TIMES_SMALLER = 1.5
"""A step may take that many times as long as one that has at least its work, before the two contradict each other."""


class Measurement(NamedTuple):
    """One step that was timed. name: where it stands in its file."""

    load: Load
    seconds: float
    name: str = "point"


@dataclass(frozen=True)
class Machine:
    """What `forerun bench step` says about the machine and the model that it timed.

    model: as it was asked for; sha256: of its file. weight_bytes: that every forward reads. read_bandwidth: bytes/s,
    the median of the same rounds. step_us: microseconds of a decode step outside of the forward. command: gives these
    numbers again.
    """

    model: str
    sha256: str
    weight_bytes: float
    cpu: str
    threads: int
    command: str
    read_bandwidth: float
    step_us: float


@dataclass(frozen=True)
class StepTimes:
    """What a file has. machine: None for points, whose hardware is of the catalog."""

    measurements: tuple[Measurement, ...]
    machine: Machine | None = None


def read_times(path: Path) -> StepTimes:
    """The step times of a file: a list of points (or one, or an object with a list named `points`), or a report of
    `forerun bench step --json`.

    Raises:
        PlanError: the file can't be read, is neither, or holds a number that can't be; it names the place.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError("file", f"{path} can't be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError("file", f"{path} is not JSON: {error}") from error
    return times_of(document, path.name)


def times_of(document: object, file: str = "file") -> StepTimes:
    """The step times of parsed JSON. Raises PlanError as `read_times` does."""
    if isinstance(document, Mapping) and {"setup", "read_gb_per_s", "rows"} <= document.keys():
        return _report(document, file)
    points = document
    if isinstance(document, Mapping):
        points = document["points"] if document.keys() == {"points"} else [document]
    if not isinstance(points, Sequence) or isinstance(points, str):
        raise PlanError(
            file, "expected a list of points with batch, tokens, context and milliseconds, or what forerun bench step "
            "--json prints",
        )  # fmt: skip
    if not 1 <= len(points) <= MOST_POINTS:
        raise PlanError(file, f"{len(points)} points are not allowed; expected 1 to {MOST_POINTS}")
    return StepTimes(tuple(_point(point, f"{file}: [{i}]") for i, point in enumerate(points)))


def check_consistent(measurements: Sequence[Measurement]) -> None:
    """Raises PlanError if a step takes much longer than one that has at least its work, as repeated ones do if they
    differ: such times are of different setups, or of a machine that others used."""
    by_time = sorted(measurements, key=lambda item: item.seconds)
    for i, fast in enumerate(by_time):
        for slow in reversed(by_time[i + 1 :]):
            if slow.seconds <= fast.seconds * MOST_TIMES_SMALLER:
                break
            less, more = slow.load, fast.load
            if less.batch <= more.batch and less.queries <= more.queries and less.context <= more.context:
                raise PlanError(
                    slow.name,
                    f"{_step(slow)} contradicts {fast.name}, {_step(fast)}; measure both in one setup, in alternation",
                )


def spread_over(measurements: Sequence[Measurement], count: int) -> tuple[Measurement, ...]:
    """`count` of them, from the one with the fewest tokens in its step to the one with the most; two are these two.

    Raises:
        PlanError: fewer than two.
    """
    if count < 2:
        raise PlanError("points", f"{count} is not allowed; expected at least 2")
    ordered = sorted(measurements, key=lambda item: (item.load.batch * item.load.queries, item.load.context))
    last = len(ordered) - 1
    if count > last:
        return tuple(ordered)
    return tuple(ordered[round(i * last / (count - 1))] for i in range(count))


def _step(item: Measurement) -> str:
    load = item.load
    return (
        f"{item.seconds * 1e3:g} ms for batch {load.batch}, {load.queries} tokens each after a context of "
        f"{load.context:g}"
    )


def _point(point: object, where: str) -> Measurement:
    if not isinstance(point, Mapping):
        raise PlanError(where, f"expected an object with {', '.join(KEYS)}")
    unknown = sorted(str(key) for key in point.keys() - set(KEYS))
    if unknown:
        raise PlanError(f"{where} {unknown[0]}", f"unknown; expected {', '.join(KEYS)}")
    return _measurement(
        where,
        _whole(where, point, "batch"),
        _whole(where, point, "tokens"),
        _number(where, point, "context", 0, MOST),
        _number(where, point, "milliseconds"),
    )


def _report(report: Mapping[str, Any], file: str) -> StepTimes:
    setup, rows = report["setup"], report["rows"]
    if not isinstance(setup, Mapping):
        raise PlanError(f"{file}: setup", "expected an object")
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not 1 <= len(rows) <= MOST_POINTS:
        raise PlanError(f"{file}: rows", f"expected a list of 1 to {MOST_POINTS} rows")
    context = _number(file, report, "context", 0, MOST)
    measurements = []
    for i, row in enumerate(rows):
        where = f"{file}: rows[{i}]"
        if not isinstance(row, Mapping) or "ms" not in row:
            raise PlanError(where, "expected rows and ms, as forerun bench step --json prints them")
        measurements.append(_measurement(where, 1, _whole(where, row, "rows"), context, _number(where, row, "ms")))
    outside = _number(file, report, "outside_native_share", 0)
    if outside > 1:
        raise PlanError(f"{file}: outside_native_share", f"{outside:g} is not allowed; expected a share from 0 to 1")
    where = f"{file}: setup"
    machine = Machine(
        model=_text(where, setup, "model"),
        sha256=_text(where, setup, "sha256"),
        weight_bytes=_number(where, setup, "weight_bytes"),
        cpu=_text(where, setup, "cpu"),
        threads=_whole(where, setup, "threads"),
        command=_text(where, setup, "command"),
        read_bandwidth=_number(file, report, "read_gb_per_s") * 1e9,
        step_us=_number(file, report, "decode_step_ms") * outside * 1e3,
    )
    return StepTimes(tuple(measurements), machine)


def _measurement(where: str, batch: int, tokens: int, context: float, milliseconds: float) -> Measurement:
    return Measurement(Load(batch, tokens, context), milliseconds / 1e3, where)


def _number(where: str, table: Mapping[str, Any], key: str, least: float | None = None, most: float = 1e15) -> float:
    """A finite number, above 0 or at least `least`, and at most `most`."""
    if key not in table:
        raise PlanError(f"{where} {key}", "missing")
    value = table[key]
    expected = "above 0" if least is None else f"at least {least:g}"
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    if not fits or not (value > 0 if least is None else value >= least) or not value <= most:
        raise PlanError(
            f"{where} {key}", f"{_shown(value)} is not allowed; expected a number {expected}, up to {most:g}"
        )
    return float(value)


def _whole(where: str, table: Mapping[str, Any], key: str) -> int:
    value = _number(where, table, key, 1, MOST)
    if value != round(value):
        raise PlanError(f"{where} {key}", f"{value:g} is not allowed; expected a whole number from 1 to {MOST:g}")
    return round(value)


def _shown(value: object) -> str:
    # Python refuses to print integers of more than 4300 digits.
    huge = isinstance(value, int) and not -(10**20) < value < 10**20
    return "a number of more than 20 digits" if huge else repr(value)[:40]


def _text(where: str, table: Mapping[str, Any], key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str):
        raise PlanError(f"{where} {key}", "expected a text" if key in table else "missing")
    return value
