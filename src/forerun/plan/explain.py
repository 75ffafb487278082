"""The derivation of a forward's time, line by line, for `--explain`."""

from __future__ import annotations

import math

from forerun.plan.derivation import Derivation
from forerun.plan.network import Attention, Layers
from forerun.plan.steptime import LOGIT_BYTES, ForwardTime

_EQUATION = "docs/step-time.md, {}"


def explain_forward(forward: ForwardTime, *, prefix: str = "") -> Derivation:
    """How `forward.seconds` comes about. Every formula, evaluated, gives the number of the model itself.

    `prefix` goes before every symbol that belongs to this forward alone, so that several derivations can be joined.
    """
    d = Derivation(f"seconds of a forward of {forward.network.name}")
    network, where, load = forward.network, forward.deployment, forward.load
    eff, hardware, t = where.eff, where.hardware, where.tensor
    fitted = "measured" if where.efficiency is None and hardware.efficiency is not None else "setting"
    p = prefix

    d.given("bandwidth", hardware.bandwidth, "B/s", hardware.sources.get("bandwidth", hardware.name))
    d.given("bandwidth_share", eff.bandwidth, "", f"{fitted}: share of the bandwidth that is reached")
    rates = hardware.sources.get("flops", hardware.name)
    d.given("peak", where.peak, "FLOP/s", f"with {where.activations} operands; {rates}")
    wide = "peak"
    if where.wide_peak != where.peak:
        wide = "wide_peak"
        d.given(wide, where.wide_peak, "FLOP/s", f"of attention and head, which stay in 16 bits; {rates}")
    d.given("compute_share", eff.compute, "", f"{fitted}: share of the peak that is reached")
    if not math.isinf(eff.order):
        d.given("order", eff.order, "", f"{fitted}: how bytes and FLOPs overlap")
    d.given("tensor", t, "accelerators", "setting: each matrix is split over them")
    d.given("act_bytes", where.act_bytes, "B", "a number between matrices and accelerators")
    d.given(f"{p}batch", load.batch, "sequences", "setting")
    d.given(f"{p}queries", load.queries, "tokens", "new tokens of each sequence")
    d.given(f"{p}context", load.context, "tokens", "cached tokens of each sequence")
    d.given("pipeline", where.pipeline, "stages", "setting")
    d.derived(f"{p}sequences", f"{p}batch / min(pipeline, {p}batch)", "sequences", "that pass together")
    d.derived(f"{p}tokens", f"{p}sequences * {p}queries", "tokens")
    seconds: list[str] = []

    def phase(name: str, terms: list[str], flops: str, peak: str = "peak") -> None:
        memory = f"({' + '.join(terms)}) / (bandwidth * bandwidth_share)"
        d.derived(f"{p}{name}_memory", memory, "s", _EQUATION.format("bytes over bandwidth"))
        d.derived(f"{p}{name}_compute", f"{flops} / ({peak} * compute_share)", "s", _EQUATION.format("FLOPs over peak"))
        pair = f"{p}{name}_memory", f"{p}{name}_compute"
        how = f"max({pair[0]}, {pair[1]})"
        if not math.isinf(eff.order):
            how = f"({pair[0]}**order + {pair[1]}**order)**(1/order)"
        d.derived(f"{p}{name}_seconds", how, "s", f"{forward.part(name).bound} is the limit")
        seconds.append(f"{p}{name}_seconds")

    if network.dense.parameters:
        d.derived(f"{p}linear_parameters", _parameters(network.layers), "parameters", "every matrix, layer by layer")
        linear, experts = network.formats.linear, network.formats.experts
        if math.isclose(network.dense.bytes, network.dense.parameters * network.formats.bytes_of("linear")):
            bits = 8 * network.formats.bytes_of("linear")
            d.derived(f"{p}linear_weight_bytes", f"{p}linear_parameters * {bits:g} / 8", "B", f"the same in {linear}")
        else:
            where_shared = f"the same in {linear}, shared experts in {experts}"
            d.given(f"{p}linear_weight_bytes", network.dense.bytes, "B", where_shared)
        d.given(f"{p}linear_io", network.dense.io, "numbers", "in and out of the same matrices, a token")
        d.derived(f"{p}linear_flops", f"2 * {p}linear_parameters * {p}tokens / tensor", "FLOP")
        phase(
            "linear",
            [f"{p}linear_weight_bytes / tensor", f"{p}tokens * {p}linear_io * act_bytes / tensor"],
            f"{p}linear_flops",
        )
    if network.mixtures:
        d.given("expert_shares", where.expert, "accelerators", "setting: whole experts are dealt out to them")
        weights, flows, products = [], [], []
        for i, mixture in enumerate(network.mixtures):
            s = f"{p}experts{i or ''}"
            d.given(f"{s}_n", mixture.n, "experts", "of a layer")
            d.given(f"{s}_active", mixture.active, "experts", "that a token uses")
            d.given(f"{s}_layers", mixture.layers, "layers", "that have them")
            d.given(f"{s}_bytes", mixture.bytes, "B", f"of one expert, in {network.formats.experts}")
            d.given(f"{s}_parameters", mixture.parameters, "parameters", "of one expert")
            d.given(f"{s}_io", mixture.io, "numbers", "in and out of one expert's matrices, a token")
            mean = f"{s}_n * (1 - (1 - {s}_active / {s}_n) ** {p}tokens)"
            d.derived(f"{s}_touched", mean, "experts", "expected distinct experts of a layer")
            here = f"{s}_touched"
            if where.expert > 1:
                spread = f"2 * log(expert_shares) * {s}_touched / expert_shares * (1 - {s}_touched / {s}_n)"
                here = f"{s}_busiest"
                d.derived(
                    here, f"min({s}_touched / expert_shares + sqrt({spread}), {s}_n / expert_shares)", "experts",
                    "on the busiest accelerator",
                )  # fmt: skip
            weights.append(f"{s}_layers * {s}_bytes * {here} * expert_shares / tensor")
            flows.append(f"{s}_layers * {s}_active * {s}_io * {p}tokens * act_bytes / tensor")
            products.append(f"2 * {s}_layers * {s}_active * {s}_parameters * {p}tokens / tensor")
        d.derived(f"{p}experts_flops", " + ".join(products), "FLOP")
        phase("experts", weights + flows, f"{p}experts_flops")
    read, multiplied = [], []
    for i, group in enumerate(group for group in network.layers if group.attention):
        assert group.attention is not None
        terms = _attention(d, p, f"{p}attention{i or ''}", group, group.attention, forward)
        read.append(terms[0])
        multiplied.append(terms[1])
    if read:
        d.derived(f"{p}attention_flops", " + ".join(multiplied), "FLOP")
        phase("attention", read, f"{p}attention_flops", wide)
    head = network.head
    if head is not None:
        d.given(f"{p}head_parameters", head.size, "parameters", f"{head.n_in} x {head.n_out}")
        bits = 8 * network.formats.bytes_of("head")
        d.derived(
            f"{p}head_weight_bytes", f"{p}head_parameters * {bits:g} / 8", "B", f"the same in {network.formats.head}"
        )
        scored = f"{p}sequences * {load.queries if load.scored is None else load.scored}"
        d.derived(f"{p}scored", scored, "tokens", "whose next-token scores are wanted")
        d.derived(f"{p}head_flops", f"2 * {p}head_parameters * {p}scored / tensor", "FLOP")
        written = f"{p}scored * ({head.n_out} * {LOGIT_BYTES} + {head.n_in} * act_bytes) / tensor"
        phase("head", [f"{p}head_weight_bytes / tensor", written], f"{p}head_flops", wide)
    if any(part.name == "communication" for part in forward.parts):
        _communication(d, p, forward)
        seconds.append(f"{p}communication_seconds")
    if eff.launch_us or eff.layer_us:
        d.given("launch_us", eff.launch_us, "us", f"{fitted}: of every forward")
        d.given("layer_us", eff.layer_us, "us", f"{fitted}: of every layer")
        d.derived(f"{p}launches_seconds", f"(launch_us + layer_us * {network.n_layers}) / 1e6", "s")
        seconds.append(f"{p}launches_seconds")
    d.derived(f"{p}forward_seconds", " + ".join(seconds), "s", _EQUATION.format("the sum of the phases"))
    return d


