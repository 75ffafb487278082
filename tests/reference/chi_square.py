"""Pearson's test with its error rates: thresholds, and the power against a known alternative."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def statistic(counts: npt.ArrayLike, expected: Floats) -> float:
    """Pearson's sum over cells of counts int[C] against probabilities float64[C].

    A count in a cell of probability 0 makes it infinite; so does no count at all.
    """
    seen = np.asarray(counts, dtype=np.float64)
    possible = expected > 0
    n = seen.sum()
    if n == 0 or seen[~possible].any():
        return math.inf
    return float((np.square(seen[possible] - n * expected[possible]) / (n * expected[possible])).sum())


def degrees(expected: Floats) -> int:
    return int(np.count_nonzero(expected)) - 1


def noncentrality(actual: Floats, expected: Floats) -> float:
    """For one draw; n draws have n times that. Infinite if `actual` has a cell that `expected` rules out."""
    possible = expected > 0
    if (actual[~possible] > 1e-12).any():
        return math.inf
    return float((np.square(actual[possible] - expected[possible]) / expected[possible]).sum())


def upper_tail(x: float, df: float) -> float:
    """Probability that a chi-square variable with `df` degrees of freedom is above x: the regularised upper incomplete
    gamma function, by its series below the mean and by Legendre's continued fraction above it."""
    a, x = df / 2, x / 2
    if x <= 0:
        return 1.0
    front = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        n = 0
        while term > total * 1e-17:
            n += 1
            term *= x / (a + n)
            total += term
        return 1 - front * total
    b = x + 1 - a
    c, d = 1e300, 1 / b
    fraction = d
    for i in range(1, 10_000):
        b += 2
        d = 1 / (-i * (i - a) * d + b)
        c = b - i * (i - a) / c
        fraction *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return front * fraction


def critical(alpha: float, df: float) -> float:
    """The threshold that a right distribution passes with probability `alpha`."""
    low, high = 0.0, df + 100 * math.sqrt(df) + 100
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if upper_tail(middle, df) > alpha else (low, middle)
    return high


def power(noncentral: float, df: int, threshold: float) -> float:
    """Probability that a noncentral chi-square variable is above the threshold: a Poisson mixture of central ones."""
    half = noncentral / 2
    if half == math.inf:
        return 1.0
    spread = 12 * math.sqrt(half) + 12
    total = 0.0
    for j in range(max(0, int(half - spread)), int(half + spread) + 1):
        weight = math.exp(-half + (j * math.log(half) if j else 0.0) - math.lgamma(j + 1))
        total += weight * upper_tail(threshold, df + 2 * j)
    return total
