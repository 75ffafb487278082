"""The derivations of what fits, of a batch's speed, of when the pool is full, and of a preemption, for `--explain`."""

from __future__ import annotations

import math
from typing import NamedTuple

from forerun.plan.capacity import Capacity, Preemption, Row
from forerun.plan.derivation import Derivation
from forerun.plan.explain import explain_forward, explain_step
from forerun.plan.explain_speculate import explain_speedup
from forerun.plan.memory import kv_copies, window_tokens
from forerun.plan.network import Network
from forerun.plan.steptime import Load, forward_time

_PAGE = "docs/plan-capacity.md, {}"


def explain_capacity(capacity: Capacity) -> Derivation:
    """How `capacity.fitting.to_the_end` comes about."""
    d = Derivation("requests that fit to the end of their replies")
    _pool(d, capacity)
    d.given("prompt", capacity.lengths.prompt, "tokens", "setting")
    d.given("reply", capacity.lengths.reply, "tokens", "setting")
    d.given("block", capacity.block, "tokens", "setting: a sequence holds whole blocks")
    d.derived("kept", "ceil((prompt + reply) / block) * block", "tokens", "at the end, in whole blocks")
    _sequence(d, capacity)
    d.derived("to_the_end", "floor(pool / sequence_bytes)", "requests")
    return d


def explain_row(capacity: Capacity, row: Row) -> Derivation:
    """How the step and the tokens/s of a row come about, each request's and those of all, which are the last line."""
    network, where, point = capacity.network, capacity.deployment, row.point
    d = Derivation(f"{row.batch} requests at once: the step, tokens/s each, tokens/s all")
    d.given("prompt", capacity.lengths.prompt, "tokens", "setting")
    d.given("last", capacity.longest(row.batch), "tokens", "at the end, or the most that fit into the pool")
    d.derived("at_tokens", "(prompt + last) / 2", "tokens", "half-way: the context of the step")
    if not point.length or capacity.proposal is None:
        d.extend(explain_step(forward_time(network, where, Load(row.batch, 1, point.context))).lines)
        return d
    speedup = explain_speedup(
        network, where, capacity.proposal, batch=row.batch, context=point.context, length=point.length
    )
    names = [line.symbol for line in speedup.lines]
    d.extend(speedup.lines[: names.index("draft_cost")])
    d.derived("step_seconds", "draft_seconds + verify_seconds", "s", _PAGE.format("speed"))
    d.derived("tokens_per_s", "tokens_per_step / step_seconds", "tokens/s", "of each request")
    d.given("requests", row.batch, "", "setting")
    d.derived("throughput", "requests * tokens_per_s", "tokens/s", "of all")
    return d


def explain_filling(capacity: Capacity, row: Row) -> Derivation:
    """How `row.fills_at` comes about, and from it `row.fills_tokens`, the last line. Raises ValueError if the pool
    doesn't fill."""
    if row.fills_at is None:
        raise ValueError(f"{row.batch} requests fit to the end")
    d = Derivation(f"the step at which {row.batch} requests fill the pool, and the tokens that each has then")
    _pool(d, capacity)
    d.given("requests", row.batch, "", "setting: that start together")
    d.given("prompt", capacity.lengths.prompt, "tokens", "setting")
    d.given("reply", capacity.lengths.reply, "tokens", "setting")
    d.given("block", capacity.block, "tokens", "setting: a sequence holds whole blocks")
    expected = "expected; derived with the row's step" if row.point.length else "without drafts"
    d.given("tokens_per_step", row.point.tokens_per_step, "tokens", expected)
    d.given("drafts", row.point.length, "tokens", "slots of a step that its drafts take")
    too_many = math.ceil((capacity.longest(row.batch) + 1) / capacity.block) * capacity.block
    growing, full = [], []
    for term in _terms(d, capacity):
        if term.most < too_many:
            full.append(f"{term.product} * {term.most:g}")
        else:
            growing.append(term.product)
    windows = ""
    if full:
        d.derived("windows_bytes", " + ".join(full), "B", "of a request, in layers whose window is full")
        windows = " - windows_bytes"
    if growing:
        d.derived("token_bytes", " + ".join(growing), "B", "that a token adds there")
        room = f"floor((pool / requests{windows}) / (token_bytes * block)) * block"
        d.derived("room", room, "tokens", "that the pool has for each")
        d.derived("first_too_many", "room + 1", "tokens")
    else:
        d.derived("first_too_many", "prompt + 1", "tokens", "full windows alone are more than the pool")
    step = "max(1, floor((first_too_many - prompt - 2 - drafts) / tokens_per_step) + 2)"
    d.derived("full_at_step", step, "", _PAGE.format("when it is full, solved for s"))
    needs = "prompt + ceil(min(tokens_per_step * (full_at_step - 1) + 1 + drafts, reply))"
    d.derived("tokens_each", needs, "tokens", _PAGE.format("when it is full: n(s)"))
    return d


