"""`rejection` in the engine, on drawn trees of several levels: answers have the target's distribution.

The test is Pearson's over three tokens, of which a tree of two siblings a level drafts all: 27 cells, 2000 requests of
one seed each, threshold at a false-alarm rate of 1e-5. The faults are those that one drafted node can't show: what
belongs to another node of the tree is used for its children.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from forerun import Engine, SamplingParams
from forerun.draft.base import DraftRow, DraftTree
from forerun.draft.candidates import Place, draw
from forerun.engine.choose import Chooser, Walk
from reference import chi_square
from reference.bigram import odds_table, write_table_gguf
from reference.drafters import Scripted
from reference.tiny import VOCAB_SIZE

PROMPT, FIRST = 200, 33
"""A prompt of one token, and the one that its own step writes."""
IDS = (97, 98, 99)
ROW_OF = {97: 0, 98: 1, 99: 2, FIRST: 3}
P = np.array([[0.3, 0.5, 0.2], [0.6, 0.1, 0.3], [0.2, 0.3, 0.5], [0.45, 0.35, 0.2]])
"""The target's probabilities of IDS, by the row of the last token."""
Q = np.array([[0.5, 0.2, 0.3], [0.2, 0.5, 0.3], [0.4, 0.4, 0.2], [0.2, 0.3, 0.5]])
"""The drafter's."""
JOINT = (P[3][:, None, None] * P[:3, :, None] * P[None, :3, :]).ravel()
PARENTS = (-1, -1, 0, 0, 2, 2)

REQUESTS = 2000
ALPHA = 1e-5
DEGREES = chi_square.degrees(JOINT)
LIMIT = chi_square.critical(ALPHA, DEGREES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PROMPT, FIRST, then IDS with the probabilities of `P`."""
    following = {token: dict(zip(IDS, P[row], strict=True)) for token, row in ROW_OF.items()}
    path = tmp_path_factory.mktemp("model") / "markov.gguf"
    return write_table_gguf(path, odds_table({PROMPT: {FIRST: 1.0}, **following}))


def drawn_tree(row: DraftRow) -> DraftTree:
    """Two siblings a level, drawn without replacement from `Q`; the first of them has children."""
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
    """Pearson's statistic of the three tokens after FIRST, in the answers to REQUESTS seeds."""
    engine = Engine(
        model, kv_tokens=8192, threads=1, cache_weights=False, max_rows=256, max_step_tokens=2048, draft_len=6,
        draft=Scripted(lambda row: drawn_tree(row) if row.tokens[-1] == FIRST else []),
    )  # fmt: skip
    live = [
        engine.submit([PROMPT], SamplingParams(temperature=1.0, verify="rejection", seed=seed, max_tokens=9))
        for seed in range(first_seed, first_seed + REQUESTS)
    ]
    counts = np.zeros(len(JOINT), dtype=np.int64)
    while live:
        engine.step()
        going = []
        for handle in live:
            found = handle.live.request.tokens[2:5]
            if len(found) == 3:
                handle.cancel()  # what comes after them isn't drafted
                counts[np.ravel_multi_index([IDS.index(token) for token in found], (3, 3, 3))] += 1
            else:
                going.append(handle)
        live = going
    stats = engine.stats().speculation
    assert stats.drafted == counts.sum() == REQUESTS
    assert stats.accepted_by_position[2] > REQUESTS / 20
    return chi_square.statistic(counts, JOINT)


def plant_q_of_another_node(patch: pytest.MonkeyPatch) -> None:
    """All children are judged by the distribution that the root's were drawn from."""
    reject: Any = Chooser._reject

    def rejecting(self: Chooser, walk: Walk, *rest: Any) -> Any:
        tree = walk.tree
        assert tree.q is not None or not len(tree)
        if tree.q is not None:
            walk.tree = replace(tree, q=np.repeat(tree.q[:1], len(tree), axis=0))
        found = reject(self, walk, *rest)
        walk.tree = tree
        return found

    patch.setattr(Chooser, "_reject", rejecting)


def plant_noise_of_another_node(patch: pytest.MonkeyPatch) -> None:
    """The uniform numbers and the noise of the root's children serve every depth."""
    patch.setattr(Walk, "position", property(lambda walk: len(walk.live.request.tokens)))


FAULTS = {"q": plant_q_of_another_node, "noise": plant_noise_of_another_node}
by_fault = pytest.mark.parametrize("plant", FAULTS.values(), ids=FAULTS)


def test_the_false_alarm_rate() -> None:
    """The threshold holds for counts, too, not only for the limit of many: 200,000 tests of right samples."""
    counts = np.random.default_rng(0).multinomial(REQUESTS, JOINT, 200_000)
    scores = (np.square(counts - REQUESTS * JOINT) / (REQUESTS * JOINT)).sum(axis=1)
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
