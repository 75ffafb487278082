"""`forerun plan models` and `forerun plan hardware`: what the planner's catalog knows, and from where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from forerun.cli.plan_setup import EXPLAIN, JSON
from forerun.cli.plan_view import derivation_json, print_derivation, print_json, print_table, quantity

if TYPE_CHECKING:
    from forerun.plan.derivation import Derivation
    from forerun.plan.hardware import Hardware
    from forerun.plan.shapes import ModelShape

MODELS_HELP = """The models of the catalog, or one by its name or file.

A model's columns: all parameters; those that one token's forward multiplies (its experts and the head, no embedding);
bytes of its weights in their published formats; KiB that a token keeps in a 16-bit KV cache; layers, and how many of
them see no more than a window of so many tokens.

--json prints command and models (name, parameters, active_parameters, weight_bytes, kv_bytes_per_token, hidden, layers,
heads, kv_heads, head_dim, vocab, intermediate, gated, tied, qkv_bias, out_bias, mlp_bias, qk_norm, sandwich_norms,
window, window_layers, sinks, latent, experts, mtp_layers, max_context, formats, source), and with --explain derivations
(parameters, active_parameters, kv_kib_per_token: each symbol, value, unit, formula, source)."""

HARDWARE_HELP = """The hardware of the catalog, or one by its name.

Rates are dense and per accelerator, the link is that to the others of a tensor-parallel group in one direction, the
ridge is the bf16 rate over the bandwidth: FLOP per byte above which arithmetic is the limit. `local` is this machine,
once it was measured.

