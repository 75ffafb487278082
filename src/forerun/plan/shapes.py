"""Shapes of language models, and the networks that they make."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import NoReturn

from forerun.errors import PlanError
from forerun.plan.formats import WeightFormats
from forerun.plan.network import Attention, Kind, Layers, Linear, Network
from forerun.plan.shown import shown

MOST = 10**9
"""Nothing in a shape is larger; a number that is comes from a slip of the keyboard."""


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are made from one latent a token.

    q_rank: of the queries' bottleneck; 0: none. kv_rank: of the latent. nope, rope, value: dimensions of a head's
    query and key without and with rotary embedding, and of its value. The cache keeps kv_rank + rope numbers a token,
    and decoding multiplies queries with the latent itself.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of a layer's feed-forward.

    n, active: routed experts of a layer, and those a token uses. intermediate: of one. shared: intermediate width of
    what every token uses besides, 0 for none. shared_gate: a learned weight of the shared part for each token.
    dense_layers: layers that have a plain feed-forward instead.
    """

    n: int
    active: int
    intermediate: int
    shared: int = 0
    shared_gate: bool = False
    dense_layers: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Everything about a model that the cost of a step depends on.

    hidden, layers, heads, kv_heads, head_dim, vocab, intermediate: as in a Hugging Face config.json (`vocab` counts
    the rows of the embedding, padding included; `intermediate` is that of dense layers). gated: feed-forwards have
    three matrices instead of two. tied: one matrix is both embedding and head. qkv_bias, out_bias, mlp_bias: biases of
    the query, key and value projections, the output projection, the feed-forward (router included). qk_norm: norms
    over each head's query and key. sandwich_norms: norms after attention and feed-forward, too. window,
    window_layers: sliding attention, and in how many layers. sinks: a learned number per head. mtp_layers:
    multi-token-prediction modules that come with it. max_context: tokens. formats: of the published weights. source:
    where these numbers are from.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    intermediate: int
    gated: bool = True
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    window: int | None = None
    window_layers: int = 0
    sinks: bool = False
    latent: LatentAttention | None = None
    experts: Experts | None = None
    mtp_layers: int = 0
    max_context: int = 0
    formats: WeightFormats = field(default_factory=WeightFormats)
    source: str = ""

    def __post_init__(self) -> None:
        self._check_sizes(self, "", ("hidden", "layers", "heads", "kv_heads", "head_dim", "vocab"))
        if self.latent is not None:
            self._check_sizes(self.latent, "latent.", ("kv_rank", "nope", "value"))
        experts = self.experts
        if experts is not None:
            self._check_sizes(experts, "experts.", ("n", "active", "intermediate"))
            if experts.active > experts.n:
                self._refuse("experts", f"a token uses {experts.active} of {experts.n}; expected 1 to {experts.n}")
            if experts.dense_layers > self.layers:
                self._refuse("dense_layers", f"{experts.dense_layers} of {self.layers} layers")
            if experts.shared_gate and not experts.shared:
                self._refuse("experts.shared", "missing, though the shared part has a gate")
        if self.heads % self.kv_heads:
            self._refuse("kv_heads", f"{self.heads} heads can't share {self.kv_heads} key-value heads evenly")
        if self.window_layers > self.layers:
            self._refuse("window_layers", f"{self.window_layers} of {self.layers} layers")
        if self.window_layers and not self.window:
            self._refuse("window", f"missing, though {self.window_layers} layers have one")
        if self.window and not self.window_layers:
            self._refuse("window_layers", f"missing, though there is a window of {self.window} tokens")
        n_dense = self.layers if experts is None else experts.dense_layers
        if n_dense and not self.intermediate:
            self._refuse("intermediate", f"missing, though {n_dense} layers are dense")

    def _check_sizes(self, part: ModelShape | LatentAttention | Experts, where: str, positive: tuple[str, ...]) -> None:
        for item in fields(part):
            value = getattr(part, item.name)
            if isinstance(value, int) and not isinstance(value, bool):
                least = int(item.name in positive)
                if not least <= value <= MOST:
                    self._refuse(where + item.name, f"{value} is not allowed; expected {least} to {MOST}")

    def _refuse(self, field: str, message: str) -> NoReturn:
        raise PlanError(f"{self.name}: {field}", message)

    def attention(self, window: int | None = None, n_in: int | None = None) -> tuple[tuple[Linear, ...], Attention]:
        """Matrices and cache of a layer's attention. `n_in`: width of what queries, keys and values read (default:
        hidden)."""
        wide = self.hidden if n_in is None else n_in
        latent, heads = self.latent, self.heads
        if latent is not None:
            width = heads * (latent.nope + latent.rope)
            queries = (
                (Linear("q_a_proj", wide, latent.q_rank), Linear("q_b_proj", latent.q_rank, width))
                if latent.q_rank
                else (Linear("q_proj", wide, width),)
            )
            kept = latent.kv_rank + latent.rope
            return (
                *queries,
                Linear("kv_a_proj", wide, kept),
                Linear("kv_b_proj", latent.kv_rank, heads * (latent.nope + latent.value)),
                Linear("o_proj", heads * latent.value, self.hidden),
            ), Attention(kept, 1, heads * (kept + latent.kv_rank), window)
        q_width, kv_width = heads * self.head_dim, self.kv_heads * self.head_dim
        biased = int(self.qkv_bias)
        return (
            Linear("q_proj", wide, q_width, n_bias=biased * q_width),
            Linear("k_proj", wide, kv_width, n_bias=biased * kv_width),
            Linear("v_proj", wide, kv_width, n_bias=biased * kv_width),
            Linear("o_proj", q_width, self.hidden, n_bias=self.hidden * self.out_bias),
        ), Attention(2 * kv_width, self.kv_heads, 2 * q_width, window)

    def feed_forward(self, *, sparse: bool) -> tuple[Linear, ...]:
        """Matrices of a layer's feed-forward, with experts or dense."""
        if not sparse:
            return self._mlp("mlp", self.intermediate, "linear", 1, 1)
        experts = self.experts
        assert experts is not None, "only a model with experts has sparse layers"
        shared = self._mlp("shared_expert", experts.shared, "experts", 1, 1) if experts.shared else ()
        gate = (Linear("shared_expert_gate", self.hidden, 1),) if experts.shared_gate else ()
        return (
            Linear("router", self.hidden, experts.n, n_bias=experts.n * self.mlp_bias),
            *self._mlp("experts", experts.intermediate, "experts", experts.n, experts.active),
            *shared,
            *gate,
        )

    def _mlp(self, name: str, width: int, kind: Kind, n: int, active: int) -> tuple[Linear, ...]:
        hidden, biased = self.hidden, int(self.mlp_bias)
        gate = (Linear(f"{name}.gate", hidden, width, kind, n, active, biased * width),) if self.gated else ()
        return (
            *gate,
            Linear(f"{name}.up", hidden, width, kind, n, active, biased * width),
            Linear(f"{name}.down", width, hidden, kind, n, active, biased * hidden),
        )

    def layer_group(self, name: str, count: int, *, sparse: bool, window: int | None = None) -> Layers:
        """`count` decoder layers."""
        linears, attention = self.attention(window)
        n_other = self.hidden * (4 if self.sandwich_norms else 2)
        if self.latent is not None:
            n_other += self.latent.q_rank + self.latent.kv_rank
        if self.qk_norm:
            n_other += 2 * self.head_dim
        if self.sinks:
            n_other += self.heads
        return Layers(name, count, (*linears, *self.feed_forward(sparse=sparse)), attention, n_other)

    @cached_property
    def head(self) -> Linear:
        """The output matrix."""
        return Linear("lm_head", self.hidden, self.vocab, "head")

    @cached_property
    def network(self) -> Network:
        """The model without its multi-token-prediction modules."""
        n_dense = self.layers if self.experts is None else self.experts.dense_layers
        n_sparse = self.layers - n_dense
        # Which layers have the window makes no difference to the cost, but for the kind of their feed-forward; where
        # there are both kinds, the few dense ones at the beginning have it last.
        windowed = {True: min(self.window_layers, n_sparse)}
        windowed[False] = self.window_layers - windowed[True]
        groups: list[Layers] = []
        for sparse, count in ((False, n_dense), (True, n_sparse)):
            name = "dense layers" if n_sparse and not sparse else "layers"
            n_open = count - windowed[sparse]
            if n_open:
                groups.append(self.layer_group(name, n_open, sparse=sparse))
            if windowed[sparse]:
                name = f"windowed {name}"
                groups.append(self.layer_group(name, windowed[sparse], sparse=sparse, window=self.window))
        return Network(
            self.name, self.hidden, tuple(groups), self.head, self.vocab * self.hidden, not self.tied, self.formats,
            n_other=self.hidden,
        )  # fmt: skip


Model = ModelShape | Network
"""What can be priced: a shape stands for the network that it makes."""


def as_network(model: Model) -> Network:
    """The network of a shape, or the network itself. Raises PlanError if it is neither."""
    if isinstance(model, Network):
        return model
    if isinstance(model, ModelShape):
        return model.network
    raise PlanError("model", f"{shown(model)} is not allowed; expected a ModelShape or a Network")
