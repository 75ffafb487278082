"""`forerun plan calibrate`: what a machine reaches, from measured step times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from forerun.cli.plan_setup import EXPLAIN, JSON, PlanSetup, planned, set_up, shared_defaults
from forerun.cli.plan_view import derivation_json, print_derivation, print_json, print_setup, print_table, quantity
from forerun.errors import PlanError

if TYPE_CHECKING:
    from forerun.plan.calibrate import Fit, FitPoint
    from forerun.plan.calibrate_data import StepTimes
    from forerun.plan.derivation import Derivation

HELP = """Fit what a machine reaches of its peaks to step times.

It also says how well that describes them.

FILE is a JSON list of {batch, tokens, context, milliseconds} (tokens: new ones of each sequence), measured with the
model, hardware and split that the options name; or what `forerun bench step --json` prints, which brings its own
hardware, named local: then --gpu plays no part, and --model is needed only if the planner doesn't know the timed one by
name. Bandwidth and compute are fitted, and a fixed overhead and the order of the overlap if the points call for them.

--json prints command, setup, file, kind ("points" or "bench step"), fitted (of bandwidth, compute, overhead, order),
held (of the same: value and reason), bandwidth_bytes_per_s, flops_per_s (both as reached), points (name, batch, tokens,
context, ms, predicted_ms, error, used), error_mean, error_max (of the points that the fit was made
from), kept_back_error_mean, kept_back_error_max (of the others; null without), measured (model, batch, queries,
context, points, error_max, sha256, cpu, threads, date), saved (path or null), and with --explain explained (name of a
point) and derivation (symbol, value, unit, formula, source)."""

WORTH_A_WARNING = 0.1
"""A larger mean error than that says that the model of a step doesn't describe these times."""


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("calibrate", help=HELP)(planned(calibrate, model_required=False))


def calibrate(
    setup: PlanSetup | None,
    ctx: typer.Context,
    file: Path = typer.Argument(..., metavar="FILE", help="Measured step times, JSON."),
    points: int | None = typer.Option(
        None, "--points", help="Fit to so many points and compare with all; 2: the fewest and the most tokens a step."
    ),
    save: bool = typer.Option(False, "--save", help="Keep the result as the hardware local, for --gpu local."),
    memory_gb: float | None = typer.Option(
        None, "--memory-gb", help="Memory of the machine that was timed with bench step. [default: this one's]"
    ),
    explain: bool = EXPLAIN,
    as_json: bool = JSON,
) -> None:
    """The command."""
    from forerun.plan.calibrate_data import read_times

    times = read_times(file)
    if times.machine is None and memory_gb is not None:
        raise PlanError("memory-gb", "only for what bench step prints; the catalog has the memory of other hardware")
    if memory_gb is not None and not 0 < memory_gb < 1e9:
        raise PlanError("memory-gb", f"{memory_gb:g} is not allowed; expected a number above 0")
    if setup is None:
        setup = _setup_of(times)
    fit = _fit(setup, times, points, memory_gb, ctx.params)
    shown = _with_fit(setup, fit)
    saved = _save(fit) if save else None
    worst = max(fit.points, key=lambda point: abs(point.error))
    derivation = _explained(fit, worst) if explain else None
    if as_json:
        print_json("calibrate", shown, _body(file, times, fit, saved, worst, derivation))
        return
    print_setup(shown)
    _print_fit(file, times, fit)
    if saved is not None:
        typer.echo(f"saved as the hardware local in {saved}")
    if derivation is not None:
        print_derivation(derivation)


def _setup_of(times: StepTimes) -> PlanSetup:
    """What a report of `bench step` says by itself."""
    from forerun.plan.catalog import PlanCatalog

    if times.machine is None:
        raise PlanError("model", "missing; expected --model, whose steps these times are")
    name = times.machine.model
    if name not in PlanCatalog.load().models:
        raise PlanError("model", f"{name!r}, which was timed, is not in the planner's catalog; name it with --model")
    return set_up(**{**shared_defaults(), "model": name})


def _fit(
    setup: PlanSetup, times: StepTimes, points: int | None, memory_gb: float | None, given: Mapping[str, Any]
) -> Fit:
    """given: the options as they were written; the setup has defaults of other machines where they weren't."""
    from datetime import date

    from forerun.plan import calibrate as plan
    from forerun.plan.calibrate_save import machine_memory

    network, where = setup.model.network, setup.deployment
    if times.machine is None:
        return plan.calibrate(network, where, times.measurements, points=points)
    if where.gpus > 1:
        raise PlanError("tensor", "forerun bench step times one machine; expected --tensor 1 and --pipeline 1")
    memory = machine_memory() if memory_gb is None else memory_gb * 1e9
    if memory is None:
        raise PlanError("memory-gb", "missing; this system doesn't say how much memory it has")
    ideal, order, layer_us = (given[name] for name in ("ideal", "order", "layer_us"))
    if ideal:
        order, layer_us = where.eff.order, where.eff.layer_us
    return plan.calibrate_machine(
        network,
        times.machine,
        times.measurements,
        memory=memory,
        activations=where.activations,
        kv=where.kv,
        order=plan.LOCAL_ORDER if order is None else order,
        layer_us=plan.LOCAL_LAYER_US if layer_us is None else layer_us,
        points=points,
        date=date.today().isoformat(),
    )


