#!/usr/bin/env python3
"""How well the planner predicts this machine: T(rows) of each catalog model after calibration on two points.

    python bench/plan_local.py
    python bench/plan_local.py --repeats 8 -m smollm2-135m-instruct
    python bench/plan_local.py --keep reports     # then: forerun plan calibrate reports/MODEL.json --points 2

For each model `forerun bench step` times forwards of 1 to 16 tokens; the planner is calibrated on the first and the
last of them (effective bandwidth, effective compute; the order of their overlap and the time of a layer are the
defaults for such machines) and predicts the others. An error is predicted over measured, less 1.

The exit code is 1 if a prediction is off by more than 15%.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError
from forerun.plan.calibrate import Fit, calibrate_machine, error_max, error_mean
from forerun.plan.calibrate_data import times_of
from forerun.plan.catalog import PlanCatalog
from forerun.plan.shapes import ModelShape

MODELS = ["smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct", "gemma-3-270m"]
ROWS = "1,2,3,4,5,6,8,12,16"
POINTS = 2
MOST = 0.15
"""What a prediction may be off by."""


def measured(model: str, repeats: int, context: int, threads: int | None) -> dict[str, Any]:
    """What `forerun bench step --json` says, run in a process of its own."""
    command = [sys.executable, "-c", "from forerun.cli import main; main()", "bench", "step", "--json", "-m", model]
    command += ["--rows", ROWS, "--repeats", str(repeats), "--context", str(context)]
    if threads is not None:
        command += ["--threads", str(threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"plan_local: forerun bench step of {model} failed")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def predicted(shape: ModelShape, report: dict[str, Any]) -> Fit:
    """The fit to two points of a report."""
    times = times_of(report, shape.name)
    assert times.machine is not None, "it is a report of bench step"
    return calibrate_machine(shape.network, times.machine, times.measurements, memory=1e12, points=POINTS)


def show(fit: Fit, report: dict[str, Any]) -> None:
    """For people."""
    hardware = fit.deployment.hardware
    reached = hardware.bandwidth * fit.deployment.eff.bandwidth / 1e9
    setup = report["setup"]
    print(f"{setup['model']}, sha256 {setup['sha256']}, {setup['cpu']}, {setup['isa']}, {setup['threads']} threads")
    print(setup["command"])
    print(
        f"read bandwidth {report['read_gb_per_s']:.1f} GB/s; fitted: {reached:.1f} GB/s, "
        f"{hardware.rate('bf16') / 1e9:.0f} GFLOP/s"
    )
    print(f"{'rows':>9s} {'ms':>9s} {'predicted':>9s} {'error':>9s}")
    for point in fit.points:
        error = "(fit)" if point.used else f"{point.error:+.1%}"
        print(f"{point.load.queries:9d} {point.seconds * 1e3:9.2f} {point.predicted_seconds * 1e3:9.2f} {error:>9s}")
    print(f"error of the others: mean {error_mean(fit.kept_back):.1%}, at most {error_max(fit.kept_back):.1%}\n")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", action="append", choices=MODELS, help="only this one; may be repeated")
    parser.add_argument("--repeats", type=int, default=20, help="rounds of bench step")
    parser.add_argument("--context", type=int, default=128, help="tokens in the cache")
    parser.add_argument("--threads", type=int, help="by default one per physical core")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write each report there")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if arguments.repeats < 1 or arguments.context < 1:
        parser.error("--repeats and --context must be at least 1")
    catalog = PlanCatalog.load()
    rows: list[dict[str, Any]] = []
    try:
        for model in arguments.model or MODELS:
            report = measured(model, arguments.repeats, arguments.context, arguments.threads)
            if arguments.keep is not None:
                arguments.keep.mkdir(parents=True, exist_ok=True)
                (arguments.keep / f"{model}.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            fit = predicted(catalog.model(model), report)
            if not arguments.json:
                show(fit, report)
            rows.append({
                "setup": report["setup"],
                "read_gb_per_s": report["read_gb_per_s"],
                "points": [
                    {"rows": p.load.queries, "ms": p.seconds * 1e3, "predicted_ms": p.predicted_seconds * 1e3,
                     "error": p.error, "used": p.used} for p in fit.points
                ],
                "error_mean": error_mean(fit.kept_back),
                "error_max": error_max(fit.kept_back),
            })  # fmt: skip
    except ForerunError as error:
        sys.exit(f"plan_local: {error}")
    worst = max(row["error_max"] for row in rows)
    if arguments.json:
        print(json.dumps({"models": rows, "error_max": worst}, indent=2))
    else:
        print(f"at most {worst:.1%} over {len(rows)} models; {MOST:.0%} are allowed")
    if worst > MOST:
        sys.exit(1)


if __name__ == "__main__":
    main()
