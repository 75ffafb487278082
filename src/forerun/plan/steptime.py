"""The time of a forward from what it moves and multiplies (docs/step-time.md has every equation).

A roofline by phase (Williams et al. 2009): linear layers, experts, attention and head each take the larger of their
bytes over the bandwidth and their FLOPs over the peak rate (or a smooth maximum of both, `Efficiency.order`);
collectives and launches come on top. Phases follow one another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from forerun.errors import PlanError
from forerun.plan.deployment import Deployment
from forerun.plan.network import Network
from forerun.plan.shapes import Model, as_network

Bound = Literal["memory", "compute", "link", "overhead"]

LOGIT_BYTES = 4
"""The head writes float32 scores."""


MOST = 10**9
"""The largest batch, and the most tokens: far more than any machine holds, and small enough to multiply."""


class Load(NamedTuple):
    """Who shares a forward: `batch` sequences, each with `queries` new tokens after `context` cached ones.

    scored: of the new tokens of each sequence, those whose next-token scores are wanted; None: all. A prompt wants 1.
    """

    batch: int
    queries: int = 1
    context: float = 0
    scored: int | None = None

    def check(self) -> None:
        """Raises PlanError naming what is out of range."""
        for name in ("batch", "queries"):
            value = getattr(self, name)
            if not (isinstance(value, int) and 1 <= value <= MOST):
                raise PlanError(name, f"{_short(value)} is not allowed; expected a whole number from 1 to {MOST}")
        if self.scored is not None and not 0 <= self.scored <= self.queries:
            raise PlanError("scored", f"{self.scored} is not allowed; expected 0 to {self.queries} tokens")
        if not 0 <= self.context <= MOST:
            raise PlanError("context", f"{_short(self.context)} is not allowed; expected 0 to {MOST} tokens")


def _short(value: float) -> str:
    """A number that may have any number of digits."""
    text = str(value) if not isinstance(value, int) or abs(value) < 10**20 else "a number of more than 20 digits"
    return text[:40]


class Part(NamedTuple):
    """One phase of a forward, on each accelerator.

    weight_bytes, kv_bytes, activation_bytes: moved to and from memory. flops: floating-point operations. link_bytes:
    sent. memory_seconds, compute_seconds: what bytes and FLOPs take alone; seconds: what the phase takes. bound: which
    of them it waits for.
    """

    name: str
    weight_bytes: float
    kv_bytes: float
    activation_bytes: float
    flops: float
    link_bytes: float
    memory_seconds: float
    compute_seconds: float
    seconds: float
    bound: Bound

    @property
    def bytes(self) -> float:
        """Bytes to and from memory."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes


@dataclass(frozen=True)
class ForwardTime:
    """What one forward takes, by phase. Bytes and FLOPs are those of one accelerator of each stage together.

    experts_touched: distinct experts read in a layer, expected; 0 without experts.
    """

    network: Network
    deployment: Deployment
    load: Load
    parts: tuple[Part, ...]
    experts_touched: float

    @property
    def seconds(self) -> float:
        """Of the forward, launches included; what the engine does besides (`Efficiency.step_us`) isn't."""
        return sum(part.seconds for part in self.parts)

    @property
    def bytes(self) -> float:
        """Moved to and from memory."""
        return sum(part.bytes for part in self.parts)

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        return sum(part.flops for part in self.parts)

    @property
    def bound(self) -> Bound:
        """What most of the time is spent waiting for."""
        waited: dict[Bound, float] = {}
        for part in self.parts:
            waited[part.bound] = waited.get(part.bound, 0.0) + part.seconds
        return max(waited, key=waited.__getitem__)

    @property
    def beyond_measured(self) -> list[str]:
        """What of it lies outside of the step times that the efficiency was fitted to, one phrase each. Empty: nothing,
        or the efficiency is no measured one."""
        measured = self.deployment.hardware.measured
        if measured is None or self.deployment.efficiency is not None:
            return []
        batch, queries, context, _scored = self.load
        return measured.beyond(batch=batch, queries=queries, context=context, model=self.network.name)

    def part(self, name: str) -> Part:
        """The phase of that name. KeyError if there is none."""
        return next((part for part in self.parts if part.name == name), None) or _no_part(name)


def _no_part(name: str) -> Part:
    raise KeyError(name)


def expected_distinct(n: int, active: int, tokens: float) -> float:
    """Distinct experts that `tokens` tokens touch if each picks `active` of `n`, all alike and independently.

    n (1 - (1 - active/n)^tokens). Real routers are less even, so this is an upper limit of the mean.
    """
    return n * (1 - math.pow(1 - active / n, tokens))


