"""The best draft tree against all trees, the table written out, greedy growth and the verifier's walk; its forms."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from functools import cache

import pytest

from forerun.draft.base import MAX_NODES, DraftTree
from forerun.errors import PlanError
from forerun.plan.acceptance import Acceptance
from forerun.plan.tree import MASK_NODES, PlannedTree, RankAcceptance, TreeTable, best_tree, tree_of
from forerun.plan.tree_text import drawing, hex_masks, matrix, sglang_tree
from reference import draft_trees as reference

Rows = tuple[tuple[float, ...], ...]

BY_RANK = RankAcceptance.by_rank(0.6, 0.15, 0.06)
EMPTY = PlannedTree((), (), ())


def random_rows(rng: random.Random, depths: int, ranks: int, *, falling: bool = False) -> Rows:
    """Rates of random depths and ranks, each row's sum between 0 and 1."""
    rows = []
    for _ in range(depths):
        parts = [rng.random() ** 2 for _ in range(ranks)]
        total = sum(parts) / rng.uniform(0.3, 1.0)
        row = [part / total for part in parts]
        rows.append(tuple(sorted(row, reverse=True) if falling else row))
    return tuple(rows)


def tree_set(tree: PlannedTree) -> reference.Tree:
    return frozenset(tree.paths)


@pytest.mark.parametrize("seed", range(3))
def test_no_tree_of_up_to_8_nodes_is_better(seed: int) -> None:
    """Children of any of three ranks, so 246,675 trees of 8; rates in no order, others at each of three depths."""
    rows = random_rows(random.Random(seed), 3, 3)
    for nodes in range(9):
        found = best_tree(RankAcceptance(rows), nodes)
        best = most_tokens(reference.all_trees(nodes, 3), rows)
        assert found.expected_tokens == pytest.approx(best, rel=1e-12)
        assert reference.expected_tokens(tree_set(found), rows) == pytest.approx(best, rel=1e-12)


def most_tokens(trees: Iterable[reference.Tree], rows: Rows) -> float:
    """1 + the largest sum of survivals."""

    @cache
    def survival(path: tuple[int, ...]) -> float:
        return survival(path[:-1]) * reference.rate(rows, path) if path else 1.0

    return 1 + max(sum(map(survival, tree)) for tree in trees)


@pytest.mark.parametrize("seed", range(4))
def test_no_ordered_tree_of_up_to_8_nodes_is_better(seed: int) -> None:
    """As many ranks as nodes, falling as a drafter's do: all 1,430 ordered trees of 8 nodes, valued by the walk."""
    rows = random_rows(random.Random(seed), seed + 1, 8, falling=True)
    for nodes in range(9):
        best = max(reference.expected_tokens(tree, rows) for tree in reference.dense_trees(nodes))
        assert best_tree(RankAcceptance(rows), nodes).expected_tokens == pytest.approx(best, rel=1e-12)


def test_there_are_as_many_trees_as_there_should_be() -> None:
    """Ordered forests of n nodes (Catalan's numbers), and threefold branching ones (Fuss and Catalan's)."""
    for n in range(7):
        assert len(set(map(frozenset, reference.dense_trees(n)))) == math.comb(2 * n, n) // (n + 1)
        assert len(set(map(frozenset, reference.all_trees(n, 3)))) == math.comb(3 * n + 3, n + 1) // (2 * n + 3)
    assert len(reference.dense_trees(8)) == 1_430
    assert len(reference.all_trees(8, 3)) == 246_675


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("children", [1, 2, 3])
def test_limits_of_depth_and_branching_leave_the_best_tree_within_them(levels: int, children: int) -> None:
    rows = random_rows(random.Random(levels * 10 + children), 2, 3)
    for nodes in (1, 4, 7):
        allowed = [
            tree
            for n in range(nodes + 1)
            for tree in reference.all_trees(n, 3)
            if reference.depth(tree) <= levels and reference.branching(tree) <= children
        ]
        best = most_tokens(allowed, rows)
        found = best_tree(RankAcceptance(rows), nodes, depth=levels, branching=children)
        assert found.levels <= levels
        assert found.branching <= children
        assert len(found) == max(map(len, allowed))
        assert found.expected_tokens == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("nodes", [10, 31, 64])
