"""What fits: weights, drafter and KV cache against the memory of the accelerators."""

from __future__ import annotations

from forerun.errors import PlanError
from forerun.plan.deployment import Deployment
from forerun.plan.network import Network

UTILIZATION = 0.9
"""Share of the memory that an engine takes, as vLLM's `gpu_memory_utilization` has it; the rest is for activations."""


def weight_bytes_per_gpu(network: Network, deployment: Deployment) -> float:
    """Bytes of weights on each accelerator, split evenly."""
    return network.weight_bytes / deployment.gpus


def kv_token_bytes(network: Network, deployment: Deployment) -> float:
    """Bytes that a token of a long text keeps on all accelerators together, windows apart: heads that can't be split
    further are kept more than once."""
    return sum(
        group.repeats
        * group.attention.kv_width
        * deployment.kv_bytes
        * deployment.tensor
        / min(deployment.tensor, group.attention.kv_shards)
        for group in network.layers
        if group.attention
    )


def sequence_bytes(network: Network, deployment: Deployment, context: float) -> float:
    """Bytes that one sequence of `context` tokens keeps on all accelerators together; windows keep no more than they
    see."""
    return sum(
        group.repeats
        * group.attention.kv_width
        * min(context, group.attention.window or context)
        * deployment.kv_bytes
        * deployment.tensor
        / min(deployment.tensor, group.attention.kv_shards)
        for group in network.layers
        if group.attention
    )


def pool_bytes(
    network: Network, deployment: Deployment, drafter: Network | None = None, *, utilization: float = UTILIZATION
) -> float:
    """Bytes left for KV on all accelerators together; negative if not even the weights fit."""
    memory = deployment.hardware.memory * deployment.gpus * utilization
    return memory - network.weight_bytes - (drafter.weight_bytes if drafter else 0.0)


def check_fits(
    network: Network,
    deployment: Deployment,
    *,
    batch: int = 1,
    context: float = 0,
    drafter: Network | None = None,
    utilization: float = UTILIZATION,
) -> None:
    """Raises PlanError unless weights and the KV of `batch` sequences of `context` tokens fit."""
    hardware = deployment.hardware
    room = hardware.memory * deployment.gpus * utilization
    have = f"{deployment.gpus} x {hardware.name} has {_gb(room)} GB of it to use"
    weights = network.weight_bytes + (drafter.weight_bytes if drafter else 0.0)
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


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f}"
