"""The table of drafters, batches and contexts against its parts, one by one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from forerun.errors import PlanError
from forerun.plan import drafters
from forerun.plan.acceptance import Acceptance
from forerun.plan.deployment import Deployment
from forerun.plan.hardware import Efficiency, Hardware, Measured
from forerun.plan.shapes import ModelShape
from forerun.plan.speculate import Proposal, best, break_even, most_that_fit, overtakes, price
from forerun.plan.speculate_table import Row, Speculations, SpeculationTable

GPU = Hardware(name="gpu", flops={"bf16": 1e15}, bandwidth=3.3e12, memory=80e9, link=4e11, link_us=8)
SHAPE = ModelShape(
    name="dense", hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, vocab=128256, intermediate=14336
)
SMALL = replace(SHAPE, name="small", hidden=1024, layers=12, heads=16, kv_heads=4, head_dim=64, intermediate=4096)
TARGET, WHERE = SHAPE.network, Deployment(hardware=GPU, tensor=2)
PROPOSALS = [
    Proposal(drafters.ngram(), Acceptance.of(0.5)),
    Proposal(drafters.medusa(SHAPE, heads=3), Acceptance.of(0.65, 0.55)),
    Proposal(drafters.model(SMALL, SHAPE), Acceptance.of(0.8)),
]
BATCHES, CONTEXTS = [2, 16, 128], [500, 20_000]


@pytest.fixture(scope="module")
def table() -> SpeculationTable:
    return Speculations(TARGET, WHERE, PROPOSALS, longest=5).table(BATCHES, CONTEXTS)


def test_rows_are_the_best_prices(table: SpeculationTable) -> None:
    expected = list(itertools.product(PROPOSALS, CONTEXTS, BATCHES))
    assert [row[:3] for row in table.rows] == [(p.drafter.name, batch, context) for p, context, batch in expected]
    for row, (proposal, context, batch) in zip(table.rows, expected, strict=True):
        if batch * context > 1e6:
            assert row.prices is None
            continue
        assert row.prices is not None
        where = {"batch": batch, "context": context}
        chosen = best(TARGET, WHERE, proposal, **where, longest=5)
        low = best(TARGET, WHERE, proposal, batch=1, context=context, longest=5)
        kept = price(TARGET, WHERE, proposal, **where, length=low.length)
        assert row.prices[:3] == (chosen, chosen, kept)
        needed = row.prices.acceptance_needed
        assert needed is not None
        for factor, pays in ((1 + 1e-6, True), (1 - 1e-6, False)):
            one = Proposal(proposal.drafter, Acceptance.of(needed * factor))
            assert (best(TARGET, WHERE, one, **where, longest=5).length > 0) == pays
        assert row.prices.loss == 0
        assert row.prices.low_load_loss == pytest.approx(1 - kept.speedup / chosen.speedup)


def test_summaries_end_where_the_memory_does(table: SpeculationTable) -> None:
    for summary, (proposal, context) in zip(table.summaries, itertools.product(PROPOSALS, CONTEXTS), strict=True):
        longest = min(5, proposal.drafter.longest)
        most = most_that_fit(TARGET, WHERE, proposal.drafter, context + longest + 1)
        assert (summary.drafter, summary.context, summary.most) == (proposal.drafter.name, context, most)
        assert summary.searched == min(most, 4096)
        assert summary.break_even == break_even(
            TARGET, WHERE, proposal, context=context, longest=5, most=summary.searched
        )
        assert [found.bucket[:2] for found in summary.buckets] == [
            (lo, min(hi, most)) for lo, hi in ((1, 2), (3, 16), (17, 128)) if lo <= most
        ]
        assert summary.peak is not None
        assert summary.peak.best.batch == min(128, most)


def test_overtakes_of_all_pairs(table: SpeculationTable) -> None:
    speculations = Speculations(TARGET, WHERE, PROPOSALS, longest=5)
    expected = []
    for context in CONTEXTS:
        for one, other in itertools.combinations([proposal.drafter.name for proposal in PROPOSALS], 2):
            most = min(speculations.most(one, context), speculations.most(other, context), 4096)
            pair = speculations.of(one), speculations.of(other)
            expected += [(context, found) for found in overtakes(*pair, context, most=most)]
    assert sorted(table.overtakes) == sorted(expected)
    assert [lead.context for lead in table.overtakes] == sorted(lead.context for lead in table.overtakes)


def test_nobody_is_overtaken_where_one_does_not_fit() -> None:
    """Medusa overtakes n-gram at batch 33; with memory for 29 sequences beside its heads it doesn't."""
    for memory, expected in ((12e9, [33]), (11.8e9, [])):
        where = replace(WHERE, hardware=replace(GPU, memory=memory))
        speculations = Speculations(TARGET, where, PROPOSALS[:2], longest=5)
        assert (speculations.most("medusa-3", 500) >= 33) == bool(expected)
        assert speculations.most("ngram", 500) > 33
        assert [lead.overtake.batch for lead in speculations.table(BATCHES, [500]).overtakes] == expected


