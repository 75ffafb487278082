"""Prices of speculation against arithmetic by hand and against trying everything."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import PlanError
from forerun.plan import drafters, speculate
from forerun.plan.acceptance import Acceptance
from forerun.plan.deployment import Deployment
from forerun.plan.formats import WeightFormats
from forerun.plan.hardware import Efficiency, Hardware
from forerun.plan.memory import check_fits
from forerun.plan.network import Layers, Linear, Network
from forerun.plan.shapes import Experts, ModelShape
from forerun.plan.speculate import (
    Bucket,
    Overtake,
    Proposal,
    Speculation,
    TargetSteps,
    best,
    break_even,
    first_loss,
    most_that_fit,
    overtakes,
    price,
    schedule,
    walked,
)
from reference import speedup as reference

GPU = Hardware(name="gpu", flops={"bf16": 1e15}, bandwidth=3.3e12, memory=80e9, link=4e11, link_us=8)
DENSE = ModelShape(
    name="dense", hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, vocab=128256, intermediate=14336
)
SMALL = replace(DENSE, name="small", hidden=1024, layers=12, heads=16, kv_heads=4, head_dim=64, intermediate=4096)
SPARSE = replace(DENSE, name="sparse", experts=Experts(n=64, active=4, intermediate=1024, shared=512), mtp_layers=1)
ONE, EIGHT = Deployment(hardware=GPU), Deployment(hardware=GPU, tensor=8)

PROPOSALS = {
    "ngram": Proposal(drafters.ngram(), Acceptance.of(0.45)),
    "medusa": Proposal(drafters.medusa(DENSE), Acceptance.of(0.65, 0.55, 0.5, 0.45)),
    "model": Proposal(drafters.model(SMALL, DENSE), Acceptance.of(0.75)),
    "eagle": Proposal(drafters.eagle(DENSE), Acceptance.of(0.72, 0.68, 0.65)),
    "eagle3": Proposal(drafters.eagle3(DENSE), Acceptance.of(0.8, 0.76, 0.73)),
    "mtp": Proposal(drafters.mtp(SPARSE), Acceptance.of(0.87, 0.75, 0.65)),
}


def of(shape: ModelShape, where: Deployment, proposal: Proposal, longest: int = 16) -> Speculation:
    return Speculation(TargetSteps(shape.network, where), proposal, longest=longest)


def of_network(network: Network, proposal: Proposal) -> Speculation:
    return Speculation(TargetSteps(network, ONE), proposal)


# One matrix of 1000 x 1000 in two bytes and nothing else: 2,000,000 bytes and 2,000 numbers in and out a token over
# 1 MB/s, so n tokens take 2 + 0.004 n seconds, until 2,000,000 n FLOP over 100 MFLOP/s, 0.02 n seconds, take longer.
SLOW = Hardware(name="slow", flops={"bf16": 1e8}, bandwidth=1e6, memory=1e9)
MATRIX = Network("matrix", 1000, (Layers("w", 1, (Linear("w", 1000, 1000),), None),), None, 0, False, WeightFormats())
HALF_SECOND = Deployment(hardware=SLOW, efficiency=replace(Efficiency.ideal(), step_us=500_000))


def test_a_point_by_hand() -> None:
    """Three drafts at half acceptance: 1 + 1/2 + 1/4 + 1/8 tokens in 2.016 + 0.5 seconds against one in 2.504."""
    point = price(MATRIX, HALF_SECOND, Proposal(drafters.ngram(), Acceptance.of(0.5)), batch=1, context=0, length=3)
    assert point.tokens_per_step == 1.875
    assert point.plain_seconds == pytest.approx(2.504)
    assert point.verify_seconds == pytest.approx(2.516)
    assert point.draft_cost == 0
    assert point.verify_ratio == pytest.approx(2.516 / 2.504)
    assert point.speedup == pytest.approx(1.875 * 2.504 / 2.516)
    assert point.tokens_per_second == pytest.approx(1.875 / 2.516)
    assert point.throughput == point.tokens_per_second


def test_a_point_by_hand_with_a_draft() -> None:
    """Two drafts by the same matrix as a head: 0.002 s launches apart, the draft is one forward of two of them."""
    where = replace(HALF_SECOND, efficiency=replace(Efficiency.ideal(), step_us=500_000, launch_us=1000))
    drafter = drafters.PricedDrafter("twin", "model", MATRIX, catch_up=1, host_us=250_000)
    point = price(MATRIX, where, Proposal(drafter, Acceptance.of(0.5)), batch=10, context=0, length=3)
    first, further = 2 + 0.004 * 20 + 0.001, 2 + 0.004 * 10 + 0.001
    assert point.draft_seconds == pytest.approx(0.25 + first + 2 * further)
    assert point.plain_seconds == pytest.approx(further + 0.5)
    assert point.verify_seconds == pytest.approx(2 + 0.004 * 40 + 0.001 + 0.5)
    assert point.draft_cost == pytest.approx((0.25 + first + 2 * further) / 3 / (further + 0.5))
    assert point.throughput == pytest.approx(10 * 1.875 / (point.draft_seconds + point.verify_seconds))


def test_where_it_stops_paying_by_hand() -> None:
    """One draft at half acceptance gains while the step takes less than 1.5 plain ones: 2 B tokens take 0.04 B seconds
    from B = 63 on (0.04 * 63 > 2 + 0.008 * 63) and 0.04 B + 0.5 >= 1.5 (2 + 0.004 B + 0.5) from B = 96 on
    (0.034 B >= 3.25)."""
    proposal = Proposal(drafters.ngram(), Acceptance.of(0.5))
    assert break_even(MATRIX, HALF_SECOND, proposal, context=0, length=1) == 96
    assert schedule(MATRIX, HALF_SECOND, proposal, context=0, most=200, longest=1) == [
        Bucket(1, 95, 1),
        Bucket(96, 200, 0),
    ]


@pytest.mark.parametrize("kind", PROPOSALS)
@pytest.mark.parametrize("where", [ONE, EIGHT], ids=["one", "eight"])
def test_every_price_is_the_reference(kind: str, where: Deployment) -> None:
    shape, proposal = SPARSE if kind == "mtp" else DENSE, PROPOSALS[kind]
    for batch, context, length in itertools.product((1, 7, 200), (0, 1000, 50_000), (0, 1, 2, 4)):
        point = price(shape.network, where, proposal, batch=batch, context=context, length=length)
        expected = reference.speedup(shape.network, where, proposal, batch, context, length)
        assert point.speedup == pytest.approx(expected, rel=1e-12), (batch, context, length)


@pytest.mark.parametrize("kind", PROPOSALS)
def test_the_best_length_is_the_best_of_all(kind: str) -> None:
    shape, proposal = SPARSE if kind == "mtp" else DENSE, PROPOSALS[kind]
    for batch, context in itertools.product((1, 3, 20, 60, 150, 1000), (0, 8000)):
        point = best(shape.network, EIGHT, proposal, batch=batch, context=context, longest=9)
        assert point.length == reference.best_length(shape.network, EIGHT, proposal, batch, context, 9)
        assert point == price(shape.network, EIGHT, proposal, batch=batch, context=context, length=point.length)


@pytest.mark.parametrize("kind", PROPOSALS)
def test_the_acceptance_needed_is_where_the_best_length_begins_to_pay(kind: str) -> None:
    """Against a walk over acceptances; the one that is needed depends on no acceptance of the drafter's."""
    shape, (drafter, rates) = SPARSE if kind == "mtp" else DENSE, PROPOSALS[kind]
    steps = 400
    for batch, context in ((1, 0), (20, 8000), (60, 0), (150, 100), (400, 0)):
        found = of(shape, ONE, Proposal(drafter, rates), longest=5)
        needed = found.acceptance_needed(batch, context)
        for length in (None, min(3, drafter.longest)):
            needed = found.acceptance_needed(batch, context, length)
            pays = []
            for step in range(steps + 1):
                gains = of(shape, ONE, Proposal(drafter, Acceptance.of(step / steps)), longest=5).speedups(
                    batch, context
                )
                pays.append((max(gains) if length is None else gains[length]) > 1)
            if needed is None:
                assert not any(pays)
                continue
            first = pays.index(True) if any(pays) else steps + 1
            assert (first - 1) / steps - 1e-9 <= needed <= first / steps + 1e-9
            assert all(pays[first:])
        other = of(shape, ONE, Proposal(drafter, Acceptance.of(0.123)), longest=5)
        assert other.acceptance_needed(batch, context) == found.acceptance_needed(batch, context)


