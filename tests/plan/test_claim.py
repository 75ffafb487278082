"""Claims with known answers; every solved value put back in gives the claim; what isn't found isn't there."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import PlanError
from forerun.plan import claim_conditions, drafters
from forerun.plan.acceptance import Acceptance
from forerun.plan.catalog import PlanCatalog
from forerun.plan.claim import Assessment, assess
from forerun.plan.claim_conditions import KINDS, MOST_TOKENS, Condition
from forerun.plan.claim_explain import explain_claim
from forerun.plan.claim_setting import Setting
from forerun.plan.claim_speedup import assess_speedup, explain_speedup
from forerun.plan.deployment import Deployment
from forerun.plan.hardware import Efficiency
from forerun.plan.speculate import Proposal, best
from forerun.plan.steptime import Load, forward_time
from reference.derivations import evaluated

CATALOG = PlanCatalog.load()
LATE = replace(Efficiency.ideal(), latency=1)
"""Peaks, and collectives that take as long as the catalog has it."""


def setting(model: str = "llama-3.3-70b", gpu: str = "h100", tensor: int = 1, **more: Any) -> Setting:
    names = ("pipeline", "activations", "kv", "expert")
    where = Deployment(
        hardware=CATALOG.gpu(gpu), tensor=tensor, **{name: more.pop(name) for name in names if name in more}
    )
    return Setting(model=CATALOG.model(model), deployment=where, **more)


def weights_in(given: Setting, linear: str, head: str | None = None) -> Setting:
    model = replace(given.model, formats=given.model.formats.quantized(linear, head))
    return replace(given, model=model)


def condition(found: Assessment, kind: str) -> Condition:
    return next(each for each in found.conditions if each.kind == kind)


# Known answers.


def test_70b_on_one_h100_is_a_division() -> None:
    """3.35 TB/s / 141 GB = 23.7 tokens/s with the embedding counted; 24.0 without it (one row of it is read) and with
    the KV of 1,000 tokens. 1,000 tokens/s are 42 times that."""
    found = assess(setting(), 1000, CATALOG)
    assert found.ceiling == pytest.approx(3.35e12 / 141e9, rel=0.03)
    assert found.ratio == pytest.approx(1000 * 141e9 / 3.35e12, rel=0.03)
    by_hand = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672) + 8192 * 128256
    assert found.setting.step_bytes.weights == 2 * by_hand
    assert found.setting.step_bytes.kv == 1001 * 320 * 1024
    assert found.ceiling == pytest.approx(3.35e12 / (2 * by_hand + 1001 * 320 * 1024))
    assert not found.room.fits
    assert found.verdict == "possible if"
    assert not any(each.counts for each in found.conditions)
    assert all("batch" in pair.kinds for pair in found.pairs)


def test_1000_tokens_for_one_user_of_a_70b_is_marketing() -> None:
    found = assess(setting(), 1000, CATALOG, stated=frozenset({"batch"}))
    assert found.verdict == "marketing"
    assert not found.pairs
    assert any("hardware" in question or "accelerator" in question for question in found.questions)


def test_70b_on_eight_h100() -> None:
    """8 x 3.35 TB/s / 141 GB = 190 tokens/s; 161 collectives of 8 us take 1.29 ms on top of 5.2 ms, of which physics
    knows nothing."""
    given = setting(tensor=8)
    assert given.ceiling == pytest.approx(8 * 3.35e12 / 141e9, rel=0.03)
    assert given.rate() == pytest.approx(given.ceiling, rel=0.01)
    assert given.rate(LATE) == pytest.approx(1 / (1 / given.ceiling + 161 * 8e-6), rel=0.01)
    found = assess(given, 180, CATALOG)
    assert found.verdict == "physics"
    assert found.usual < found.claimed
    assert "more than engines usually reach" in found.summary
    over = assess(given, 195, CATALOG)
    assert over.ratio > 1
    assert over.verdict == "possible if"


def test_no_number_of_accelerators_outruns_the_collectives() -> None:
    """161 collectives of 8 us: 776 tokens/s at most, whatever the bandwidth, in what engines usually reach."""
    for tensor in (8, 16, 64):
        found = assess(setting(tensor=tensor), 780, CATALOG)
        assert found.usual < found.setting.rate(LATE) < 776
    gpus = condition(assess(setting(tensor=8), 780, CATALOG), "gpus")
    assert gpus.needed == pytest.approx(8 * 780 / setting(tensor=8).ceiling)
    assert gpus.sufficient
    assert not gpus.plausible


def test_a_machine_of_sram_makes_it_physics(tmp_path: Path) -> None:
    """A wafer with 21 PB/s and 44 GB: the 70B in 4 bits fits, and 1,000 tokens/s are a hundredth of its peak."""
    mine = tmp_path / "mine.toml"
    mine.write_text(
        '[hardware.wafer]\nbandwidth_gb_s = 21e6\nmemory_gb = 44\ntflops = { bf16 = 125000 }\n'
        '[hardware.wafers]\nbandwidth_gb_s = 84e6\nmemory_gb = 176\ntflops = { bf16 = 500000 }\n'
    )  # fmt: skip
    catalog = PlanCatalog.load(mine)
    one = replace(setting(), deployment=Deployment(hardware=catalog.gpu("wafer")))
    tight = assess(weights_in(one, "int4", "int4"), 1000, catalog)
    assert tight.verdict == "physics"
    assert tight.share < 0.01
    assert assess(one, 1000, catalog).verdict == "possible if"  # 141 GB don't fit in 44
    four = replace(setting(), deployment=Deployment(hardware=catalog.gpu("wafers")))
    assert assess(four, 2100, catalog).verdict == "physics"
    # And to someone who claims it of an H100 the catalog names the wafers.
    other = assess(setting(), 1000, catalog)
    assert condition(other, "hardware").real == "wafers"
    assert other.verdict == "possible if"


def test_deepseek_v3_on_eight_h200() -> None:
    """37 GB in 8 bits over 38.4 TB/s: 1,000 tokens/s by the division, and half of that with 123 collectives of 8 us."""
    given = setting("deepseek-v3", "h200", 8, activations="fp8", context=0)
    assert given.step_bytes.weights == pytest.approx(36.6e9 + 129280 * 7168, rel=0.01)
    assert given.ceiling == pytest.approx(8 * 4.8e12 / 37.6e9, rel=0.03)
    assert given.rate() == pytest.approx(given.ceiling, rel=0.03)
    assert given.rate(LATE) == pytest.approx(1 / (1 / given.ceiling + 123 * 8e-6), rel=0.03)
    assert assess(given, 1000, CATALOG).verdict == "physics"
    found = assess(given, 1300, CATALOG, stated=frozenset({"batch"}))
    assert found.ratio > 1
    assert condition(found, "acceptance").counts


def test_a_batch_reads_weights_once() -> None:
    """64 users of the 8B on one H100: 15 GB of weights and 8.4 GB of KV a step are 143 steps/s and 9,200 tokens/s."""
    given = setting("llama-3.1-8b", batch=64, context=1000)
    read = 2 * 7_504_658_432 + 64 * 1001 * 128 * 1024
    assert given.step_bytes.total == pytest.approx(read, rel=1e-3)
    assert given.ceiling == pytest.approx(3.35e12 / read, rel=1e-3)
    together = replace(given, aggregate=True)
    assert together.ceiling == pytest.approx(64 * given.ceiling)
    assert assess(together, 9000, CATALOG).verdict == "physics"
    assert assess(given, 9000, CATALOG).verdict == "possible if"


def test_what_does_not_fit_is_no_physics_however_slow() -> None:
    found = assess(setting(), 20, CATALOG)
    assert found.share < 1
    assert found.verdict == "possible if"
    assert condition(found, "weights").real == "fp8 weights"
    assert condition(found, "gpus").real == "2 x h100"
    assert not condition(found, "acceptance").counts


def test_the_share_of_the_peak_is_told() -> None:
    given = setting("llama-3.1-8b")
    modest = assess(given, 0.5 * given.rate(), CATALOG)
    assert modest.summary.startswith("50% of what the hardware allows, and no more")
    bold = assess(given, 0.97 * given.rate(), CATALOG)
    assert bold.verdict == "physics"
    assert "97% of what the hardware allows, more than engines usually reach" in bold.summary
    assert any("bandwidth" in question for question in bold.questions)


# The order of the three speeds, and the division by another way.


def random_setting(rng: random.Random) -> Setting:
    model = CATALOG.model(rng.choice(["llama-3.1-8b", "llama-3.3-70b", "deepseek-v3", "gpt-oss-20b", "mixtral-8x7b"]))
    where = Deployment(
        hardware=CATALOG.gpu(rng.choice(["h100", "h200", "b200", "mi300x"])), tensor=rng.choice([1, 2, 8]),
        pipeline=rng.choice([1, 1, 2]), kv=rng.choice(["bf16", "fp8"]),
    )  # fmt: skip
    return Setting(
        model=model, deployment=where, batch=rng.choice([1, 2, 7, 64]), context=rng.choice([0, 100, 5000]),
        tokens_per_step=rng.choice([1.0, 1.0, 2.5]), aggregate=rng.random() < 0.5,
    )  # fmt: skip


def test_ceiling_above_ideal_above_usual() -> None:
    rng = random.Random(1)
    for _ in range(200):
        given = random_setting(rng)
        assert given.ceiling >= given.rate() * (1 - 1e-12)
        assert given.rate() > given.rate(Efficiency())


def test_the_division_is_the_step_model_without_everything_else() -> None:
    rng = random.Random(2)
    for _ in range(200):
        given = replace(random_setting(rng), tokens_per_step=1.0)
        where = replace(given.deployment, efficiency=Efficiency.ideal())
        parts = forward_time(given.model.network, where, Load(given.batch, 1, given.context)).parts
        moved = sum(part.weight_bytes + part.kv_bytes for part in parts) / where.hardware.bandwidth
        assert given.ceiling == pytest.approx(given.users / moved)


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


# Planted faults.


def test_a_fault_in_the_bytes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Setting.step_bytes.fget
    assert honest is not None

    def doubled(self: Setting) -> Any:
        read = honest(self)
        return read._replace(kv=2 * read.kv)

    monkeypatch.setattr(Setting, "step_bytes", property(doubled))
    with pytest.raises(AssertionError):
        test_the_division_is_the_step_model_without_everything_else()
    with pytest.raises(AssertionError):
        test_70b_on_one_h100_is_a_division()


def test_a_verdict_without_memory_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.plan.claim_setting.Room.fits", property(lambda self: True))  # noqa: ARG005
    with pytest.raises(AssertionError):
        test_what_does_not_fit_is_no_physics_however_slow()


# Speedups.


def test_three_times_faster_needs_three_tokens() -> None:
    """Verifying four tokens of one sequence is nearly free: 3.00 tokens, 75% or so of each draft token."""
    given = setting("llama-3.1-8b")
    found = assess_speedup(given, 3, CATALOG)
    assert found.needed == pytest.approx(3, rel=0.01)
    assert found.rate is not None
    assert Acceptance.of(found.rate).expected_tokens(4) == pytest.approx(found.needed)
    assert found.verdict == "possible if"
    assert assess_speedup(given, 6, CATALOG).verdict == "marketing"
    assert assess_speedup(given, 1, CATALOG).verdict == "physics"


def test_a_stated_number_of_tokens_is_the_limit() -> None:
    given = replace(setting("llama-3.1-8b"), tokens_per_step=2.5)
    assert assess_speedup(given, 2.4, CATALOG).verdict == "physics"
    over = assess_speedup(given, 3, CATALOG)
    assert over.verdict == "marketing"
    assert over.limit == pytest.approx(2.5, rel=0.01)


def test_a_full_batch_has_nothing_to_spare() -> None:
    """At the ridge of 295 FLOP a byte every token verified costs as much as it brings."""
    found = assess_speedup(setting("llama-3.1-8b", batch=512, context=0), 2, CATALOG)
    assert found.verdict == "marketing"
    assert found.needed is None
    assert found.limit < 1.2


def test_a_drafter_has_its_best_as_the_limit() -> None:
    given = setting(tensor=8)
    proposal = Proposal(drafters.eagle3(given.model), Acceptance.of(0.8, 0.76, 0.73))
    found = assess_speedup(given, 2.5, CATALOG, proposal)
    where = replace(given.deployment, efficiency=Efficiency.ideal())
    point = best(given.model.network, where, proposal, batch=1, context=1000)
    assert found.limit == point.speedup
    assert found.verdict == "physics"
    assert assess_speedup(given, point.speedup * 1.01, CATALOG, proposal).verdict == "possible if"


def test_a_speedup_of_what_does_not_fit() -> None:
    found = assess_speedup(setting(), 3, CATALOG)
    assert found.verdict == "possible if"
    assert "fp8 weights or 2 x h100" in found.summary
    # Not even where the tokens are stated that it needs.
    assert assess_speedup(setting(tokens_per_step=4.0), 3, CATALOG).verdict == "possible if"
    nowhere = setting("deepseek-v3", "rtx4090")
    assert assess_speedup(nowhere, 2, CATALOG).verdict == "marketing"
    assert "doesn't fit" in assess_speedup(nowhere, 2, CATALOG).summary


# Derivations and what is refused.


def test_the_derivation_ends_in_the_ratio() -> None:
    rng = random.Random(4)
    for _ in range(60):
        given = random_setting(rng)
        claimed = rng.uniform(1, 5000)
        derivation = explain_claim(given, claimed)
        evaluated(derivation.lines)
        assert derivation.value == pytest.approx(assess(given, claimed, CATALOG, stated=frozenset(KINDS)).ratio)


def test_the_derivation_of_a_speedup_ends_in_the_ratio() -> None:
    given = setting("llama-3.1-8b", batch=4)
    proposal = Proposal(drafters.eagle3(given.model), Acceptance.of(0.8))
    for found in (
        assess_speedup(given, 3, CATALOG),
        assess_speedup(replace(given, tokens_per_step=2.2), 3, CATALOG),
        assess_speedup(given, 3, CATALOG, proposal),
    ):
        derivation = explain_speedup(found)
        evaluated(derivation.lines)
        assert derivation.value == pytest.approx(found.ratio)


@pytest.mark.parametrize("claimed", [0, -1, math.inf, math.nan])
def test_a_claim_is_a_number_above_zero(claimed: float) -> None:
    with pytest.raises(PlanError) as caught:
        assess(setting(), claimed, CATALOG)
    assert caught.value.field == "tokens-per-s"
    with pytest.raises(PlanError) as caught:
        assess_speedup(setting(), claimed, CATALOG)
    assert caught.value.field == "speedup"


def test_conditions_are_refused_by_name() -> None:
    for more, field in (
        ({"batch": 0}, "batch"), ({"context": -1}, "context"), ({"context": math.nan}, "context"),
        ({"tokens_per_step": 0.5}, "tokens-per-step"), ({"tokens_per_step": math.nan}, "tokens-per-step"),
        ({"tokens_per_step": 65.0}, "tokens-per-step"), ({"utilization": 0.0}, "utilization"),
    ):  # fmt: skip
        with pytest.raises(PlanError) as caught:
            setting(**more)
        assert caught.value.field == field
    with pytest.raises(PlanError, match="'price' is no condition"):
        assess(setting(), 1, CATALOG, stated=frozenset({"price"}))
    proposal = Proposal(drafters.ngram(), Acceptance.of(0.5))
    with pytest.raises(PlanError, match="only one"):
        assess_speedup(replace(setting(), tokens_per_step=2), 2, CATALOG, proposal)