def test_a_given_length_and_what_it_loses() -> None:
    """Medusa drafts as far as it can."""
    table = Speculations(TARGET, WHERE, PROPOSALS, length=4, longest=5).table([1, 128], [500])
    for row in table.rows:
        assert row.prices is not None
        point, chosen = row.prices[:2]
        assert row.prices.acceptance_needed is not None
        assert point.length == (3 if row.drafter == "medusa-3" else 4)
        proposal = next(p for p in PROPOSALS if p.drafter.name == row.drafter)
        assert point == price(TARGET, WHERE, proposal, batch=row.batch, context=500, length=point.length)
        assert row.prices.loss == 1 - point.speedup / chosen.speedup
    ngram = table.summaries[0]
    assert ngram.break_even == break_even(TARGET, WHERE, PROPOSALS[0], context=500, length=4, most=4096)
    wide = Speculations(TARGET, WHERE, PROPOSALS[:1], length=20, longest=5).table([1], [500]).rows[0]
    assert wide.prices is not None
    assert wide.prices.point.length == 20


def test_only_draft_models_run_elsewhere() -> None:
    alone = replace(WHERE, tensor=1)
    speculations = Speculations(TARGET, WHERE, PROPOSALS, longest=5, draft_deployment=alone)
    assert [speculations.drafts_on(proposal) for proposal in PROPOSALS] == [None, None, alone]
    for row in speculations.table([4], [500]).rows:
        assert row.prices is not None
        proposal = next(p for p in PROPOSALS if p.drafter.name == row.drafter)
        where = speculations.drafts_on(proposal)
        assert row.prices.best == best(TARGET, WHERE, proposal, batch=4, context=500, longest=5, draft_deployment=where)
    fewer = most_that_fit(TARGET, WHERE, PROPOSALS[2].drafter, 506, draft_deployment=alone)
    assert speculations.most("small", 500) == fewer < most_that_fit(TARGET, WHERE, PROPOSALS[2].drafter, 506)


def test_nothing_fits() -> None:
    table = Speculations(TARGET, WHERE, PROPOSALS[:1]).table([1, 2], [100_000_000])
    assert table.rows == (Row("ngram", 1, 100_000_000, None), Row("ngram", 2, 100_000_000, None))
    assert (table.summaries[0].most, table.summaries[0].peak, table.summaries[0].buckets) == (0, None, ())
    assert table.overtakes == ()
    assert table.beyond_measured(TARGET, WHERE) == []


def test_what_was_not_measured_is_said() -> None:
    measured = Measured(model="dense", batch=(1, 8), queries=(1, 4), context=(0, 600), points=9, error_max=0.1)
    gpu = replace(GPU, efficiency=Efficiency(), measured=measured)
    where = Deployment(hardware=gpu, tensor=2)

    def beyond(batches: list[int], contexts: list[float], longest: int) -> list[str]:
        table = Speculations(TARGET, where, PROPOSALS[:1], longest=longest).table(batches, contexts)
        return table.beyond_measured(TARGET, where)

    assert beyond([1, 8], [0, 600], 3) == []
    assert {phrase.split()[0] for phrase in beyond([1, 9], [0, 700], 4)} == {"batch", "queries", "context"}


def test_a_length_must_be_one() -> None:
    with pytest.raises(PlanError, match="length: 0 is not allowed"):
        Speculations(TARGET, WHERE, PROPOSALS, length=0)
