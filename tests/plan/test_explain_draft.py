"""The derivation of a draft's cost: every line follows from those before, the last one is the model's number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.errors import PlanError
from forerun.plan import drafters
from forerun.plan.catalog import PlanCatalog
from forerun.plan.deployment import Deployment
from forerun.plan.drafters import PricedDrafter
from forerun.plan.explain import explain_forward
from forerun.plan.explain_draft import explain_draft
from forerun.plan.hardware import Efficiency, Hardware
from forerun.plan.steptime import Load, forward_time
from reference.derivations import evaluated

H100 = Hardware(
    name="h100", flops={"bf16": 989e12, "fp8": 1979e12}, bandwidth=3.35e12, memory=80e9, link=450e9, link_us=8
)
ONE, EIGHT = Deployment(hardware=H100), Deployment(hardware=H100, tensor=8, expert=8, pipeline=2)
SMOOTH = Deployment(hardware=H100, tensor=2, efficiency=Efficiency(order=3))
CATALOG = PlanCatalog.load()
LLAMA_8B, LLAMA_70B, DEEPSEEK = (CATALOG.model(name) for name in ("llama-3.1-8b", "llama-3.3-70b", "deepseek-v3"))
DRAFTERS = [
    drafters.ngram(),
    drafters.ngram(host_us=20),
    drafters.medusa(LLAMA_70B),
    drafters.model(LLAMA_8B, LLAMA_70B),
    replace(drafters.model(LLAMA_8B), host_us=50),
    drafters.eagle(LLAMA_70B),
    drafters.eagle3(LLAMA_70B),
    drafters.mtp(DEEPSEEK),
]


@pytest.mark.parametrize("where", [ONE, EIGHT, SMOOTH], ids=["one", "eight", "smooth"])
@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: f"{drafter.name}-{drafter.host_us:g}")
def test_the_last_line_is_the_draft_of_the_model(drafter: PricedDrafter, where: Deployment) -> None:
    for length in (0, 1, 2, 4):
        for width in (1, 6):
            for apart in (False, True):
                derivation = explain_draft(
                    drafter, where, batch=5, context=700, length=length, width=width, apart=apart
                )  # fmt: skip
                evaluated(derivation.lines)
                assert derivation.lines[-1].symbol == "draft_seconds"
                expected = drafter.seconds(where, 5, 700, length, width)
                assert derivation.value == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_lines_that_two_forwards_share_stand_once() -> None:
    derivation = explain_draft(drafters.model(LLAMA_8B), ONE, batch=2, context=100, length=4)
    symbols = [line.symbol for line in derivation.lines]
    for shared in ("draft_linear_parameters", "draft_linear_weight_bytes", "draft_head_seconds", "draft_batch"):
        assert shared in symbols
    for own in ("queries", "tokens", "linear_seconds", "attention_seconds", "forward_seconds"):
        assert {f"draft_first_{own}", f"draft_next_{own}"} <= set(symbols)
        assert f"draft_{own}" not in symbols
    values = {line.symbol: line.value for line in derivation.lines}
    assert (values["draft_first_queries"], values["draft_next_queries"]) == (2, 1)
    [last] = [line for line in derivation.lines if line.symbol == "draft_seconds"]
    assert last.formula == "draft_first_forward_seconds + (draft_length - 1) * draft_next_forward_seconds"


def test_it_joins_the_derivation_of_a_target_on_the_same_machine() -> None:
    target = forward_time(LLAMA_70B.network, ONE, Load(5, 5, 700))
    derivation = explain_forward(target)
    derivation.extend(explain_draft(drafters.eagle3(LLAMA_70B), ONE, batch=5, context=700, length=4).lines)
    derivation.derived("fraction", "draft_seconds / forward_seconds", "")
    evaluated(derivation.lines)
    expected = drafters.eagle3(LLAMA_70B).seconds(ONE, 5, 700, 4) / target.seconds
    assert derivation.value == pytest.approx(expected, rel=1e-12)


def test_apart_it_joins_that_of_a_target_elsewhere() -> None:
    target = forward_time(LLAMA_70B.network, EIGHT, Load(5, 5, 700))
    drafter = drafters.model(LLAMA_8B)
    derivation = explain_forward(target)
    with pytest.raises(ValueError, match="tensor is 8 already, not 1"):
        derivation.extend(explain_draft(drafter, ONE, batch=5, context=700, length=4).lines)
    derivation = explain_forward(target)
    derivation.extend(explain_draft(drafter, ONE, batch=5, context=700, length=4, apart=True).lines)
    evaluated(derivation.lines)
    assert derivation.value == pytest.approx(drafter.seconds(ONE, 5, 700, 4), rel=1e-12)


def test_the_prefix_is_the_callers() -> None:
    derivation = explain_draft(drafters.medusa(LLAMA_70B), ONE, batch=1, context=10, length=3, prefix="medusa_")
    assert derivation.lines[-1].symbol == "medusa_seconds"
    assert derivation.title == "seconds of a draft of 3 tokens by medusa-4"
    wide = explain_draft(drafters.eagle(LLAMA_70B), ONE, batch=1, context=10, length=3, width=7)
    assert wide.title == "seconds of a draft of 3 tokens, 7 nodes a level by eagle"


def test_a_draft_that_cannot_be_is_refused() -> None:
    with pytest.raises(PlanError, match="draft length: 5 is not allowed for medusa-4; expected 0 to 4"):
        explain_draft(drafters.medusa(LLAMA_70B), ONE, batch=1, context=10, length=5)
    with pytest.raises(PlanError, match="batch: 0 is not allowed"):
        explain_draft(drafters.eagle(LLAMA_70B), ONE, batch=0, context=10, length=2)
