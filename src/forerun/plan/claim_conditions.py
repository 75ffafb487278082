"""Which conditions that a claim doesn't state would make it true, each solved for its value (docs/plan-claim.md)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

from forerun.errors import PlanError
from forerun.plan.catalog import LOCAL, PlanCatalog
from forerun.plan.claim_setting import MOST_QUERIES, Setting
from forerun.plan.formats import WEIGHT_BITS, WeightFormats
from forerun.plan.hardware import Hardware
from forerun.plan.speculate import Proposal, best

Kind = Literal["weights", "kv", "gpus", "hardware", "batch", "acceptance"]
KINDS: tuple[Kind, ...] = get_args(Kind)

NODE = 8
"""Accelerators that usually share one fast link; more of them talk over a slower one than the catalog's."""

MOST_TOKENS = 5.0
"""Mean tokens a step up to which speculation is taken as plausible: above the largest speedups that papers report for
batch 1 (EAGLE-3: 4.4, arXiv 2503.01840; suffix decoding on code agents: 4.0, arXiv 2411.04975)."""

MOST_GPUS = 64
"""Accelerators that are tried."""

MOST_USERS = 1 << 20
"""Sequences that are tried."""

_GPU_FORMATS = ("fp8", "nvfp4", "mxfp4", "int4")
_GGUF_FORMATS = ("q8_0", "q6_k", "q5_k", "q4_k")
_TOKENS_TRIED = (2.0, 3.0, 4.0, 5.0)


class Move(NamedTuple):
    """One condition changed. text: to what. doubt: why it isn't plausible; empty if it is."""

    kind: Kind
    text: str
    setting: Setting
    doubt: str = ""


@dataclass(frozen=True)
class Condition:
    """What one condition would have to be for the claim to be true, everything else as stated.

    needed: by the division alone (bytes over bandwidth), in `unit`; None: no value would do. real: the mildest real
    thing that does by the full model, or the strongest there is. reached: tokens/s with it; None: there is nothing to
    try. sufficient: whether the claim is possible with it, memory included. plausible: whether it is within what is
    usual. settled: the claim says something else. note: what is to be said about it.
    """

    kind: Kind | Literal["active", "drafter"]
    needed: float | None
    unit: str
    real: str
    reached: float | None
    sufficient: bool
    plausible: bool
    settled: bool
    note: str = ""

    @property
    def counts(self) -> bool:
        """Whether it makes the claim possible."""
        return self.sufficient and self.plausible and not self.settled


@dataclass(frozen=True)
class Pair:
    """Two conditions that together make the claim possible. reached: tokens/s with them."""

    kinds: tuple[Kind, Kind]
    text: str
    reached: float


def conditions(
    setting: Setting,
    claimed: float,
    catalog: PlanCatalog,
    *,
    stated: frozenset[str] = frozenset(),
    proposal: Proposal | None = None,
) -> list[Condition]:
    """Every condition solved by itself. `proposal`: a drafter that is priced besides."""
    found = [_condition(kind, setting, claimed, catalog, stated) for kind in KINDS]
    if proposal is not None:
        found.append(_drafter(setting, claimed, proposal, stated))
    return [*found, _active(setting, claimed, catalog)]


def pairs(setting: Setting, claimed: float, catalog: PlanCatalog, stated: frozenset[str] = frozenset()) -> list[Pair]:
    """The mildest plausible combination of each two kinds of condition, where there is one."""
    found = []
    for first, second in itertools.combinations([kind for kind in KINDS if kind not in stated], 2):
        pair = next(_pairs_of(first, second, setting, claimed, catalog), None)
        if pair is not None:
            found.append(pair)
    return found


def ways_to_fit(setting: Setting, catalog: PlanCatalog) -> list[str]:
    """The mildest plausible change of each kind with which the model fits the memory."""
    kinds: tuple[Kind, ...] = ("weights", "kv", "gpus", "hardware")
    found = []
    for kind in kinds:
        moves = _MOVES[kind](setting, math.inf, catalog)
        found += [move.text for move in moves if not move.doubt and move.setting.room.fits][:1]
    return found


