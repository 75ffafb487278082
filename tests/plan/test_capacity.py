"""Capacity against a pool walked step by step, hand arithmetic, and every chunk of a prefill priced by itself."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from forerun.errors import PlanError
from forerun.plan import drafters
from forerun.plan.acceptance import Acceptance
from forerun.plan.capacity import Capacity, Growth, Lengths, default_batches
from forerun.plan.capacity_explain import explain_capacity
from forerun.plan.catalog import PlanCatalog
from forerun.plan.deployment import Deployment
from forerun.plan.hardware import Efficiency
from forerun.plan.shapes import ModelShape
from forerun.plan.speculate import Proposal, best, price
from forerun.plan.steptime import Load, forward_time
from reference.derivations import evaluated
from reference.kv_pool import LayerKind, held_bytes, mean_bytes, walk

CATALOG = PlanCatalog.load()
LLAMA8, LLAMA70, DEEPSEEK = (CATALOG.model(name) for name in ("llama-3.1-8b", "llama-3.3-70b", "deepseek-v3"))
TINY = ModelShape(
    name="tiny", hidden=64, layers=3, heads=4, kv_heads=2, head_dim=16, vocab=1000, intermediate=128, max_context=4096
)
TOKEN = 3 * 2 * 2 * 16 * 2  # bytes of a token of TINY in all its layers
WINDOWED = replace(TINY, name="windowed", window=50, window_layers=2)


def holding(model: ModelShape, pool: float, lengths: Lengths, **more: Any) -> Capacity:
    """A machine on which weights leave exactly so many bytes."""
    proposal: Proposal | None = more.get("proposal")
    taken = model.network.weight_bytes + (proposal.drafter.weight_bytes if proposal else 0.0)
    hardware = replace(CATALOG.gpu("h100"), memory=taken + pool)
    where = Deployment(hardware=hardware, efficiency=more.pop("efficiency", None))
    return Capacity(network=model.network, deployment=where, lengths=lengths, utilization=1.0, **more)


def on(gpu: str = "h100", tensor: int = 1, **more: Any) -> Deployment:
    return Deployment(hardware=CATALOG.gpu(gpu), tensor=tensor, **more)


def test_llama_70b_on_four_h100() -> None:
    """By hand: 4 x 80e9 x 0.9 - 141.107e9 = 146.89e9 bytes; 1504 tokens x 320 KiB = 492.8e6 a request at the end."""
    found = Capacity(network=LLAMA70.network, deployment=on(tensor=4), lengths=Lengths(1000, 500))
    assert found.pool == pytest.approx(146.89e9, rel=1e-4)
    assert found.token_bytes == found.long_token_bytes == 320 * 1024
    assert found.held(1500) == 1504 * 320 * 1024
    assert found.fitting == (
        146892587008 // (1008 * 327680),
        math.floor(146892587008 / found.mean_held),
        146892587008 // (1504 * 327680),
    )
    assert found.fitting.to_the_end == 298


def test_latent_attention_is_kept_by_every_accelerator() -> None:
    fewer = Capacity(network=DEEPSEEK.network, deployment=on("h200", 8), lengths=Lengths(1000, 500))
    assert fewer.token_bytes == 8 * (512 + 64) * 61 * 2


@pytest.mark.parametrize("model", [TINY, WINDOWED])
@pytest.mark.parametrize("block", [1, 7, 16])
def test_the_mean_is_that_of_every_token(model: ModelShape, block: int) -> None:
    for prompt, reply in ((1, 1), (3, 40), (48, 5), (49, 100), (200, 333)):
        found = holding(model, 1e9, Lengths(prompt, reply), block=block)
        each = sum(found.held(prompt + n) for n in range(1, reply + 1)) / reply
        assert found.mean_held == pytest.approx(each)
        if model is TINY:
            assert each == pytest.approx(mean_bytes([LayerKind(TOKEN)], prompt=prompt, reply=reply, block=block))


def random_case(rng: random.Random) -> dict[str, Any]:
    tokens_per_step = rng.choice([Fraction(1), Fraction(1), Fraction(5, 4), Fraction(7, 2), Fraction(19, 8)])
    drafts = 0 if tokens_per_step == 1 else rng.randint(math.ceil(tokens_per_step) - 1, 8)
    return {
        "prompt": rng.randint(1, 120), "reply": rng.randint(1, 400), "batch": rng.randint(1, 9),
        "tokens_per_step": tokens_per_step, "drafts": drafts, "block": rng.choice([1, 3, 16]),
    }  # fmt: skip


def filled(found: Capacity, case: dict[str, Any]) -> tuple[int, int] | None:
    growth = Growth(float(case["tokens_per_step"]), case["drafts"])
    step = found.fills_at(case["batch"], growth)
    return None if step is None else (step, found.needs(step, growth))


def cases(seed: int, count: int) -> list[tuple[dict[str, Any], float]]:
    """Random requests, and a pool that is too small for about half of them."""
    rng = random.Random(seed)
    found = []
    while len(found) < count:
        case = random_case(rng)
        end = held_bytes(case["prompt"] + case["reply"], [LayerKind(TOKEN)], case["block"])
        pool = case["batch"] * end * rng.choice([0.5, 0.8, 0.95, 1.0, 1.3])
        if pool >= TOKEN * (case["prompt"] + 1):
            found.append((case, pool))
    return found


def test_the_step_at_which_the_pool_fills_is_the_one_walked_to() -> None:
    outcomes = set()
    for case, pool in cases(1, 300):
        found = holding(TINY, pool, Lengths(case["prompt"], case["reply"]), block=case["block"])
        walked = walk([LayerKind(TOKEN)], found.pool, **case)
        expected = None if walked is None else (walked.step, walked.tokens)
        assert filled(found, case) == expected, case
        outcomes.add("never" if walked is None else "first" if walked.step == 1 else "later")
    assert outcomes == {"never", "first", "later"}


@pytest.mark.parametrize("fault", ["no blocks", "no drafts", "one token a step", "one block less"])
def test_a_fault_in_the_books_is_noticed(fault: str) -> None:
    """The walk with one thing forgotten disagrees somewhere."""
    wrong = 0
    for case, pool in cases(2, 100):
        found = holding(TINY, pool, Lengths(case["prompt"], case["reply"]), block=case["block"])
        other = dict(case)
        if fault == "no blocks":
            other["block"] = 1
        elif fault == "no drafts":
            other["drafts"] = 0
        elif fault == "one token a step":
            other["tokens_per_step"] = Fraction(1)
        less = TOKEN * case["block"] if fault == "one block less" else 0
        walked = walk([LayerKind(TOKEN)], found.pool - less, **other)
        wrong += filled(found, case) != (None if walked is None else (walked.step, walked.tokens))
    assert wrong > 3


def test_windows_never_promise_more_than_there_is() -> None:
    """The books count a window at its worst alignment, so the pool may be said to fill early, and never late."""
    kinds = [LayerKind(TOKEN // 3), LayerKind(2 * TOKEN // 3, 50)]
    rng = random.Random(3)
    for _ in range(100):
        case = random_case(rng)
        most = held_bytes(case["prompt"] + case["reply"], kinds, case["block"]) * case["batch"]
        pool = max(most * rng.choice([0.6, 0.9, 1.0]), 2 * TOKEN * (case["prompt"] + 1 + case["block"]))
        found = holding(WINDOWED, pool, Lengths(case["prompt"], case["reply"]), block=case["block"])
        walked, said = walk(kinds, found.pool, **case), filled(found, case)
        assert said is not None or walked is None
        assert walked is None or said is None or said[0] <= walked.step


def test_what_fits_fits_and_no_more() -> None:
    for model in (TINY, WINDOWED):
        for pool in (1e6, 3.3e6, 20e6):
            found = holding(model, pool, Lengths(100, 900))
            sizes = found.held(101), found.mean_held, found.held(1000)
            for count, each in zip(found.fitting, sizes, strict=True):
                assert count * each <= found.pool < (count + 1) * each
            assert found.fills_at(found.fitting.to_the_end, Growth()) is None
            assert found.fills_at(found.fitting.to_the_end + 1, Growth()) is not None


def test_short_prompts_with_enormous_replies() -> None:
    """The pool looks empty at the start: 3,900 requests fit, of which 14 to the end, and a batch of 64 fills it."""
    found = Capacity(network=LLAMA70.network, deployment=on(tensor=4), lengths=Lengths(100, 30_000))
    assert found.fitting.at_start == math.floor(found.pool / (112 * 320 * 1024))
    assert found.fitting.to_the_end == math.floor(found.pool / (30_112 * 320 * 1024))
    [row] = found.rows([64])
    # 64 sequences fill it when each has pool / 64 bytes, in whole blocks.
    each = math.floor(found.pool / 64 / (16 * 320 * 1024)) * 16
    assert row.fills_at == each + 1 - 100
    assert row.fills_tokens == each + 1
    assert row.pool_start < 0.02
    assert row.pool_end > 4
    assert row.point.context == (100 + each) / 2


def test_a_preemption_by_hand() -> None:
    """5,000 tokens in chunks of 2,048 and a rest of 904; swapping is bytes over the host link of every accelerator."""
    where = on(tensor=4)
    found = Capacity(network=LLAMA70.network, deployment=where, lengths=Lengths(4000, 1000))
    cost = found.preemption(5000)
    loads = [Load(1, 2048, 0, 1), Load(1, 2048, 2048, 1), Load(1, 904, 4096, 1)]
    network = LLAMA70.network
    assert cost.recompute_seconds == pytest.approx(
        sum(forward_time(network, where, load).seconds for load in loads) + 3 * 300e-6
    )
    assert cost.swap_bytes == 5008 * 320 * 1024
    assert cost.swap_seconds == pytest.approx(2 * 5008 * 320 * 1024 / (4 * 64e9 * 0.7))


def test_many_chunks_are_sampled_to_a_thousandth() -> None:
    found = Capacity(network=LLAMA8.network, deployment=on(), lengths=Lengths(10, 10), chunk=64)
    tokens = 64 * 1500 + 17
    exact = sum(
        forward_time(LLAMA8.network, on(), Load(1, 64, 64 * i, 1)).seconds + 300e-6 for i in range(1500)
    ) + (forward_time(LLAMA8.network, on(), Load(1, 17, 64 * 1500, 1)).seconds + 300e-6)  # fmt: skip
    assert found.preemption(tokens).recompute_seconds == pytest.approx(exact, rel=1e-3)


def test_a_drafter_with_kv_is_computed_again_too() -> None:
    proposal = Proposal(drafters.eagle(LLAMA8), Acceptance.of(0.7))
    with_it = Capacity(network=LLAMA8.network, deployment=on(), lengths=Lengths(500, 500), proposal=proposal)
    without = Capacity(network=LLAMA8.network, deployment=on(), lengths=Lengths(500, 500))
    network = proposal.drafter.network
    assert network is not None
    more = forward_time(network, on(), Load(1, 1000, 0, 1)).seconds
    both = with_it.preemption(1000), without.preemption(1000)
    assert both[0].recompute_seconds - both[1].recompute_seconds == pytest.approx(more)
    # A layer's KV of the 32 + 1.
    assert both[0].swap_bytes / both[1].swap_bytes == pytest.approx(33 / 32)


def test_hardware_without_a_host_link_cannot_swap() -> None:
    where = replace(on(), hardware=replace(CATALOG.gpu("h100"), host=0.0))
    found = Capacity(network=LLAMA8.network, deployment=where, lengths=Lengths(10, 10))
    assert found.preemption(100).swap_seconds is None


def test_drafters_take_their_part_of_the_pool() -> None:
    plain = Capacity(network=LLAMA8.network, deployment=on(), lengths=Lengths(1000, 200))
    head = (4096 * 4096 + 4096 + 4096 * 128256) * 2
    medusa = replace(plain, proposal=Proposal(drafters.medusa(LLAMA8, heads=4), Acceptance.of(0.6)))
    assert plain.pool - medusa.pool == pytest.approx(4 * head)
    assert plain.held(1200) == medusa.held(1200) == 150 * 2**20
    draft = replace(plain, proposal=Proposal(drafters.model(CATALOG.model("llama-3.2-1b")), Acceptance.of(0.6)))
    assert draft.token_bytes == 128 * 1024 + 2 * 16 * 8 * 64 * 2
    assert draft.fitting.to_the_end < plain.fitting.to_the_end


def test_rows_are_priced_as_speculation_is() -> None:
    lengths, where = Lengths(1000, 500), on(tensor=4)
    plain = Capacity(network=LLAMA70.network, deployment=where, lengths=lengths)
    [row] = plain.rows([16])
    seconds = forward_time(LLAMA70.network, where, Load(16, 1, 1250)).seconds + 300e-6
    assert row.step_seconds == pytest.approx(seconds)
    assert row.point.tokens_per_second == pytest.approx(1 / seconds)
    assert row.point.throughput == pytest.approx(16 / seconds)
    assert row.pool_start == pytest.approx(16 * 1008 * 320 * 1024 / plain.pool)
    assert row.pool_end == pytest.approx(16 * 1504 * 320 * 1024 / plain.pool)
    proposal = Proposal(drafters.eagle3(LLAMA70), Acceptance.of(0.8, 0.7))
    fast = replace(plain, proposal=proposal)
    [chosen] = fast.rows([16])
    assert chosen.point == best(LLAMA70.network, where, proposal, batch=16, context=1250)
    [given] = fast.rows([16], length=3)
    assert given.point == price(LLAMA70.network, where, proposal, batch=16, context=1250, length=3)
    assert given.point.tokens_per_step == pytest.approx(1 + 0.8 + 0.8 * 0.7 + 0.8 * 0.7 * 0.7)


def test_speculation_fills_the_pool_in_fewer_steps() -> None:
    lengths = Lengths(100, 3000)
    proposal = Proposal(drafters.ngram(), Acceptance.of(0.9))
    ideal = Efficiency.ideal()
    plain = holding(TINY, 1e6, lengths, efficiency=ideal)
    fast = holding(TINY, 1e6, lengths, efficiency=ideal, proposal=proposal)
    [slow_row], [fast_row] = plain.rows([4]), fast.rows([4], length=3)
    assert slow_row.fills_at is not None
    assert fast_row.fills_at is not None
    tokens = 1 + 0.9 + 0.81 + 0.729
    assert fast_row.fills_at == pytest.approx(slow_row.fills_at / tokens, abs=3)


def test_a_batch_of_users_and_the_three_counts_are_shown() -> None:
    found = Capacity(network=LLAMA70.network, deployment=on(tensor=4), lengths=Lengths(1000, 500))
    batches = default_batches(found.fitting)
    assert set(found.fitting) <= set(batches)
    assert {1, 2, 4, 256} <= set(batches)
    assert max(batches) == found.fitting.at_start


@pytest.mark.parametrize("model", [TINY, WINDOWED, LLAMA8, CATALOG.model("gpt-oss-20b")])
@pytest.mark.parametrize("with_drafter", [False, True])
def test_the_derivation_ends_in_the_table(model: ModelShape, with_drafter: bool) -> None:
    proposal = Proposal(drafters.eagle(model), Acceptance.of(0.7)) if with_drafter else None
    found = Capacity(
        network=model.network, deployment=on(tensor=2), lengths=Lengths(333, 777), proposal=proposal, block=32
    )
    derivation = explain_capacity(found)
    values = evaluated(derivation.lines)
    assert derivation.value == found.fitting.to_the_end
    assert values["pool"] == pytest.approx(found.pool)
    assert values["sequence_bytes"] == pytest.approx(found.held(1110))


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"lengths": Lengths(0, 1)}, "prompt"), ({"lengths": Lengths(1, 0)}, "reply"),
        ({"lengths": Lengths(-5, 1)}, "prompt"), ({"lengths": Lengths(1, 10**10)}, "reply"), ({"block": 0}, "block"),
        ({"chunk": -1}, "chunk"), ({"utilization": 0.0}, "utilization"), ({"utilization": math.nan}, "utilization"),
        ({"utilization": 1.5}, "utilization"), ({"network": LLAMA70.network}, "memory"),
        ({"lengths": Lengths(10**9, 1)}, "memory"),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_named(changed: dict[str, Any], field: str) -> None:
    given: dict[str, Any] = {"network": LLAMA8.network, "deployment": on(), "lengths": Lengths(10, 10), **changed}
    with pytest.raises(PlanError) as caught:
        Capacity(**given)
    assert caught.value.field == field


def test_drafts_need_a_drafter() -> None:
    found = Capacity(network=LLAMA8.network, deployment=on(), lengths=Lengths(10, 10))
    with pytest.raises(PlanError, match="length"):
        found.rows([1], length=3)
    with pytest.raises(PlanError, match="batch"):
        found.rows([0])
    with pytest.raises(PlanError, match="draft length"):
        replace(found, proposal=Proposal(drafters.medusa(LLAMA8), Acceptance.of(0.5))).rows([1], length=9)
