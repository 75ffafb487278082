"""The derivation of a speedup leads to the speedup of the table."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from forerun.plan import drafters
from forerun.plan.acceptance import Acceptance
from forerun.plan.deployment import Deployment
from forerun.plan.explain_speculate import explain_speedup
from forerun.plan.hardware import Efficiency, Hardware
from forerun.plan.shapes import Experts, ModelShape
from forerun.plan.speculate import Proposal, price
from reference.derivations import evaluated

GPU = Hardware(name="gpu", flops={"bf16": 1e15}, bandwidth=3.3e12, memory=80e9, link=4e11, link_us=8)
DENSE = ModelShape(
    name="dense", hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, vocab=128256, intermediate=14336
)
SPARSE = replace(DENSE, name="sparse", experts=Experts(n=64, active=4, intermediate=1024), mtp_layers=1)
SMALL = replace(DENSE, name="small", hidden=1024, layers=12, heads=16, kv_heads=4, head_dim=64, intermediate=4096)
EIGHT = Deployment(hardware=GPU, tensor=8)
DRAFTERS = {
    "ngram": (DENSE, drafters.ngram(host_us=70)),
    "medusa": (DENSE, drafters.medusa(DENSE)),
    "model": (DENSE, drafters.model(SMALL)),
    "eagle3": (DENSE, drafters.eagle3(DENSE)),
    "mtp": (SPARSE, drafters.mtp(SPARSE)),
}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("efficiency", [None, Efficiency.ideal(), Efficiency(order=3)])
def test_every_line_follows_and_the_last_is_the_speedup(kind: str, efficiency: Efficiency | None) -> None:
    shape, drafter = DRAFTERS[kind]
    where = replace(EIGHT, efficiency=efficiency)
    proposal = Proposal(drafter, Acceptance.of(0.8, 0.7))
    for batch, context, length, draft_where in itertools.product(
        (1, 40), (0, 9000), (0, 1, 4), (None, replace(where, tensor=1))
    ):
        case = {"batch": batch, "context": context, "length": length, "draft_deployment": draft_where}
        derivation = explain_speedup(shape.network, where, proposal, **case)
        point = price(shape.network, where, proposal, **case)
        assert derivation.lines[-1].symbol == "speedup"
        assert derivation.value == pytest.approx(point.speedup, rel=1e-12)
        values = evaluated(derivation.lines)
        for symbol, value in (
            ("tokens_per_step", point.tokens_per_step), ("plain_seconds", point.plain_seconds),
            ("verify_seconds", point.verify_seconds), ("draft_cost", point.draft_cost),
            ("verify_ratio", point.verify_ratio),
        ):  # fmt: skip
            assert values[symbol] == pytest.approx(value, rel=1e-12), symbol


def test_it_stays_short() -> None:
    """What plain and verifying step have in common stands once, and so do those of the draft's forwards."""
    proposal = Proposal(drafters.eagle3(DENSE), Acceptance.of(0.8, 0.7))
    derivation = explain_speedup(DENSE.network, EIGHT, proposal, batch=4, context=1000, length=4)
    assert len(derivation.lines) < 130
    assert len({(line.value, line.formula, line.source) for line in derivation.lines if line.formula}) == sum(
        bool(line.formula) for line in derivation.lines
    )
