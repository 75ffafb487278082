"""Sampling as textbooks write it, in float64 with full sorts, and statistics to judge it by.

`edited` alone is float32: its order of operations is part of what a request is promised.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.sample import SamplingParams
from forerun.sample.arrays import LateEdits
from forerun.sample.params import STAGES, Stage

Floats = npt.NDArray[np.float64]


class Reference(NamedTuple):
    """A distribution after transforms.

    probabilities: float64[V], 0 for what the transforms removed. margin: how far the closest token
    was from a threshold of top-p or min-p (below about 1e-5, float32 may decide otherwise).
    """

    probabilities: Floats
    margin: float


def softmax(x: npt.ArrayLike) -> Floats:
    values = np.asarray(x, dtype=np.float64)
    weights = np.exp(values - values.max())
    return weights / weights.sum()


def probabilities(
    logits: npt.ArrayLike,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
    order: Sequence[Stage] = STAGES,
    edits: LateEdits | None = None,
) -> Reference:
    """The distribution after the stages in this order, renormalised before each.

    The definitions of Hugging Face's processors of these names, but for ties: top-k keeps exactly k tokens.
    """
    scores = np.asarray(logits, dtype=np.float64).copy()
    margin = math.inf
    for stage in order:
        if stage == "penalties" and edits is not None:
            for token, bias, factor, by_count, by_presence in zip(*edits, strict=True):
                x = scores[token] + bias
                scores[token] = (x * factor if x < 0 else x / factor) - by_count - by_presence
        elif stage == "temperature":
            scores /= temperature
        elif stage == "top_k" and top_k:
            ranked = -np.sort(-scores)
            scores[sorted(range(len(scores)), key=lambda i: (-scores[i], i))[top_k:]] = -math.inf
            if edits is not None and top_k < len(scores) and ranked[top_k] > -math.inf:
                margin = min(margin, ranked[top_k - 1] - ranked[top_k])
        elif stage == "top_p" and top_p < 1.0:
            p = softmax(scores)
            before = 0.0
            for rank, i in enumerate(sorted(range(len(scores)), key=lambda i: (-scores[i], i))):
                if rank > 0:
                    margin = min(margin, abs(before - top_p))
                    if before >= top_p:
                        scores[i] = -math.inf
                before += p[i]
        elif stage == "min_p" and min_p > 0.0:
            p = softmax(scores)
            relative = p / p.max()
            margin = min(margin, float(np.abs(relative - min_p).min()))
            scores[relative < min_p] = -math.inf
        elif stage == "typical_p" and typical_p < 1.0:
            scores, safe = _locally_typical(scores, typical_p)
            margin = min(margin, safe)
    return Reference(softmax(scores), margin)


def _locally_typical(scores: Floats, typical_p: float) -> tuple[Floats, float]:
    """Scores after TypicalLogitsWarper, and how far the closest token was from another decision."""
    with np.errstate(divide="ignore"):
        logs = np.log(softmax(scores))
    p = np.exp(logs)
    entropy = -np.nansum(np.where(p > 0, logs, 0) * p)
    distance = np.abs(-logs - entropy)
    by_distance = np.argsort(distance, kind="stable")
    reached = np.cumsum(p[by_distance])
    last = min(int((reached < typical_p).sum()), len(p) - 1)
    limit = distance[by_distance[last]]
    others = np.abs(distance[np.isfinite(distance)] - limit)
    margin = min(float(np.abs(reached - typical_p).min()), _gap(np.sort(others)))
    return np.where(distance > limit, -math.inf, scores), margin


def _gap(ascending: Floats) -> float:
    """The smallest difference of neighbours."""
    return float(np.diff(ascending).min()) if len(ascending) > 1 else math.inf


def edited(
    logits: npt.NDArray[np.float32],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    banned: Collection[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> npt.NDArray[np.float32]:
    """Logits float32[V] after bias, penalties and bans, token by token from the whole history.

    output: everything generated before this position, drafts on the way to it included. Bias and penalties are left to
    the sampler where they come after another stage.
    """
    text = [*prompt, *output]
    ends = {word[-1] for word in bad_words if text[len(text) - len(word) + 1 :] == list(word[:-1])
            and len(word) <= len(text) + 1}  # fmt: skip
    if params.late_penalties:
        row = logits.copy()
        for token in range(len(row)):
            if token in ends or (token in banned and len(output) < params.min_tokens):
                row[token] = -math.inf
        return row
    bias = dict(params.biases)
    row = logits.copy()
    with np.errstate(over="ignore"):
        for token, x in enumerate(logits):
            if np.float32(bias.get(token, 0)) != 0:
                x = x + np.float32(bias[token])
            if np.float32(params.repetition_penalty) != 1 and (token in prompt or token in output):
                factor = np.float32(params.repetition_penalty)
                x = x * factor if x < 0 else x / factor
            count = list(output).count(token)
            if count and np.float32(params.frequency_penalty) != 0:
                x = x - np.float32(params.frequency_penalty) * np.float32(count)
            if count and np.float32(params.presence_penalty) != 0:
                x = x - np.float32(params.presence_penalty)
            if token in ends or (token in banned and len(output) < params.min_tokens):
                x = np.float32(-math.inf)
            row[token] = x
    return row


def log_softmax(logits: npt.ArrayLike) -> Floats:
    x = np.asarray(logits, dtype=np.float64)
    shifted = x - x.max()
    return shifted - math.log(math.fsum(np.exp(shifted)))


def chi_square_score(tokens: npt.ArrayLike, expected: Floats) -> float:
    """How far the counts of `tokens` are from `expected` (float64[V]), in standard deviations.

    Pearson's statistic, brought to a normal score by Wilson and Hilferty's cube root. Tokens
    expected fewer than 5 times share one cell; a token that can't occur makes the score infinite.
    """
    counts = np.bincount(np.asarray(tokens), minlength=len(expected)).astype(np.float64)
    if counts[expected == 0].any():
        return math.inf
    mean = expected * counts.sum()
    rare = mean < 5
    observed = [*counts[~rare]]
    wanted = [*mean[~rare]]
    if mean[rare].sum() > 0:
        observed.append(counts[rare].sum())
        wanted.append(mean[rare].sum())
    if len(wanted) < 2:
        return 0.0
    statistic = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True))
    degrees = len(wanted) - 1
    spread = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def ks_score(sample: npt.ArrayLike, cdf: Floats) -> float:
    """Kolmogorov's sqrt(n) * D of a sorted sample that the exact distribution maps to `cdf`.

    Values above 1.95 have a probability of 0.001.
    """
    n = np.asarray(sample).size
    steps = np.arange(n + 1) / n
    distance = max(np.abs(cdf - steps[1:]).max(), np.abs(cdf - steps[:-1]).max())
    return float(math.sqrt(n) * distance)
