"""Rows of logits of every kind, to compare a kernel with its definition on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def random_logits(rng: np.random.Generator, n: int, V: int) -> npt.NDArray[np.float32]:
    """Rows of every kind: smooth, peaked, tied, masked, flat, huge, signed zeros, faulty."""
    rows = (rng.standard_normal((n, V)) * rng.choice([0.01, 1, 4, 30], (n, 1))).astype(np.float32)
    kind = rng.integers(0, 10, n)
    rows[kind == 1] = np.round(rows[kind == 1])
    rows[kind == 2] = np.float32(rng.standard_normal())
    rows[kind == 3] = rng.choice(np.array([0.0, -0.0, 1.0], np.float32), (int((kind == 3).sum()), V))
    masked = np.flatnonzero(kind == 4)
    rows[masked] = np.where(rng.random((len(masked), V)) < 0.9, -np.inf, rows[masked])
    rows[kind == 5] *= np.float32(1e36)
    faulty = np.flatnonzero((kind == 6) & (rng.random(n) < 0.2))
    rows[faulty, rng.integers(0, V, len(faulty))] = rng.choice(
        np.array([np.nan, np.inf, -np.nan], np.float32), len(faulty)
    )
    for row in np.flatnonzero(kind == 7):
        rows[row, rng.integers(0, V, 3)] += 20
    return rows
