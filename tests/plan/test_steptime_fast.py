"""The short way to a forward's seconds against the long one: equal to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.plan import drafters
from forerun.plan.deployment import Deployment
from forerun.plan.hardware import Efficiency, Hardware
from forerun.plan.network import Layers, Linear, Network
from forerun.plan.shapes import Experts, LatentAttention, ModelShape
from forerun.plan.steptime import Load, forward_time
from forerun.plan.steptime_fast import ForwardSeconds

GPU = Hardware(name="gpu", flops={"bf16": 1e15, "fp8": 2e15}, bandwidth=3.3e12, memory=8e10, link=4e11, link_us=9)
DENSE = ModelShape(
    name="dense", hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, vocab=128256, intermediate=14336
)
SPARSE = replace(
    DENSE, name="sparse", experts=Experts(n=60, active=7, intermediate=1000, shared=512, dense_layers=2), mtp_layers=1
)
WINDOWED = replace(DENSE, name="windowed", window=1000, window_layers=16)
LATENT = replace(SPARSE, name="latent", latent=LatentAttention(q_rank=99, kv_rank=512, nope=128, rope=64, value=128))
HEADLESS = Network("headless", 8, (Layers("only", 3, (Linear("w", 8, 8),), None),), None, 0, False, DENSE.formats)
EMPTY = Network("empty", 8, (), None, 0, False, DENSE.formats)

networks = st.sampled_from([
    DENSE.network, SPARSE.network, WINDOWED.network, LATENT.network, HEADLESS, EMPTY,
    *(drafter.network for drafter in (
        drafters.medusa(DENSE), drafters.eagle(DENSE), drafters.eagle3(LATENT), drafters.mtp(LATENT),
    )),
])  # fmt: skip
deployments = st.builds(
    lambda split, activations, kv, efficiency: Deployment(
        hardware=GPU, tensor=split[0], pipeline=split[1], expert=split[2], activations=activations, kv=kv,
        efficiency=efficiency,
    ),
    st.sampled_from([(1, 1, 1), (8, 1, 1), (8, 1, 8), (6, 3, 2), (1, 4, 1)]),
    st.sampled_from(["bf16", "fp8"]),
    st.sampled_from(["bf16", "fp8"]),
    st.sampled_from([None, Efficiency.ideal(), Efficiency(order=3), Efficiency(order=1.5, bandwidth=0.71)]),
)  # fmt: skip
loads = st.builds(
    lambda batch, queries, context, scored: Load(batch, queries, context, scored and min(scored, queries)),
    st.integers(1, 5000),
    st.integers(1, 64),
    st.one_of(st.integers(0, 200_000), st.floats(0, 2e5)),
    st.sampled_from([None, 1, 3]),
)


@settings(max_examples=400, deadline=None)
@given(networks, deployments, loads)
def test_the_same_seconds(network: Network, deployment: Deployment, load: Load) -> None:
    assert ForwardSeconds(network, deployment)(*load) == forward_time(network, deployment, load).seconds


@pytest.mark.parametrize("tokens", [(1, 1), (300, 5)])
def test_one_object_answers_for_many_loads(tokens: tuple[int, int]) -> None:
    """In any order, and as often as one likes."""
    deployment = Deployment(hardware=GPU, tensor=8)
    seconds = ForwardSeconds(LATENT.network, deployment)
    seconds(64, 9, 1e4)
    for _ in range(2):
        assert seconds(*tokens, 777) == forward_time(LATENT.network, deployment, Load(*tokens, 777)).seconds