@pytest.mark.parametrize("levels", [1, 4, 16])
def test_larger_trees_agree_with_the_table_and_with_greedy_growth(nodes: int, levels: int) -> None:
    rows = random_rows(random.Random(nodes + levels), 3, 4)
    found = best_tree(RankAcceptance(rows), nodes, depth=levels)
    assert found.expected_tokens == pytest.approx(reference.table_optimum(rows, nodes, levels), rel=1e-12)
    grown = reference.greedy(rows, nodes, levels)
    assert tree_set(found) == grown


def test_one_table_serves_every_limit_of_depth() -> None:
    acceptance = RankAcceptance(random_rows(random.Random(5), 3, 3))
    table = TreeTable(acceptance, 20)
    for levels in (20, 3, 1, 7, 2):
        assert table.best(levels) == best_tree(acceptance, 20, depth=levels)
    assert table.best() == best_tree(acceptance, 20)


def test_the_first_nodes_of_a_best_tree_are_the_best_tree_of_so_many() -> None:
    acceptance = RankAcceptance(random_rows(random.Random(1), 4, 3))
    whole = best_tree(acceptance, 40)
    for n in range(41):
        assert whole.first(n) == best_tree(acceptance, n)
        assert whole.first(n).expected_tokens == pytest.approx(([1.0] + [g.expected_tokens for g in whole.growth])[n])


@pytest.mark.parametrize("seed", range(2))
def test_the_verifiers_walk_gives_the_expected_tokens(seed: int) -> None:
    rng = random.Random(seed)
    rows = random_rows(rng, 2, 3)
    tree = best_tree(RankAcceptance(rows), 9)
    n = 40_000
    drawn = [reference.walk(tree_set(tree), rows, rng) for _ in range(n)]
    mean = sum(drawn) / n
    deviation = math.sqrt(sum((x - mean) ** 2 for x in drawn) / n / n)
    assert abs(mean - tree.expected_tokens) < 4 * deviation
    assert deviation < 0.02


def test_a_chain_is_what_the_formula_of_chains_says() -> None:
    chain = best_tree(BY_RANK, 5, branching=1)
    assert chain.is_chain
    assert chain.expected_tokens == pytest.approx(Acceptance.of(0.6).expected_tokens(5))
    assert best_tree(BY_RANK, 10).is_chain is False


def test_children_that_are_never_accepted_are_left_out() -> None:
    assert best_tree(RankAcceptance(((0.5, 0.0), (0.0,))), 8).paths == ((0,),)
    assert best_tree(RankAcceptance(((0.0,),)), 8) == EMPTY
    assert best_tree(BY_RANK, 8, depth=1).ranks == (0, 1, 2)


def test_among_equal_trees_the_shallow_one_is_taken() -> None:
    """.5 * .5 and the second rank's .25 are the same; the drafter gets by with one forward."""
    assert best_tree(RankAcceptance.by_rank(0.5, 0.25), 2).paths == ((0,), (1,))


def test_certain_tokens_make_a_chain() -> None:
    assert best_tree(RankAcceptance.by_rank(1.0), 256).expected_tokens == 257
    assert best_tree(RankAcceptance.by_rank(1.0), 256, depth=16).levels == 16


def test_masks_and_order_are_those_of_the_engine() -> None:
    tree = best_tree(RankAcceptance(random_rows(random.Random(2), 3, 4)), MAX_NODES)
    assert len(tree) == MASK_NODES == MAX_NODES
    engine = DraftTree(range(len(tree)), tree.parents)
    assert list(tree.ancestors()) == engine.ancestors()
    assert list(tree.depths) == engine.depths()
    assert all(parent < node for node, parent in enumerate(tree.parents))
    assert list(tree.survivals) == sorted(tree.survivals, reverse=True)
    assert max(tree.ancestors()) < 1 << 64


