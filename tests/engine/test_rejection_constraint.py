"""`rejection` under a constraint: answers have the target's distribution among what the grammar allows.

Drawn trees hold tokens that the grammar forbids. These have to be rejected in their turn, so that the residual takes
their place. The test is Pearson's over three tokens: 12 texts, 3000 requests of one seed each, threshold at a
false-alarm rate of 1e-5. The faults are the two short cuts that suggest themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from forerun import Engine, SamplingParams
from forerun.constrain import Regex
from forerun.constrain.state import GrammarState
from forerun.draft.base import DraftRow, DraftTree
from forerun.draft.candidates import Place, draw
from forerun.engine import speculate
from reference import chi_square
from reference.bigram import odds_table, write_table_gguf
from reference.drafters import Scripted
from reference.tiny import VOCAB_SIZE

PROMPT, FIRST = 200, ord("!")
"""A prompt of one token, and the one that its own step writes."""
IDS = tuple(b"abcd")
LEGAL = 3
"""The last of IDS is never allowed, nor is one of them twice in a row; so nothing is ever forced, nor is FIRST."""
CONSTRAINT = Regex("[!?](a(b[ac]|c[ab])|b(a[bc]|c[ab])|c(a[bc]|b[ac]))")
ROW_OF = {97: 0, 98: 1, 99: 2, 100: 3, FIRST: 4}
P = np.array([
    [0.2, 0.6, 0.1, 0.1], [0.5, 0.2, 0.2, 0.1], [0.5, 0.2, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25], [0.6, 0.2, 0.1, 0.1]
])  # fmt: skip
"""The target's probabilities of IDS without a constraint, by the row of the last token."""
Q = np.array([
    [0.25, 0.1, 0.15, 0.5], [0.15, 0.25, 0.1, 0.5], [0.1, 0.15, 0.25, 0.5], [0.4, 0.3, 0.2, 0.1], [0.1, 0.15, 0.25, 0.5]
])  # fmt: skip
"""The drafter's, which knows of no constraint."""
PARENTS = (-1, -1, 0, 0, 2, 2)


def allowed_after(token: int) -> npt.NDArray[np.float64]:
    """The target's probabilities of IDS after a token under the constraint."""
    p = P[ROW_OF[token]].copy()
    p[LEGAL:] = 0
    if token in IDS:
        p[IDS.index(token)] = 0
    return p / p.sum()


JOINT = {
    (a, b, c): allowed_after(FIRST)[IDS.index(a)] * allowed_after(a)[IDS.index(b)] * allowed_after(b)[IDS.index(c)]
    for a in IDS[:LEGAL] for b in IDS[:LEGAL] for c in IDS[:LEGAL] if a != b != c
}  # fmt: skip
EXPECTED = np.array(list(JOINT.values()))

