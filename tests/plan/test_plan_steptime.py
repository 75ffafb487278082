"""The time of a forward against arithmetic written out by hand, and its derivation against itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import PlanError
from forerun.plan.deployment import Deployment
from forerun.plan.explain import explain_forward
from forerun.plan.hardware import Efficiency, Hardware
from forerun.plan.network import Attention
from forerun.plan.shapes import Experts, LatentAttention, ModelShape
from forerun.plan.steptime import Load, busiest, expected_distinct, forward_time
from reference.experts import simulated_distinct

GPU = Hardware(
    name="gpu", flops={"bf16": 1e15, "fp8": 2e15}, bandwidth=2e12, memory=80e9, link=4e11, link_us=10, host=5e10
)
DENSE = ModelShape(
    name="dense", hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, vocab=128256, intermediate=14336
)
WINDOWED = replace(DENSE, name="windowed", window=128, window_layers=16)
SPARSE = replace(DENSE, name="sparse", experts=Experts(n=64, active=4, intermediate=1024, shared=512, dense_layers=2))
LATENT = replace(DENSE, name="latent", latent=LatentAttention(q_rank=1536, kv_rank=512, nope=128, rope=64, value=128))
MODELS = {shape.name: shape for shape in (DENSE, WINDOWED, SPARSE, LATENT)}
IDEAL = Deployment(hardware=GPU, efficiency=Efficiency.ideal())
LATE = replace(Efficiency.ideal(), latency=1)

deployments = st.builds(
    lambda splits, activations, kv, efficiency: Deployment(
        hardware=GPU, tensor=splits[0], pipeline=splits[1], expert=splits[2], activations=activations, kv=kv,
        efficiency=efficiency,
    ),
    st.sampled_from([(1, 1, 1), (8, 1, 1), (8, 1, 8), (4, 2, 2), (1, 4, 1)]),
    st.sampled_from(["bf16", "fp8"]),
    st.sampled_from(["bf16", "fp8"]),
    st.sampled_from([None, Efficiency.ideal(), Efficiency(order=3), Efficiency(order=1, layer_us=0)]),
)  # fmt: skip
loads = st.builds(Load, st.integers(1, 300), st.integers(1, 200), st.integers(0, 100_000), st.just(None))


def test_one_token_reads_every_weight_once() -> None:
    """8.03e9 parameters less the embedding in two bytes over 2 TB/s, by hand."""
    forward = forward_time(DENSE.network, IDEAL, Load(1, 1, 0))
    matrices = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336)
    flows = 32 * (4 * 4096 + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    linear = forward.part("linear")
    assert linear.weight_bytes == 2 * matrices
    assert linear.activation_bytes == 2 * flows
    assert linear.flops == 2 * matrices
    assert linear.seconds == pytest.approx((2 * matrices + 2 * flows) / 2e12)
    head = forward.part("head")
    assert head.weight_bytes == 2 * 4096 * 128256
    assert head.activation_bytes == 4 * 128256 + 2 * 4096
    assert [part.name for part in forward.parts] == ["linear", "attention", "head"]
    assert forward.bound == "memory"


def test_attention_reads_a_sequence_once_for_all_its_queries() -> None:
    """And multiplies each query with every key before it."""
    part = forward_time(DENSE.network, IDEAL, Load(7, 5, 1000)).part("attention")
    kept = 2 * 8 * 128 * 2  # bytes of a token in a layer
    assert part.kv_bytes == 32 * kept * 7 * (1000 + 5)
    assert part.flops == 2 * 32 * (2 * 32 * 128) * 7 * sum(1000 + i for i in range(1, 6))


def test_a_window_bounds_what_is_read_and_multiplied() -> None:
    part = forward_time(WINDOWED.network, IDEAL, Load(1, 3, 1000)).part("attention")
    kept = 2 * 8 * 128 * 2
    assert part.kv_bytes == 16 * kept * (1000 + 3) + 16 * kept * (127 + 3)  # the last 127 and the three
    assert part.flops == 2 * 16 * 8192 * (1001 + 1002 + 1003) + 2 * 16 * 8192 * 3 * 128


@pytest.mark.parametrize("window", [None, 1, 2, 5, 128])
@given(queries=st.integers(1, 40), context=st.integers(0, 200))
@settings(deadline=None)
def test_pairs_and_keys_are_those_that_a_mask_has(window: int | None, queries: int, context: int) -> None:
    attention = Attention(1, 1, 1, window)
    seen = [
        {key for key in range(context + query + 1) if window is None or key > context + query - window}
        for query in range(queries)
    ]
    assert attention.pairs(queries, context) == sum(map(len, seen))
    cached = {key for keys in seen for key in keys if key < context}
    assert attention.keys(context) == len(cached)


def test_the_latent_cache_is_read_by_every_accelerator() -> None:
    one = forward_time(LATENT.network, Deployment(hardware=GPU), Load(4, 1, 5000)).part("attention")
    eight = forward_time(LATENT.network, Deployment(hardware=GPU, tensor=8), Load(4, 1, 5000)).part("attention")
    assert one.kv_bytes == eight.kv_bytes == 32 * 576 * 2 * 4 * 5001
    assert eight.flops == one.flops / 8
    assert one.flops == 2 * 32 * 32 * (576 + 512) * 4 * 5001


def test_key_value_heads_split_as_far_as_they_go() -> None:
    def read(tensor: int) -> float:
        where = Deployment(hardware=GPU, tensor=tensor)
        return forward_time(DENSE.network, where, Load(1, 1, 100)).part("attention").kv_bytes

    assert read(8) == read(1) / 8 == read(16)
    assert read(3) == pytest.approx(read(1) * 3 / 8)  # of 8 heads, somebody has 3


@pytest.mark.parametrize(("n", "active", "tokens"), [(8, 2, 1), (8, 2, 3), (64, 4, 20), (256, 8, 32)])
def test_expected_distinct_experts(n: int, active: int, tokens: int) -> None:
    mean, error = simulated_distinct(n, active, tokens, shares=1, repeats=4000)
    assert expected_distinct(n, active, tokens) == pytest.approx(mean, abs=5 * error + 1e-9)
    assert expected_distinct(n, active, 1) == pytest.approx(active)


@pytest.mark.parametrize(("n", "active", "tokens", "shares"), [(256, 8, 8, 8), (256, 8, 64, 8), (128, 8, 32, 4)])
def test_the_busiest_share_is_a_little_above_the_simulated_one(n: int, active: int, tokens: int, shares: int) -> None:
    mean, _ = simulated_distinct(n, active, tokens, shares=shares, repeats=2000)
    assert mean <= busiest(n, active, tokens, shares) <= 1.25 * mean


def test_experts_weigh_as_much_as_are_touched() -> None:
    forward = forward_time(SPARSE.network, IDEAL, Load(5, 2, 0))
    touched = 64 * (1 - (60 / 64) ** 10)
    one = 3 * 4096 * 1024
    assert forward.experts_touched == pytest.approx(touched)
    assert forward.part("experts").weight_bytes == pytest.approx(2 * 30 * touched * one)
    assert forward.part("experts").flops == 2 * 30 * 4 * one * 10


def test_collectives() -> None:
    """Two all-reduces a layer move 2 (t-1)/t of the vector each, and the scores are gathered."""
    where = Deployment(hardware=GPU, tensor=4, efficiency=LATE)
    part = forward_time(DENSE.network, where, Load(8, 3, 50)).part("communication")
    vectors, scores = 24 * 4096 * 2, 24 * 128256 * 2
    sent = 2 * 32 * vectors * 2 * 3 / 4 + scores * 3 / 4
    assert part.link_bytes == sent
    assert part.seconds == pytest.approx(sent / 4e11 + 65 * 10e-6)
    assert part.bound == "link"
    ideal = forward_time(DENSE.network, replace(where, efficiency=Efficiency.ideal()), Load(8, 3, 50))
    assert ideal.part("communication").seconds == pytest.approx(sent / 4e11), "bytes alone are what physics asks for"


def test_stages_run_parts_of_the_batch() -> None:
    """As many sequences pass together as there are stages to fill; one sequence fills one stage at a time."""
    where = Deployment(hardware=GPU, pipeline=4, efficiency=LATE)
    whole, part = (forward_time(DENSE.network, where, Load(batch, 1, 100)) for batch in (32, 8))
    assert whole.part("linear") == forward_time(DENSE.network, IDEAL, Load(8, 1, 100)).part("linear")
    assert part.part("linear") == forward_time(DENSE.network, IDEAL, Load(2, 1, 100)).part("linear")
    assert whole.part("communication").seconds == pytest.approx(4 * (8 * 4096 * 2 / 4e11 + 10e-6))


def test_operands_of_8_bits_are_the_layers_own() -> None:
    """What flows, attention and head stay in 16 bits: only the layers' products run at the higher rate."""
    wide, narrow = (
        forward_time(DENSE.network, Deployment(hardware=GPU, tensor=2, activations=kind), Load(64, 8, 500))
        for kind in ("bf16", "fp8")
    )
    assert narrow.part("linear").compute_seconds == wide.part("linear").compute_seconds / 2
    for name in ("attention", "head", "communication"):
        assert narrow.part(name) == wide.part(name)
    assert narrow.part("linear").activation_bytes == wide.part("linear").activation_bytes


