"""`forerun plan calibrate` and bench/plan_local.py: what they print, keep and refuse, and who makes use of it."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from forerun.cli.plan_calibrate import HELP
from forerun.plan.catalog import PlanCatalog
from reference.derivations import evaluated
from reference.planning import PlanCommand
from reference.scripts import loaded

MODEL = "qwen2.5-coder-1.5b-instruct"
AVX2 = {1: 37.8, 2: 39.9, 3: 43.9, 4: 50.5, 5: 62.4, 8: 95.0, 16: 171.2}
REPORT: dict[str, Any] = {
    "setup": {
        "model": MODEL, "sha256": "cc324a", "architecture": "qwen2", "weight_bytes": 1_000_570_888, "cpu": "AMD EPYC",
        "physical_cores": 2, "logical_cpus": 2, "isa": "avx2", "threads": 2, "forerun": "0.1.0",
        "command": f"forerun bench step -m {MODEL} --rows 1,2,3,4,5,8,16 --context 128 --repeats 20 --threads 2",
    },
    "context": 128, "repeats": 20, "read_gb_per_s": 24.3, "read_gb_per_s_best": 27.8, "decode_step_ms": 38.0,
    "outside_native_share": 0.007,
    "rows": [
        {"rows": rows, "ms": ms, "ms_best": ms, "ratio": ms / 37.8, "weight_gb_per_s": 1000.57 / ms,
         "bandwidth_share": 1000.57 / ms / 24.3}
        for rows, ms in AVX2.items()
    ],
}  # fmt: skip
# Steps of Llama 3.1 8B on one H100 as --bandwidth-share .7 --compute-share .5 and the other defaults have them.
POINTS = [
    {"batch": 1, "tokens": 1, "context": 1000, "milliseconds": 6.951},
    {"batch": 16, "tokens": 1, "context": 1000, "milliseconds": 7.804},
    {"batch": 64, "tokens": 4, "context": 1000, "milliseconds": 17.1},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def report(tmp_path: Path) -> str:
    return written(tmp_path, REPORT)


def written(folder: Path, document: object) -> str:
    path = folder / "step.json"
    path.write_text(json.dumps(document))
    return str(path)


COMMAND = PlanCommand()
call, data = COMMAND.call, COMMAND.data


def step_points(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    """Steps as `forerun plan step` has them under some options."""
    points = []
    for batch, queries, context in ((1, 1, 1000), (8, 1, 2000), (64, 4, 1000), (200, 4, 500), (16, 1, 300)):
        arguments = ["-b", f"{batch}", "-q", f"{queries}", "-c", f"{context}", *options]
        seconds = data(capsys, "step", "-m", "llama-3.1-8b", *arguments)["seconds"]
        points.append({"batch": batch, "tokens": queries, "context": context, "milliseconds": seconds * 1e3})
    return points


def test_a_report_of_bench_step_needs_nothing_else(report: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, output, errors = call(capsys, "calibrate", report, "--points", "2")
    assert (code, errors) == (0, "")
    assert f"{MODEL} on local" in output
    assert "7 forwards, timed by forerun bench step" in output
    assert re.search(r"fitted: bandwidth 2\d\.\d+ GB/s, compute 29\d\.?\d* GFLOP/s\n", output)
    assert "held: order 3: 2 different steps are too few to tell it" in output
    assert re.search(r"^ +1 +8 +128 +95 +87\.\d+ +-7\.\d% +check", output, re.MULTILINE)
    assert re.search(r"error of the 5 others: mean [23]\.\d%, at most 7\.\d%", output)
    assert f"measured with {MODEL}, batch 1, 1 to 16 new tokens each, context 128; what lies outside" in output
    assert "not described well" not in output


def test_json_has_the_keys_of_the_help(report: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, "calibrate", report, "--points", "2", "--explain")
    described = HELP.partition("--json prints ")[2]
    top = re.sub(r"\([^()]*\)", "", described.replace("\n", " "))
    top = top.replace("and with --explain ", "").replace("  and ", ", ")
    assert list(found) == [name.strip(" .") for name in top.split(",")]
    assert found["kind"] == "bench step"
    assert found["fitted"] == ["bandwidth", "compute"]
    assert list(found["held"]) == ["overhead", "order"]
    for key in ("points", "measured", "derivation"):
        row = found[key] if key == "measured" else found[key][0]
        described_row = re.search(rf"\b{key} \(([^)]*)\)", described.replace("\n", " "))
        assert described_row is not None
        assert list(row) == described_row[1].split(", ")
    assert found["setup"]["gpu"] == "local"
    assert found["setup"]["order"] == 3
    assert found["saved"] is None
    assert found["kept_back_error_max"] == pytest.approx(max(abs(point["error"]) for point in found["points"]))
    for point in found["points"]:
        assert point["error"] == pytest.approx(point["predicted_ms"] / point["ms"] - 1)
    everything = data(capsys, "calibrate", report)
    assert everything["kept_back_error_max"] is None
    assert "derivation" not in everything


@pytest.mark.parametrize("kind", ["report", "points"])
def test_the_derivation_gives_the_prediction_of_its_point(
    kind: str, report: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each formula, evaluated over the lines before, gives its value, and the last one is the table's number."""
    options = ["calibrate", report]
    if kind == "points":
        points = step_points(capsys, "--bandwidth-share", "0.6", "--order", "2")
        options = ["calibrate", written(tmp_path, points), "-m", "llama-3.1-8b"]
    found = data(capsys, *options, "--explain")
    values = evaluated(found["derivation"])
    point = max(found["points"], key=lambda point: abs(point["error"]))
    assert found["explained"] == point["name"]
    assert found["derivation"][-1]["value"] * 1e3 == pytest.approx(point["predicted_ms"], rel=1e-12)
    assert {"bandwidth_share", "compute_share"} <= values.keys()
    output = call(capsys, *options, "--explain")[1]
    assert f"seconds of {point['name']}, which was measured as" in output


