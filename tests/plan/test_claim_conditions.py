"""What would make a claim true: every solved value put back in gives the claim; what isn't found isn't there."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from forerun.plan import claim_conditions, drafters
from forerun.plan.acceptance import Acceptance
from forerun.plan.claim import assess
from forerun.plan.claim_conditions import KINDS, MOST_TOKENS
from forerun.plan.claim_setting import Setting
from forerun.plan.claim_speedup import assess_speedup
from forerun.plan.deployment import Deployment
from forerun.plan.hardware import Efficiency
from forerun.plan.speculate import Proposal, best
from forerun.plan.steptime import Load, forward_time
from reference.claims import CATALOG, condition, random_setting, setting, weights_in

# Solved values, put back in.


def test_each_needed_value_gives_the_claim_by_the_division() -> None:
    rng = random.Random(3)
    seen = set()
    for _ in range(100):
        given = replace(random_setting(rng), tokens_per_step=1.0)
        claimed = given.ceiling * rng.choice([1.5, 3.0, 6.0])
        found = {each.kind: each for each in claim_conditions.conditions(given, claimed, CATALOG)}
        read, bandwidth = given.step_bytes, given.bandwidth * given.users

        bits = found["weights"].needed
        if bits is not None:
            seen.add("weights")
            weights = given.weights_read * bits / 8
            assert bandwidth / (weights + read.kv) == pytest.approx(claimed)
        bits = found["kv"].needed
        if bits is not None:
            seen.add("kv")
            kv = read.kv / given.deployment.kv_bytes * bits / 8
            assert bandwidth / (read.weights + kv) == pytest.approx(claimed)
        tera = found["hardware"].needed
        assert tera is not None
        hardware = replace(given.deployment.hardware, bandwidth=tera * 1e12)
        assert replace(given, deployment=replace(given.deployment, hardware=hardware)).ceiling == pytest.approx(claimed)
        tokens = found["acceptance"].needed
        assert tokens is not None
        assert replace(given, tokens_per_step=tokens).ceiling == pytest.approx(claimed)
        active = found["active"].needed
        if active is not None:
            weights = active * 1e9 * read.weights / given.weights_read
            assert bandwidth / (weights + read.kv) == pytest.approx(claimed)
        batch = found["batch"].needed
        if batch is not None:
            seen.add("batch")
            n = int(batch)
            assert replace(given, batch=n, aggregate=True).ceiling >= claimed
            if n > given.batch:
                assert replace(given, batch=n - 1, aggregate=True).ceiling < claimed
    assert seen == {"weights", "kv", "batch"}


def test_bits_needed_as_a_format_of_so_many_bits() -> None:
    """The division with the weights in that many bits is the claim itself."""
    found = assess(setting("llama-3.1-8b"), 900, CATALOG)
    bits = condition(found, "weights").needed
    assert bits is not None
    name = f"{bits:.6f}bits"
    assert weights_in(setting("llama-3.1-8b"), name, name).ceiling == pytest.approx(900, rel=1e-6)


def test_the_fewest_users_and_tokens_by_the_full_model() -> None:
    given = setting("llama-3.1-8b")
    for claimed in (300.0, 2500.0, 8000.0):
        found = assess(given, claimed, CATALOG)
        users = int(condition(found, "batch").real.split()[0])
        counted = next(n for n in itertools.count(1) if replace(given, batch=n, aggregate=True).rate() >= claimed)
        assert users == counted
    found = assess(given, 700, CATALOG)
    exact = float(condition(found, "acceptance").real.split()[0])
    where = replace(given.deployment, efficiency=Efficiency.ideal())
    steps = [forward_time(given.model.network, where, Load(1, queries, 1000)) for queries in range(1, 65)]
    needed = next(700 * step.seconds for q, step in enumerate(steps, 1) if 700 * step.seconds <= q)
    assert exact == pytest.approx(needed, abs=0.006)


def test_the_nearest_format_is_the_mildest_that_does() -> None:
    given = setting("llama-3.1-8b")
    for claimed, name in ((300.0, "fp8"), (760.0, "nvfp4"), (800.0, "mxfp4"), (825.0, "int4"), (840.0, None)):
        weights = condition(assess(given, claimed, CATALOG), "weights")
        assert weights.sufficient == (name is not None)
        if name:
            assert weights.real == f"{name} weights"


def test_formats_with_fewer_bits_stay() -> None:
    """Experts of 4.25 bits aren't made 8 bits where the rest is."""
    given = setting("gpt-oss-20b")
    fewer = claim_conditions._formats(given)[0].setting
    assert fewer.model.formats.experts == "mxfp4"
    assert fewer.model.formats.linear == "fp8"
    assert fewer.step_bytes.weights < given.step_bytes.weights


def test_more_than_a_node_is_no_plausible_answer() -> None:
    gpus = condition(assess(setting(), 480, CATALOG, stated=frozenset({"batch"})), "gpus")
    assert gpus.sufficient
    assert gpus.real == "32 x h100"
    assert not gpus.plausible
    assert not gpus.counts
    assert "node of 8" in gpus.note
    assert "past 8 KV heads the cache is kept 4 times" in gpus.note


def test_heads_are_split_evenly_or_not_at_all() -> None:
    """12 heads go on 2 and 4 accelerators; 8 would leave some without."""
    tried = claim_conditions._gpus(setting("qwen2.5-coder-1.5b-instruct"))
    assert [move.text for move in tried] == ["2 x h100", "4 x h100"]
    assert not claim_conditions._gpus(
        replace(setting(), deployment=Deployment(hardware=replace(CATALOG.gpu("h100"), link=0.0)))
    )


