"""What a draft tree costs, at which batches it is the best, and the derivations."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from forerun.errors import PlanError
from forerun.plan import drafters
from forerun.plan.acceptance import Acceptance
from forerun.plan.catalog import PlanCatalog
from forerun.plan.deployment import Deployment
from forerun.plan.drafters import PricedDrafter
from forerun.plan.hardware import Efficiency
from forerun.plan.speculate import Proposal, TargetSteps, price
from forerun.plan.steptime import Load, forward_time
from forerun.plan.tree import PlannedTree, RankAcceptance, best_tree, tree_of
from forerun.plan.tree_explain import explain_speedup, explain_tokens
from forerun.plan.tree_price import TreePricer, batches_where, best_trees, tree_forwards
from reference import draft_trees as reference
from reference.derivations import evaluated

BY_RANK = RankAcceptance.by_rank(0.6, 0.15, 0.06)
CATALOG = PlanCatalog.load()
TARGET = CATALOG.model("llama-3.1-8b")
MIXTURE = CATALOG.model("mixtral-8x7b")
WHERE = Deployment(hardware=CATALOG.gpu("h100"))
IDEAL = Deployment(hardware=CATALOG.gpu("h100"), efficiency=Efficiency.ideal())
EMPTY = PlannedTree((), (), ())


def eagle3() -> PricedDrafter:
    return drafters.eagle3(TARGET)


def pricer(drafter: PricedDrafter | None = None, where: Deployment = WHERE) -> TreePricer:
    return TreePricer(TargetSteps(TARGET.network, where), drafter or eagle3())


def test_a_ten_node_tree_against_a_five_token_chain() -> None:
    tree, chain = best_tree(BY_RANK, 10), best_tree(BY_RANK, 5, branching=1)
    # By hand: the ten largest products of .6, .15 and .06.
    by_hand = 0.6 + 0.36 + 0.216 + 0.15 + 0.13 + 0.09 + 0.09 + 0.078 + 0.06 + 0.054
    assert tree.expected_tokens == pytest.approx(1 + by_hand, rel=0.03)
    assert tree.expected_tokens == pytest.approx(2.82736, rel=1e-9)
    assert chain.expected_tokens == pytest.approx((1 - 0.6**6) / 0.4, rel=1e-9)
    assert tree.expected_tokens / chain.expected_tokens == pytest.approx(1.19, rel=0.03)
    assert tree.levels == chain.levels == 5


def test_the_batch_at_which_the_chain_overtakes_the_tree_by_hand() -> None:
    """Llama 3.1 8B on an H100, a free drafter, every peak reached. A token is 2 FLOPs a parameter, so b sequences
    of q queries compute for b q / 295 of the time in which the weights are read (295 FLOP/byte is the ridge for 2-byte
    weights); a token's activations, logits and KV are x of the weights' bytes. The tree computes when the chain still
    waits for memory, so they are alike where 2.827 / (11 b / 295) = 2.383 / (1 + 6 b x); later both compute, and the
    chain's gain ends where 2.383 / (6 b / 295) = 1 / (1 + b x)."""
    tree, chain = best_tree(BY_RANK, 10), best_tree(BY_RANK, 5, branching=1)
    ridge = 989e12 / 3.35e12
    flow = 32 * (2 * 4096 + 2 * (4096 + 1024) + 2 * 4096 + 3 * (4096 + 14336))  # numbers in and out of the matrices
    x = (2 * flow + 4 * 128256 + 2 * 4096 + 131072) / 15.01e9
    alike = 2.827 * ridge / (2.383 * 11 - 2.827 * 6 * x * ridge)
    end = 2.383 * ridge / (6 - 2.383 * x * ridge)
    assert (round(alike, 1), round(end, 1)) == (34.4, 122.9)
    free = pricer(drafters.ngram(), IDEAL)

    def speedup(which: PlannedTree, batch: int) -> float:
        return free.price(which, batch, 0).speedup

    [(first, last)] = batches_where(lambda batch: speedup(tree, batch) > speedup(chain, batch))
    assert (first, last + 1) == (1, pytest.approx(alike, rel=0.03))
    [(first, last)] = batches_where(lambda batch: speedup(chain, batch) > 1)
    assert (first, last + 1) == (1, pytest.approx(end, rel=0.03))