--json prints command, hardware (name, flops_per_s, bandwidth_bytes_per_s, memory_bytes, link_bytes_per_s,
link_us, host_bytes_per_s, ridge_flops_per_byte, ridge_type, efficiency, measured, sources) and local_error (why there
is no `local`, or null), and with --explain derivation (symbol, value, unit, formula, source)."""

_CATALOG = typer.Option(None, "--catalog", metavar="FILE", help="TOML with models and hardware of yours.")


def register(group: typer.Typer) -> None:
    """Add the commands."""
    group.command("models", help=MODELS_HELP)(models)
    group.command("hardware", help=HARDWARE_HELP)(hardware)


def models(
    name: str | None = typer.Argument(None, metavar="NAME|PATH", help="One model; by default all of the catalog."),
    catalog: Path | None = _CATALOG,
    explain: bool = EXPLAIN,
    as_json: bool = JSON,
) -> None:
    """The command."""
    from forerun.plan.catalog import PlanCatalog

    known = PlanCatalog.load(catalog)
    chosen = list(known.models.values()) if name is None else [known.shape(name)]
    derivations = _derivations(chosen[0]) if _explained(explain, name, "models") else {}
    if as_json:
        body: dict[str, Any] = {"models": [_model_json(shape) for shape in chosen]}
        if explain:
            body["derivations"] = {key: derivation_json(found) for key, found in derivations.items()}
        print_json("models", None, body)
        return
    print_table(
        ("model", "params", "active", "weights", "KV KiB", "layers", "windows"),
        [_model_row(shape) for shape in chosen],
    )
    if name is not None:
        _print_model(chosen[0])
    for derivation in derivations.values():
        print_derivation(derivation)


def hardware(
    name: str | None = typer.Argument(None, metavar="NAME", help="One of them; by default all of the catalog."),
    catalog: Path | None = _CATALOG,
    explain: bool = EXPLAIN,
    as_json: bool = JSON,
) -> None:
    """The command."""
    from forerun.plan.catalog import PlanCatalog
    from forerun.plan.explain_catalog import explain_ridge

    known = PlanCatalog.load(catalog)
    chosen = list(known.hardware.values()) if name is None else [known.gpu(name)]
    derivation = explain_ridge(chosen[0]) if _explained(explain, name, "hardware") else None
    missing = None if known.local_error is None else str(known.local_error)
    if as_json:
        body: dict[str, Any] = {"hardware": [_hardware_json(found) for found in chosen], "local_error": missing}
        if derivation is not None:
            body["derivation"] = derivation_json(derivation)
        print_json("hardware", None, body)
        return
    # Nobody runs a language model in float32; where it is the only rate, it is shown.
    dtypes = list(dict.fromkeys(t for found in chosen for t in found.flops if t != "f32" or len(found.flops) == 1))
    print_table(
        ("hardware", *dtypes, "TB/s", "GB", "link", "host", "ridge"),
        [_hardware_row(found, dtypes) for found in chosen],
    )
    typer.echo("TFLOP/s by data type; bandwidth, memory; link and host in GB/s, one direction; ridge in FLOP/B")
    if name is None and missing is not None:
        typer.echo(f"local: {missing.removeprefix('gpu: ')}")
    if derivation is not None:
        print_derivation(derivation)


def _explained(explain: bool, name: str | None, command: str) -> bool:
    from forerun.errors import PlanError

    if explain and name is None:
        raise PlanError("--explain", f"of which one? expected its name: forerun plan {command} NAME --explain")
    return explain


def _derivations(shape: ModelShape) -> Mapping[str, Derivation]:
    from forerun.plan.explain_catalog import explain_active, explain_kv, explain_parameters

    found = (explain_parameters(shape), explain_active(shape), explain_kv(shape))
    return {derivation.lines[-1].symbol: derivation for derivation in found}


def _kv_bytes(shape: ModelShape) -> int:
    from forerun.plan.explain_catalog import KV_NUMBER_BYTES

    return shape.network.kv_width * KV_NUMBER_BYTES


def _model_row(shape: ModelShape) -> tuple[str, ...]:
    network = shape.network
    return (
        shape.name,
        quantity(network.n_parameters),
        quantity(network.n_active),
        quantity(network.weight_bytes, "B"),
        f"{_kv_bytes(shape) / 1024:.5g}",
        str(shape.layers),
        f"{shape.window_layers} x {shape.window}" if shape.window_layers else "-",
    )


def _print_model(shape: ModelShape) -> None:
    network, formats = shape.network, shape.formats
    typer.echo(f"{network.n_parameters:,} parameters, {network.n_active:,} of them multiplied by a token's forward")
    experts = f"experts {formats.experts}, " if shape.experts is not None else ""
    typer.echo(f"formats: layers {formats.linear}, {experts}head {formats.head}, embedding {formats.embedding}")
    if shape.max_context:
        typer.echo(f"context: at most {shape.max_context} tokens")
    typer.echo(f"source: {shape.source or 'not stated'}")


def _model_json(shape: ModelShape) -> dict[str, Any]:
    network, fields = shape.network, asdict(shape)
    return {
        "name": fields.pop("name"),
        "parameters": network.n_parameters,
        "active_parameters": network.n_active,
        "weight_bytes": network.weight_bytes,
        "kv_bytes_per_token": _kv_bytes(shape),
        **fields,
    }


def _hardware_row(found: Hardware, dtypes: list[str]) -> tuple[str, ...]:
    rates = (f"{found.flops[dtype] / 1e12:.5g}" if dtype in found.flops else "-" for dtype in dtypes)
    numbers = (f"{value / 1e9:.4g}" if value else "-" for value in (found.memory, found.link, found.host))
    return (found.name, *rates, f"{found.bandwidth / 1e12:.4g}", *numbers, f"{_ridge(found):.4g}")


def _ridge(found: Hardware) -> float:
    from forerun.plan.explain_catalog import ridge_type

    return found.ridge(ridge_type(found))


def _hardware_json(found: Hardware) -> dict[str, Any]:
    from forerun.plan.explain_catalog import ridge_type

    return {
        "name": found.name,
        "flops_per_s": dict(found.flops),
        "bandwidth_bytes_per_s": found.bandwidth,
        "memory_bytes": found.memory,
        "link_bytes_per_s": found.link,
        "link_us": found.link_us,
        "host_bytes_per_s": found.host,
        "ridge_flops_per_byte": _ridge(found),
        "ridge_type": ridge_type(found),
        "efficiency": None if found.efficiency is None else asdict(found.efficiency),
        "measured": None if found.measured is None else asdict(found.measured),
        "sources": dict(found.sources),
    }
