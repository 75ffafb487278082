"""Drafters: their parameters against the tensors of their checkpoints, and what a draft runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import pytest

from forerun.errors import PlanError
from forerun.plan import drafters
from forerun.plan.catalog import PlanCatalog
from forerun.plan.deployment import Deployment
from forerun.plan.drafters import LONGEST_DRAFT, PricedDrafter
from forerun.plan.hardware import Efficiency, Hardware
from forerun.plan.shapes import ModelShape
from forerun.plan.steptime import Load, forward_time

H100 = Hardware(name="h100", flops={"bf16": 989e12, "fp8": 1979e12}, bandwidth=3.35e12, memory=80e9, link=450e9)
IDEAL = Deployment(hardware=H100, efficiency=Efficiency.ideal())
CATALOG = PlanCatalog.load()
LLAMA_8B, LLAMA_70B, DEEPSEEK = (CATALOG.model(name) for name in ("llama-3.1-8b", "llama-3.3-70b", "deepseek-v3"))


def llama(hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int = 32000) -> ModelShape:
    return ModelShape(
        name="llama", hidden=hidden, layers=2, heads=heads, kv_heads=kv_heads, head_dim=hidden // heads, vocab=vocab,
        intermediate=intermediate,
    )  # fmt: skip


def count(tensors: Mapping[str, tuple[int, ...]]) -> int:
    return sum(prod(shape) for shape in tensors.values())


def eagle3_tensors(shape: ModelShape, draft_vocab: int) -> dict[str, tuple[int, ...]]:
    """Of an EAGLE-3 checkpoint: queries, keys and values read embedding and hidden state side by side."""
    h, q, kv, m = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.intermediate
    return {
        "fc.weight": (h, 3 * h),
        "layers.0.self_attn.q_proj.weight": (q, 2 * h),
        "layers.0.self_attn.k_proj.weight": (kv, 2 * h),
        "layers.0.self_attn.v_proj.weight": (kv, 2 * h),
        "layers.0.self_attn.o_proj.weight": (h, q),
        "layers.0.mlp.gate_proj.weight": (m, h),
        "layers.0.mlp.up_proj.weight": (m, h),
        "layers.0.mlp.down_proj.weight": (h, m),
        "layers.0.input_layernorm.weight": (h,),
        "layers.0.hidden_norm.weight": (h,),
        "layers.0.post_attention_layernorm.weight": (h,),
        "norm.weight": (h,),
        "lm_head.weight": (draft_vocab, h),
    }


def eagle_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Of an EAGLE checkpoint, without the embedding that it shares: no norm before the attention, none at the end."""
    h, q, kv, m = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.intermediate
    return {
        "fc.weight": (h, 2 * h),
        "layers.0.self_attn.q_proj.weight": (q, h),
        "layers.0.self_attn.k_proj.weight": (kv, h),
        "layers.0.self_attn.v_proj.weight": (kv, h),
        "layers.0.self_attn.o_proj.weight": (h, q),
        "layers.0.mlp.gate_proj.weight": (m, h),
        "layers.0.mlp.up_proj.weight": (m, h),
        "layers.0.mlp.down_proj.weight": (h, m),
        "layers.0.post_attention_layernorm.weight": (h,),
    }


def medusa_tensors(shape: ModelShape, heads: int, layers: int) -> dict[str, tuple[int, ...]]:
    h = shape.hidden
    found: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for layer in range(layers):
            found[f"{head}.{layer}.linear.weight"] = (h, h)
            found[f"{head}.{layer}.linear.bias"] = (h,)
        found[f"{head}.{layers}.weight"] = (shape.vocab, h)
    return found


def mtp_tensors() -> dict[str, tuple[int, ...]]:
    """`model.layers.61` of DeepSeek-V3, without the embedding and the head that it shares."""
    h, heads, q_rank, kv_rank, nope, rope, value, experts, width = 7168, 128, 1536, 512, 128, 64, 128, 256, 2048
    found: dict[str, tuple[int, ...]] = {
        "enorm": (h,), "hnorm": (h,), "shared_head.norm": (h,), "eh_proj": (h, 2 * h),
        "input_layernorm": (h,), "post_attention_layernorm": (h,),
        "q_a_proj": (q_rank, h), "q_a_layernorm": (q_rank,), "q_b_proj": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + rope, h), "kv_a_layernorm": (kv_rank,),
        "kv_b_proj": (heads * (nope + value), kv_rank), "o_proj": (h, heads * value),
        "mlp.gate": (experts, h),
    }  # fmt: skip
    for expert in [*map(str, range(experts)), "shared"]:
        found |= {f"{expert}.gate": (width, h), f"{expert}.up": (width, h), f"{expert}.down": (h, width)}
    return found