@pytest.mark.parametrize("where", [WHERE, IDEAL])
@pytest.mark.parametrize("spec", ["ngram", "eagle3", "eagle", "model", "medusa"])
@pytest.mark.parametrize("length", [0, 1, 4])
def test_a_chain_costs_what_speculation_with_a_chain_costs(where: Deployment, spec: str, length: int) -> None:
    drafter = {
        "ngram": drafters.ngram(host_us=20),
        "eagle3": eagle3(),
        "eagle": drafters.eagle(TARGET),
        "model": drafters.model(CATALOG.model("llama-3.2-1b"), TARGET),
        "medusa": drafters.medusa(TARGET),
    }[spec]
    rates = (0.7, 0.6, 0.5)
    chain = best_tree(RankAcceptance(tuple((rate,) for rate in rates)), length)
    proposal = Proposal(drafter, Acceptance(rates))
    expected = price(TARGET.network, where, proposal, batch=8, context=900, length=length)
    found = pricer(drafter, where).price(chain, 8, 900)
    assert found.length == length
    assert found.speedup == pytest.approx(expected.speedup, rel=1e-12)
    assert found.draft_seconds == pytest.approx(expected.draft_seconds, rel=1e-12)
    assert found.verify_seconds == pytest.approx(expected.verify_seconds, rel=1e-12)


def test_each_level_is_a_forward_over_the_nodes_that_have_children() -> None:
    tree, drafter = best_tree(BY_RANK, 10), eagle3()
    assert drafter.network is not None
    point = pricer(drafter).price(tree, 16, 1000)
    seconds = forward_time(drafter.network, WHERE, Load(16, 6, 1000, 1)).seconds  # the root, after up to 5 accepted
    for level in range(1, tree.levels):
        continued = len({path[:-1] for path in tree.paths if len(path) == level + 1})
        seconds += forward_time(drafter.network, WHERE, Load(16, continued, 1000)).seconds
    assert point.draft_seconds == pytest.approx(seconds, rel=1e-12)
    verify = forward_time(TARGET.network, WHERE, Load(16, 11, 1000)).seconds + WHERE.eff.step_us * 1e-6
    assert point.verify_seconds == pytest.approx(verify, rel=1e-12)
    assert sum(forward.repeats for forward in tree_forwards(drafter, tree)) == 5


def test_heads_cost_no_more_for_a_tree_than_for_its_longest_path() -> None:
    medusa = drafters.medusa(TARGET)
    tree = best_tree(BY_RANK, 20, depth=4)
    point = pricer(medusa).price(tree, 1, 1000)
    assert point.draft_seconds == pytest.approx(medusa.seconds(WHERE, 1, 1000, tree.levels))
    with pytest.raises(PlanError, match="draft length: 5 is not allowed for medusa-4"):
        pricer(medusa).price(best_tree(BY_RANK, 10), 1, 1000)


def test_a_drafter_elsewhere_is_priced_where_it_runs() -> None:
    here = TreePricer(TargetSteps(TARGET.network, IDEAL), eagle3(), draft_deployment=WHERE)
    tree = best_tree(BY_RANK, 10)
    assert here.price(tree, 4, 0).draft_seconds == pricer(where=WHERE).price(tree, 4, 0).draft_seconds
    assert here.price(tree, 4, 0).verify_seconds == pricer(where=IDEAL).price(tree, 4, 0).verify_seconds


@pytest.mark.parametrize("batch", [1, 8, 40, 100, 1000, 4000])
@pytest.mark.parametrize("drafter", [eagle3(), drafters.medusa(TARGET), drafters.ngram(host_us=200)])
def test_the_best_beginning_is_the_best_of_all_prices(batch: int, drafter: PricedDrafter) -> None:
    levels = min(6, drafter.longest)
    trees = best_trees(BY_RANK, 24, depth=levels)
    priced = pricer(drafter)
    tree, point = priced.best(trees, batch, 1000)
    every = [priced.price(each.first(n), batch, 1000) for each in trees for n in range(len(each) + 1)]
    assert point.speedup == pytest.approx(max(each.speedup for each in every), rel=1e-12)
    assert point == priced.price(tree, batch, 1000)
    assert (len(tree) == 0) == (point.speedup == 1.0)


def test_a_drafter_that_takes_too_long_isnt_asked() -> None:
    """Half a second of the host's time against steps of milliseconds."""
    tree, point = pricer(drafters.ngram(host_us=500_000)).best([best_tree(BY_RANK, 10)], 1, 1000)
    assert tree == EMPTY
    assert (point.speedup, point.draft_seconds, point.length) == (1.0, 0.0, 0)


def test_where_width_is_free_no_tree_of_up_to_5_nodes_is_faster() -> None:
    """Medusa's draft costs by its levels alone, so the best size and depth give the best tree of all."""
    acceptance = RankAcceptance(((0.55, 0.1, 0.2), (0.3, 0.45, 0.05)))
    priced = pricer(drafters.medusa(TARGET))
    sizes: set[int] = set()
    for batch in (4, 30, 60, 120, 400):
        best = max(
            priced.price(tree_of(tree, acceptance), batch, 500).speedup
            for n in range(6)
            for tree in reference.all_trees(n, 3)
            if reference.depth(tree) <= 4
        )
        tree, point = priced.best(best_trees(acceptance, 5, depth=4), batch, 500)
        assert point.speedup == pytest.approx(best, rel=1e-12)
        sizes.add(len(tree))
    assert len(sizes) > 2