def test_overlap_by_order() -> None:
    assert Efficiency(order=math.inf).overlapped(3, 4) == 4
    assert Efficiency(order=1).overlapped(3, 4) == pytest.approx(7)
    assert Efficiency(order=2).overlapped(3, 4) == Efficiency(order=2).overlapped(4, 3) == pytest.approx(5)
    assert Efficiency(order=3).overlapped(0, 4) == 4


def test_only_scored_tokens_meet_the_head() -> None:
    prompt = forward_time(DENSE.network, IDEAL, Load(2, 500, 0, scored=1)).part("head")
    assert prompt.flops == 2 * 4096 * 128256 * 2


@pytest.mark.parametrize("name", MODELS)
@given(where=deployments, load=loads)
@settings(max_examples=40, deadline=None)
def test_more_work_never_takes_less_time(name: str, where: Deployment, load: Load) -> None:
    network = MODELS[name].network
    base = forward_time(network, where, load).seconds
    # A batch that no longer divides evenly into the stages' parts is compared with multiples of them only.
    more = (load._replace(batch=load.batch * 2), load._replace(queries=load.queries + 1))
    for other in (*more, load._replace(context=load.context + 1)):
        if min(where.pipeline, load.batch) == min(where.pipeline, other.batch):
            assert forward_time(network, where, other).seconds >= base * (1 - 1e-12)


