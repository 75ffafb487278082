"""Sampling parameters of several rows as the native functions take them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.sample.params import SamplingParams


class SpecArrays(NamedTuple):
    """One entry a row, in the order of the arguments of the native `sample` and `reject`."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    position: npt.NDArray[np.int64]

    @classmethod
    def of(cls, params: Iterable[SamplingParams], seeds: Iterable[int], positions: Iterable[int]) -> SpecArrays:
        """Rows with these parameters, seeds in [0, 2^64), and positions of the token that is chosen."""
        params = list(params)
        return cls(
            np.array([p.temperature for p in params], dtype=np.float32),
            np.array([p.top_k for p in params], dtype=np.int32),
            np.array([p.top_p for p in params], dtype=np.float32),
            np.array([p.min_p for p in params], dtype=np.float32),
            np.array(list(seeds), dtype=np.uint64),
            np.array(list(positions), dtype=np.int64),
        )
