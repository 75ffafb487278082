"""A transformer as the matrices it reads and the products it makes: what a step costs follows from these.

Targets and drafters are both networks, so one model of a step prices them all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from forerun.plan.formats import WeightFormats

Kind = Literal["linear", "experts", "head"]


class Linear(NamedTuple):
    """A matrix, or `experts` alike of which a token uses `active`.

    n_in, n_out: of one of them. n_bias: bias entries of one of them.
    """

    name: str
    n_in: int
    n_out: int
    kind: Kind = "linear"
    experts: int = 1
    active: int = 1
    n_bias: int = 0

    @property
    def size(self) -> int:
        """Parameters of one expert (of the whole, where there is one)."""
        return self.n_in * self.n_out + self.n_bias


class Attention(NamedTuple):
    """What a layer's attention keeps and multiplies.

    kv_width: numbers kept for each token. kv_shards: over how many GPUs of a tensor-parallel group they can be split
    before they are kept twice (the key-value heads; 1 for the latent of MLA). pair_width: numbers multiplied for each
    pair of query and key, scores and values together, over all heads; FLOPs are twice that. window: keys that a query
    sees, itself included; None: all.
    """

    kv_width: int
    kv_shards: int
    pair_width: int
    window: int | None = None

    def kept_share(self, tensor: int) -> float:
        """Share of the cache that each of `tensor` accelerators keeps and reads: whole key-value heads, so as many as
        the one with the most of them."""
        return math.ceil(self.kv_shards / tensor) / self.kv_shards

    def pairs(self, queries: int, context: float) -> float:
        """Pairs of query and key when `queries` tokens follow `context` cached ones, each seeing itself and what is
        before it."""
        if self.window is None:
            return queries * context + queries * (queries + 1) / 2
        whole = min(max(self.window - context, 0.0), float(queries))  # queries whose window isn't full
        n = int(whole)
        return n * context + n * (n + 1) / 2 + (queries - n) * float(self.window)

    def keys(self, context: float) -> float:
        """Cached tokens that are read, each once for all queries of a sequence: the first one sees the most of them."""
        return context if self.window is None else min(context, self.window - 1.0)


class Layers(NamedTuple):
    """`repeats` layers alike. n_other: parameters of one that are in no matrix (norms, sinks)."""

    name: str
    repeats: int
    linears: tuple[Linear, ...]
    attention: Attention | None
    n_other: int = 0


class Dense(NamedTuple):
    """All matrices that every token uses, over all layers, without the head.

    io: numbers that flow in and out of them for one token.
    """

    parameters: int
    bytes: float
    io: int


class Mixture(NamedTuple):
    """The experts of `layers` layers, each with `n` of which a token uses `active`; the rest is of one expert."""

    layers: int
    n: int
    active: int
    parameters: int
    bytes: float
    io: int


@dataclass(frozen=True)
class Network:
    """Layers between an embedding and a head.

    hidden: numbers that flow from layer to layer. head: the output matrix, read and multiplied by every token; None if
    the network ends with its layers. embedding: parameters of an embedding of its own (0 if it uses another's); only
    the rows of the step's tokens are read. owns_head: whether the head's memory is its own (not if it is tied to the
    embedding, or the target's). n_other: parameters in no matrix and no layer. formats: of the weights.
    """

    name: str
    hidden: int
    layers: tuple[Layers, ...]
    head: Linear | None
    embedding: int
    owns_head: bool
    formats: WeightFormats
    n_other: int = 0

    @cached_property
    def n_layers(self) -> int:
        """Layers, as they are passed one after the other."""
        return sum(group.repeats for group in self.layers)

    @cached_property
    def n_parameters(self) -> int:
        """All parameters that it owns."""
        own = self.embedding + self.n_other + (self.head.size if self.head and self.owns_head else 0)
        return own + sum(
            group.repeats * (group.n_other + sum(linear.size * linear.experts for linear in group.linears))
            for group in self.layers
        )

    @cached_property
    def n_active(self) -> int:
        """Parameters that one token's forward multiplies: layers with the experts it uses, and the head."""
        return (self.head.size if self.head else 0) + sum(
            group.repeats * sum(linear.size * linear.active for linear in group.linears) for group in self.layers
        )

    @cached_property
    def dense(self) -> Dense:
        """What every token's forward multiplies, but for the head."""
        found = [(group.repeats, linear) for group in self.layers for linear in group.linears if linear.experts == 1]
        return Dense(
            sum(count * linear.size for count, linear in found),
            sum(count * linear.size * self.formats.bytes_of(linear.kind) for count, linear in found),
            sum(count * (linear.n_in + linear.n_out) for count, linear in found),
        )

    @cached_property
    def mixtures(self) -> tuple[Mixture, ...]:
        """The experts, one entry for each run of layers whose experts are alike."""
        mixtures: list[Mixture] = []
        for group in self.layers:
            parts = [linear for linear in group.linears if linear.experts > 1]
            if not parts:
                continue
            found = Mixture(
                group.repeats,
                parts[0].experts,
                parts[0].active,
                sum(linear.size for linear in parts),
                sum(linear.size * self.formats.bytes_of(linear.kind) for linear in parts),
                sum(linear.n_in + linear.n_out for linear in parts),
            )
            if mixtures and mixtures[-1][1:] == found[1:]:
                found = found._replace(layers=found.layers + mixtures.pop().layers)
            mixtures.append(found)
        return tuple(mixtures)

    @cached_property
    def kv_width(self) -> int:
        """Numbers kept for each token, all layers together (windows apart)."""
        return sum(group.repeats * group.attention.kv_width for group in self.layers if group.attention)

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of all weights that it owns. What is in no matrix is counted in 16 bits."""
        total = 2.0 * self.n_other + self.embedding * self.formats.bytes_of("embedding")
        if self.head and self.owns_head:
            total += self.head.size * self.formats.bytes_of("head")
        for group in self.layers:
            total += group.repeats * (
                2.0 * group.n_other
                + sum(linear.size * linear.experts * self.formats.bytes_of(linear.kind) for linear in group.linears)
            )
        return total

    def kv_tokens(self, context: float) -> float:
        """Numbers that a sequence of `context` tokens keeps, windows respected."""
        return sum(
            group.repeats * group.attention.kv_width * min(context, group.attention.window or context)
            for group in self.layers
            if group.attention
        )