def test_a_longer_draft_may_need_less() -> None:
    """Where the draft costs the host as long whatever its length, one token pays last."""
    one = of(DENSE, ONE, Proposal(drafters.ngram(host_us=3000), Acceptance.of(0.5)))
    needed, by_length = one.acceptance_needed(1, 0), [one.acceptance_needed(1, 0, length) for length in range(1, 17)]
    assert needed is not None
    assert needed == min(rate for rate in by_length if rate is not None)
    assert by_length[0] is not None
    assert needed < by_length[0] - 0.05


def test_no_acceptance_is_enough() -> None:
    """Arithmetic is the limit: a token verified takes as long as one written."""
    slow = replace(GPU, flops={"bf16": 1e12})
    one = of(DENSE, Deployment(hardware=slow, efficiency=Efficiency.ideal()), PROPOSALS["eagle3"])
    assert one.acceptance_needed(64, 0) is None
    assert one.acceptance_needed(64, 0, 2) is None
    assert one.best(64, 0).length == 0


def test_of_equal_lengths_the_shortest() -> None:
    """Steps that cost the same whatever they verify, and a second draft token that is never accepted."""
    fixed = Network("nothing", 8, (), None, 0, False, WeightFormats())
    proposal = Proposal(drafters.ngram(), Acceptance.of(0.5, 0))
    assert of_network(fixed, proposal).speedups(1, 0)[1:3] == [1.5, 1.5]
    assert of_network(fixed, proposal).best(1, 0).length == 1