@pytest.mark.parametrize("name", MODELS)
@given(where=deployments, load=loads)
@settings(max_examples=60, deadline=None)
def test_the_derivation_gives_the_models_own_number(name: str, where: Deployment, load: Load) -> None:
    """Its formulas are the equations once more, evaluated from the inputs that it shows."""
    forward = forward_time(MODELS[name].network, where, load)
    derivation = explain_forward(forward, prefix="x_")
    assert derivation.value == pytest.approx(forward.seconds, rel=1e-12)
    values = {line.symbol: line.value for line in derivation.lines}
    for part in forward.parts:
        assert values[f"x_{part.name}_seconds"] == pytest.approx(part.seconds, rel=1e-12)
        if part.flops:
            assert values[f"x_{part.name}_flops"] == pytest.approx(part.flops, rel=1e-12)
    assert len(values) == len(derivation.lines)


def test_a_fault_in_the_model_shows_in_the_derivation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way about, too: neither is computed from the other."""
    monkeypatch.setattr(Efficiency, "overlapped", lambda _self, memory, compute: memory + compute)
    forward = forward_time(DENSE.network, IDEAL, Load(4, 4, 1000))
    assert explain_forward(forward).value != pytest.approx(forward.seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("field", "load"),
    [
        ("batch", Load(0)),
        ("batch", Load(1.5)),  # type: ignore[arg-type]
        ("queries", Load(1, 0)),
        ("scored", Load(1, 4, 0, 5)),
        ("scored", Load(1, 4, 0, -1)),
        ("context", Load(1, 1, -1)),
        ("context", Load(1, 1, 10**400)),
        ("batch", Load(10**10)),
        ("context", Load(1, 1, math.nan)),
        ("context", Load(1, 1, math.inf)),
    ],
)
def test_loads_out_of_range(field: str, load: Load) -> None:
    with pytest.raises(PlanError) as caught:
        forward_time(DENSE.network, IDEAL, load)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("tensor", {"tensor": 0}),
        ("expert", {"tensor": 4, "expert": 3}),
        ("activations", {"activations": "int8"}),
        ("activations", {"activations": "int3"}),
        ("kv", {"kv": "int3"}),
        ("tensor", {"tensor": 2, "hardware": replace(GPU, link=0)}),
    ],
)
def test_deployments_that_cannot_be(field: str, options: dict[str, object]) -> None:
    with pytest.raises(PlanError) as caught:
        Deployment(**{"hardware": GPU, **options})  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    "options",
    [{"bandwidth": 0}, {"bandwidth": 1.1}, {"compute": -1}, {"link": math.nan}, {"order": 0.5}, {"order": math.nan},
     {"step_us": -1}, {"layer_us": math.inf}],
)  # fmt: skip
def test_efficiencies_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(PlanError) as caught:
        Efficiency(**options)
    assert caught.value.field in options
