"""Drafters priced by their own shapes: what a draft costs, and what it needs to be kept.

Sources: Medusa (arXiv 2401.10774), EAGLE (2401.15077), EAGLE-3 (2503.01840), multi-token prediction as in DeepSeek-V3
(2412.19437), draft models (2211.17192), prompt lookup and suffix matching, which need no model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from forerun.errors import PlanError
from forerun.plan.deployment import Deployment
from forerun.plan.formats import WeightFormats
from forerun.plan.network import Layers, Linear, Network
from forerun.plan.shapes import Model, ModelShape
from forerun.plan.steptime import ForwardTime, Load, forward_time

DrafterKind = Literal["ngram", "medusa", "model", "eagle", "eagle3", "mtp"]

EAGLE3_VOCAB = 32_000
"""Tokens that an EAGLE-3 head can propose, unless it says otherwise (`draft_vocab_size`)."""

LONGEST_DRAFT = 63
"""Tokens of a draft: with the one that it continues they fill a 64-bit mask of a tree."""


class DraftForward(NamedTuple):
    """`repeats` forwards alike on the way to a draft."""

    network: Network
    queries: int
    scored: int
    repeats: int


@dataclass(frozen=True)
class PricedDrafter:
    """What a drafter runs for a draft.

    kind: which sort. network: what each of its forwards reads and multiplies (for Medusa: one head); None: nothing.
    longest: tokens that it can propose at most, along a path. parallel: one forward proposes all of them (Medusa).
    catch_up: new tokens of its first forward beyond the one that it continues: 0, 1 (a draft model doesn't know the
    last token that it proposed itself), or None: as many as were verified, since it reads the target's hidden states
    there (EAGLE, MTP). host_us: microseconds of a draft outside of forwards.
    """

    name: str
    kind: DrafterKind
    network: Network | None
    longest: int = LONGEST_DRAFT
    parallel: bool = False
    catch_up: int | None = 0
    host_us: float = 0.0

    def forwards(self, length: int, width: int = 1) -> list[DraftForward]:
        """The forwards behind a draft of `length` levels with `width` nodes a level (the first has one parent).

        Raises:
            PlanError: it can't draft that far, or no node wide.
        """
        if not 0 <= length <= self.longest:
            raise PlanError("draft length", f"{length} is not allowed for {self.name}; expected 0 to {self.longest}")
        if width < 1:
            raise PlanError("width", f"{width} is not allowed; expected at least 1 node a level")
        if self.network is None or length == 0:
            return []
        if self.parallel:
            return [DraftForward(_repeated(self.network, length), 1, 1, 1)]
        known = 1 + (length if self.catch_up is None else self.catch_up)
        first = [DraftForward(self.network, known, 1, 1)]
        return first if length == 1 else [*first, DraftForward(self.network, width, width, length - 1)]

    def times(
        self, deployment: Deployment, batch: int, context: float, length: int, width: int = 1
    ) -> list[tuple[ForwardTime, int]]:
        """What each of these forwards takes, and how often it is run. The context is taken as constant."""
        return [
            (forward_time(f.network, deployment, Load(batch, f.queries, context, f.scored)), f.repeats)
            for f in self.forwards(length, width)
        ]

    def seconds(self, deployment: Deployment, batch: int, context: float, length: int, width: int = 1) -> float:
        """Seconds of a draft for every sequence of the batch."""
        if not length:
            return 0.0
        forwards = self.times(deployment, batch, context, length, width)
        return self.host_us * 1e-6 + sum(forward.seconds * repeats for forward, repeats in forwards)

    def fraction(
        self, target: Model, deployment: Deployment, batch: int, context: float, length: int, width: int = 1
    ) -> float:
        """Time of a draft in plain steps of `target` with the same load: length times the c of arXiv 2211.17192."""
        step = forward_time(target, deployment, Load(batch, 1, context)).seconds + deployment.eff.step_us * 1e-6
        return self.seconds(deployment, batch, context, length, width) / step

    @property
    def weight_bytes(self) -> float:
        """Bytes of its own weights."""
        return _owned(self).weight_bytes if self.network else 0.0

    @property
    def kv_width(self) -> int:
        """Numbers that it caches for each token."""
        return self.network.kv_width if self.network else 0


def _repeated(one: Network, n: int) -> Network:
    """`n` Medusa heads beside one another: their vocabulary matrices are one that is as much wider."""
    assert one.head is not None
    layers = tuple(group._replace(repeats=n * group.repeats) for group in one.layers)
    return replace(one, layers=layers, head=one.head._replace(n_out=n * one.head.n_out))


def _owned(drafter: PricedDrafter) -> Network:
    assert drafter.network is not None
    return _repeated(drafter.network, drafter.longest) if drafter.parallel else drafter.network


def ngram(name: str = "ngram", *, host_us: float = 0.0) -> PricedDrafter:
    """Prompt lookup or suffix matching: no weights, no forward."""
    return PricedDrafter(name, "ngram", None, host_us=host_us)


def medusa(target: ModelShape, *, heads: int = 4, layers: int = 1) -> PricedDrafter:
    """`heads` heads on the target's last hidden state, each `layers` residual blocks and a vocabulary matrix of its
    own. All of it is trained on top of the target and stays in 16 bits, whatever the target's weights are in.

    Raises:
        PlanError: no head, or more than a draft can have tokens.
    """
    if not 1 <= heads <= LONGEST_DRAFT:
        raise PlanError("drafter", f"{heads} Medusa heads; expected 1 to {LONGEST_DRAFT}")
    hidden = target.hidden
    blocks = tuple(Linear(f"block.{i}", hidden, hidden, n_bias=hidden) for i in range(layers))
    network = Network(
        f"medusa on {target.name}", hidden, (Layers("medusa blocks", 1, blocks, None),),
        Linear("medusa lm_head", hidden, target.vocab, "head"), 0, True, WeightFormats(),
    )  # fmt: skip
    return PricedDrafter(f"medusa-{heads}", "medusa", network, longest=heads, parallel=True)


def model(draft: ModelShape, target: ModelShape | None = None) -> PricedDrafter:
    """A smaller model of the same vocabulary.

    Raises:
        PlanError: the vocabularies differ by 1,024 rows or more, which padding doesn't explain.
    """
    if target is not None and abs(draft.vocab - target.vocab) >= 1024:
        raise PlanError(
            "drafter",
            f"{draft.name} has {draft.vocab} tokens and {target.name} {target.vocab}; a draft model needs the "
            "target's vocabulary",
        )
    return PricedDrafter(draft.name, "model", draft.network, catch_up=1)


def eagle(target: ModelShape, *, intermediate: int | None = None) -> PricedDrafter:
    """EAGLE: one decoder layer over embedding and hidden state, with the target's embedding and head. The layer has no
    norm before its attention, and none follows it. `intermediate`: width of its feed-forward (`_llama_layer`)."""
    layer = _llama_layer(target, target.hidden, intermediate)
    layer = layer._replace(n_other=layer.n_other - target.hidden)
    fuse = Layers("fuse", 1, (Linear("fc", 2 * target.hidden, target.hidden),), None)
    network = Network(
        f"eagle on {target.name}", target.hidden, (fuse, layer), target.head, 0, False,
        replace(target.formats, linear="bf16", experts="bf16"),
    )  # fmt: skip
    return PricedDrafter("eagle", "eagle", network, catch_up=None)


def eagle3(
    target: ModelShape, *, draft_vocab: int | None = EAGLE3_VOCAB, intermediate: int | None = None
) -> PricedDrafter:
    """EAGLE-3: hidden states of three layers fused, one decoder layer over it and the embedding, and a head of its own
    over `draft_vocab` tokens (None: the whole vocabulary). In 16 bits, whatever the target's weights are in.
    `intermediate`: width of its feed-forward (`_llama_layer`).

    Raises:
        PlanError: the draft vocabulary is larger than the target's.
    """
    hidden = target.hidden
    vocab = target.vocab if draft_vocab is None else draft_vocab
    if not 1 <= vocab <= target.vocab:
        raise PlanError("draft_vocab", f"{vocab} is not allowed; expected 1 to the target's {target.vocab}")
    fuse = Layers("fuse", 1, (Linear("fc", 3 * hidden, hidden),), None)
    network = Network(
        f"eagle3 on {target.name}", hidden, (fuse, _llama_layer(target, 2 * hidden, intermediate)),
        Linear("lm_head", hidden, vocab, "head"), 0, True, WeightFormats(), n_other=2 * hidden,
    )  # fmt: skip
    name = "eagle3-full" if draft_vocab is None else "eagle3" if vocab == EAGLE3_VOCAB else f"eagle3-{vocab}"
    return PricedDrafter(name, "eagle3", network, catch_up=None)


def mtp(target: ModelShape) -> PricedDrafter:
    """A multi-token-prediction module: a projection of embedding and hidden state, one layer like the target's last,
    and the target's embedding and head. For more tokens than it has modules the last one is used again.

    Raises:
        PlanError: the target has no such module.
    """
    if not target.mtp_layers:
        raise PlanError("drafter", f"{target.name} comes without multi-token-prediction modules")
    layer = target.layer_group("mtp layer", 1, sparse=target.experts is not None)
    fuse = Layers("fuse", 1, (Linear("eh_proj", 2 * target.hidden, target.hidden),), None, 3 * target.hidden)
    network = Network(f"mtp of {target.name}", target.hidden, (fuse, layer), target.head, 0, False, target.formats)
    return PricedDrafter("mtp", "mtp", network, catch_up=None)


def _llama_layer(target: ModelShape, n_in: int, intermediate: int | None) -> Layers:
    """One decoder layer as in Llama, which EAGLE heads have whatever the target's layers are like: the target's heads,
    or 128 numbers a head and 8 key-value heads where the target's attention is latent; no biases; a dense feed-forward,
    by default as wide as the target's, or as what a token uses of its experts."""
    experts, latent = target.experts, target.latent
    if intermediate is None:
        intermediate = target.intermediate or (experts.active * experts.intermediate + experts.shared if experts else 0)
    heads, kv_heads, head_dim = target.heads, target.kv_heads, target.head_dim
    if latent is not None:
        heads, head_dim = max(target.hidden // 128, 1), 128
        kv_heads = math.gcd(heads, 8)
    like = ModelShape(
        name=target.name, hidden=target.hidden, layers=1, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        vocab=target.vocab, intermediate=intermediate,
    )  # fmt: skip
    linears, attention = like.attention(n_in=n_in)
    return Layers("layer", 1, (*linears, *like.feed_forward(sparse=False)), attention, 2 * target.hidden)