def owned(drafter: PricedDrafter) -> int:
    """Parameters of all of it."""
    assert drafter.network is not None
    return drafter.network.n_parameters * (drafter.longest if drafter.parallel else 1)


@pytest.mark.parametrize("target", [LLAMA_8B, LLAMA_70B], ids=lambda target: target.name)
def test_the_parameters_are_those_of_the_checkpoints(target: ModelShape) -> None:
    assert owned(drafters.eagle3(target)) == count(eagle3_tensors(target, 32000))
    assert owned(drafters.eagle3(target, draft_vocab=None)) == count(eagle3_tensors(target, target.vocab))
    assert owned(drafters.eagle(target)) == count(eagle_tensors(target))
    for heads, layers in ((4, 1), (5, 1), (3, 2), (2, 0)):
        assert owned(drafters.medusa(target, heads=heads, layers=layers)) == count(
            medusa_tensors(target, heads, layers)
        )
    assert owned(drafters.model(target)) == target.network.n_parameters


def test_the_parameters_of_the_mtp_module() -> None:
    """DeepSeek's README_WEIGHTS: 11.5B unique ones, 1.5B active with the head; both leave out eh_proj (0.1B)."""
    module = drafters.mtp(DEEPSEEK)
    assert module.network is not None
    assert owned(module) == count(mtp_tensors())
    eh_proj = 2 * 7168**2
    assert (owned(module) - eh_proj) / 1e9 == pytest.approx(11.5, abs=0.05)
    assert (module.network.n_active - eh_proj) / 1e9 == pytest.approx(1.5, abs=0.05)


@pytest.mark.parametrize(
    ("target", "billions"),
    [
        (llama(4096, 11008, 32, 32), 0.24),  # Vicuna 7B, LLaMA2-Chat 7B
        (llama(5120, 13824, 40, 40), 0.37),  # Vicuna 13B, LLaMA2-Chat 13B
        (llama(8192, 28672, 64, 8), 0.99),  # LLaMA2-Chat 70B
        (LLAMA_8B, 0.25),
        (LLAMA_70B, 0.99),
        (CATALOG.model("qwen2.5-7b"), 0.26),  # the shapes of Qwen2 7B
    ],
    ids=lambda value: value.name if isinstance(value, ModelShape) else str(value),
)
def test_eagle_heads_have_the_published_sizes(target: ModelShape, billions: float) -> None:
    """The table of EAGLE's README. Two others don't follow from the shapes: it says 0.56B for Vicuna 33B (0.62B) and
    1.05B for Qwen2 72B (1.01B)."""
    assert owned(drafters.eagle(target)) / 1e9 == pytest.approx(billions, abs=0.005)


def test_the_head_of_a_mixture_is_a_llama_layer() -> None:
    """As SpecForge's configurations have them; the feed-forward of DeepSeek-V3's is wider than its dense layers."""
    qwen = CATALOG.model("qwen3-30b-a3b")
    like = replace(llama(2048, 6144, 32, 4, qwen.vocab), head_dim=128)
    assert owned(drafters.eagle3(qwen)) == count(eagle3_tensors(like, 32000))
    like = llama(7168, 40960, 56, 8, DEEPSEEK.vocab)
    wide = drafters.eagle3(DEEPSEEK, intermediate=40960)
    assert owned(wide) == count(eagle3_tensors(like, 32000))
    assert wide.kv_width == 2 * 8 * 128
    assert owned(drafters.eagle(DEEPSEEK, intermediate=40960)) == count(eagle_tensors(like))
    assert owned(drafters.eagle3(DEEPSEEK)) == count(eagle3_tensors(replace(like, intermediate=18432), 32000))


