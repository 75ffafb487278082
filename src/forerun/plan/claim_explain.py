"""The derivation of a claim's ratio to its ceiling, for `--explain`."""

from __future__ import annotations

from forerun.plan.claim_setting import Setting
from forerun.plan.derivation import Derivation

_DIVISION = "docs/plan-claim.md, one division"


def explain_claim(setting: Setting, claimed: float) -> Derivation:
    """How the ratio of the claim to `setting.ceiling` comes about."""
    d = Derivation("the claim, in ceilings")
    network, where = setting.model.network, setting.deployment
    hardware, formats = where.hardware, network.formats
    d.given("bandwidth", hardware.bandwidth, "B/s", hardware.sources.get("bandwidth", hardware.name))
    d.given("tensor", where.tensor, "accelerators", "that work on a token at a time")
    d.given("batch", setting.batch, "sequences", "setting")
    sequences = "batch"
    if where.pipeline > 1:
        d.given("pipeline", where.pipeline, "stages", "passed one after the other")
        sequences = "sequences"
        d.derived(sequences, "batch / min(pipeline, batch)", "sequences", "that pass together")
    d.given("context", setting.context, "tokens", "cached tokens of each sequence")
    matrices = f"{network.dense.parameters:,} x {formats.linear}; {setting.model.source or network.name}"
    d.given("linear_weight_bytes", network.dense.bytes, "B", matrices)
    weights = ["linear_weight_bytes"]
    for i, mixture in enumerate(network.mixtures):
        s = f"experts{i or ''}"
        d.given(f"{s}_layers", mixture.layers, "layers", "with experts")
        d.given(f"{s}_n", mixture.n, "experts", "of a layer")
        d.given(f"{s}_active", mixture.active, "experts", "that a token uses")
        d.given(f"{s}_bytes", mixture.bytes, "B", f"of one expert, in {formats.experts}")
        d.derived(
            f"{s}_touched", f"{s}_n * (1 - (1 - {s}_active / {s}_n) ** {sequences})", "experts", "expected, of a layer"
        )
        weights.append(f"{s}_layers * {s}_bytes * {s}_touched")
    if network.head is not None:
        size = network.head.size * formats.bytes_of("head")
        d.given("head_weight_bytes", size, "B", f"{network.head.n_in} x {network.head.n_out}, {formats.head}")
        weights.append("head_weight_bytes")
    d.derived("weight_bytes", " + ".join(weights), "B", "read once a step; of the embedding only a row a token")
    read = []
    for i, group in enumerate(group for group in network.layers if group.attention):
        attention, s = group.attention, f"kv{i or ''}"
        assert attention is not None
        copies = where.tensor * attention.kept_share(where.tensor)
        d.given(f"{s}_layers", group.repeats, "layers", group.name)
        d.given(f"{s}_width", attention.kv_width, "numbers", "kept a token and layer")
        d.given(f"{s}_copies", copies, "", "accelerators over key-value heads, where there are more of them")
        d.given("kv_number_bytes", where.kv_bytes, "B", f"a number of the cache in {where.kv}")
        keys = "context" if attention.window is None else f"min(context, {attention.window - 1})"
        read.append(f"{s}_layers * {s}_width * {s}_copies * kv_number_bytes * ({keys} + 1)")
    if read:
        d.derived("kv_bytes", f"{sequences} * ({' + '.join(read)})", "B", "of all sequences")
    d.derived("step_bytes", "weight_bytes + kv_bytes" if read else "weight_bytes", "B")
    d.given("tokens_per_step", setting.tokens_per_step, "tokens", "that a sequence gets of a step")
    d.given("users", setting.users, "sequences", "whose tokens the claim counts")
    d.derived("ceiling", "users * tokens_per_step * bandwidth * tensor / step_bytes", "tokens/s", _DIVISION)
    d.given("claimed", claimed, "tokens/s", "the claim")
    d.derived("ratio", "claimed / ceiling", "", "above 1: not under these conditions")
    return d
