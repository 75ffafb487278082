"""Where the numbers of a catalog's entry come from, line by line, for `--explain`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType

from forerun.plan.derivation import Derivation
from forerun.plan.hardware import Hardware
from forerun.plan.network import Layers, Linear
from forerun.plan.shapes import ModelShape

KV_NUMBER_BYTES = 2
"""The catalog's tables count a cache of 16-bit numbers."""

_SIZES: Mapping[str, tuple[str, str]] = MappingProxyType({
    "q_proj": ("hidden * heads * head_dim", "heads * head_dim"),
    "k_proj": ("hidden * kv_heads * head_dim", "kv_heads * head_dim"),
    "v_proj": ("hidden * kv_heads * head_dim", "kv_heads * head_dim"),
    "o_proj": ("heads * head_dim * hidden", "hidden"),
    "mlp.gate": ("hidden * intermediate", "intermediate"),
    "mlp.up": ("hidden * intermediate", "intermediate"),
    "mlp.down": ("intermediate * hidden", "hidden"),
    "router": ("hidden * experts", "experts"),
    "experts.gate": ("hidden * expert_width", "expert_width"),
    "experts.up": ("hidden * expert_width", "expert_width"),
    "experts.down": ("expert_width * hidden", "hidden"),
    "shared_expert.gate": ("hidden * shared_width", "shared_width"),
    "shared_expert.up": ("hidden * shared_width", "shared_width"),
    "shared_expert.down": ("shared_width * hidden", "hidden"),
    "shared_expert_gate": ("hidden", ""),
})  # fmt: skip
_LATENT_SIZES: Mapping[str, str] = MappingProxyType({
    "q_proj": "hidden * heads * (nope + rope)",
    "q_a_proj": "hidden * q_rank",
    "q_b_proj": "q_rank * heads * (nope + rope)",
    "kv_a_proj": "hidden * (kv_rank + rope)",
    "kv_b_proj": "kv_rank * heads * (nope + value_dim)",
    "o_proj": "heads * value_dim * hidden",
})  # fmt: skip


def explain_parameters(shape: ModelShape) -> Derivation:
    """All parameters, `network.n_parameters`."""
    d = Derivation(f"parameters of {shape.name}")
    _fields(d, shape)
    parts = [_group(d, shape, group, of_token=False) for group in shape.network.layers]
    parts.append(_symbol(d, "embedding", "vocab * hidden"))
    if not shape.tied:
        parts.append(_symbol(d, "head", "hidden * vocab"))
    parts.append(_symbol(d, "final_norm", "hidden"))
    d.derived("parameters", " + ".join(parts), "parameters", "head and embedding are one matrix" if shape.tied else "")
    return d


def explain_active(shape: ModelShape) -> Derivation:
    """Parameters that a token's forward multiplies, `network.n_active`: norms and embedding aren't multiplied."""
    d = Derivation(f"parameters of {shape.name} that a token's forward multiplies")
    _fields(d, shape)
    parts = [_group(d, shape, group, of_token=True) for group in shape.network.layers]
    parts.append(_symbol(d, "head", "hidden * vocab"))
    d.derived("active_parameters", " + ".join(parts), "parameters", "layers and head")
    return d


def explain_kv(shape: ModelShape) -> Derivation:
    """KiB that a token keeps in a cache of 16-bit numbers, all layers together, windows apart."""
    d = Derivation(f"KiB of the KV cache of {shape.name} for one token")
    d.given("layers", shape.layers, "layers", shape.source)
    if shape.latent is not None:
        d.given("kv_rank", shape.latent.kv_rank, "", shape.source)
        d.given("rope", shape.latent.rope, "", shape.source)
        width = "kv_rank + rope"
    else:
        d.given("kv_heads", shape.kv_heads, "heads", shape.source)
        d.given("head_dim", shape.head_dim, "", shape.source)
        width = "2 * kv_heads * head_dim"
    d.derived("kv_width", width, "numbers", "kept a token and layer")
    d.given("kv_number_bytes", KV_NUMBER_BYTES, "B", "16 bits")
    d.derived("kv_bytes_per_token", "layers * kv_width * kv_number_bytes", "B")
    d.derived("kv_kib_per_token", "kv_bytes_per_token / 1024", "KiB")
    return d