def _pairs_of(first: Kind, second: Kind, setting: Setting, claimed: float, catalog: PlanCatalog) -> Iterator[Pair]:
    if (first, second) == ("batch", "acceptance"):
        # Both are solved for, so one of them is set to round values.
        steps = [replace(setting, tokens_per_step=e) for e in _TOKENS_TRIED if e > setting.tokens_per_step]
        together = [
            (Move("acceptance", f"{step.tokens_per_step:g} tokens a step", step), move)
            for step in steps
            for move in _users(step, claimed)
        ]
    else:
        # Mild to strong: by the sum of both ranks.
        ranked = [
            (i + j, one, other)
            for i, one in enumerate(_MOVES[first](setting, claimed, catalog))
            if not one.doubt
            for j, other in enumerate(_MOVES[second](one.setting, claimed, catalog))
        ]
        together = [(one, other) for _, one, other in sorted(ranked, key=lambda item: item[0])]
    for one, other in together:
        if not other.doubt and other.setting.allows(claimed):
            yield Pair((first, second), f"{one.text} and {other.text}", other.setting.rate())


_LIMITS = MappingProxyType({"memory": "memory bandwidth", "compute": "arithmetic", "link": "the link"})


def _condition(kind: Kind, setting: Setting, claimed: float, catalog: PlanCatalog, stated: frozenset[str]) -> Condition:
    needed, unit = _NEEDED[kind](setting, claimed)
    moves = _MOVES[kind](setting, claimed, catalog)
    enough = [move for move in moves if move.setting.allows(claimed)]
    if enough:
        chosen, *more = enough
        others = [move.text for move in more] if kind == "hardware" else []
        note = chosen.doubt or (f"so do {', '.join(others)}" if others else "")
        return Condition(
            kind, needed, unit, chosen.text, chosen.setting.rate(), True, not chosen.doubt, kind in stated, note
        )  # fmt: skip
    if not moves:
        return Condition(kind, needed, unit, "-", None, False, False, kind in stated, _NOTHING[kind])
    last = max(moves, key=lambda move: move.setting.rate())
    room = last.setting.room
    note = f"not enough; the limit is then {_LIMITS[last.setting.forward().bound]}" if room.fits else room.lack
    return Condition(
        kind, needed, unit, last.text, last.setting.rate(), False, not last.doubt, kind in stated, note
    )  # fmt: skip


# How much is needed, by the division.


def _budget(setting: Setting, claimed: float) -> float:
    """Bytes that a step may read."""
    return setting.users * setting.tokens_per_step * setting.bandwidth / claimed


def _bits_needed(setting: Setting, claimed: float) -> tuple[float | None, str]:
    bits = 8 * (_budget(setting, claimed) - setting.step_bytes.kv) / setting.weights_read
    return bits if bits > 0 else None, "bits a weight"


def _kv_bits_needed(setting: Setting, claimed: float) -> tuple[float | None, str]:
    left = _budget(setting, claimed) - setting.step_bytes.weights
    bits = 8 * setting.deployment.kv_bytes * left / setting.step_bytes.kv
    return bits if bits > 0 else None, "bits a number"


def _gpus_needed(setting: Setting, claimed: float) -> tuple[float | None, str]:
    return setting.deployment.gpus * claimed / setting.ceiling, "accelerators"


def _bandwidth_needed(setting: Setting, claimed: float) -> tuple[float | None, str]:
    return setting.deployment.hardware.bandwidth * claimed / setting.ceiling / 1e12, "TB/s each"


def _users_needed(setting: Setting, claimed: float) -> tuple[float | None, str]:
    needed = _smallest_batch(setting, lambda together: together.ceiling >= claimed)
    return needed, "sequence" if needed == 1 else "sequences together"


def _tokens_needed(setting: Setting, claimed: float) -> tuple[float | None, str]:
    return setting.tokens_per_step * claimed / setting.ceiling, "tokens a step"


