"""`greedy`, the layout of ragged rows, and what is refused."""

from __future__ import annotations

import array_api_strict
import numpy as np
import pytest

from forerun.draft.base import DraftTree
from forerun.errors import VerificationError
from forerun.verify import (
    DrawnFrom,
    Trees,
    Verdict,
    Verdicts,
    coupled,
    greedy,
    own_tokens,
    rejection,
    seeded_draws,
)

NAMESPACES = ["numpy", "array_api_strict", "torch"]


def converter(name: str):
    """From NumPy arrays to those of a namespace."""
    if name == "numpy":
        return lambda array: array
    if name == "array_api_strict":
        return array_api_strict.asarray
    torch = pytest.importorskip("torch", reason="torch is not installed")
    return lambda array: torch.asarray(np.ascontiguousarray(array))


def random_trees(rng: np.random.Generator, n_rows: int, V: int, most: int = 9) -> list[DraftTree]:
    trees = []
    for _ in range(n_rows):
        n = int(rng.integers(0, most + 1))
        chain = rng.random() < 0.3
        parents = [node - 1 if chain else int(rng.integers(-1, node)) for node in range(n)]
        trees.append(DraftTree(rng.integers(0, V, n).tolist(), parents))
    return trees


def walk(tree: DraftTree, best: np.ndarray) -> tuple[list[int], int]:
    """The obvious way: from node to the first child with the token."""
    node, path = -1, []
    while True:
        token = int(best[node + 1])
        found = [i for i, parent in enumerate(tree.parents) if parent == node and tree.tokens[i] == token]
        if not found:
            return path, token
        node = found[0]
        path.append(node)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_greedy_walks_as_the_obvious_way_does(namespace):
    rng, to = np.random.default_rng(0), converter(namespace)
    drafts = random_trees(rng, 400, 3)
    best = rng.integers(0, 3, (400, 10))
    found = greedy(Trees(*map(to, Trees.of(drafts))), to(best))
    expected = [walk(tree, row) for tree, row in zip(drafts, best, strict=True)]
    assert [(verdict.path.tolist(), verdict.next_token) for verdict in found] == expected
    assert max(len(path) for path, _ in expected) > 3
    assert [int(n) for n in found.accepted] == [len(path) for path, _ in expected]


def test_of_siblings_with_one_token_the_first_is_accepted():
    tree = DraftTree([5, 5, 7], [-1, -1, 1])
    verdict = greedy(Trees.of([tree]), np.array([[5, 7, 7, 9]]))[0]
    assert (verdict.path.tolist(), verdict.next_token) == ([0], 7)


def test_correction_bonus_and_no_draft():
    trees = Trees.of([DraftTree.chain([1, 2]), DraftTree.chain([1, 3]), DraftTree((), ())])
    verdicts = greedy(trees, np.array([[1, 2, 4], [1, 2, 4], [6, 0, 0]]))
    assert [(v.path.tolist(), v.next_token, v.accepted) for v in verdicts] == [([0, 1], 4, 2), ([0], 2, 1), ([], 6, 0)]
    assert verdicts.emitted(trees).tolist() == [[1, 2, 4], [1, 2, -1], [6, -1, -1]]
    assert verdicts.path.tolist() == [[0, 1], [0, -1], [-1, -1]]


def test_a_negative_token_ends_the_walk():
    """A node whose scores are no numbers has no token; padding, which is -1, must not match it."""
    trees = Trees.of([DraftTree.chain([1]), DraftTree.chain([1, 2])])
    verdicts = greedy(trees, np.array([[-1, 1, 1], [1, -1, 1]]))
    assert [(v.path.tolist(), v.next_token) for v in verdicts] == [([], -1), ([0], -1)]