def explain_step(forward: ForwardTime, *, generating: bool = True, source: str = "") -> Derivation:
    """How a step's time comes about: the forward, and what the engine does besides. `generating`: its tokens/s, too, of
    each sequence and of all, which is the last line then. source: of what the engine does besides."""
    d = explain_forward(forward)
    d.title = f"a step of {forward.network.name}"
    d.given("step_us", forward.deployment.eff.step_us, "us", source or "setting: of every step, beside the forward")
    d.derived("step_seconds", "forward_seconds + step_us / 1e6", "s", _EQUATION.format("a forward and what is besides"))
    if generating:
        d.title += ", its time and tokens/s"
        d.derived("tokens_per_s", "1 / step_seconds", "tokens/s", "of each sequence")
        d.derived("throughput", "batch * tokens_per_s", "tokens/s", "of all")
    else:
        d.title += ", its time"
    return d


def _parameters(groups: tuple[Layers, ...]) -> str:
    parts = []
    for group in groups:
        sizes = [
            f"{linear.n_in}*{linear.n_out}" + (f"+{linear.n_bias}" if linear.n_bias else "")
            for linear in group.linears
            if linear.experts == 1
        ]
        if sizes:
            parts.append(f"{group.repeats}*({' + '.join(sizes)})")
    return " + ".join(parts)


