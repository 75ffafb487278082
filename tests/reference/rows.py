"""Rows of logits and of sampling parameters of every kind, to compare a kernel with its definition on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from forerun.constrain.bits import pack
from forerun.sample.arrays import LateEdits, order_code
from forerun.sample.masks import Masks
from forerun.sample.params import STAGES, Stage


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


def random_masks(rng: np.random.Generator, n: int, V: int) -> Masks:
    """For n rows: none, most, few or one token, runs of tokens, or nothing allowed; masks may serve several rows."""
    share = rng.choice([0.001, 0.05, 0.5, 0.95, 0.999], (n, 1))
    allowed = rng.random((n, V)) < share
    kind = rng.integers(0, 8, n)
    allowed[kind == 0] = True
    allowed[kind == 1] = rng.integers(0, V) == np.arange(V)
    runs = np.arange(V) // 64 % 2 == 0
    allowed[kind == 2] = runs
    allowed[kind == 3] = ~runs | (rng.random(V) < 0.02)
    rows = np.where(rng.random(n) < 0.4, -1, rng.integers(0, n, n))
    return Masks(pack(allowed), rows.astype(np.int32))


def random_typical_p(rng: np.random.Generator, n: int) -> npt.NDArray[np.float32]:
    """Off in half of the rows."""
    values = rng.choice([0, 1e-9, 0.2, 0.5, 0.9, 0.99, 1 - 2**-24], n)
    return np.where(rng.random(n) < 0.5, 1, values).astype(np.float32)


def random_orders(rng: np.random.Generator, n: int) -> npt.NDArray[np.uint32]:
    """Codes of `order_code`: the default one, all stages in another order, or some of them."""
    stages = [rng.permutation(STAGES)[: rng.integers(1, 7)] if rng.random() < 0.3 else rng.permutation(STAGES)
              for _ in range(n)]  # fmt: skip
    codes = np.array([order_code([*names]) for names in stages], dtype=np.uint32)
    return np.where(rng.random(n) < 0.4, 0, codes).astype(np.uint32)


def stages_of(code: int) -> tuple[Stage, ...]:
    """The inverse of `order_code`; of 0, the default order, whose penalties are in the logits already."""
    digits = [code >> 4 * place & 15 for place in range(6)]
    return tuple(STAGES[digit - 1] for digit in digits if digit) or STAGES[1:]


def random_late_edits(rng: np.random.Generator, n: int, V: int) -> np.ndarray:
    """object[n]: None, or edits of a few tokens or many; some of them change nothing."""
    edits = np.full(n, None, dtype=object)
    for row in np.flatnonzero(rng.random(n) < 0.5):
        ids = rng.permutation(V)[: rng.integers(0, min(V, 100) + 1)].astype(np.int32)

        def column(*values: float, ids: np.ndarray = ids) -> np.ndarray:
            return rng.choice(np.array(values, np.float32), len(ids))

        edits[row] = LateEdits(
            ids,
            column(0, 0, -100, -0.3, 1.5, 100),
            column(1, 1, 1.3, 0.01, 100),
            column(0, 0.7, -1.4, 3000),
            column(0, 0, 2, -2),
        )
    return edits