def test_what_each_kind_runs_for_a_draft() -> None:
    def run(drafter: PricedDrafter, length: int, width: int = 1) -> list[tuple[int, int, int]]:
        return [(f.queries, f.scored, f.repeats) for f in drafter.forwards(length, width)]

    draft_model = drafters.model(LLAMA_8B)
    assert run(draft_model, 1) == [(2, 1, 1)], "the token that it proposed last and the target's"
    assert run(draft_model, 5) == [(2, 1, 1), (1, 1, 4)]
    for drafter in (drafters.eagle(LLAMA_8B), drafters.eagle3(LLAMA_8B), drafters.mtp(DEEPSEEK)):
        assert run(drafter, 1) == [(2, 1, 1)], "the hidden states of what was verified"
        assert run(drafter, 3) == [(4, 1, 1), (1, 1, 2)]
        assert run(drafter, 3, 8) == [(4, 1, 1), (8, 8, 2)]
    heads = drafters.medusa(LLAMA_8B)
    assert [run(heads, length) for length in (1, 4)] == [[(1, 1, 1)]] * 2, "one forward, however long"
    assert run(heads, 4, 10) == [(1, 1, 1)], "a wide tree takes more scores of each head, not more work"
    assert drafters.ngram().forwards(7) == []
    for drafter in (draft_model, heads):
        assert drafter.forwards(0) == []


def test_a_shorter_draft_needs_fewer_heads() -> None:
    heads = drafters.medusa(LLAMA_8B)
    [two], [four] = heads.forwards(2), heads.forwards(4)
    assert 2 * two.network.n_parameters == four.network.n_parameters == owned(heads)


def test_the_time_of_a_draft_is_that_of_its_forwards() -> None:
    where = Deployment(hardware=H100, tensor=4)
    drafter = replace(drafters.model(LLAMA_8B), host_us=70)
    network = LLAMA_8B.network

    def forward(queries: int, scored: int) -> float:
        return forward_time(network, where, Load(6, queries, 900, scored)).seconds

    assert drafter.seconds(where, 6, 900, 4) == pytest.approx(70e-6 + forward(2, 1) + 3 * forward(1, 1), rel=1e-12)
    assert drafter.seconds(where, 6, 900, 4, 5) == pytest.approx(70e-6 + forward(2, 1) + 3 * forward(5, 5), rel=1e-12)
    assert drafter.seconds(where, 6, 900, 0) == 0
    assert drafters.ngram().seconds(where, 6, 900, 9) == 0
    assert drafters.ngram(host_us=20).seconds(where, 6, 900, 9) == pytest.approx(20e-6)


def test_a_draft_as_a_fraction_of_a_step() -> None:
    step = forward_time(LLAMA_70B.network, IDEAL, Load(8, 1, 500)).seconds
    drafter = drafters.eagle3(LLAMA_70B)
    fraction = drafter.fraction(LLAMA_70B.network, IDEAL, 8, 500, 3)
    assert fraction == pytest.approx(drafter.seconds(IDEAL, 8, 500, 3) / step, rel=1e-12)
    real = Deployment(hardware=H100, efficiency=Efficiency(step_us=5000))
    slow = forward_time(LLAMA_70B.network, real, Load(8, 1, 500)).seconds + 0.005
    assert drafter.fraction(LLAMA_70B.network, real, 8, 500, 3) == pytest.approx(
        drafter.seconds(real, 8, 500, 3) / slow, rel=1e-12
    )


def test_a_wide_tree_is_nearly_free_until_arithmetic_is_the_limit() -> None:
    drafter, target = drafters.eagle3(LLAMA_70B), LLAMA_70B.network

    def price(batch: int, width: int) -> float:
        return drafter.fraction(target, IDEAL, batch, 1000, 4, width) / drafter.fraction(target, IDEAL, batch, 1000, 4)

    assert 1 < price(1, 8) < 1.03
    assert price(256, 8) > 2
    widths = [price(32, width) for width in (1, 2, 4, 8, 16)]
    assert widths == sorted(widths)


def test_the_context_costs_a_drafter_by_its_own_cache() -> None:
    """A draft model keeps 128 KiB a token against the target's 320, an EAGLE-3 layer 4 KiB, Medusa nothing."""
    target = LLAMA_70B.network
    assert [
        drafter.kv_width * 2 / 1024
        for drafter in (drafters.model(LLAMA_8B), drafters.eagle3(LLAMA_70B), drafters.medusa(LLAMA_70B))
    ] == [128, 4, 0]
    assert target.kv_width * 2 / 1024 == 320
    cost = [drafters.model(LLAMA_8B).fraction(target, IDEAL, 1, context, 4) for context in (0, 1e5, 1e9)]
    assert cost == sorted(cost)
    assert cost[-1] == pytest.approx(4 * 128 / 320, rel=0.01), "so much cache that the weights no longer count"