def test_the_trees_that_are_tried_have_every_depth_once() -> None:
    trees = best_trees(BY_RANK, 20, depth=16)
    chain, *others = trees
    assert chain == best_tree(BY_RANK, 20, depth=16, branching=1)
    assert others[0] == best_tree(BY_RANK, 20)
    assert [tree.levels for tree in others] == list(range(others[0].levels, 0, -1))


def test_experts_make_wide_verification_dear_at_small_batches() -> None:
    """Each query touches other experts, so a tree costs more than the chain where a dense model reads the same."""
    steps = TargetSteps(MIXTURE.network, replace(IDEAL, tensor=2))
    priced = TreePricer(steps, drafters.ngram())
    tree, chain = best_tree(BY_RANK, 10), best_tree(BY_RANK, 5, branching=1)
    assert priced.price(tree, 1, 0).verify_ratio > 1.1 * priced.price(chain, 1, 0).verify_ratio > 1.3
    assert pricer(where=IDEAL).price(tree, 1, 0).verify_ratio < 1.02


@pytest.mark.parametrize("runs", [[(1, 4096)], [], [(1, 1)], [(3, 17)], [(1, 64), (100, 700)], [(2, 2), (4096, 4096)]])
def test_runs_of_batches_are_found_wherever_they_end(runs: list[tuple[int, int]]) -> None:
    assert batches_where(lambda batch: any(first <= batch <= last for first, last in runs)) == runs


def test_runs_end_with_the_batches_that_are_looked_at() -> None:
    assert batches_where(bool, 77) == [(1, 77)]
    assert batches_where(lambda batch: batch > 70, 77) == [(71, 77)]
    assert batches_where(lambda batch: batch > 77, 77) == []
    assert batches_where(bool, 1) == [(1, 1)]


def pays(which: PlannedTree, priced: TreePricer, context: float) -> list[tuple[int, int]]:
    return batches_where(lambda batch: priced.price(which, batch, context).speedup > 1)


def test_long_contexts_let_a_draft_pay_at_every_batch() -> None:
    """The cache is read once for all queries of a sequence; where it outweighs all else, they are free again."""
    chain, free = best_tree(BY_RANK, 5, branching=1), pricer(drafters.ngram(), IDEAL)
    [(first, short)] = pays(chain, free, 0)
    assert first == 1
    [(first, longer)] = pays(chain, free, 1000)
    assert first == 1
    assert 2 * short < longer < 1000
    assert pays(chain, free, 2000) == [(1, 4096)]


def test_experts_can_make_a_draft_pay_only_from_some_batch_on() -> None:
    """At batch 1 the chain's queries touch more than three times the experts of plain decoding."""
    chain = best_tree(BY_RANK, 5, branching=1)
    priced = TreePricer(TargetSteps(MIXTURE.network, replace(IDEAL, tensor=2)), drafters.ngram())
    [(first, last)] = pays(chain, priced, 0)
    assert first == 2
    assert 100 < last < 1000


def test_expected_tokens_are_derived() -> None:
    acceptance = RankAcceptance(((0.6, 0.2), (0.5, 0.1, 0.05)))
    tree = best_tree(acceptance, 12)
    derivation = explain_tokens(tree, acceptance)
    evaluated(derivation.lines)
    assert derivation.value == tree.expected_tokens
    assert derivation.lines[-1].symbol == "expected_tokens"
    assert explain_tokens(EMPTY, acceptance).value == 1


@pytest.mark.parametrize("drafter", [eagle3(), drafters.medusa(TARGET), drafters.ngram(host_us=50)])
@pytest.mark.parametrize("nodes", [0, 1, 10])
def test_the_speedup_is_derived(drafter: PricedDrafter, nodes: int) -> None:
    tree = best_tree(BY_RANK, nodes, depth=4)
    point = pricer(drafter).price(tree, 32, 1000)
    derivation = explain_speedup(TARGET.network, WHERE, drafter, tree, BY_RANK, batch=32, context=1000)
    evaluated(derivation.lines)
    assert derivation.value == pytest.approx(point.speedup, rel=1e-12)
    values = {line.symbol: line.value for line in derivation.lines}
    assert values["draft_seconds"] == pytest.approx(point.draft_seconds, rel=1e-12)
    assert values["verify_seconds"] == pytest.approx(point.verify_seconds, rel=1e-12)
    assert values["plain_seconds"] == pytest.approx(point.plain_seconds, rel=1e-12)


@pytest.mark.parametrize(("batch", "context", "field"), [(0, 0, "batch"), (1, -1, "context"), (1, math.nan, "context")])
def test_loads_out_of_range_are_refused(batch: int, context: float, field: str) -> None:
    tree = best_tree(BY_RANK, 3)
    for call in (pricer().price, lambda tree, *load: pricer().best([tree], *load)):
        with pytest.raises(PlanError) as caught:
            call(tree, batch, context)
        assert caught.value.field == field
