"""Claims of being so many times faster: what physics says to them, with and without a drafter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.plan import drafters
from forerun.plan.acceptance import Acceptance
from forerun.plan.claim_speedup import assess_speedup, explain_speedup
from forerun.plan.hardware import Efficiency
from forerun.plan.speculate import Proposal, best
from reference.claims import CATALOG, setting
from reference.derivations import evaluated


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