def test_the_memory_of_a_drafter() -> None:
    assert drafters.ngram().weight_bytes == 0
    assert drafters.ngram().kv_width == 0
    assert drafters.medusa(LLAMA_70B).weight_bytes == 2 * count(medusa_tensors(LLAMA_70B, 4, 1))
    assert drafters.eagle(LLAMA_70B).weight_bytes == 2 * count(eagle_tensors(LLAMA_70B)), "the head is the target's"
    assert drafters.eagle3(LLAMA_70B).weight_bytes == 2 * count(eagle3_tensors(LLAMA_70B, 32000))
    assert drafters.model(LLAMA_8B).weight_bytes == LLAMA_8B.network.weight_bytes
    # fp8 but for what is in no matrix.
    other = sum(prod(shape) for shape in mtp_tensors().values() if len(shape) == 1)
    assert drafters.mtp(DEEPSEEK).weight_bytes == count(mtp_tensors()) + other


def test_what_is_trained_on_a_quantized_target_stays_in_16_bits() -> None:
    small = replace(LLAMA_70B, formats=LLAMA_70B.formats.quantized("int4", "int8"))
    for make in (drafters.medusa, drafters.eagle3, drafters.eagle):
        assert make(small).weight_bytes == make(LLAMA_70B).weight_bytes, make.__name__
    head = drafters.eagle(small).forwards(1)[0].network
    assert head.formats.bytes_of("head") == 1, "the target's own head has the target's format"


def test_a_mixture_gets_a_dense_drafter_as_wide_as_what_a_token_uses() -> None:
    assert DEEPSEEK.experts is not None
    target = replace(DEEPSEEK, intermediate=0, experts=replace(DEEPSEEK.experts, dense_layers=0))
    [*_, layer] = drafters.eagle3(target).forwards(1)[0].network.layers
    assert {linear.n_out for linear in layer.linears if linear.name == "mlp.up"} == {8 * 2048 + 2048}
    assert all(linear.experts == 1 for linear in layer.linears)


def test_a_target_with_another_vocabulary_is_refused() -> None:
    near, far = replace(LLAMA_8B, vocab=LLAMA_70B.vocab + 128), replace(LLAMA_8B, vocab=LLAMA_70B.vocab + 1024)
    drafters.model(near, LLAMA_70B)
    with pytest.raises(PlanError, match=r"drafter: llama-3\.1-8b has 129280 tokens and llama-3.3-70b 128256"):
        drafters.model(far, LLAMA_70B)
    drafters.model(far)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PlanError, match=r"drafter: llama-3\.1-8b comes without multi-token-prediction modules"):
        drafters.mtp(LLAMA_8B)
    for heads in (0, -1, LONGEST_DRAFT + 1):
        with pytest.raises(PlanError, match=f"drafter: {heads} Medusa heads; expected 1 to 63"):
            drafters.medusa(LLAMA_8B, heads=heads)
    for vocab in (0, -5, LLAMA_8B.vocab + 1):
        with pytest.raises(PlanError, match=f"draft_vocab: {vocab} is not allowed; expected 1 to the target's"):
            drafters.eagle3(LLAMA_8B, draft_vocab=vocab)
    for drafter, most in ((drafters.medusa(LLAMA_8B), 4), (drafters.eagle(LLAMA_8B), 63)):
        for length in (-1, most + 1):
            with pytest.raises(PlanError, match=f"draft length: {length} is not allowed for .*; expected 0 to {most}"):
                drafter.forwards(length)


def test_the_width_of_a_draft_is_at_least_one() -> None:
    for width in (0, -1):
        with pytest.raises(PlanError, match=f"width: {width} is not allowed"):
            drafters.eagle(LLAMA_8B).forwards(3, width)


def test_names_tell_the_variants_of_a_head_apart() -> None:
    heads = [drafters.eagle3(LLAMA_8B, draft_vocab=vocab).name for vocab in (drafters.EAGLE3_VOCAB, None, 64_000)]
    assert heads == ["eagle3", "eagle3-full", "eagle3-64000"]