def test_greedy_never_reads_padding():
    rng = np.random.default_rng(1)
    drafts = random_trees(rng, 300, 2)
    trees = Trees.of(drafts)
    best = rng.integers(0, 2, (300, 10))
    clean = greedy(trees, best)
    beyond = np.arange(9)[None, :] >= trees.lengths[:, None]
    for _ in range(5):
        noisy = Trees(
            np.where(beyond, rng.integers(0, 2, beyond.shape), trees.tokens),
            np.where(beyond, rng.integers(-1, 9, beyond.shape), trees.parents),
            trees.lengths,
        )
        spoilt = greedy(noisy, best)
        assert np.array_equal(spoilt.mask, clean.mask)
        assert np.array_equal(spoilt.next_token, clean.next_token)
    read = greedy(noisy._replace(parents=np.minimum(noisy.parents, np.arange(9) - 1), lengths=np.full(300, 9)), best)
    assert not np.array_equal(read.mask, clean.mask)  # a walk that read it would differ


@pytest.mark.parametrize("namespace", ["array_api_strict", "torch"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_namespace_decides_alike(namespace, dtype):
    rng, to = np.random.default_rng(2), converter(namespace)
    drafts = random_trees(rng, 60, 6)
    trees = Trees.of(drafts)
    there = Trees(*map(to, trees))
    logits = rng.standard_normal((60, 10, 6)).astype(dtype)
    p = np.exp(logits)
    p /= p.sum(axis=-1, keepdims=True)
    q = rng.dirichlet(np.ones(6), (60, 9)).astype(dtype)
    drawn = rng.random((60, 9)) < 0.7
    seeds, positions = list(range(60)), rng.integers(0, 1000, 60).tolist()
    draws = seeded_draws(trees, seeds, positions)
    own = rng.integers(0, 6, (60, 10))

    def same(found: Verdicts, expected: Verdicts) -> None:
        assert type(found.mask) is type(to(np.zeros(1)))
        assert [(v.path.tolist(), v.next_token) for v in found] == [(v.path.tolist(), v.next_token) for v in expected]
        assert np.asarray(expected.emitted(trees)).tolist() == [
            [int(token) for token in row] for row in np.asarray(found.emitted(there)).tolist()
        ]

    assert all(np.array_equal(a, b) for a, b in zip(draws, seeded_draws(there, seeds, positions), strict=True))
    same(coupled(there, to(logits), seeds, positions), coupled(trees, logits, seeds, positions))
    numbers = {"accept": draws.accept, "final": draws.final}
    for extra in ({}, {"q": q}, {"q": q, "drawn": drawn, "own": own}):
        arguments = {**numbers, **extra}
        same(
            rejection(there, to(p), **{name: to(array) for name, array in arguments.items()}),
            rejection(trees, p, **arguments),
        )


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize(("n_rows", "n"), [(0, 0), (0, 3), (4, 0)])
def test_no_rows_and_no_nodes(namespace, n_rows, n):
    to = converter(namespace)
    nodes = np.full((n_rows, n), -1)
    trees = Trees(to(nodes), to(nodes), to(np.zeros(n_rows, np.int64)))
    p = np.full((n_rows, n + 1, 4), 0.25)
    numbers = {"accept": to(np.zeros((n_rows, n))), "final": to(np.full((n_rows, n + 1), 0.6))}
    for verdicts, expected in [
        (greedy(trees, to(np.full((n_rows, n + 1), 3))), 3),
        (rejection(trees, to(p), **numbers), 2),
        (rejection(trees, to(p), to(p[:, 1:]), **numbers), 2),
    ]:
        assert len(verdicts) == n_rows
        assert [(v.accepted, v.next_token) for v in verdicts] == [(0, expected)] * n_rows
        assert tuple(verdicts.emitted(trees).shape) == (n_rows, n + 1)


def test_q_of_a_batch_is_laid_out_like_its_trees():
    q = np.array([[0.5, 0.5, 0], [0, 1, 0]], np.float32)
    drawn_from = DrawnFrom.of([DraftTree.chain([1]), DraftTree.chain([0, 1], q=q), DraftTree((), ())], 3)
    assert drawn_from.q.shape == (3, 2, 3)
    assert np.array_equal(drawn_from.q[1], q)
    assert drawn_from.drawn.tolist() == [[False, False], [True, True], [False, False]]


def test_own_tokens_are_the_lowest_of_the_highest():
    logits = np.array(
        [[[1, 3, 3], [-np.inf, -np.inf, 0]], [[np.nan, 0, 0], [-np.inf] * 3], [[0, np.inf, 0], [1, 0, 0]]]
    )
    assert own_tokens(logits, np.zeros((3, 2, 3))).tolist() == [[1, 2], [-1, -2], [-1, 0]]


def test_p_without_a_distribution_is_reported_where_the_walk_stands():
    trees = Trees.of([DraftTree.chain([0])] * 6)
    sound = [0.0, 1.0]
    p = np.array([[[1.0, 0], row] for row in ([np.nan, 1], [np.inf, 0], [-0.1, 1], [0, 0], sound)] + [[[0, 0], sound]])
    verdicts = rejection(trees, p, accept=np.full((6, 1), 0.5), final=np.full((6, 2), 0.5))
    assert [(v.accepted, v.next_token) for v in verdicts] == [(1, -1), (1, -1), (1, -1), (1, -2), (1, 1), (0, -2)]


def test_a_verdict_says_how_many_were_accepted():
    assert Verdict(np.array([0, 2], np.int32), 7).accepted == 2


TREES = Trees.of([DraftTree([1, 2, 3], [-1, 0, 0])])
P, Q = np.full((1, 4, 5), 0.2), np.full((1, 3, 5), 0.2)
NUMBERS = {"accept": np.zeros((1, 3)), "final": np.zeros((1, 4))}


@pytest.mark.parametrize(
    ("trees", "message"),
    [
        (TREES._replace(parents=np.zeros((1, 2))), r"tokens have shape \(1, 3\), parents \(1, 2\)"),
        (TREES._replace(lengths=np.array([3, 3])), r"lengths \(2,\); expected \[R, N\], \[R, N\] and \[R\]"),
        (TREES._replace(lengths=np.array([4])), "a draft is no tree; expected lengths from 0 to 3"),
        (TREES._replace(lengths=np.array([-1])), "a draft is no tree"),
        (TREES._replace(parents=np.array([[-1, 1, 0]])), "each parent from -1 to the index before its node"),
        (TREES._replace(parents=np.array([[-2, 0, 0]])), "a draft is no tree"),
        (TREES._replace(tokens=np.array([[-1, 2, 3]])), "tokens from 0"),
    ],
)
def test_what_is_no_tree_is_refused(trees, message):
    with pytest.raises(VerificationError, match=message):
        greedy(trees, np.zeros((1, 4), np.int64))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: greedy(TREES, np.zeros((1, 3))), r"best has shape \(1, 3\) for drafts of shape \(1, 3\)"),
        (lambda: coupled(TREES, P[:, :3], [0], [0]), r"logits has shape \(1, 3, 5\)"),
        (lambda: coupled(TREES, P, [0, 1], [0]), "there are 2 seeds for 1 rows"),
        (lambda: coupled(TREES, P, [0], []), "there are 0 positions for 1 rows"),
        (lambda: own_tokens(P, Q), "noise has shape"),
        (lambda: rejection(TREES, P[:, :3], **NUMBERS), "p has shape"),
        (lambda: rejection(TREES, P, P, **NUMBERS), "q has shape"),
        (lambda: rejection(TREES, P, Q[:, :, :4], **NUMBERS), "q has 4 tokens and p has 5"),
        (lambda: rejection(TREES, P[:, :, :3], **NUMBERS), "a draft token is outside the vocabulary of 3 tokens"),
        (lambda: rejection(TREES, P, **{**NUMBERS, "accept": np.zeros((1, 4))}), "accept has shape"),
        (lambda: rejection(TREES, P, **{**NUMBERS, "final": np.zeros((1, 3))}), "final has shape"),
        (lambda: rejection(TREES, P, own=np.zeros((2, 4)), **NUMBERS), "own has shape"),
        (lambda: rejection(TREES, P, Q, drawn=np.zeros((1, 4), bool), **NUMBERS), "drawn has shape"),
    ],
    ids=str,
)
def test_arrays_that_do_not_fit_are_refused(call, message):
    with pytest.raises(VerificationError, match=message):
        call()