def explain_recompute(capacity: Capacity, preempted: Preemption) -> Derivation:
    """How `preempted.recompute_seconds` comes about. Of several chunks the first is derived; the others go by the same
    equations with more cached tokens, and are given as their sum."""
    where, drafter, tokens = capacity.deployment, capacity.drafter, preempted.tokens
    d = Derivation(f"computing {tokens} preempted tokens again")
    size, chunks = min(tokens, capacity.chunk), math.ceil(tokens / capacity.chunk)
    networks = {"": capacity.network}
    if drafter is not None and drafter.network is not None and drafter.kv_width:
        networks["drafter_"] = drafter.network
    seconds, terms = 0.0, []
    for prefix, network in networks.items():
        forward = forward_time(network, where, Load(1, size, 0, 1))
        d.extend(explain_forward(forward, prefix=prefix).lines)
        seconds += forward.seconds
        terms.append(f"{prefix}forward_seconds")
    d.given("step_us", where.eff.step_us, "us", "setting: of every step, beside the forward")
    if chunks > 1:
        others = preempted.recompute_seconds - chunks * where.eff.step_us * 1e-6 - seconds
        source = f"the other {chunks - 1} chunks: the same with {size} more cached tokens each, the last one shorter"
        d.given("further_seconds", others, "s", source)
        terms.append("further_seconds")
    d.derived("recompute_seconds", f"{' + '.join(terms)} + {chunks} * step_us / 1e6", "s", _PAGE.format("a preemption"))
    return d


def explain_swap(capacity: Capacity, preempted: Preemption) -> Derivation:
    """How `preempted.swap_seconds` comes about. Raises ValueError if there is no link to a host."""
    where, hardware = capacity.deployment, capacity.deployment.hardware
    if not hardware.host:
        raise ValueError(f"{hardware.name} has no link to a host")
    d = Derivation(f"swapping {preempted.tokens} preempted tokens out and in")
    d.given("tokens", preempted.tokens, "tokens", "of the request")
    d.given("block", capacity.block, "tokens", "setting: a sequence holds whole blocks")
    d.derived("kept", "ceil(tokens / block) * block", "tokens", "in whole blocks")
    _sequence(d, capacity)
    d.given("host", hardware.host, "B/s", hardware.sources.get("host", hardware.name))
    d.given("link_share", where.eff.link, "", "setting: share of the link that is reached")
    d.given("accelerators", where.gpus, "", "tensor x pipeline")
    how = "2 * sequence_bytes / (host * link_share * accelerators)"
    d.derived("swap_seconds", how, "s", _PAGE.format("what a preemption costs"))
    return d


def _pool(d: Derivation, capacity: Capacity) -> None:
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


class _Term(NamedTuple):
    """Of some layers: symbol they begin with, product of a token's bytes, the most tokens they keep, their window."""

    symbol: str
    product: str
    most: float
    window: int | None


def _terms(d: Derivation, capacity: Capacity) -> list[_Term]:
    drafter, terms = capacity.drafter, _held(d, "kv", capacity.network, capacity)
    if drafter is not None and drafter.network is not None:
        terms += _held(d, "drafter_kv", drafter.network, capacity)
    return terms


def _sequence(d: Derivation, capacity: Capacity) -> None:
    """`sequence_bytes` from `kept` tokens in blocks of `block`."""
    products = []
    for term in _terms(d, capacity):
        kept = "kept"
        if term.window is not None:
            kept = f"{term.symbol}_kept"
            window = f"(ceil(({term.window} - 1) / block) + 1) * block"
            d.derived(kept, f"min(kept, {window})", "tokens", f"a window of {term.window}, in whole blocks")
        products.append(f"{term.product} * {kept}")
    d.derived("sequence_bytes", " + ".join(products), "B", _PAGE.format("bytes of a sequence"))


def _held(d: Derivation, prefix: str, network: Network, capacity: Capacity) -> list[_Term]:
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
        most = math.inf if attention.window is None else window_tokens(attention.window, capacity.block)
        terms.append(_Term(s, f"{s}_layers * {s}_width * kv_number_bytes * {s}_copies", most, attention.window))
    return terms
