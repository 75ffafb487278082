"""How many sequences a machine holds, when its KV pool is full, and what then happens (docs/plan-capacity.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from forerun.errors import PlanError
from forerun.plan.acceptance import Acceptance
from forerun.plan.deployment import Deployment
from forerun.plan.drafters import PricedDrafter, ngram
from forerun.plan.memory import (
    BLOCK,
    UTILIZATION,
    check_fits,
    kv_copies,
    kv_token_bytes,
    pool_bytes,
    sequence_bytes,
    window_tokens,
)
from forerun.plan.network import Attention, Layers, Network
from forerun.plan.shapes import as_network
from forerun.plan.speculate import Point, Proposal, best, price
from forerun.plan.steptime import Load, forward_time

CHUNK = 2048
"""Tokens of a prompt that are computed in one step."""

_SAMPLED = 128


class Lengths(NamedTuple):
    """Tokens of every request. The first token of a reply counts as one of its decode steps."""

    prompt: int
    reply: int

    def check(self) -> None:
        """Raises PlanError naming what is out of range."""
        for name in ("prompt", "reply"):
            value = getattr(self, name)
            if not (isinstance(value, int) and 1 <= value <= 10**9):
                raise PlanError(name, f"{value} is not allowed; expected a whole number of tokens, 1 to 1e9")


class Growth(NamedTuple):
    """How a request grows. tokens_per_step: of a decode step, expected. drafts: slots that a step takes for draft
    tokens, given back when they are rejected."""

    tokens_per_step: float = 1.0
    drafts: int = 0


class Fitting(NamedTuple):
    """Requests that the pool holds: all in their first decode step, spread evenly over their lives, in their last."""

    at_start: int
    on_average: int
    to_the_end: int


class Preemption(NamedTuple):
    """What it costs to take a request of `tokens` tokens out of the pool and back.

    recompute_seconds: prefill of its tokens in chunks, the drafter's too, with nothing else in the step. swap_bytes:
    its KV on all accelerators, one way. swap_seconds: there and back over the host links; None: there are none.
    """

    tokens: int
    recompute_seconds: float
    swap_bytes: float
    swap_seconds: float | None


class Row(NamedTuple):
    """One batch of requests that start together.

    point: step time and tokens a step, half-way from the prompts to the end, or to a full pool. pool_start, pool_end:
    share of the pool that they want in the first and the last step. fills_at: the first decode step, from 1, in which
    they don't fit, and fills_tokens what each has by then; None: they fit to the end.
    """

    batch: int
    point: Point
    pool_start: float
    pool_end: float
    fills_at: int | None
    fills_tokens: int | None

    @property
    def step_seconds(self) -> float:
        """Draft and verify, and what is besides."""
        return self.point.draft_seconds + self.point.verify_seconds


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """A model on a machine with requests alike.

    utilization: share of the memory that is used. block: tokens of a block of the pool. proposal: a drafter, whose
    weights and KV take part of it. chunk: tokens of a prompt in one step.

    Raises:
        PlanError: something is out of range, or not even one request can start.
    """

    network: Network
    deployment: Deployment
    lengths: Lengths
    utilization: float = UTILIZATION
    block: int = BLOCK
    chunk: int = CHUNK
    proposal: Proposal | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "network", as_network(self.network))
        self.lengths.check()
        for name in ("block", "chunk"):
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= 1):
                raise PlanError(name, f"{value} is not allowed; expected a whole number, at least 1")
        check_fits(
            self.network, self.deployment, batch=1, context=self.lengths.prompt + 1, drafter=self.drafter,
            utilization=self.utilization,
        )  # fmt: skip

    @property
    def drafter(self) -> PricedDrafter | None:
        """The drafter, if there is one."""
        return self.proposal.drafter if self.proposal else None

    @cached_property
    def pool(self) -> float:
        """Bytes for KV on all accelerators."""
        return pool_bytes(self.network, self.deployment, self.drafter, utilization=self.utilization)

    @property
    def token_bytes(self) -> float:
        """KV of a token while a text is within all windows, the drafter's included."""
        return self._both(kv_token_bytes(self.network, self.deployment), windowed=True)

    @property
    def long_token_bytes(self) -> float:
        """KV that a further token adds beyond all windows."""
        return self._both(kv_token_bytes(self.network, self.deployment, windowed=False), windowed=False)

    def _both(self, target: float, *, windowed: bool) -> float:
        return target + (kv_token_bytes(self.drafter, self.deployment, windowed=windowed) if self.drafter else 0.0)

    def held(self, tokens: int) -> float:
        """Bytes of the pool that a sequence of so many tokens holds, in whole blocks."""
        target = sequence_bytes(self.network, self.deployment, tokens, block=self.block)
        if self.drafter is None:
            return target
        return target + sequence_bytes(self.drafter, self.deployment, tokens, block=self.block)

    def steps(self, growth: Growth) -> int:
        """Decode steps of a request."""
        return math.ceil(self.lengths.reply / growth.tokens_per_step)

    def needs(self, step: int, growth: Growth) -> int:
        """Tokens that a request has slots for in its decode step `step`, from 1: what is cached, the token that is
        computed, and drafts, no more than the reply still lacks."""
        cached = growth.tokens_per_step * (step - 1)
        return self.lengths.prompt + math.ceil(min(cached + 1 + growth.drafts, self.lengths.reply))

    @cached_property
    def fitting(self) -> Fitting:
        """How many requests fit. On average: against the mean of what one holds from its first to its last token, as if
        starts were spread evenly; it leaves nothing for chance."""
        prompt, reply = self.lengths
        held = self.held(prompt + 1), self.mean_held, self.held(prompt + reply)
        return Fitting(*(math.floor(self.pool / each) for each in held))

    @property
    def mean_held(self) -> float:
        """Bytes that a request holds, on average over the tokens of its reply."""
        groups = [*self.network.layers, *(self._drafter_layers())]
        return sum(
            group.repeats * group.attention.kv_width * self.deployment.kv_bytes
            * kv_copies(group.attention, self.deployment) * self._mean_tokens(group.attention)
            for group in groups if group.attention
        )  # fmt: skip

    def _drafter_layers(self) -> tuple[Layers, ...]:
        network = self.drafter.network if self.drafter else None
        return network.layers if network else ()

    def _mean_tokens(self, attention: Attention) -> float:
        """Of `kept_tokens` over lengths prompt + 1 to prompt + reply."""
        prompt, reply = self.lengths
        most = math.inf if attention.window is None else window_tokens(attention.window, self.block)
        return (_kept_sum(prompt + reply, most, self.block) - _kept_sum(prompt, most, self.block)) / reply

    def fills_at(self, batch: int, growth: Growth) -> int | None:
        """The first decode step, from 1, in which `batch` requests that start together don't fit; None: they do."""

        def full(step: int) -> bool:
            return batch * self.held(self.needs(step, growth)) > self.pool

        last = self.steps(growth)
        if not full(last):
            return None
        low, high = 0, last
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if full(middle) else (middle, high)
        return high

    def preemption(self, tokens: int) -> Preemption:
        """What it costs to preempt a request of so many tokens."""
        where, drafter = self.deployment, self.drafter
        networks = [self.network]
        if drafter is not None and drafter.network is not None and drafter.kv_width:
            networks.append(drafter.network)
        seconds, done = 0.0, 0
        for size, count in _chunks(tokens, self.chunk):
            # Between kinks the time is linear in what is cached, so that the middle of some chunks stands for them all.
            sampled = min(count, _SAMPLED)
            before = [done + ((i + 0.5) * count / sampled - 0.5) * size for i in range(sampled)]
            for network in networks:
                times = [forward_time(network, where, Load(1, size, context, 1)).seconds for context in before]
                seconds += sum(times) * count / sampled
            seconds += count * where.eff.step_us * 1e-6
            done += size * count
        moved = self.held(tokens)
        host = where.hardware.host * where.eff.link * where.gpus
        return Preemption(tokens, seconds, moved, 2 * moved / host if host else None)

    def rows(self, batches: Iterable[int], *, length: int | None = None) -> list[Row]:
        """Speed and memory of each batch. `length`: draft tokens; None: the best at each batch."""
        return [self._row(batch, length) for batch in batches]

    def longest(self, batch: int) -> int:
        """Tokens up to which `batch` requests fit, no more than prompt and reply have and no fewer than the prompt."""
        low, high = self.lengths.prompt, sum(self.lengths) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if batch * self.held(middle) <= self.pool else (low, middle)
        return low

    def _row(self, batch: int, length: int | None) -> Row:
        Load(batch).check()
        point = self._point(batch, (self.lengths.prompt + self.longest(batch)) / 2, length)
        growth = Growth(point.tokens_per_step, point.length)
        fills = self.fills_at(batch, growth)
        start, end = self.held(self.needs(1, growth)), self.held(self.lengths.prompt + self.lengths.reply)
        return Row(
            batch, point, batch * start / self.pool, batch * end / self.pool, fills,
            None if fills is None else self.needs(fills, growth),
        )  # fmt: skip

    def _point(self, batch: int, context: float, length: int | None) -> Point:
        if self.proposal is None:
            if length:
                raise PlanError("length", f"{length} draft tokens need a drafter (--drafter)")
            proposal, length = _PLAIN, 0
        else:
            proposal = self.proposal
        if length is None:
            return best(self.network, self.deployment, proposal, batch=batch, context=context)
        return price(self.network, self.deployment, proposal, batch=batch, context=context, length=length)


_PLAIN = Proposal(ngram("none"), Acceptance.of(0.0))


def _kept_sum(n: int, most: float, block: int) -> float:
    """Sum over c = 1 to n of min(c rounded up to whole blocks, most), `most` being whole blocks."""
    if math.isinf(most) or n <= most:
        blocks, rest = divmod(n, block)
        return block * (block * blocks * (blocks + 1) / 2 + rest * (blocks + 1))
    return _kept_sum(int(most), math.inf, block) + (n - most) * most


def _chunks(tokens: int, chunk: int) -> list[tuple[int, int]]:
    """Sizes of the chunks of a prompt, and how many there are of each."""
    whole, rest = divmod(tokens, chunk)
    return [(size, count) for size, count in ((chunk, whole), (rest, 1)) if size and count]


def default_batches(fitting: Fitting, most: int = 4096) -> Sequence[int]:
    """Powers of two up to what fits at the start, and the three counts themselves."""
    last = min(max(fitting.at_start, 1), most)
    powers = [1 << i for i in range(last.bit_length())]
    return sorted({batch for batch in (*powers, *fitting) if 1 <= batch <= last})