_NEEDED: Mapping[Kind, Callable[[Setting, float], tuple[float | None, str]]] = MappingProxyType({
    "weights": _bits_needed, "kv": _kv_bits_needed, "gpus": _gpus_needed, "hardware": _bandwidth_needed,
    "batch": _users_needed, "acceptance": _tokens_needed,
})  # fmt: skip


def _smallest_batch(setting: Setting, enough: Callable[[Setting], bool]) -> int | None:
    """The smallest batch, not under the stated one, whose tokens together are enough; None: none up to the most."""

    def at(batch: int) -> bool:
        return enough(replace(setting, batch=batch, aggregate=True))

    bad, good = setting.batch - 1, setting.batch
    while not at(good):
        bad, good = good, good * 2
        if good > MOST_USERS:
            return None
    while good - bad > 1:
        middle = (good + bad) // 2
        bad, good = (bad, middle) if at(middle) else (middle, good)
    return good


# What can be changed, mild to strong.


def _formats(setting: Setting) -> list[Move]:
    formats = setting.model.formats
    now = max(formats.bytes_of(kind) for kind in ("linear", "experts") if kind == "linear" or setting.model.experts)
    unpacked = formats.linear.startswith("q") or formats.linear.endswith("bits")
    names = _GGUF_FORMATS if unpacked else _GPU_FORMATS
    moves = []
    for name in names:
        if WEIGHT_BITS[name] / 8 < now:
            model = replace(setting.model, formats=_lowered(formats, name))
            where = setting.deployment
            if name in where.hardware.flops:
                where = replace(where, activations=name)
            moves.append(Move("weights", f"{name} weights", replace(setting, model=model, deployment=where)))
    return moves


def _lowered(formats: WeightFormats, name: str) -> WeightFormats:
    """All weights in that format, but for those that have fewer bits already."""

    def lower(kind: str) -> str:
        return name if WEIGHT_BITS[name] / 8 < formats.bytes_of(kind) else str(getattr(formats, kind))

    return WeightFormats(*(lower(kind) for kind in ("linear", "experts", "head", "embedding")))


def _kv(setting: Setting) -> list[Move]:
    if setting.deployment.kv_bytes == 1:
        return []
    return [Move("kv", "fp8 KV", replace(setting, deployment=replace(setting.deployment, kv="fp8")))]


def _gpus(setting: Setting) -> list[Move]:
    where, model = setting.deployment, setting.model
    moves = []
    tensor = 2 * where.tensor
    while where.hardware.link and tensor * where.pipeline <= MOST_GPUS and model.heads % tensor == 0:
        count = tensor * where.pipeline
        doubt = ""
        if count > NODE:
            doubt = f"more than a usual node of {NODE}, with slower links between nodes"
            if tensor > model.kv_heads:
                doubt += f"; past {model.kv_heads} KV heads the cache is kept {tensor / model.kv_heads:g} times"
        setting_there = replace(setting, deployment=replace(where, tensor=tensor))
        moves.append(Move("gpus", f"{count} x {where.hardware.name}", setting_there, doubt))
        tensor *= 2
    return moves


def _hardware(setting: Setting, catalog: PlanCatalog) -> list[Move]:
    now = setting.deployment.hardware
    faster = [h for h in catalog.hardware.values() if h.bandwidth > now.bandwidth and h.name != LOCAL]
    moves = []
    for hardware in sorted(faster, key=lambda item: item.bandwidth):
        where = _moved(setting, hardware)
        if where is not None:
            moves.append(Move("hardware", hardware.name, where))
    return moves


def _moved(setting: Setting, hardware: Hardware) -> Setting | None:
    """The same on other hardware, or None if it can't be."""
    where = setting.deployment
    activations = where.activations if where.activations in hardware.flops else "bf16"
    try:
        there = replace(where, hardware=hardware, activations=activations, efficiency=None)
    except PlanError:
        return None
    return replace(setting, deployment=there)


