"""What a claim says about its conditions, and the speed that physics allows under them (docs/plan-claim.md)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from forerun.errors import PlanError
from forerun.plan.deployment import Deployment
from forerun.plan.drafters import PricedDrafter
from forerun.plan.hardware import Efficiency
from forerun.plan.memory import UTILIZATION, kv_copies, sequence_bytes, usable_bytes
from forerun.plan.network import Mixture
from forerun.plan.shapes import ModelShape
from forerun.plan.steptime import ForwardTime, Load, expected_distinct, forward_time

MOST_QUERIES = 64
"""Tokens that a step can verify for one sequence."""


class StepBytes(NamedTuple):
    """What one step of plain decoding has to read, over all accelerators that work on it at a time: weights once, the
    KV of every sequence (copies included)."""

    weights: float
    kv: float

    @property
    def total(self) -> float:
        """Both."""
        return self.weights + self.kv


class Room(NamedTuple):
    """Bytes needed against bytes there are, on all accelerators together."""

    weights: float
    kv: float
    usable: float

    @property
    def fits(self) -> bool:
        """Whether weights and KV have room."""
        return self.weights + self.kv <= self.usable

    @property
    def lack(self) -> str:
        """In few words that it doesn't fit."""
        return f"doesn't fit: {(self.weights + self.kv) / 1e9:.1f} of {self.usable / 1e9:.1f} GB"

    def __str__(self) -> str:
        return f"weights {self.weights / 1e9:.1f} GB and KV {self.kv / 1e9:.1f} GB of {self.usable / 1e9:.1f} GB"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Conditions of a claim.

    batch: sequences that share a step. context: cached tokens of each. tokens_per_step: tokens that a sequence gets of
    a step, 1 without speculation. aggregate: speeds are those of all sequences together, not of one. utilization: share
    of the memory that is used.
    """

    model: ModelShape
    deployment: Deployment
    batch: int = 1
    context: float = 1000
    tokens_per_step: float = 1.0
    aggregate: bool = False
    utilization: float = UTILIZATION

    def __post_init__(self) -> None:
        Load(self.batch, 1, self.context).check()
        if not 1 <= self.tokens_per_step <= MOST_QUERIES:
            raise PlanError(
                "tokens-per-step", f"{self.tokens_per_step} is not allowed; expected 1 to {MOST_QUERIES} tokens"
            )
        usable_bytes(self.deployment, self.utilization)

    @property
    def users(self) -> int:
        """Sequences whose tokens the speed counts."""
        return self.batch if self.aggregate else 1

    @property
    def sequences(self) -> float:
        """Sequences that pass the stages of a pipeline together."""
        return self.batch / min(self.deployment.pipeline, self.batch)

    @property
    def step_bytes(self) -> StepBytes:
        """What a step of plain decoding reads."""
        network, where = self.model.network, self.deployment
        weights = self._read(network.dense.bytes, lambda mixture: mixture.bytes, network.formats.bytes_of("head"))
        kv = sum(
            group.repeats * group.attention.kv_width * (group.attention.keys(self.context) + 1)
            * kv_copies(group.attention, where)
            for group in network.layers if group.attention
        )  # fmt: skip
        return StepBytes(weights, kv * self.sequences * where.kv_bytes)

    @property
    def weights_read(self) -> float:
        """Parameters behind `step_bytes.weights`."""
        return self._read(self.model.network.dense.parameters, lambda mixture: mixture.parameters, 1)

    def _read(self, dense: float, expert: Callable[[Mixture], float], head: float) -> float:
        """What a step reads of the weights over all accelerators, in the unit of its arguments: all of the dense ones,
        one expert, one parameter of the head.

        `forward_time` counts the experts of the busiest accelerator where whole experts are dealt out; a bound has the
        mean of all.
        """
        network = self.model.network
        for mixture in network.mixtures:
            dense += mixture.layers * expert(mixture) * expected_distinct(mixture.n, mixture.active, self.sequences)
        return dense + (network.head.size * head if network.head else 0)

    @property
    def bandwidth(self) -> float:
        """Bytes/s of the accelerators that work on a token at a time: stages of a pipeline follow one another."""
        return self.deployment.hardware.bandwidth * self.deployment.tensor

    @property
    def ceiling(self) -> float:
        """Tokens/s by one division: bandwidth over bytes of a step, times the tokens that a step gives."""
        return self.users * self.tokens_per_step * self.bandwidth / self.step_bytes.total

    def forward(self, efficiency: Efficiency | None = None) -> ForwardTime:
        """The forward of a step by the full model; without `efficiency` at peaks.

        Speculation is priced at the least that it can cost: drafts are free, and only as many tokens are verified as
        are accepted.
        """
        where = replace(self.deployment, efficiency=efficiency or Efficiency.ideal())
        return forward_time(
            self.model.network, where, Load(self.batch, math.ceil(self.tokens_per_step), self.context)
        )  # fmt: skip

    def rate(self, efficiency: Efficiency | None = None) -> float:
        """Tokens/s by the full model: arithmetic, collectives and activations, too; without `efficiency` at peaks."""
        beside = efficiency.step_us * 1e-6 if efficiency else 0.0
        return self.users * self.tokens_per_step / (self.forward(efficiency).seconds + beside)

    @property
    def room(self) -> Room:
        """What it takes of the memory."""
        network, where = self.model.network, self.deployment
        tokens = self.context + math.ceil(self.tokens_per_step)
        kv = self.batch * sequence_bytes(network, where, tokens)
        return Room(network.weight_bytes, kv, usable_bytes(where, self.utilization))

    def room_with(self, drafter: PricedDrafter, length: int) -> Room:
        """What it takes with a drafter's weights and KV, and slots for its drafts."""
        network, where = self.model.network, self.deployment
        tokens = self.context + 1 + length
        kv = sequence_bytes(network, where, tokens) + sequence_bytes(drafter, where, tokens)
        weights = network.weight_bytes + drafter.weight_bytes
        return Room(weights, self.batch * kv, usable_bytes(where, self.utilization))

    def allows(self, claimed: float) -> bool:
        """Whether that many tokens/s are possible: the model fits, and the peaks suffice."""
        return self.room.fits and self.rate() >= claimed