def test_the_matrix_shows_each_query_the_root_its_ancestors_and_itself() -> None:
    tree = best_tree(BY_RANK, 12)
    paths = [(), *tree.paths]
    for row, query in zip(tree.visible(), paths, strict=True):
        assert row == [query[: len(key)] == key for key in paths]
    lines = matrix(tree)
    for mask, line in zip(tree.ancestors(), lines[1:], strict=True):
        assert f"{mask:0{len(line)}b}"[::-1] == line
    assert hex_masks(tree) == [f"0x{mask:016x}" for mask in tree.ancestors()]


def test_a_mask_of_more_than_64_bits_is_refused() -> None:
    tree = best_tree(BY_RANK, MASK_NODES + 1)
    with pytest.raises(PlanError, match="nodes: 64 nodes and the root need more than 64 bits"):
        tree.ancestors()
    assert hex_masks(tree) is None
    assert len(matrix(tree)) == MASK_NODES + 2


def test_levels_widths_and_expanded_are_counts_of_paths() -> None:
    tree = best_tree(BY_RANK, 25)
    assert tree.widths[1:] != tree.expanded[:-1]
    parents = {path[:-1] for path in tree.paths}
    for depth in range(tree.levels):
        here = [path for path in tree.paths if len(path) == depth + 1]
        assert tree.widths[depth] == len(here)
        assert tree.expanded[depth] == len(parents & set(here))
    assert sum(tree.widths) == 25
    assert EMPTY.levels == EMPTY.branching == 0
    assert EMPTY.widths == EMPTY.expanded == ()


def test_growth_says_what_each_node_adds() -> None:
    tree = best_tree(BY_RANK, 25)
    for n, grown in enumerate(tree.growth, 1):
        before, now, level = tree.first(n - 1), tree.first(n), tree.depths[n - 1] - 1
        assert grown.levels == now.levels
        widened = level >= 0 and now.expanded[level] > before.expanded[level]
        assert grown.expanded == (now.expanded[level] if widened else 0)


def test_a_tree_of_ones_own_is_valued_by_the_same_rates() -> None:
    shape = [[0], [1], [0, 0], [0, 1], [0, 0, 0]]
    tree = tree_of(shape, BY_RANK)
    assert tree.expected_tokens == pytest.approx(1 + 0.6 + 0.15 + 0.36 + 0.09 + 0.216)
    assert tree_of([[7]], BY_RANK).survivals == (0.0,)
    with pytest.raises(PlanError, match=r"tree: has \[1, 0\] but not its parent"):
        tree_of([[0], [1, 0]], BY_RANK)
    with pytest.raises(PlanError, match="tree: has a node twice"):
        tree_of([[0], [0]], BY_RANK)
    with pytest.raises(PlanError, match=r"tree: has \[\] but"):
        tree_of([[]], BY_RANK)


def test_the_room_that_sglang_needs() -> None:
    tree = best_tree(BY_RANK, 10)
    assert sglang_tree(tree) == (5, 3, 11)
    assert sglang_tree(best_tree(BY_RANK, 4, branching=1)) == (4, 1, 5)
    both = [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]]
    bushy = tree_of([*both, *([*path, 0] for path in both[2:])], RankAcceptance.by_rank(0.5, 0.3))
    assert sglang_tree(bushy) == (3, 4, 11)  # two candidates after each node, but four nodes of a level go on


def test_the_drawing_has_a_line_for_each_node_below_its_parent() -> None:
    assert drawing(tree_of([[0], [1], [0, 1], [0, 0], [1, 0]], BY_RANK)) == [
        "root",
        "├─ 0: rank 0, 0.6000",
        "│  ├─ 1: rank 0, 0.3600",
        "│  └─ 3: rank 1, 0.0900",
        "└─ 2: rank 1, 0.1500",
        "   └─ 4: rank 0, 0.0900",
    ]


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"nodes": -1}, "nodes"),
        ({"nodes": 257}, "nodes"),
        ({"depth": 0}, "depth"),
        ({"depth": -3}, "depth"),
        ({"branching": 0}, "branching"),
    ],
)
def test_limits_out_of_range_are_refused(limits: dict[str, int], field: str) -> None:
    with pytest.raises(PlanError) as caught:
        best_tree(BY_RANK, **({"nodes": 5} | limits))  # type: ignore[arg-type]
    assert caught.value.field == field