def test_what_is_kept_between_batches_changes_nothing() -> None:
    """One object for many batches and contexts, drafters on the same steps: the same numbers as one at a time."""
    steps = TargetSteps(DENSE.network, EIGHT)
    for proposal in PROPOSALS.values():
        one = Speculation(steps, proposal, longest=6)
        for batch, context in itertools.product((64, 1, 9, 64), (8000, 0)):
            alone = best(DENSE.network, EIGHT, proposal, batch=batch, context=context, longest=6)
            assert one.best(batch, context) == alone
            assert one.speedups(batch, context) == [
                price(DENSE.network, EIGHT, proposal, batch=batch, context=context, length=length).speedup
                for length in range(one.longest + 1)
            ]


@pytest.mark.parametrize("kind", PROPOSALS)
def test_the_schedule_is_every_batch(kind: str) -> None:
    shape, proposal = SPARSE if kind == "mtp" else DENSE, PROPOSALS[kind]
    buckets = schedule(shape.network, ONE, proposal, context=2000, most=120, longest=5)
    assert [bucket.lo for bucket in buckets] == [1, *(bucket.hi + 1 for bucket in buckets[:-1])]
    assert buckets[-1].hi == 120
    assert all(one.length != other.length for one, other in itertools.pairwise(buckets))
    for bucket in buckets:
        for batch in range(bucket.lo, bucket.hi + 1):
            assert bucket.length == reference.best_length(shape.network, ONE, proposal, batch, 2000, 5)


@pytest.mark.parametrize("kind", PROPOSALS)
@pytest.mark.parametrize("length", [None, 1, 4])
def test_where_it_pays_is_every_batch(kind: str, length: int | None) -> None:
    """With experts there is more than one run of batches, and break-even is the end of the first."""
    shape, proposal = SPARSE if kind == "mtp" else DENSE, PROPOSALS[kind]
    one = of(shape, ONE, proposal, longest=4)
    for context in (0, 3000):
        runs = one.runs(context, length=length, most=400)
        paying = {batch for first, last in runs for batch in range(first, last + 1)}
        assert paying == {batch for batch in range(1, 401) if one.at(batch, context, length).speedup > 1}
        found = break_even(shape.network, ONE, proposal, context=context, length=length, longest=4, most=400)
        assert found == next((batch for batch in range(1, 401) if batch not in paying), None)


def test_a_mixture_pays_again_once_all_experts_are_read() -> None:
    """A weak drafter on many small experts: a second token doubles what is read at batch 1; at 64 it reads nothing."""
    shape = replace(DENSE, experts=Experts(n=128, active=2, intermediate=2048))
    assert of(shape, ONE, Proposal(drafters.ngram(), Acceptance.of(0.3))).runs(0, most=512)[0][0] > 1
    better, weaker = (of(shape, ONE, Proposal(drafters.ngram(str(a)), Acceptance.of(a))) for a in (0.45, 0.4))
    assert [len(one.runs(0, most=512)) for one in (better, weaker)] == [2, 2]
    assert overtakes(weaker, better, 0, most=512) == []
    assert shape.experts is not None
    dense = replace(shape, experts=None, intermediate=4096)
    assert of(dense, ONE, Proposal(drafters.ngram(), Acceptance.of(0.3))).runs(0, most=512)[0][0] == 1


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_a_single_change_is_found_where_it_is(change: int, most: int) -> None:
    runs = speculate._runs(lambda batch: batch >= change, most)
    expected = [(1, change - 1, False), (change, most, True)] if 1 < change <= most else [(1, most, change == 1)]
    assert runs == expected