def _with_fit(setup: PlanSetup, fit: Fit) -> PlanSetup:
    """The setup with what was found in place of what was assumed."""
    eff = fit.deployment.eff
    options: dict[str, Any] = {
        **setup.options,
        "gpu": fit.deployment.hardware.name,
        "bandwidth_share": eff.bandwidth,
        "compute_share": eff.compute,
        "link_share": eff.link,
        "order": None if eff.order == float("inf") else eff.order,
        "step_us": eff.step_us,
        "launch_us": eff.launch_us,
        "layer_us": eff.layer_us,
    }
    return replace(setup, deployment=fit.deployment, options=options)


def _save(fit: Fit) -> Path:
    from forerun.plan.calibrate_save import save_hardware
    from forerun.plan.catalog import local_path

    path = local_path()
    save_hardware(fit.deployment.hardware, path)
    return path


def _explained(fit: Fit, point: FitPoint) -> Derivation:
    """How the prediction of one point comes about."""
    from forerun.plan.explain import explain_forward, explain_step
    from forerun.plan.steptime import forward_time

    forward = forward_time(fit.network, fit.deployment, point.load)
    if fit.forwards:
        derivation = explain_forward(forward)
    else:
        source = f"{'measured' if 'overhead' in fit.fitted else 'setting'}: of every step, beside the forward"
        derivation = explain_step(forward, generating=False, source=source)
    derivation.title = f"seconds of {point.name}, which was measured as {point.seconds * 1e3:.4g} ms"
    return derivation


def _reached(fit: Fit) -> tuple[float, float]:
    """Bytes and FLOPs a second."""
    hardware, eff = fit.deployment.hardware, fit.deployment.eff
    return hardware.bandwidth * eff.bandwidth, hardware.rate(fit.deployment.activations) * eff.compute


def _print_fit(file: Path, times: StepTimes, fit: Fit) -> None:
    from forerun.plan.calibrate import error_max, error_mean

    bandwidth, compute = _reached(fit)
    eff = fit.deployment.eff
    overhead = eff.launch_us if fit.forwards else eff.step_us
    kind = "forwards, timed by forerun bench step" if times.machine else "steps"
    typer.echo(f"{file.name}: {len(fit.points)} {kind}")
    values = {
        "bandwidth": quantity(bandwidth, "B/s"),
        "compute": quantity(compute, "FLOP/s"),
        "overhead": f"{overhead:.4g} us",
        "order": f"{eff.order:.3g}",
    }
    typer.echo("fitted: " + ", ".join(f"{name} {values[name]}" for name in fit.fitted))
    for name, reason in fit.held.items():
        typer.echo(f"held: {name} {reason}")
    rows: list[Sequence[str]] = [
        (
            str(point.load.batch), str(point.load.queries), f"{point.load.context:g}", f"{point.seconds * 1e3:.4g}",
            f"{point.predicted_seconds * 1e3:.4g}", f"{point.error:+.1%}", "fit" if point.used else "check",
        )
        for point in fit.points
    ]  # fmt: skip
    print_table(("batch", "tokens", "context", "ms", "predicted", "error", "for"), rows, words=(6,))
    typer.echo(f"error of the {len(fit.used)} points fitted to: mean {error_mean(fit.used):.1%}, at most "
               f"{error_max(fit.used):.1%}")  # fmt: skip
    if fit.kept_back:
        typer.echo(f"error of the {len(fit.kept_back)} others: mean {error_mean(fit.kept_back):.1%}, at most "
                   f"{error_max(fit.kept_back):.1%}")  # fmt: skip
    if error_mean(fit.points) > WORTH_A_WARNING:
        typer.echo("these times are not described well: check the model and its formats, or measure on a quiet machine")


def _body(
    file: Path,
    times: StepTimes,
    fit: Fit,
    saved: Path | None,
    worst: FitPoint,
    derivation: Derivation | None,
) -> dict[str, Any]:
    from dataclasses import asdict

    from forerun.plan.calibrate import error_max, error_mean

    bandwidth, compute = _reached(fit)
    kept_back = fit.kept_back
    body: dict[str, Any] = {
        "file": str(file),
        "kind": "points" if times.machine is None else "bench step",
        "fitted": fit.fitted,
        "held": fit.held,
        "bandwidth_bytes_per_s": bandwidth,
        "flops_per_s": compute,
        "points": [
            {
                "name": point.name,
                "batch": point.load.batch,
                "tokens": point.load.queries,
                "context": point.load.context,
                "ms": point.seconds * 1e3,
                "predicted_ms": point.predicted_seconds * 1e3,
                "error": point.error,
                "used": point.used,
            }
            for point in fit.points
        ],
        "error_mean": error_mean(fit.used),
        "error_max": error_max(fit.used),
        "kept_back_error_mean": error_mean(kept_back) if kept_back else None,
        "kept_back_error_max": error_max(kept_back) if kept_back else None,
        "measured": asdict(fit.measured),
        "saved": None if saved is None else str(saved),
    }
    if derivation is not None:
        body |= {"explained": worst.name, "derivation": derivation_json(derivation)}
    return body
