"""Masks as the native functions take them. What a mask forbids has the logit -inf, before anything else happens to the
logits."""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from forerun.constrain.bits import Words


class Masks(NamedTuple):
    """Masks of several rows, the last two arrays of the native `sample` and `reject`.

    words: uint32[M, W]. rows: int32[R], each row's mask; -1 where every token is allowed.
    """

    words: Words
    rows: npt.NDArray[np.int32]

    @classmethod
    def none(cls, n_rows: int) -> Self:
        """Rows that may choose every token."""
        return cls(np.empty((0, 0), dtype=np.uint32), np.full(n_rows, -1, dtype=np.int32))
