"""What fits: weights, drafter and KV cache against the memory of the accelerators (docs/plan-capacity.md).

Everything is counted over all accelerators of a copy and taken to be spread evenly over them: embedding and head are
split by the vocabulary, stages of a pipeline are alike. Key-value heads are dealt out whole, so where they can't be
split any further (more accelerators than heads, or the one latent of MLA) each accelerator keeps a copy.
"""

from __future__ import annotations

import math

from forerun.errors import PlanError
from forerun.plan.deployment import Deployment
from forerun.plan.drafters import PricedDrafter
from forerun.plan.network import Attention, Layers
from forerun.plan.shapes import Model, ModelShape, as_network

UTILIZATION = 0.9
"""Share of the memory that an engine takes, as vLLM's `gpu_memory_utilization` has it; the rest is for activations."""

BLOCK = 16
"""Tokens of a block of the cache, as vLLM and Forerun have it."""

Holder = Model | PricedDrafter
"""What keeps weights and KV. A drafter may own more weights than one of its forwards reads (Medusa's heads)."""


def weight_bytes_per_gpu(network: Model, deployment: Deployment) -> float:
    """Bytes of weights on each accelerator, split evenly."""
    return as_network(network).weight_bytes / deployment.gpus


def kv_copies(attention: Attention, deployment: Deployment) -> float:
    """How often each number of the cache is kept, on average: 1 where the tensor-parallel accelerators split the
    key-value heads evenly, tensor / heads where they outnumber them."""
    return attention.kept_share(deployment.tensor) * deployment.tensor


def kv_token_bytes(holder: Holder, deployment: Deployment, *, windowed: bool = True) -> float:
    """Bytes that a token adds on all accelerators together. `windowed`: layers with a window included, as while a text
    is shorter than it; without them, what a token of a longer text adds."""
    return sum(
        group.repeats * group.attention.kv_width * deployment.kv_bytes * kv_copies(group.attention, deployment)
        for group in _layers(holder)
        if group.attention and (windowed or group.attention.window is None)
    )


def kept_tokens(context: float, window: int | None, block: int | None = None) -> float:
    """Tokens whose KV a layer keeps of `context`, in whole blocks if `block` is given.

    A window of w tokens that isn't aligned with the blocks lies in up to ceil((w - 1) / block) + 1 of them; what is
    before it is given back.
    """
    if block is None:
        return min(context, math.inf if window is None else window)
    kept = float(math.ceil(context / block) * block)
    return kept if window is None else min(kept, window_tokens(window, block))


def window_tokens(window: int, block: int) -> float:
    """The most tokens, in whole blocks, that a layer with a window keeps."""
    return float((math.ceil((window - 1) / block) + 1) * block)


def sequence_bytes(holder: Holder, deployment: Deployment, context: float, *, block: int | None = None) -> float:
    """Bytes that one sequence of `context` tokens keeps on all accelerators together; windows keep no more than they
    see. `block`: tokens of a block of the cache, of which a sequence holds whole ones; None: no rounding."""
    return sum(
        group.repeats
        * group.attention.kv_width
        * kept_tokens(context, group.attention.window, block)
        * deployment.kv_bytes
        * kv_copies(group.attention, deployment)
        for group in _layers(holder)
        if group.attention
    )


def usable_bytes(deployment: Deployment, utilization: float = UTILIZATION) -> float:
    """Bytes for weights and KV on all accelerators together. Raises PlanError if the share is out of range."""
    if not 0 < utilization <= 1:
        raise PlanError("utilization", f"{utilization} is not allowed; expected a share above 0, at most 1")
    return deployment.hardware.memory * deployment.gpus * utilization


def pool_bytes(
    network: Model, deployment: Deployment, drafter: Holder | None = None, *, utilization: float = UTILIZATION
) -> float:
    """Bytes left for KV on all accelerators together; negative if not even the weights fit."""
    taken = _weight_bytes(network) + (_weight_bytes(drafter) if drafter else 0.0)
    return usable_bytes(deployment, utilization) - taken


def check_fits(
    network: Model,
    deployment: Deployment,
    *,
    batch: int = 1,
    context: float = 0,
    drafter: Holder | None = None,
    utilization: float = UTILIZATION,
) -> None:
    """Raises PlanError unless weights and the KV of `batch` sequences of `context` tokens fit."""
    room = usable_bytes(deployment, utilization)
    have = f"{deployment.gpus} x {deployment.hardware.name} has {_gb(room)} GB of it to use"
    weights = _weight_bytes(network) + (_weight_bytes(drafter) if drafter else 0.0)
    if weights > room:
        raise PlanError(
            "memory",
            f"the weights of {network.name} take {_gb(weights)} GB and {have}; use more accelerators (--tensor) or "
            "fewer bytes a weight (--weights)",
        )
    kv = batch * sequence_bytes(network, deployment, context)
    if drafter is not None:
        kv += batch * sequence_bytes(drafter, deployment, context)
    if weights + kv > room:
        raise PlanError(
            "memory",
            f"weights take {_gb(weights)} GB, the KV of {batch} x {context:g} tokens {_gb(kv)} GB, and {have}; lower "
            "the batch or the context, or use --kv fp8 or more accelerators",
        )


def supports_context(shape: ModelShape, context: float) -> bool:
    """Whether the model can have that many tokens before it; True where its longest context isn't known."""
    return not shape.max_context or context <= shape.max_context


def check_context(shape: ModelShape, context: float, field: str = "context") -> None:
    """Raises PlanError naming `field` if a context is longer than the model's longest, where that is known."""
    if not supports_context(shape, context):
        raise PlanError(
            field,
            f"{context:g} tokens are more than the {shape.max_context} of {shape.name}; where RoPE scaling "
            "extends it, give a config.json with the longer max_position_embeddings, or a --catalog entry",
        )


def _layers(holder: Holder) -> tuple[Layers, ...]:
    network = holder.network if isinstance(holder, PricedDrafter) else as_network(holder)
    return network.layers if network else ()


def _weight_bytes(holder: Holder) -> float:
    return holder.weight_bytes if isinstance(holder, PricedDrafter) else as_network(holder).weight_bytes


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f}"
