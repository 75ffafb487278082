"""Options that all planner commands share, and what they set up."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from forerun.errors import PlanError

if TYPE_CHECKING:
    from forerun.plan.catalog import PlanCatalog
    from forerun.plan.deployment import Deployment
    from forerun.plan.shapes import ModelShape

JSON = typer.Option(False, "--json", help="Print JSON instead of text.")
EXPLAIN = typer.Option(False, "--explain", help="Print how the numbers come about: equations, values, sources.")


@dataclass(frozen=True)
class PlanSetup:
    """Model and machine that a command is about. `options`: the shared options as they were understood, for JSON
    (docs/plan.md lists its keys)."""

    model: ModelShape
    deployment: Deployment
    catalog: PlanCatalog
    options: dict[str, Any]


def _efficiency(name: str, about: str, general: str) -> Any:
    return typer.Option(None, name, help=f"{about} [default: {general}, unless the hardware has its own]")


_SHARED: dict[str, tuple[Any, Any]] = {
    "model": (str, typer.Option(
        ..., "--model", "-m", metavar="NAME|PATH",
        help="A model of the planner's catalog, a config.json, or a folder with one.",
    )),
    "gpu": (str, typer.Option("h100", "--gpu", "-g", metavar="NAME", help="Hardware of the planner's catalog.")),
    "tensor": (int, typer.Option(1, "--tensor", "-t", help="Accelerators that each matrix is split over.")),
    "pipeline": (int, typer.Option(1, "--pipeline", help="Stages of layers.")),
    "expert": (int, typer.Option(1, "--expert", help="Accelerators that whole experts are dealt out to.")),
    "weights": (str | None, typer.Option(
        None, "--weights", metavar="FORMAT", help="Format of the layers' weights. [default: as published]"
    )),
    "head": (str | None, typer.Option(
        None, "--head", metavar="FORMAT", help="Format of embedding and head. [default: as published]"
    )),
    "activations": (str | None, typer.Option(
        None, "--activations", metavar="TYPE", help="Operands: bf16, fp8, int8. [default: as the weights allow]"
    )),
    "kv": (str, typer.Option("bf16", "--kv", metavar="TYPE", help="Type of the KV cache.")),
    "ideal": (bool, typer.Option(False, "--ideal", help="Peaks reached and nothing besides: what physics allows.")),
    "bandwidth_share": (float | None, _efficiency("--bandwidth-share", "Of the bandwidth, reached.", "0.8")),
    "compute_share": (float | None, _efficiency("--compute-share", "Of the peak rate, reached.", "0.6")),
    "link_share": (float | None, _efficiency("--link-share", "Of the link, reached.", "0.7")),
    "order": (float | None, _efficiency(
        "--order", "How bytes and FLOPs overlap: (m^order + c^order)^(1/order); inf: the larger.", "inf"
    )),
    "step_us": (float | None, _efficiency("--step-us", "Microseconds of a step beside its forwards.", "300")),
    "launch_us": (float | None, _efficiency("--launch-us", "Microseconds of each forward.", "30")),
    "layer_us": (float | None, _efficiency("--layer-us", "Microseconds of each layer.", "5")),
    "catalog": (Path | None, typer.Option(
        None, "--catalog", metavar="FILE", help="TOML with models and hardware of yours."
    )),
}  # fmt: skip
_EFFICIENCY = ("bandwidth_share", "compute_share", "link_share", "order", "step_us", "launch_us", "layer_us")


def planned(command: Callable[..., None], *, model_required: bool = True) -> Callable[..., None]:
    """Gives a command the shared options; it is called with `setup: PlanSetup` and its own parameters.

    A command that doesn't require a model gets None where none is given; the other shared options are refused then.
    """
    own = inspect.signature(command, eval_str=True)
    options = dict(_SHARED)
    if not model_required:
        optional = copy.copy(_SHARED["model"][1])
        optional.default = None
        options["model"] = (str | None, optional)
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)
        for name, (kind, option) in options.items()
    ]
    mine = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, p in own.parameters.items() if name != "setup"]

    @functools.wraps(command)
    def call(**given: Any) -> None:
        options = {name: given.pop(name) for name in _SHARED}
        if options["model"] is None:
            _check_unused(options)
            command(setup=None, **given)
        else:
            command(setup=set_up(**options), **given)

    call.__signature__ = inspect.Signature([*shared, *mine])  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in (*shared, *mine)}
    return call


def shared_defaults() -> dict[str, Any]:
    """The shared options where none is given, as `set_up` takes them; the model is missing."""
    return {name: option.default for name, (_kind, option) in _SHARED.items() if name != "model"}


def _check_unused(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value != _SHARED[name][1].default and name != "model":
            raise PlanError("model", f"missing; expected --model, since --{name.replace('_', '-')} is about its step")


def set_up(
    *,
    model: str,
    gpu: str,
    tensor: int,
    pipeline: int,
    expert: int,
    weights: str | None,
    head: str | None,
    activations: str | None,
    kv: str,
    ideal: bool,
    catalog: Path | None,
    **efficiency: float | None,
) -> PlanSetup:
    """Model and machine of the shared options. Raises PlanError naming the one at fault."""
    from forerun.plan.catalog import PlanCatalog
    from forerun.plan.deployment import Deployment
    from forerun.plan.hardware import Efficiency

    known = PlanCatalog.load(catalog)
    shape = known.shape(model)
    if weights is not None or head is not None:
        shape = replace(shape, formats=shape.formats.quantized(weights, head))
    hardware = known.gpu(gpu)
    eff = Efficiency.ideal() if ideal else hardware.efficiency or Efficiency()
    changed: dict[str, Any] = {
        name.removesuffix("_share"): efficiency[name] for name in _EFFICIENCY if efficiency[name] is not None
    }
    if changed:
        eff = replace(eff, **changed)
    operands = activations or _operands(shape.formats.linear, hardware.flops)
    where = Deployment(
        hardware=hardware, tensor=tensor, pipeline=pipeline, expert=expert, activations=operands, kv=kv,
        efficiency=eff if ideal or changed else None,
    )  # fmt: skip
    where.check_split(shape)
    used = where.eff
    return PlanSetup(
        shape,
        where,
        known,
        {
            "model": shape.name,
            "gpu": hardware.name,
            "tensor": tensor,
            "pipeline": pipeline,
            "expert": expert,
            "weights": shape.formats.linear,
            "experts": shape.formats.experts if shape.experts else None,
            "head": shape.formats.head,
            "activations": operands,
            "kv": kv,
            "bandwidth_share": used.bandwidth,
            "compute_share": used.compute,
            "link_share": used.link,
            "order": None if used.order == float("inf") else used.order,
            "step_us": used.step_us,
            "launch_us": used.launch_us,
            "layer_us": used.layer_us,
        },
    )


def _operands(weights: str, rates: object) -> str:
    """8-bit weights are multiplied in 8 bits where the hardware can; others are unpacked to 16."""
    if weights in ("fp8", "int8") and isinstance(rates, dict) and weights in rates:
        return weights
    return "bf16"