def _users(setting: Setting, claimed: float) -> list[Move]:
    batch = _smallest_batch(setting, lambda together: together.rate() >= claimed)
    if batch is None:
        return []
    users = "1 user" if batch == 1 else f"{batch} users together"
    text = users if not setting.aggregate else f"a batch of {batch}"
    return [Move("batch", text, replace(setting, batch=batch, aggregate=True))]


def _tokens(setting: Setting, claimed: float) -> list[Move]:
    """The fewest tokens a step that do, verifying at least as many."""
    for queries in range(math.ceil(setting.tokens_per_step), MOST_QUERIES + 1):
        # The seconds are those of any tokens a step that round up to `queries`.
        step = replace(setting, tokens_per_step=queries)
        needed = max(claimed * queries / step.rate(), setting.tokens_per_step)
        if needed <= queries:
            doubt = "" if needed <= MOST_TOKENS else f"more than the {MOST_TOKENS:g} that are plausible"
            # Rounded up, so that it is enough in spite of rounding.
            exact = min(float(queries), needed * (1 + 1e-12))
            text = f"{needed:.2f} tokens a step"
            return [Move("acceptance", text, replace(setting, tokens_per_step=exact), doubt)]
    return []


_Moves = Callable[[Setting, float, PlanCatalog], list[Move]]
_MOVES: Mapping[Kind, _Moves] = MappingProxyType({
    "weights": lambda setting, _claimed, _catalog: _formats(setting),
    "kv": lambda setting, _claimed, _catalog: _kv(setting),
    "gpus": lambda setting, _claimed, _catalog: _gpus(setting),
    "hardware": lambda setting, _claimed, catalog: _hardware(setting, catalog),
    "batch": lambda setting, claimed, _catalog: _users(setting, claimed),
    "acceptance": lambda setting, claimed, _catalog: _tokens(setting, claimed),
})  # fmt: skip

_NOTHING: Mapping[Kind, str] = MappingProxyType({
    "weights": "no format has fewer bits",
    "kv": "no type has fewer bits",
    "gpus": "it has no link to others, or there are no more to try",
    "hardware": "the catalog has none with more bandwidth",
    "batch": "KV and arithmetic of each sequence cost more than it gives",
    "acceptance": f"not with {MOST_QUERIES} tokens verified a step",
})  # fmt: skip


# What is reported but isn't a condition of this model.


def _active(setting: Setting, claimed: float, catalog: PlanCatalog) -> Condition:
    """Parameters that a step may read. Another model, so it never makes the claim true of this one."""
    read, room = setting.step_bytes, _budget(setting, claimed) - setting.step_bytes.kv
    needed = setting.weights_read * room / read.weights
    if needed <= 0:
        return Condition("active", None, "G parameters a step", "-", None, False, False, False, "KV alone is too much")
    if needed >= setting.weights_read:
        return Condition("active", needed / 1e9, "G parameters a step", "-", None, False, False, False, "not the limit")
    small = [
        (shape.network.n_active, name) for name, shape in catalog.models.items() if shape.network.n_active <= needed
    ]
    active, name = max(small, default=(0, "-"))
    note = f"another model: it has {active / 1e9:.3g} G" if small else "another model; the catalog has none so small"
    return Condition("active", needed / 1e9, "G parameters a step", name, None, False, False, False, note)


def _drafter(setting: Setting, claimed: float, proposal: Proposal, stated: frozenset[str]) -> Condition:
    """A drafter at its best length, its own time counted, at peaks."""
    where = setting.forward().deployment
    point = best(setting.model.network, where, proposal, batch=setting.batch, context=setting.context)
    rate = setting.users * point.tokens_per_second
    rates = ",".join(f"{rate:g}" for rate in proposal.acceptance.rates)
    text = f"{point.drafter}, {point.length} drafts"
    note = f"{point.tokens_per_step:.2f} tokens a step at acceptance {rates}"
    room = setting.room_with(proposal.drafter, point.length)
    if not room.fits:
        note = room.lack
    enough = rate >= claimed and room.fits
    needed = claimed / (rate / point.tokens_per_step) if rate else None
    return Condition("drafter", needed, "tokens a step", text, rate, enough, True, "acceptance" in stated, note)
