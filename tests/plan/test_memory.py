"""What fits: bytes of KV and weights against hand arithmetic, a dealing of heads, and blocks counted one by one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from forerun.errors import PlanError
from forerun.plan import drafters, memory
from forerun.plan.catalog import PlanCatalog
from forerun.plan.deployment import Deployment
from forerun.plan.hardware import Hardware
from forerun.plan.memory import (
    check_context,
    check_fits,
    kept_tokens,
    kv_copies,
    kv_token_bytes,
    pool_bytes,
    sequence_bytes,
    supports_context,
    usable_bytes,
    weight_bytes_per_gpu,
)
from forerun.plan.network import Attention
from forerun.plan.shapes import ModelShape
from reference.kv_pool import blocks_touched

CATALOG = PlanCatalog.load()
LLAMA8, LLAMA70, DEEPSEEK = (CATALOG.model(name) for name in ("llama-3.1-8b", "llama-3.3-70b", "deepseek-v3"))
SMALL = ModelShape(
    name="small", hidden=64, layers=6, heads=8, kv_heads=2, head_dim=16, vocab=1000, intermediate=128, window=100,
    window_layers=4,
)  # fmt: skip


def on(tensor: int = 1, **other: Any) -> Deployment:
    return Deployment(hardware=CATALOG.gpu("h100"), tensor=tensor, **other)


def test_kv_of_known_models() -> None:
    """By hand: 2 x layers x heads x dimensions x 2 bytes; MLA keeps latent and rotary key, 512 + 64, in 61 layers."""
    assert kv_token_bytes(LLAMA8.network, on()) == 2 * 32 * 8 * 128 * 2 == 128 * 1024
    assert kv_token_bytes(LLAMA70.network, on()) == 320 * 1024
    assert kv_token_bytes(LLAMA70.network, on(kv="fp8")) == 160 * 1024
    assert kv_token_bytes(DEEPSEEK.network, on()) == (512 + 64) * 61 * 2
    assert sequence_bytes(LLAMA70.network, on(), 4096) == 4096 * 320 * 1024


def test_four_beams_apart_take_600_mib() -> None:
    assert 4 * sequence_bytes(LLAMA8.network, on(), 1200, block=16) == 600 * 2**20


def test_what_cannot_be_split_is_kept_by_everybody() -> None:
    assert kv_token_bytes(LLAMA70.network, on(8)) == 320 * 1024
    assert kv_token_bytes(LLAMA70.network, on(16)) == 2 * 320 * 1024
    assert kv_token_bytes(DEEPSEEK.network, on(8)) == 8 * (512 + 64) * 61 * 2
    # Stages keep their own layers only.
    assert kv_token_bytes(DEEPSEEK.network, on(2, pipeline=4)) == 2 * (512 + 64) * 61 * 2


@pytest.mark.parametrize("heads", range(1, 10))
@pytest.mark.parametrize("tensor", [1, 2, 3, 4, 5, 8, 16])
def test_heads_are_dealt_out_whole(heads: int, tensor: int) -> None:
    """Every accelerator has room for as many heads as the one that gets most of them."""
    ranks = [0] * tensor
    for turn in range(max(heads, tensor)):
        ranks[turn % tensor] += 1
    attention = Attention(2 * heads * 16, heads, 0)
    assert kv_copies(attention, on(tensor)) == pytest.approx(tensor * max(ranks) / heads)


def test_windows_keep_what_they_see() -> None:
    each = 2 * 2 * 16 * 2  # bytes of a token and layer
    network = SMALL.network
    assert kv_token_bytes(network, on()) == 6 * each
    assert kv_token_bytes(network, on(), windowed=False) == 2 * each
    assert sequence_bytes(network, on(), 60) == 6 * each * 60
    assert sequence_bytes(network, on(), 1000) == each * (2 * 1000 + 4 * 100)
    grown = sequence_bytes(network, on(), 1001) - sequence_bytes(network, on(), 1000)
    assert grown == kv_token_bytes(network, on(), windowed=False)


@pytest.mark.parametrize("block", [1, 5, 16])
@pytest.mark.parametrize("window", [None, 1, 2, 16, 17, 33, 100])
def test_blocks_counted_one_by_one(block: int, window: int | None) -> None:
    """Never fewer than are touched; as many as at the worst alignment once the window is left behind."""
    most = 0
    for tokens in range(1, 300):
        touched, kept = blocks_touched(tokens, window, block), kept_tokens(tokens, window, block)
        assert kept >= touched * block
        if window is None or tokens <= window:
            assert kept == math.ceil(tokens / block) * block
        most = max(most, touched)
    assert kept_tokens(299, window, block) == most * block
    assert kept_tokens(299, window) == min(299, window or 299)


def test_weights_are_split_over_all_accelerators() -> None:
    # 70.55e9 parameters in 16 bits.
    assert LLAMA70.network.weight_bytes == pytest.approx(141.1e9, rel=1e-3)
    assert weight_bytes_per_gpu(LLAMA70.network, on(4, pipeline=2)) == LLAMA70.network.weight_bytes / 8


def test_the_pool_is_what_weights_leave() -> None:
    assert pool_bytes(LLAMA8.network, on()) == pytest.approx(0.9 * 80e9 - LLAMA8.network.weight_bytes)
    assert pool_bytes(LLAMA70.network, on()) < 0
    assert pool_bytes(LLAMA70.network, on(2, pipeline=2), utilization=0.8) == pytest.approx(
        0.8 * 320e9 - LLAMA70.network.weight_bytes
    )


def test_every_medusa_head_takes_memory() -> None:
    """The priced network is one head; four are kept: a residual block and a vocabulary matrix each."""
    medusa = drafters.medusa(LLAMA8, heads=4)
    head = 4096 * 4096 + 4096 + 4096 * 128256
    taken = pool_bytes(LLAMA8.network, on()) - pool_bytes(LLAMA8.network, on(), medusa)
    assert taken == pytest.approx(4 * head * 2)
    assert sequence_bytes(medusa, on(), 1000) == 0


def test_a_draft_model_keeps_weights_and_kv() -> None:
    draft = drafters.model(LLAMA8, LLAMA70)
    taken = pool_bytes(LLAMA70.network, on(4)) - pool_bytes(LLAMA70.network, on(4), draft)
    assert taken == pytest.approx(LLAMA8.network.weight_bytes)
    assert kv_token_bytes(draft, on(4)) == 128 * 1024
    assert sequence_bytes(drafters.ngram(), on(), 1000) == 0


def exact(batch: int, context: int, spare: float, drafter: drafters.PricedDrafter | None = None) -> Deployment:
    """A machine with exactly the room for it, and `spare` bytes besides."""
    where = on()
    need = SMALL.network.weight_bytes + batch * sequence_bytes(SMALL.network, where, context) + spare
    if drafter is not None:
        need += drafter.weight_bytes + batch * sequence_bytes(drafter, where, context)
    return replace(where, hardware=replace(where.hardware, memory=need / memory.UTILIZATION))


@pytest.mark.parametrize("drafter", [None, drafters.eagle(SMALL), drafters.medusa(SMALL), drafters.ngram()])
def test_fits_to_the_byte(drafter: drafters.PricedDrafter | None) -> None:
    check_fits(SMALL.network, exact(7, 300, 1, drafter), batch=7, context=300, drafter=drafter)
    for batch, context, spare in ((7, 300, -1.0), (8, 300, 1.0), (7, 301, 1.0)):
        where = exact(7, 300, spare, drafter)
        with pytest.raises(PlanError, match="the KV of") as caught:
            check_fits(SMALL.network, where, batch=batch, context=context, drafter=drafter)
        assert caught.value.field == "memory"


def test_too_many_weights_are_named() -> None:
    with pytest.raises(PlanError, match=r"141\.1 GB and 1 x h100 has 72\.0 GB"):
        check_fits(LLAMA70.network, on())
    draft = drafters.model(LLAMA70, LLAMA70)
    check_fits(LLAMA70.network, on(2))
    with pytest.raises(PlanError, match=r"282\.2 GB"):
        check_fits(LLAMA70.network, on(2), drafter=draft)


@pytest.mark.parametrize("share", [0, -0.1, 1.01, math.inf, math.nan])
def test_a_share_of_memory_is_a_share(share: float) -> None:
    with pytest.raises(PlanError, match="utilization"):
        usable_bytes(on(), share)


def test_hardware_of_the_users() -> None:
    mine = Hardware(name="mine", flops={"bf16": 1e12}, bandwidth=1e11, memory=1e9)
    assert usable_bytes(Deployment(hardware=mine), 1) == 1e9


def test_a_context_may_be_as_long_as_the_models() -> None:
    longest = LLAMA8.max_context
    assert longest == 131072
    check_context(LLAMA8, longest)
    assert supports_context(LLAMA8, longest)
    assert not supports_context(LLAMA8, longest + 1)
    with pytest.raises(PlanError, match="131073 tokens are more than the 131072 of llama") as caught:
        check_context(LLAMA8, longest + 1, "contexts")
    assert caught.value.field == "contexts"
    check_context(SMALL, 10**9)  # its longest isn't known


@pytest.mark.parametrize(
    ("heads", "kv_heads", "allowed"),
    [
        (64, 8, {1, 2, 4, 8, 16, 32, 64}),
        (14, 2, {1, 2, 14}),  # 7 accelerators would share 2 key-value heads
        (24, 8, {1, 2, 4, 8, 24}),
        (9, 3, {1, 3, 9}),
        (8, 1, {1, 2, 4, 8}),
    ],
)
def test_a_split_deals_heads_out_whole(heads: int, kv_heads: int, allowed: set[int]) -> None:
    """As vLLM does it: query heads in equal parts; key-value heads in equal parts or equally many copies."""
    shape = replace(SMALL, heads=heads, kv_heads=kv_heads)
    for tensor in range(1, 2 * heads + 1):
        if tensor in allowed:
            on(tensor).check_split(shape)
            continue
        with pytest.raises(PlanError, match=f"expected one of {', '.join(map(str, sorted(allowed)))}$") as caught:
            on(tensor).check_split(shape)
        assert caught.value.field == "tensor"


def test_a_latent_is_kept_by_all_and_a_stage_has_a_layer() -> None:
    on(64).check_split(replace(DEEPSEEK, kv_heads=2))
    on(64).check_split(DEEPSEEK)
    on(pipeline=SMALL.layers).check_split(SMALL)
    with pytest.raises(PlanError, match="at most the 6 layers of small") as caught:
        on(pipeline=SMALL.layers + 1).check_split(SMALL)
    assert caught.value.field == "pipeline"