def _attention(
    d: Derivation, p: str, s: str, group: Layers, attention: Attention, forward: ForwardTime
) -> tuple[str, str]:
    """Lines of one group of layers; returns the terms of its bytes and its FLOPs."""
    where = forward.deployment
    d.given("kv_number_bytes", where.kv_bytes, "B", f"a number of the cache in {where.kv}")
    d.given(f"{s}_layers", group.repeats, "layers", group.name)
    d.given(f"{s}_kv_width", attention.kv_width, "numbers", "kept a token and layer")
    d.given(f"{s}_pair_width", attention.pair_width, "products", "for each query and key, all heads, scores and values")
    heads = f"{attention.kv_shards} key-value heads" if attention.kv_shards > 1 else "kept whole"
    d.given(f"{s}_kv_share", attention.kept_share(where.tensor), "", f"of the cache on each accelerator: {heads}")
    keys, pairs = f"{p}context", f"{p}queries * {p}context + {p}queries * ({p}queries + 1) / 2"
    if attention.window is not None:
        d.given(f"{s}_window", attention.window, "tokens", "a query sees no more")
        keys = f"min({p}context, {s}_window - 1)"
        open_ = f"floor(min(max({s}_window - {p}context, 0), {p}queries))"
        d.derived(f"{s}_unclipped", open_, "queries", "that see all before them")
        pairs = f"{s}_unclipped * {p}context + {s}_unclipped * ({s}_unclipped + 1) / 2"
        pairs += f" + ({p}queries - {s}_unclipped) * {s}_window"
    d.derived(f"{s}_keys", keys, "tokens", "read for each sequence")
    d.derived(f"{s}_pairs", pairs, "pairs", "of query and key, each sequence")
    return (
        f"{s}_layers * {s}_kv_width * ({s}_keys + {p}queries) * {p}sequences * kv_number_bytes * {s}_kv_share",
        f"2 * {s}_layers * {s}_pair_width * {s}_pairs * {p}sequences / tensor",
    )


def _communication(d: Derivation, p: str, forward: ForwardTime) -> None:
    network, where = forward.network, forward.deployment
    hardware = where.hardware
    d.given("link", hardware.link, "B/s", hardware.sources.get("link", hardware.name))
    d.given("link_share", where.eff.link, "", "setting: share of the link that is reached")
    d.given("link_us", hardware.link_us, "us", hardware.sources.get("link_us", "of a collective at least"))
    d.given("latency", where.eff.latency, "", "setting: share of that which is counted; 0: what physics allows")
    sent, calls = [], []
    if where.tensor > 1:
        sent.append(f"2 * {network.n_layers} * {p}tokens * {network.hidden} * act_bytes * 2 * (tensor - 1) / tensor")
        calls.append(f"2 * {network.n_layers}")
        if network.head is not None:
            sent.append(f"{p}scored * {network.head.n_out} * act_bytes * (tensor - 1) / tensor")
            calls.append("1")
    if where.pipeline > 1:
        sent.append(f"pipeline * {p}tokens * {network.hidden} * act_bytes")
        calls.append("pipeline")
    d.derived(f"{p}sent", " + ".join(sent), "B", "two all-reduces a layer, one gather of the scores, stage to stage")
    d.derived(f"{p}collectives", " + ".join(calls), "")
    d.derived(
        f"{p}communication_seconds", f"{p}sent / (link * link_share) + {p}collectives * link_us * latency / 1e6", "s"
    )
