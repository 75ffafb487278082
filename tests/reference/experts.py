"""Experts that tokens pick, drawn one by one."""

from __future__ import annotations

import numpy as np


def simulated_distinct(n: int, active: int, tokens: int, *, shares: int, repeats: int) -> tuple[float, float]:
    """Distinct experts on the busiest of `shares` equal parts of `n`, when each token picks `active`: mean and its
    standard error."""
    rng = np.random.default_rng(0)
    counts = []
    for _ in range(repeats):
        picked = rng.permuted(np.tile(np.arange(n), (tokens, 1)), axis=1)[:, :active]
        touched = np.zeros(n, dtype=bool)
        touched[picked.ravel()] = True
        counts.append(touched.reshape(shares, n // shares).sum(axis=1).max())
    return float(np.mean(counts)), float(np.std(counts) / np.sqrt(repeats))