def test_tokens_a_step_have_a_limit_of_plausibility() -> None:
    given = setting("llama-3.1-8b")
    for tokens, plausible in ((MOST_TOKENS - 0.1, True), (MOST_TOKENS + 0.1, False)):
        acceptance = condition(assess(given, tokens * given.rate() * 0.995, CATALOG), "acceptance")
        assert acceptance.sufficient
        assert acceptance.plausible == plausible


def test_another_model_never_counts() -> None:
    active = condition(assess(setting(), 100, CATALOG), "active")
    assert active.needed == pytest.approx((3.35e12 / 100 - 1001 * 320 * 1024) / 2 / 1e9, rel=1e-3)
    assert not active.counts
    assert CATALOG.model(active.real).network.n_active / 1e9 <= active.needed


def test_a_stated_condition_is_solved_but_does_not_count() -> None:
    given = setting("llama-3.1-8b")
    free = assess(given, 400, CATALOG)
    for kind in KINDS:
        if kind == "kv":
            continue
        settled = assess(given, 400, CATALOG, stated=frozenset({kind}))
        assert condition(free, kind).counts
        assert condition(settled, kind).needed == condition(free, kind).needed
        assert not condition(settled, kind).counts
    nothing = assess(given, 400, CATALOG, stated=frozenset(KINDS))
    assert nothing.verdict == "marketing"


def test_a_drafter_is_priced_with_its_own_time_and_memory() -> None:
    given = setting("llama-3.1-8b", batch=2)
    proposal = Proposal(drafters.eagle3(given.model), Acceptance.of(0.8, 0.75))
    found = assess(given, 500, CATALOG, proposal=proposal)
    where = replace(given.deployment, efficiency=Efficiency.ideal())
    point = best(given.model.network, where, proposal, batch=2, context=1000)
    drafter = condition(found, "drafter")
    assert drafter.reached == pytest.approx(point.tokens_per_second)
    assert drafter.counts == (point.tokens_per_second >= 500)
    # On a machine with room for the model alone it doesn't count, nor where its own KV has none.
    weights, tokens = given.room.weights + proposal.drafter.weight_bytes, 1001 + point.length
    kv = 2 * tokens * (128 + 4) * 1024  # two sequences, 32 layers and the drafter's
    for memory, enough in ((weights - 1e6, False), (weights + kv - 1, False), (weights + kv + 1, True)):
        tight = replace(given, deployment=replace(where, hardware=replace(where.hardware, memory=memory / 0.9 + 1e-3)))
        assert tight.room.fits
        assert condition(assess(tight, 500, CATALOG, proposal=proposal), "drafter").sufficient == enough
        assert assess_speedup(tight, 1.5, CATALOG, proposal).room.fits == enough


# Pairs.


def grid(given: Setting, kinds: tuple[str, str]) -> list[Setting]:
    """Every plausible combination of two kinds of condition, written out without the code under test."""
    found = [given]
    for kind in kinds:
        wider = []
        for one in found:
            where, model = one.deployment, one.model
            if kind == "weights":
                for name in ("fp8", "nvfp4", "mxfp4", "int4"):
                    fast = (
                        replace(where, activations="fp8") if name == "fp8" and "fp8" in where.hardware.flops else where
                    )
                    wider.append(replace(weights_in(one, name, name), deployment=fast))
            elif kind == "kv":
                wider.append(replace(one, deployment=replace(where, kv="fp8")))
            elif kind == "gpus":
                wider += [replace(one, deployment=replace(where, tensor=t)) for t in (2, 4, 8) if model.heads % t == 0]
            elif kind == "hardware":
                for name in ("h200", "b200", "mi300x", "h100", "a100"):
                    gpu = CATALOG.gpu(name)
                    if gpu.bandwidth > where.hardware.bandwidth:
                        wider.append(replace(one, deployment=replace(where, hardware=gpu, activations="bf16")))
            elif kind == "batch":
                wider += [replace(one, batch=n, aggregate=True) for n in range(1, 64)]
            else:
                wider += [replace(one, tokens_per_step=e) for e in (1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0)]
        found = wider
    return found


@pytest.mark.parametrize("claimed", [25.0, 110.0, 240.0, 450.0, 1000.0, 3000.0])
@pytest.mark.parametrize("gpu", ["h100", "l40s"])
def test_pairs_are_those_of_a_grid(claimed: float, gpu: str) -> None:
    """A pair is reported where the grid has one, it does what it says, and where it isn't the grid has none."""
    given = setting(gpu=gpu)
    found = {pair.kinds: pair for pair in claim_conditions.pairs(given, claimed, CATALOG)}
    for kinds in itertools.combinations(KINDS, 2):
        if any(other.allows(claimed) for other in grid(given, kinds)):
            assert kinds in found, kinds
    for pair in found.values():
        assert pair.reached >= claimed * (1 - 1e-9)


def test_the_mildest_pair_comes_first() -> None:
    pair = next(p for p in claim_conditions.pairs(setting(), 100, CATALOG) if p.kinds == ("weights", "gpus"))
    assert pair.text == "fp8 weights and 4 x h100"
    by_hand = 4 * 3.35e12 / (139e9 / 2 + 328e6)
    assert pair.reached == pytest.approx(by_hand, rel=0.01)


def test_pairs_only_where_nothing_suffices_alone() -> None:
    assert assess(setting("llama-3.1-8b"), 400, CATALOG).pairs == ()
    assert assess(setting(), 1000, CATALOG).pairs
