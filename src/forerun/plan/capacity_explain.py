"""The derivation of how many requests fit to the end, for `--explain`."""

from __future__ import annotations

from forerun.plan.capacity import Capacity
from forerun.plan.derivation import Derivation
from forerun.plan.memory import kv_copies
from forerun.plan.network import Network

_PAGE = "docs/plan-capacity.md, {}"


def explain_capacity(capacity: Capacity) -> Derivation:
    """How `capacity.fitting.to_the_end` comes about."""
    d = Derivation("requests that fit to the end of their replies")
    where, network, drafter = capacity.deployment, capacity.network, capacity.drafter
    hardware = where.hardware
    d.given("memory", hardware.memory, "B", hardware.sources.get("memory", hardware.name))
    d.given("accelerators", where.gpus, "", "tensor x pipeline")
    d.given("utilization", capacity.utilization, "", "setting: share of the memory that is used")
    d.given("weight_bytes", network.weight_bytes, "B", f"all {network.n_parameters:,} parameters in their formats")
    taken = "weight_bytes"
    if drafter is not None:
        d.given("drafter_bytes", drafter.weight_bytes, "B", f"weights of {drafter.name}")
        taken += " - drafter_bytes"
    d.derived("pool", f"memory * accelerators * utilization - {taken}", "B", _PAGE.format("the pool"))
    d.given("prompt", capacity.lengths.prompt, "tokens", "setting")
    d.given("reply", capacity.lengths.reply, "tokens", "setting")
    d.given("block", capacity.block, "tokens", "setting: a sequence holds whole blocks")
    d.derived("kept", "ceil((prompt + reply) / block) * block", "tokens", "at the end, in whole blocks")
    terms = _held(d, "kv", network, capacity)
    if drafter is not None and drafter.network is not None:
        terms += _held(d, "drafter_kv", drafter.network, capacity)
    d.derived("sequence_bytes", " + ".join(terms), "B", _PAGE.format("bytes of a sequence"))
    d.derived("to_the_end", "floor(pool / sequence_bytes)", "requests")
    return d


def _held(d: Derivation, prefix: str, network: Network, capacity: Capacity) -> list[str]:
    where, terms = capacity.deployment, []
    for i, group in enumerate(group for group in network.layers if group.attention):
        attention, s = group.attention, f"{prefix}{i or ''}"
        assert attention is not None
        d.given(f"{s}_layers", group.repeats, "layers", f"{group.name} of {network.name}")
        d.given(f"{s}_width", attention.kv_width, "numbers", "kept a token and layer")
        d.given("kv_number_bytes", where.kv_bytes, "B", f"a number of the cache in {where.kv}")
        d.given(
            f"{s}_copies", kv_copies(attention, where), "", "1 if the accelerators split the key-value heads evenly"
        )
        kept = "kept"
        if attention.window is not None:
            kept = f"{s}_kept"
            window = f"(ceil(({attention.window} - 1) / block) + 1) * block"
            d.derived(kept, f"min(kept, {window})", "tokens", f"a window of {attention.window}, in whole blocks")
        terms.append(f"{s}_layers * {s}_width * kv_number_bytes * {s}_copies * {kept}")
    return terms
