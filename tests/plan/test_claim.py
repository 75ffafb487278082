"""Claimed speeds with known answers, the order of the three speeds, and derivations."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import PlanError
from forerun.plan import drafters
from forerun.plan.acceptance import Acceptance
from forerun.plan.catalog import PlanCatalog
from forerun.plan.claim import assess
from forerun.plan.claim_conditions import KINDS
from forerun.plan.claim_explain import explain_claim
from forerun.plan.claim_setting import Setting
from forerun.plan.claim_speedup import assess_speedup
from forerun.plan.deployment import Deployment
from forerun.plan.hardware import Efficiency
from forerun.plan.speculate import Proposal
from forerun.plan.steptime import Load, forward_time
from reference.claims import CATALOG, LATE, condition, random_setting, setting, weights_in
from reference.derivations import evaluated

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


# Derivations and what is refused.


def test_the_derivation_ends_in_the_ratio() -> None:
    rng = random.Random(4)
    for _ in range(60):
        given = random_setting(rng)
        claimed = rng.uniform(1, 5000)
        derivation = explain_claim(given, claimed)
        evaluated(derivation.lines)
        assert derivation.value == pytest.approx(assess(given, claimed, CATALOG, stated=frozenset(KINDS)).ratio)


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
