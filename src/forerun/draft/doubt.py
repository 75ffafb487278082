"""How far a request's text is to be believed to repeat, learnt from what became of its drafts.

A drafter that copies believes a continuation with probability w / (w + e): w is the evidence, e the escape, what it
takes to believe as much as not. How often copying pays differs far more between requests (an edited file, a poem)
than such a formula can know, so each request carries a factor on its escapes, its doubt. After each verified draft it
takes one step of logistic regression: the log-odds of every belief are log(w / e) - log(doubt), and the gradient of the
log loss in them is the probability minus the outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from forerun.draft.base import DraftTree

RATE = 0.15
"""Step of the regression, in log-odds for a belief that was entirely wrong."""

MOST = 8.0
"""The doubt stays between 1 / MOST and MOST, so that one stretch of text is unlearnt within the next."""


def updated_doubt(doubt: float, tree: DraftTree, accepted: Sequence[int]) -> float:
    """The doubt after `tree` was verified and its nodes `accepted` (root to leaf) were kept.

    Each step of the walk is one observation: the belief that some child would be accepted, the sum of the children's
    confidence, against whether one was. The walk's last node counts only where it had children to refuse.
    """
    if not tree.confidence:
        return doubt
    walk = {-1, *accepted}
    believed: dict[int, float] = {}
    for parent, confidence in zip(tree.parents, tree.confidence, strict=True):
        if parent in walk:
            believed[parent] = believed.get(parent, 0.0) + confidence
    # Every node of the walk but the last has an accepted child.
    step = sum(min(belief, 1.0) for belief in believed.values()) - len(accepted)
    return min(max(doubt * exp(RATE * step), 1 / MOST), MOST)