@given(st.sets(st.integers(2, 16), max_size=15), st.integers(16, 300))
def test_any_changes_among_small_batches_are_found(changes: set[int], most: int) -> None:
    def state(batch: int) -> int:
        return sum(batch >= change for change in changes) % 2

    runs = speculate._runs(state, most)
    assert [first for first, _, _ in runs] == [1, *sorted(changes)]
    assert [last for _, last, _ in runs] == [*(change - 1 for change in sorted(changes)), most]


def test_batches_that_are_looked_at() -> None:
    assert walked(1) == [1]
    assert walked(40) == [*range(1, 17), 20, 24, 28, 32, 40]
    assert walked(41)[-2:] == [40, 41]
    assert walked(4096)[-1] == 4096


def test_the_first_batch_that_loses() -> None:
    assert first_loss([], 8) == 1
    assert first_loss([(2, 8)], 8) == 1
    assert first_loss([(1, 3), (6, 8)], 8) == 4
    assert first_loss([(1, 8)], 8) is None


@pytest.mark.parametrize(
    ("one", "other"), list(itertools.combinations([kind for kind in PROPOSALS if kind != "mtp"], 2))
)
def test_overtaking_is_every_batch(one: str, other: str) -> None:
    steps = TargetSteps(DENSE.network, ONE)
    pair = [Speculation(steps, PROPOSALS[kind], longest=4) for kind in (one, other)]
    for context in (0, 4000):
        expected, ahead = [], None
        for batch in range(1, 301):
            speeds = [item.best(batch, context).speedup for item in pair]
            if speeds[0] == speeds[1]:
                continue
            now = pair[speeds[1] > speeds[0]].drafter.name
            if ahead is not None and now != ahead:
                expected.append((batch, now, ahead))
            ahead = now
        assert overtakes(*pair, context, most=300) == expected


def test_a_dear_drafter_overtakes_a_free_one_by_hand() -> None:
    """1.4 tokens for V seconds against 1.9 for V + 1: equal at V = 2.8, which 2 B tokens reach at B = 37.5
    (2 + 0.008 B + 0.5)."""
    dear = Proposal(drafters.ngram("dear", host_us=1_000_000), Acceptance.of(0.9))
    free = Proposal(drafters.ngram("free"), Acceptance.of(0.4))
    steps = TargetSteps(MATRIX, HALF_SECOND)
    pair = Speculation(steps, dear), Speculation(steps, free)
    assert overtakes(*pair, 0, lengths=(1, 1), most=60) == [Overtake(38, "dear", "free")]
    assert overtakes(*reversed(pair), 0, lengths=(1, 1), most=60) == [Overtake(38, "dear", "free")]
    assert overtakes(*pair, 0, lengths=(1, 1), most=37) == []


def test_longer_contexts_move_break_even_up() -> None:
    """More of a step is KV, which all queries of a sequence share (MagicDec, arXiv 2408.11049)."""
    found = [
        break_even(DENSE.network, ONE, PROPOSALS["ngram"], context=context, most=4096) or 4097
        for context in (0, 250, 500, 1000, 8000)
    ]
    assert found == sorted(found)
    assert found[0] < 400
    assert found[-1] == 4097


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 600), st.sampled_from([0, 1000, 20_000]), st.floats(0, 0.98), st.floats(0, 0.98))
def test_better_drafts_are_longer_and_faster(batch: int, context: int, one: float, other: float) -> None:
    low, high = sorted((one, other))
    drafter = PROPOSALS["eagle3"].drafter
    worse = best(DENSE.network, EIGHT, Proposal(drafter, Acceptance.of(low)), batch=batch, context=context)
    better = best(DENSE.network, EIGHT, Proposal(drafter, Acceptance.of(high)), batch=batch, context=context)
    assert 1 <= worse.speedup <= better.speedup
    assert worse.length <= better.length


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 600), st.sampled_from([0, 1000, 20_000]), st.integers(1, 15))
def test_verification_costs_more_the_more_it_verifies(batch: int, context: int, length: int) -> None:
    proposal = PROPOSALS["ngram"]
    ratios = [
        price(DENSE.network, EIGHT, proposal, batch=batch, context=context, length=n).verify_ratio
        for n in (0, length, length + 1)
    ]
    assert ratios[0] == 1
    assert 1 < ratios[1] < ratios[2] <= length + 2