def test_what_was_saved_is_used_and_its_limits_are_told(
    report: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = data(capsys, "calibrate", report, "--save", "--memory-gb", "16")
    assert found["saved"] == str(cache / "plan" / "local.toml")
    within = ["step", "-g", "local", "-m", MODEL, "-c", "128", "-q", "8"]
    step = data(capsys, *within)
    assert step["beyond_measured"] == []
    point = next(point for point in found["points"] if point["tokens"] == 8)
    assert step["forward_seconds"] * 1e3 == pytest.approx(point["predicted_ms"], rel=1e-9)
    assert step["seconds"] - step["forward_seconds"] == pytest.approx(266e-6)
    assert "beyond what was measured" not in call(capsys, *within)[1]

    beyond = ["step", "-g", "local", "-m", MODEL, "-c", "1000", "-b", "4", "-q", "17"]
    marks = ["batch 4 (measured 1)", "queries 17 (measured 1 to 16)", "context 1000 (measured 128)"]
    assert data(capsys, *beyond)["beyond_measured"] == marks
    assert f"beyond what was measured, so extrapolated: {'; '.join(marks)}" in call(capsys, *beyond)[1]
    other = data(capsys, "step", "-g", "local", "-m", "smollm2-135m-instruct", "-c", "128")
    assert other["beyond_measured"] == [f"model smollm2-135m-instruct (measured {MODEL})"]
    # Somebody's own shares were never measured, and no accelerator of the catalog was.
    assert data(capsys, *beyond, "--bandwidth-share", "0.5")["beyond_measured"] == []
    assert data(capsys, "step", "-m", MODEL, "-b", "100")["beyond_measured"] == []


def test_points_of_other_hardware(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `plan step` says under given shares is found again."""
    points = step_points(capsys, "-t", "2", "--bandwidth-share", "0.66", "--compute-share", "0.41")
    found = data(capsys, "calibrate", written(tmp_path, {"points": points}), "-m", "llama-3.1-8b", "-t", "2")
    assert found["kind"] == "points"
    assert found["setup"]["gpu"] == "h100"
    assert found["setup"]["bandwidth_share"] == pytest.approx(0.66, rel=1e-3)
    assert found["setup"]["compute_share"] == pytest.approx(0.41, rel=1e-3)
    assert found["error_max"] < 1e-3
    assert math.isclose(found["bandwidth_bytes_per_s"], 0.66 * 3.35e12, rel_tol=1e-3)
    assert found["measured"]["batch"] == [1, 200]
    saving = ["calibrate", str(tmp_path / "step.json"), "-m", "llama-3.1-8b", "-t", "2", "--save"]
    assert "saved as the hardware local in" in call(capsys, *saving)[1]
    step = data(capsys, "step", "-m", "llama-3.1-8b", "-g", "local", "-t", "2", "-b", "8", "-c", "2000")
    assert step["seconds"] * 1e3 == pytest.approx(points[1]["milliseconds"], rel=1e-3)
    assert step["beyond_measured"] == []


@pytest.mark.parametrize("options", [[], ["--order", "inf"], ["--order", "2"], ["--ideal"], ["--layer-us", "50"]])
def test_a_report_is_fitted_with_what_was_given_and_otherwise_as_the_benchmark_does(
    options: list[str], report: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The larger of both is not "nothing given"."""
    found = data(capsys, "calibrate", report, "--points", "2", *(["-m", MODEL] if options else []), *options)["setup"]
    expected: dict[str, tuple[float, float]] = {
        "": (3, 5), "--order inf": (math.inf, 5), "--order 2": (2, 5), "--ideal": (math.inf, 0),
        "--layer-us 50": (3, 50),
    }  # fmt: skip
    order = math.inf if found["order"] is None else found["order"]
    assert (order, found["layer_us"]) == expected[" ".join(options)]


def test_command_and_benchmark_have_the_same_defaults(
    plan_local: ModuleType, report: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the planner's own default for other machines is another one, or the hardware has its own."""
    shape = PlanCatalog.load().model(MODEL)
    fit = plan_local.predicted(shape, REPORT)
    for gpu in ("h100", "local"):
        found = data(capsys, "calibrate", report, "--points", "2", "-m", MODEL, "-g", gpu, "--save")
        assert (found["setup"]["order"], found["setup"]["layer_us"]) == (
            fit.deployment.eff.order, fit.deployment.eff.layer_us
        )  # fmt: skip
        assert [p["predicted_ms"] for p in found["points"]] == [p.predicted_seconds * 1e3 for p in fit.points]
        data(capsys, "calibrate", report, "--points", "2", "-m", MODEL, "--layer-us", "9", "--save")


def test_times_that_the_model_does_not_describe_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step that gets slower by a jump."""
    points = [
        {"batch": batch, "tokens": 1, "context": 100, "milliseconds": 10 if batch < 8 else 30} for batch in range(1, 17)
    ]
    output = call(capsys, "calibrate", written(tmp_path, points), "-m", "llama-3.1-8b")[1]
    assert "these times are not described well" in output


@pytest.mark.parametrize(
    ("document", "options", "error"),
    [
        (POINTS, [], "model: missing; expected --model"),
        (POINTS, ["-m", "llama-3.1-9b"], "model: 'llama-3.1-9b'"),
        (POINTS, ["-m", "llama-3.1-8b", "--memory-gb", "3"], "memory-gb: "),
        (POINTS, ["-m", "llama-3.1-8b", "--points", "1"], "points: 1 is not allowed; expected at least 2"),
        (POINTS, ["-m", "llama-3.3-70b", "-t", "2"], "step.json: [0]: 6.951 ms is less than the"),
        (REPORT, ["-m", "llama-3.1-8b"], "model: a forward of llama-3.1-8b reads"),
        (REPORT, ["-m", MODEL, "-t", "2"], "tensor: "),
        (REPORT, ["--order", "2"], "model: missing; expected --model"),
        (REPORT, ["--memory-gb", "0"], "memory-gb: 0"),
        (REPORT, ["--memory-gb", "nan"], "memory-gb: nan"),
        ({**REPORT, "rows": REPORT["rows"][:1]}, [], "rows: bandwidth and compute can't be told apart"),
        ({**REPORT, "setup": {**REPORT["setup"], "model": "x.gguf"}}, [], "model: 'x.gguf', which was timed, is not"),
        ({"command": "plan step"}, ["-m", MODEL], "step.json: [0] command: unknown"),
        (["a"], ["-m", MODEL], "step.json: [0]: expected an object"),
        ([{**POINTS[0], "milliseconds": -1}], ["-m", MODEL], "step.json: [0] milliseconds: -1 is not allowed"),
    ],
)
def test_what_is_wrong_is_one_line(
    document: object, options: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, errors = call(capsys, "calibrate", written(tmp_path, document), *options)
    assert (code, output) == (1, "")
    assert errors.startswith(f"forerun: error: {error}")
    assert errors.count("\n") == 1


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    code, _output, errors = call(capsys, "calibrate", "nowhere.json", "-m", MODEL)
    assert code == 1
    assert errors.startswith("forerun: error: file: nowhere.json can't be read")


@pytest.fixture
def plan_local() -> Iterator[ModuleType]:
    yield from loaded(Path(__file__).parents[2] / "bench" / "plan_local.py")


def test_the_benchmark_fails_where_a_prediction_is_off(
    plan_local: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The README's times pass; a step of four tokens that takes 70 ms doesn't."""
    report = json.loads(json.dumps(REPORT))
    monkeypatch.setattr(plan_local, "measured", lambda *_arguments: report)
    monkeypatch.setattr(sys, "argv", ["plan_local.py", "-m", MODEL, "--keep", str(tmp_path / "kept")])
    plan_local.main()
    assert "at most 7.5% over 1 models; 15% are allowed" in capsys.readouterr().out
    assert json.loads((tmp_path / "kept" / f"{MODEL}.json").read_text()) == REPORT
    report["rows"][3]["ms"] = 70.0
    with pytest.raises(SystemExit) as left:
        plan_local.main()
    assert left.value.code == 1
    assert "at most 27" in capsys.readouterr().out
