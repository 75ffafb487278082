"""Measured step times read from JSON: both shapes, and every kind of wrong file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import PlanError
from forerun.plan.calibrate_data import Machine, Measurement, read_times, times_of
from forerun.plan.steptime import Load

REPORT: dict[str, Any] = {
    "setup": {
        "model": "coder", "sha256": "ab", "architecture": "qwen2", "weight_bytes": 1_000_000_000, "cpu": "a processor",
        "physical_cores": 2, "logical_cpus": 2, "isa": "avx2", "threads": 2, "forerun": "0.1.0",
        "command": "forerun bench step -m coder --rows 1,16 --context 128 --repeats 20 --threads 2",
    },
    "context": 128, "repeats": 20, "read_gb_per_s": 24.3, "read_gb_per_s_best": 27.8, "decode_step_ms": 38.0,
    "outside_native_share": 0.007,
    "rows": [
        {"rows": 1, "ms": 37.8, "ms_best": 36.0, "ratio": 1.0, "weight_gb_per_s": 26.4, "bandwidth_share": 1.09},
        {"rows": 16, "ms": 171.2, "ms_best": 170.0, "ratio": 4.5, "weight_gb_per_s": 5.8, "bandwidth_share": 0.24},
    ],
}  # fmt: skip
POINT = {"batch": 4, "tokens": 3, "context": 100, "milliseconds": 12.5}


def test_a_report_of_bench_step_is_read_as_it_is_printed() -> None:
    times = times_of(json.loads(json.dumps(REPORT)), "step.json")
    assert times.measurements == (
        Measurement(Load(1, 1, 128), 0.0378, "step.json: rows[0]"),
        Measurement(Load(1, 16, 128), 0.1712, "step.json: rows[1]"),
    )
    assert times.machine == Machine(
        "coder", "ab", 1e9, "a processor", 2, REPORT["setup"]["command"], 24.3e9, pytest.approx(266)
    )


def test_points_are_read_from_a_list_an_object_or_one() -> None:
    expected = (Measurement(Load(4, 3, 100), 0.0125, "file: [0]"),)
    for document in ([POINT], {"points": [POINT]}, POINT):
        times = times_of(document)
        assert times.measurements == expected
        assert times.machine is None


def changed(document: Any, *path: Any, to: Any) -> Any:
    """A deep copy with one value replaced, or removed by `...`."""
    copy = json.loads(json.dumps(document))
    target = copy
    for key in path[:-1]:
        target = target[key]
    if to is ...:
        del target[path[-1]]
    else:
        target[path[-1]] = to
    return copy


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ("text", "f"), (None, "f"), (3, "f"), ([], "f"), ({}, "f: [0] batch"), ([3], "f: [0]"), ({"points": 3}, "f"),
        ([POINT] * 401, "f"),
        *((changed([POINT], 0, key, to=...), f"f: [0] {key}") for key in POINT),
        *((changed([POINT], 0, key, to=bad), f"f: [0] {key}")
          for key in POINT for bad in (-1, "1", None, True, [1], 1e16, float("nan"), float("inf"), 10**400)),
        *((changed([POINT], 0, key, to=0), f"f: [0] {key}") for key in ("batch", "tokens", "milliseconds")),
        *((changed([POINT], 0, key, to=1.5), f"f: [0] {key}") for key in ("batch", "tokens")),
        (changed([POINT], 0, "batches", to=1), "f: [0] batches"),
        (changed(REPORT, "setup", to=3), "f: setup"),
        (changed(REPORT, "setup", "weight_bytes", to=...), "f: setup weight_bytes"),
        (changed(REPORT, "setup", "cpu", to=3), "f: setup cpu"),
        (changed(REPORT, "rows", to={}), "f: rows"),
        (changed(REPORT, "rows", to=[]), "f: rows"),
        (changed(REPORT, "rows", 1, to=7), "f: rows[1]"),
        (changed(REPORT, "rows", 1, "ms", to=0), "f: rows[1] ms"),
        (changed(REPORT, "rows", 1, "rows", to=0), "f: rows[1] rows"),
        (changed(REPORT, "context", to=...), "f context"),
        (changed(REPORT, "read_gb_per_s", to=0), "f read_gb_per_s"),
        (changed(REPORT, "outside_native_share", to=2), "f: outside_native_share"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_named(document: Any, field: str) -> None:
    with pytest.raises(PlanError) as caught:
        times_of(document, "f")
    assert caught.value.field == field


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b"[" + b"9" * 5000 + b"]"])
def test_files_that_are_no_json_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "f.json"
    with pytest.raises(PlanError, match="can't be read") as caught:
        read_times(path)
    assert caught.value.field == "file"
    path.write_bytes(content)
    with pytest.raises(PlanError):
        read_times(path)
    with pytest.raises(PlanError, match="can't be read"):
        read_times(tmp_path)