def test_a_drafter_elsewhere_is_priced_there() -> None:
    alone = replace(EIGHT, tensor=1)
    proposal = PROPOSALS["model"]
    point = price(DENSE.network, EIGHT, proposal, batch=4, context=1000, length=3, draft_deployment=alone)
    assert (
        point.draft_seconds
        == proposal.drafter.seconds(alone, 4, 1000, 3)
        != proposal.drafter.seconds(EIGHT, 4, 1000, 3)
    )
    assert point.verify_seconds == price(DENSE.network, EIGHT, proposal, batch=4, context=1000, length=3).verify_seconds
    chosen = best(DENSE.network, EIGHT, proposal, batch=4, context=1000, draft_deployment=alone)
    assert chosen.draft_seconds == proposal.drafter.seconds(alone, 4, 1000, chosen.length)


def test_one_length_for_a_bucket_loses_least_at_the_worse_end() -> None:
    one = of(DENSE, ONE, PROPOSALS["eagle3"], longest=6)
    bucket, loss = one.bucket(1000, 33, 128)

    def worst(length: int) -> float:
        return max(1 - one.price(batch, 1000, length).speedup / one.best(batch, 1000).speedup for batch in (33, 128))

    assert (bucket.lo, bucket.hi) == (33, 128)
    assert loss == pytest.approx(worst(bucket.length))
    assert all(worst(length) >= loss - 1e-12 for length in range(7))
    assert one.bucket(1000, 5, 5) == (Bucket(5, 5, one.best(5, 1000).length), 0)


@pytest.mark.parametrize("kind", ["ngram", "medusa", "model"])
def test_as_many_sequences_fit_as_are_checked_to(kind: str) -> None:
    drafter = PROPOSALS[kind].drafter
    for where, tokens in ((ONE, 1000), (ONE, 30_000), (EIGHT, 5000)):
        most = most_that_fit(DENSE.network, where, drafter, tokens)
        check_fits(DENSE.network, where, batch=most, context=tokens, drafter=drafter)
        with pytest.raises(PlanError, match="memory"):
            check_fits(DENSE.network, where, batch=most + 1, context=tokens, drafter=drafter)


def test_fewer_fit_beside_a_drafter_on_one_accelerator() -> None:
    """By hand, per accelerator: 72 GB less an eighth of the target and the whole drafter; keys and values alike."""
    drafter, alone = PROPOSALS["model"].drafter, replace(EIGHT, tensor=1)
    assert drafter.network is not None
    room = 72e9 - DENSE.network.weight_bytes / 8 - drafter.network.weight_bytes
    each = 1000 * 2 * (32 * 2 * 8 * 128 / 8 + 12 * 2 * 4 * 64)
    assert most_that_fit(DENSE.network, EIGHT, drafter, 1000, draft_deployment=alone) == int(room // each)
    tight = replace(EIGHT, hardware=replace(GPU, memory=1e9))
    assert most_that_fit(DENSE.network, tight, drafter, 1000) == 0


def test_what_is_out_of_range_is_named() -> None:
    def check(field: str, batch: int = 1, context: float = 0, length: int = 1, kind: str = "medusa") -> None:
        with pytest.raises(PlanError) as raised:
            price(DENSE.network, ONE, PROPOSALS[kind], batch=batch, context=context, length=length)
        assert raised.value.field == field

    check("batch", batch=0)
    check("context", context=-1)
    check("context", context=float("nan"))
    check("draft length", length=5)
    check("draft length", length=-1, kind="ngram")
    check("draft length", length=64, kind="ngram")
    with pytest.raises(PlanError, match="longest"):
        best(DENSE.network, ONE, PROPOSALS["ngram"], batch=1, context=0, longest=-1)
    with pytest.raises(PlanError, match="batch"):
        best(DENSE.network, ONE, PROPOSALS["ngram"], batch=0, context=0)
    with pytest.raises(PlanError, match="most"):
        schedule(DENSE.network, ONE, PROPOSALS["ngram"], context=0, most=0)