def explain_ridge(hardware: Hardware) -> Derivation:
    """Every field with its source, and the ridge: FLOP per byte above which arithmetic is the limit."""
    d = Derivation(f"{hardware.name}: FLOP for each byte of memory traffic")

    def source(field: str) -> str:
        return hardware.sources.get(field, "stated without a source")

    d.given("memory", hardware.memory, "B", source("memory"))
    for name, unit in (("link", "B/s"), ("link_us", "us"), ("host", "B/s")):
        if getattr(hardware, name):
            d.given(name, getattr(hardware, name), unit, source(name))
    if hardware.efficiency is not None:
        for item in fields(hardware.efficiency):
            unit = "us" if item.name.endswith("_us") else ""
            d.given(f"reached_{item.name}", getattr(hardware.efficiency, item.name), unit, source("efficiency"))
    main = ridge_type(hardware)
    for dtype, rate in hardware.flops.items():
        d.given(f"peak_{dtype}", rate, "FLOP/s", source("flops"))
    d.given("bandwidth", hardware.bandwidth, "B/s", source("bandwidth"))
    d.derived("ridge", f"peak_{main} / bandwidth", "FLOP/B", f"{main} operands")
    return d


def ridge_type(hardware: Hardware) -> str:
    """The type whose rate the catalog's ridge is of: bf16, or the first that there is."""
    return "bf16" if "bf16" in hardware.flops else next(iter(hardware.flops))


def _fields(d: Derivation, shape: ModelShape) -> None:
    names = ["hidden", "layers", "heads"]
    if shape.latent is None:
        names.append("kv_heads")
    if shape.latent is None or shape.qk_norm:
        names.append("head_dim")
    names.append("vocab")
    experts = shape.experts
    if experts is None or experts.dense_layers:
        names.append("intermediate")
    for name in names:
        d.given(name, getattr(shape, name), "", shape.source)
    if shape.latent is not None:
        for item in fields(shape.latent):
            name = "value_dim" if item.name == "value" else item.name
            d.given(name, getattr(shape.latent, item.name), "", shape.source)
    if experts is not None:
        d.given("experts", experts.n, "", shape.source)
        d.given("experts_of_token", experts.active, "", shape.source)
        d.given("expert_width", experts.intermediate, "", shape.source)
        if experts.shared:
            d.given("shared_width", experts.shared, "", shape.source)


def _group(d: Derivation, shape: ModelShape, group: Layers, *, of_token: bool) -> str:
    terms = [_symbol(d, _name(linear), _size(shape, linear, of_token)) for linear in group.linears]
    if not of_token:
        norms = [f"{4 if shape.sandwich_norms else 2} * hidden"]
        norms += ["q_rank", "kv_rank"] if shape.latent is not None else []
        norms += ["2 * head_dim"] if shape.qk_norm else []
        norms += ["heads"] if shape.sinks else []
        terms.append(_symbol(d, "norms_and_sinks" if shape.sinks else "norms", " + ".join(norms)))
    name = f"in_{group.name.replace(' ', '_')}"
    count = "layers" if group.repeats == shape.layers else str(group.repeats)
    d.derived(name, f"{count} * ({' + '.join(terms)})", "parameters", f"{group.repeats} {group.name}")
    return name


def _name(linear: Linear) -> str:
    return "gate_of_shared_expert" if linear.name == "shared_expert_gate" else linear.name.replace(".", "_")


def _size(shape: ModelShape, linear: Linear, of_token: bool) -> str:
    size, bias = _SIZES.get(linear.name, ("", ""))
    if shape.latent is not None:
        size = _LATENT_SIZES.get(linear.name, size)
    formula = f"{size} + {bias}" if linear.n_bias else size
    if linear.name.startswith("experts."):
        return f"{'experts_of_token' if of_token else 'experts'} * ({formula})"
    return formula


def _symbol(d: Derivation, symbol: str, formula: str) -> str:
    d.derived(symbol, formula, "parameters")
    return symbol
