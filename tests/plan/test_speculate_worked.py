"""The worked tables of docs/plan-speculate.md against the model: Llama 3.3 70B on eight H100s, and a mixture."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from forerun.plan.catalog import PlanCatalog
from forerun.plan.deployment import Deployment
from forerun.plan.spec import proposal_of
from forerun.plan.speculate import break_even, schedule
from forerun.plan.speculate_table import Speculations

PAGE = (Path(__file__).parents[2] / "docs" / "plan-speculate.md").read_text()
TEXT = " ".join(PAGE.replace("\\\n", " ").split())
SPECS = {
    "ngram": "ngram:0.45",
    "medusa-4": "medusa:0.65,0.55,0.5,0.45",
    "eagle3": "eagle3:0.8,0.76,0.73",
    "llama-3.1-8b": "model=llama-3.1-8b:0.75",
}
BATCHES, CONTEXTS = [4, 8, 16, 32, 64, 128, 256], [1000, 8000, 32000]

CATALOG = PlanCatalog.load()
SHAPE = CATALOG.model("llama-3.3-70b")
WHERE = Deployment(hardware=CATALOG.gpu("h100"), tensor=8)
PROPOSALS = [proposal_of(text, SHAPE, CATALOG.shape) for text in SPECS.values()]


def shown(columns: str) -> list[list[str]]:
    """The rows of the page's table with that heading."""
    lines = PAGE[PAGE.index(columns) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_commands_are_those_of_the_tables() -> None:
    drafters = " ".join(f"-d {text}" for text in SPECS.values())
    assert f"-m llama-3.3-70b -g h100 -t 8 --batches {','.join(map(str, BATCHES))} {drafters}" in TEXT
    assert f"--batches 256 --contexts 0,1000,2000,4000 --length 4 {drafters}" in TEXT


def test_draft_lengths_by_bucket_and_what_is_lost_at_peak_load() -> None:
    table = Speculations(SHAPE.network, WHERE, PROPOSALS).table(BATCHES, CONTEXTS)
    lengths, peaks = [], []
    for summary in table.summaries:
        assert summary.peak is not None
        found = {item.bucket.lo: str(item.bucket.length) for item in summary.buckets}
        name = [summary.drafter, str(summary.context)]
        lengths.append([*name, *(found.get(lo, "-") for lo in (1, *(batch + 1 for batch in BATCHES[:-1])))])
        _, best, kept, _ = summary.peak
        peaks.append([
            *name, str(summary.most), str(summary.break_even or "none"), str(best.batch), str(kept.length),
            f"{kept.speedup:.2f}", str(best.length), f"{best.speedup:.2f}", f"{summary.peak.low_load_loss:.0%}",
        ])  # fmt: skip
    assert shown("| drafter | context | 1-4 |") == lengths
    assert shown("| drafter | context | fit |") == peaks


def test_break_even_moves_with_the_context() -> None:
    contexts = (0, 1000, 2000, 4000)
    expected = []
    for proposal in PROPOSALS:
        row = []
        for context in contexts:
            most = Speculations(SHAPE.network, WHERE, [proposal], length=4).most(proposal.drafter.name, context)
            found = break_even(SHAPE.network, WHERE, proposal, context=context, length=4, most=min(most, 4096))
            row.append(str(found) if found else f"none up to {most}")
        expected.append([proposal.drafter.name, *row])
    assert shown("| break-even batch of four draft tokens |") == expected
    for proposal in PROPOSALS:
        found = [
            break_even(SHAPE.network, WHERE, proposal, context=context, length=4) or 5000
            for context in (*contexts, 20_000)
        ]
        assert found == sorted(found)
        assert found[0] < found[3]


def test_medusa_and_the_draft_model_change_places() -> None:
    speculations = Speculations(SHAPE.network, WHERE, PROPOSALS, length=4)
    table = speculations.table([256], [0, 1000, 2000])
    found = {
        lead.context: lead.overtake.batch
        for lead in table.overtakes
        if {lead.overtake.ahead, lead.overtake.behind} == {"medusa-4", "llama-3.1-8b"}
    }
    assert found == {0: 67, 1000: 96, 2000: 183}
    assert "below batch 96 and the draft model from there on (67 without context, 183 at 2,000 tokens)" in TEXT
    medusa, model = (speculations.of(name).at(96, 1000, 4) for name in ("medusa-4", "llama-3.1-8b"))
    costs = [f"{point.tokens_per_step:.2f} {4 * point.draft_cost:.2f}" for point in (model, medusa)]
    assert costs == ["3.05 0.85", "2.27 0.08"]
    assert (
        "gives 3.05 tokens and its draft costs 4 c = 0.85 steps (batch 96, context 1000), Medusa 2.27 for 0.08" in TEXT
    )
    assert 1 < medusa.speedup < model.speedup < 1.03


def test_n_gram_against_the_draft_model() -> None:
    table = Speculations(SHAPE.network, WHERE, [PROPOSALS[0], PROPOSALS[3]]).table(BATCHES, [8000])
    assert [(lead.overtake.batch, lead.overtake.ahead) for lead in table.overtakes] == [(9, "ngram")]
    assert "from batch 9 on" in TEXT


def test_a_mixture_s_lengths_grow_with_the_batch() -> None:
    shape, where = CATALOG.model("deepseek-v3"), Deployment(hardware=CATALOG.gpu("h200"), tensor=8, activations="fp8")
    mtp, ngram = (proposal_of(text, shape, CATALOG.shape) for text in ("mtp:0.87,0.75,0.65", "ngram:0.3"))
    table = Speculations(shape.network, where, [mtp, ngram]).table([1, 4, 16, 64, 128], [4000])
    lengths = [row.prices.best.length for row in table.rows[:5] if row.prices]
    assert (lengths[0], lengths[2], lengths[4]) == (2, 5, 4)
    assert "is 2 for one sequence, 5 for 16 and 4 for 128" in TEXT
    assert [run[0] for run in table.summaries[1].pays] == [1, 31]
    assert "pays at batch 1 and from 31 on" in TEXT


def test_one_length_for_a_bucket_is_close_to_the_best_of_each_batch() -> None:
    """The buckets look at their ends only; against every batch between, the schedule's length gains a tenth at most."""
    speculations = Speculations(SHAPE.network, WHERE, PROPOSALS)
    for proposal, context in itertools.product(PROPOSALS, (1000, 8000)):
        one = speculations.of(proposal.drafter.name)
        exact = schedule(SHAPE.network, WHERE, proposal, context=context, most=128)
        by_batch = {batch: bucket.length for bucket in exact for batch in range(bucket.lo, bucket.hi + 1)}
        for lo, hi in ((1, 4), (5, 8), (9, 16), (17, 32), (33, 64), (65, 128)):
            (_, _, length), loss = one.bucket(context, lo, hi)
            for batch in range(lo, hi + 1):
                best = one.price(batch, context, by_batch[batch]).speedup
                assert 1 - one.price(batch, context, length).speedup / best <= max(loss, 1e-12) + 0.005


def test_what_the_page_says_of_a_fixed_setting_under_load() -> None:
    text = r"EAGLE-3's eight tokens, (\S+) times as fast for one user, make 256 users at 1,000 tokens (\S+) times"
    found = re.search(text, TEXT)
    assert found is not None
    one = Speculations(SHAPE.network, WHERE, PROPOSALS).of("eagle3")
    assert one.best(1, 1000).length == 8
    assert found.groups() == (f"{one.best(1, 1000).speedup:.2f}", f"{one.price(256, 1000, 8).speedup:.2f}")
    assert f"{one.price(64, 1000, 3).verify_ratio:.2f}" == "1.37"