def busiest(n: int, active: int, tokens: float, shares: int) -> float:
    """Distinct experts on the busiest of `shares` accelerators with n / shares experts each.

    Mean plus sqrt(2 ln shares) standard deviations, the usual bound of the largest of `shares` normal variables, and at
    most n / shares. One share: the mean of all.
    """
    mean = expected_distinct(n, active, tokens)
    if shares == 1:
        return mean
    p = mean / n
    return min(mean / shares + math.sqrt(2 * math.log(shares) * n / shares * p * (1 - p)), n / shares)


def forward_time(model: Model, deployment: Deployment, load: Load) -> ForwardTime:
    """What a forward of `load` through a model takes on `deployment`.

    With pipeline stages the batch passes in as many equal parts as there are stages (or sequences, if fewer): everybody
    gets the next token after one part has passed all stages, so that time is the step's, and bytes and FLOPs are
    one part's.

    Raises:
        PlanError: the load is out of range.
    """
    load.check()
    network = as_network(model)
    sequences = load.batch / min(deployment.pipeline, load.batch)
    tokens = sequences * load.queries
    dense, eff, t = network.dense, deployment.eff, deployment.tensor
    act, width = deployment.act_bytes, network.hidden
    parts: list[Part] = []

    def phase(name: str, weights: float, kv: float, activations: float, flops: float, *, wide: bool = False) -> None:
        memory = (weights + kv + activations) / (deployment.hardware.bandwidth * eff.bandwidth)
        compute = flops / ((deployment.wide_peak if wide else deployment.peak) * eff.compute)
        seconds = eff.overlapped(memory, compute)
        bound: Bound = "memory" if memory >= compute else "compute"
        parts.append(Part(name, weights, kv, activations, flops, 0.0, memory, compute, seconds, bound))

    if dense.parameters:
        phase("linear", dense.bytes / t, 0.0, tokens * dense.io * act / t, 2 * dense.parameters * tokens / t)
    touched = 0.0
    if network.mixtures:
        weights = activations = flops = 0.0
        n_layers = sum(mixture.layers for mixture in network.mixtures)
        for mixture in network.mixtures:
            here = busiest(mixture.n, mixture.active, tokens, deployment.expert)
            weights += mixture.layers * mixture.bytes * here * deployment.expert / t
            activations += mixture.layers * mixture.active * mixture.io * tokens * act / t
            flops += 2 * mixture.layers * mixture.active * mixture.parameters * tokens / t
            touched += mixture.layers * expected_distinct(mixture.n, mixture.active, tokens) / n_layers
        phase("experts", weights, 0.0, activations, flops)
    kv = flops = 0.0
    for group in network.layers:
        attention = group.attention
        if attention is not None:
            kept = attention.keys(load.context) + load.queries
            share = attention.kept_share(t)
            kv += group.repeats * attention.kv_width * kept * sequences * deployment.kv_bytes * share
            pairs = attention.pairs(load.queries, load.context)
            flops += 2 * group.repeats * attention.pair_width * pairs * sequences / t
    if flops:
        phase("attention", 0.0, kv, 0.0, flops, wide=True)
    scored = sequences * (load.queries if load.scored is None else load.scored)
    if network.head is not None:
        head = network.head
        written = scored * (head.n_out * LOGIT_BYTES + head.n_in * act)
        weights = head.size * network.formats.bytes_of("head") / t
        phase("head", weights, 0.0, written / t, 2 * head.size * scored / t, wide=True)
    sent = seconds = 0.0
    link = deployment.hardware.link * eff.link
    if t > 1:
        reduced = 2 * network.n_layers * tokens * width * act * 2 * (t - 1) / t
        gathered = scored * network.head.n_out * act * (t - 1) / t if network.head else 0.0
        sent += reduced + gathered
        seconds += (2 * network.n_layers + (network.head is not None)) * deployment.collective_seconds
    if deployment.pipeline > 1:
        sent += deployment.pipeline * tokens * width * act
        seconds += deployment.pipeline * deployment.collective_seconds
    if sent:
        seconds += sent / link
        parts.append(Part("communication", 0.0, 0.0, 0.0, 0.0, sent, 0.0, 0.0, seconds, "link"))
    fixed = (eff.launch_us + eff.layer_us * network.n_layers) * 1e-6
    if fixed:
        parts.append(Part("launches", 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, fixed, "overhead"))
    return ForwardTime(network, deployment, load, tuple(parts), touched)