REQUESTS = 3000
ALPHA = 1e-5
DEGREES = chi_square.degrees(EXPECTED)
LIMIT = chi_square.critical(ALPHA, DEGREES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PROMPT, FIRST, then IDS with the probabilities of `P`."""
    following = {token: dict(zip(IDS, P[row], strict=True)) for token, row in ROW_OF.items()}
    path = tmp_path_factory.mktemp("model") / "markov.gguf"
    return write_table_gguf(path, odds_table({PROMPT: {FIRST: 1.0}, **following}))


def drawn_tree(row: DraftRow) -> DraftTree:
    """Two siblings a level, drawn without replacement from `Q`; the first of them has children, even if forbidden."""
    context = list(row.tokens)
    tokens: list[int] = []
    q: list[npt.NDArray[np.float32]] = []
    for _ in range(3):
        logits = np.full(VOCAB_SIZE, -np.inf, dtype=np.float32)
        logits[list(IDS)] = np.log(Q[ROW_OF[context[-1]]])
        found = draw(logits, Place(0, len(context), row.params, row.seed), 2, VOCAB_SIZE)
        assert found.q is not None
        tokens += found.tokens
        q += [found.q, found.q]
        context.append(found.tokens[0])
    return DraftTree(tokens, PARENTS, (), np.stack(q))


def score(model: Path, first_seed: int = 0) -> float:
    """Pearson's statistic of the answers to REQUESTS seeds."""
    engine = Engine(
        model, kv_tokens=8192, threads=1, cache_weights=False, max_rows=256, max_step_tokens=2048, draft_len=6,
        draft=Scripted(lambda row: drawn_tree(row) if row.tokens[-1] == FIRST else []),
    )  # fmt: skip
    params = [
        SamplingParams(temperature=1.0, verify="rejection", seed=seed, max_tokens=9, constraint=CONSTRAINT)
        for seed in range(first_seed, first_seed + REQUESTS)
    ]
    counts = dict.fromkeys(JOINT, 0)
    for output in engine.generate([[PROMPT]] * REQUESTS, params):
        counts[output.token_ids[1:]] += 1  # type: ignore[index]  # a KeyError where it isn't one of the 12 texts
    stats = engine.stats().speculation
    assert stats.drafted == REQUESTS
    assert stats.accepted_by_position[2] > REQUESTS / 50
    return chi_square.statistic(np.array(list(counts.values())), EXPECTED)


def plant_cut_trees(patch: pytest.MonkeyPatch) -> None:
    """Drawn nodes that the grammar forbids are dropped before verification, as chosen ones are."""

    def cut(grammar: GrammarState, tree: DraftTree) -> DraftTree:
        kept = [node for node, reaches in enumerate(grammar.reachable(tree.tokens, tree.parents)) if reaches]
        if tree.q is None:
            return tree
        place = {-1: -1} | {node: i for i, node in enumerate(kept)}
        return DraftTree(
            [tree.tokens[node] for node in kept], [place[tree.parents[node]] for node in kept], (), tree.q[kept]
        )

    patch.setattr(speculate, "cut_to_grammar", cut)


def plant_masked_q(patch: pytest.MonkeyPatch) -> None:
    """Allowed nodes are judged as if they had been drawn from what the grammar allows."""

    def masked(grammar: GrammarState, tree: DraftTree) -> DraftTree:  # noqa: ARG001
        if tree.q is None:
            return tree
        q = tree.q.copy()
        q[:, IDS[:LEGAL]] /= q[:, IDS[:LEGAL]].sum(axis=1, keepdims=True)
        return DraftTree(tree.tokens, tree.parents, (), q)

    patch.setattr(speculate, "cut_to_grammar", masked)


FAULTS = {"cut trees": plant_cut_trees, "masked q": plant_masked_q}
by_fault = pytest.mark.parametrize("plant", FAULTS.values(), ids=FAULTS)


def test_the_false_alarm_rate() -> None:
    """The threshold holds for counts, too, not only for the limit of many: 200,000 tests of right samples."""
    counts = np.random.default_rng(0).multinomial(REQUESTS, EXPECTED, 200_000)
    scores = (np.square(counts - REQUESTS * EXPECTED) / (REQUESTS * EXPECTED)).sum(axis=1)
    assert np.mean(scores > LIMIT) < 5e-5  # 2 expected


def test_drawn_trees_have_the_targets_distribution(model: Path) -> None:
    """A right engine fails here under one set of seeds in 100,000."""
    assert score(model) < LIMIT


@by_fault
def test_a_planted_fault_is_caught(
    model: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """And under nearly all other seeds: a score is about DEGREES + the noncentrality, which gives the power."""
    plant(monkeypatch)
    found = score(model)
    assert found > LIMIT
    assert chi_square.power(found - DEGREES, DEGREES, LIMIT) > 0.99


@pytest.mark.slow
def test_no_alarm_under_nearly_any_seed(model: Path) -> None:
    """At 1e-5 a test, one alarm in 20 has a probability of 2e-4; their mean is that of a chi-square variable."""
    scores = [score(model, 10_000 * i) for i in range(1, 21)]
    assert max(scores) < LIMIT
    # Four standard deviations of the mean of 20.
    assert abs(np.mean(scores) - DEGREES) < 4 * np.sqrt(2 * DEGREES / 20)


@pytest.mark.slow
@by_fault
def test_a_planted_fault_is_caught_under_other_seeds(
    model: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    assert min(score(model, 10_000 * i) for i in range(1, 11)) > LIMIT
