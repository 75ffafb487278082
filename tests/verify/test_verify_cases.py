"""Cases of sampling with drafts that went wrong elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.sample.transforms import exp32
from forerun.verify import Trees, coupled, greedy, rejection
from forerun.verify.node import reject, scores
from reference import chi_square
from reference.verification import pick

ALPHA = 1e-4

A, B = 0, 1
TARGET = np.log(np.array([0.3, 0.5, 0.1, 0.1])).astype(np.float32)
DRAFT_Q = np.array([0.2, 0.1, 0.1, 0.1], np.float32) * 2  # only its place in q matters at temperature 0
UNIFORMS = np.random.default_rng(0).random(500)


def of_draft_a(logits: np.ndarray) -> tuple[Trees, np.ndarray]:
    """500 rows whose draft is token a, with these scores at every column."""
    trees = Trees(np.full((500, 1), A), np.full((500, 1), -1), np.ones(500, np.int64))
    return trees, np.broadcast_to(logits, (500, 2, logits.size))


def test_case_10_at_temperature_0_the_draft_does_not_decide():
    """q(a) is the drafter's largest and p(a) = 0.3 < p(b) = 0.5: the answer is b, always, by every rule."""
    z = scores(TARGET, temperature=0)
    assert exp32(z).tolist() == [0, 1, 0, 0]  # the distribution after all transforms
    trees, rows = of_draft_a(z)
    numbers = {"accept": UNIFORMS[:, None], "final": np.stack([UNIFORMS, UNIFORMS], axis=1)}
    q = np.broadcast_to(DRAFT_Q, (500, 1, 4))
    for verdicts in (
        greedy(trees, np.broadcast_to(TARGET, (500, 2, 4)).argmax(axis=-1)),
        coupled(trees, rows, range(500), range(500)),
        rejection(trees, exp32(z)[None, None].repeat(500, axis=0).repeat(2, axis=1), q, **numbers),
        rejection(trees, exp32(z)[None, None].repeat(500, axis=0).repeat(2, axis=1), **numbers),
    ):
        assert not verdicts.mask.any()
        assert set(verdicts.next_token.tolist()) == {B}
    for seed in range(50):
        for q_row in (DRAFT_Q, None):
            choice = reject(TARGET, temperature=0, seed=seed, position=3, children=[A], q=[q_row])
            assert choice == (-1, B)


def test_case_10_softmaxes_at_temperature_1_would_give_a():
    """The fault: at temperature 0 the ratio of untransformed probabilities accepts a, whose p is above its q."""
    trees, _ = of_draft_a(TARGET)
    p = np.broadcast_to(np.exp(TARGET), (500, 2, 4))
    q = np.broadcast_to(np.array([0.2, 0.1, 0.1, 0.1], np.float32), (500, 1, 4))
    wrong = rejection(trees, p, q / q.sum(axis=-1, keepdims=True), accept=UNIFORMS[:, None], final=np.zeros((500, 2)))
    assert wrong.mask.any()


def test_case_10_p_and_q_are_taken_after_all_transforms():
    """top-k 1 leaves b alone at any temperature."""
    for seed in range(50):
        choice = reject(TARGET, temperature=1.5, top_k=1, seed=seed, position=3, children=[A, 2], q=[DRAFT_Q, DRAFT_Q])
        assert choice == (-1, B)


def test_case_11_a_chosen_draft_is_accepted_with_p_and_not_with_a_ratio():
    trees, _ = of_draft_a(TARGET)
    p = np.broadcast_to(np.exp(TARGET), (500, 2, 4))
    accepted = rejection(trees, p, accept=UNIFORMS[:, None], final=np.zeros((500, 2))).mask[:, 0]
    assert accepted.tolist() == (UNIFORMS < 0.3).tolist()
    softmax = np.broadcast_to(np.array([0.4, 0.2, 0.2, 0.2], np.float32), (500, 1, 4))
    with_ratio = rejection(trees, p, softmax, accept=UNIFORMS[:, None], final=np.zeros((500, 2))).mask[:, 0]
    assert with_ratio.tolist() == (UNIFORMS < 0.3 / 0.4).tolist()


def test_case_11_the_correction_of_a_chosen_draft_is_p_without_it():
    trees, _ = of_draft_a(TARGET)
    p = np.broadcast_to(np.exp(TARGET), (500, 2, 4))
    grid = (np.arange(500) + 0.5) / 500
    rejected = rejection(trees, p, accept=np.full((500, 1), 0.9), final=np.stack([grid, grid], axis=1))
    counts = np.bincount(rejected.next_token, minlength=4)
    assert np.abs(counts - 500 * np.array([0, 0.5, 0.1, 0.1]) / 0.7).max() <= 1


@pytest.mark.parametrize("fault", ["top_k", "bfloat16"])
def test_case_12_what_was_drawn_and_what_is_judged_are_one_distribution(fault):
    """The drafter draws after top-k (or in coarse numbers); a q without it is caught, the right q is not.

    One step, so that the first token's law is known: with the whole q, tokens that top-k kept come too often.
    """
    rng = np.random.default_rng(12)
    V, n = 6, 60_000
    p = np.array([0.3, 0.25, 0.2, 0.12, 0.08, 0.05])
    q = np.array([0.05, 0.4, 0.1, 0.25, 0.15, 0.05])
    coarse = np.exp2(np.floor(np.log2(q) * 4) / 4)  # bfloat16, exaggerated
    used = np.where(q >= 0.15, q, 0) if fault == "top_k" else coarse
    used = used / used.sum()
    tokens = pick(np.broadcast_to(used, (n, V)), rng.random(n))
    trees = Trees(tokens[:, None], np.full((n, 1), -1), np.ones(n, np.int64))
    found = {}
    for name, judged in (("right", used), ("wrong", q)):
        verdicts = rejection(
            trees, np.broadcast_to(p, (n, 2, V)), np.broadcast_to(judged, (n, 1, V)),
            accept=rng.random((n, 1)), final=rng.random((n, 2)),
        )  # fmt: skip
        first = np.where(verdicts.mask[:, 0], tokens, verdicts.next_token)
        found[name] = chi_square.statistic(np.bincount(first, minlength=V), p)
    limit = chi_square.critical(ALPHA, V - 1)
    assert found["right"] < limit < found["wrong"]
