"""The native functions with a name for each argument; what isn't given is off."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from forerun import _native
from forerun.sample import SamplingParams
from forerun.sample.arrays import LateEdits, SpecArrays
from forerun.sample.masks import Masks

Column = npt.ArrayLike
"""One value for all rows, or one a row."""


def spec(
    n: int,
    *,
    temperature: Column = 1.0,
    top_k: Column = 0,
    top_p: Column = 1.0,
    min_p: Column = 0.0,
    typical_p: Column = 1.0,
    order: Column = 0,
    seed: Column = 0,
    position: Column = 0,
    late: Sequence[LateEdits | None] = (),
) -> SpecArrays:
    """The parameters of n rows; order: codes of `order_code`."""

    def column(value: Column, dtype: type) -> np.ndarray:
        return np.ascontiguousarray(np.broadcast_to(np.asarray(value).astype(dtype), n))

    off = SpecArrays.of([SamplingParams()] * n, [0] * n, [0] * n, late)
    return SpecArrays(
        column(temperature, np.float32),
        column(top_k, np.int32),
        column(top_p, np.float32),
        column(min_p, np.float32),
        column(typical_p, np.float32),
        column(order, np.uint32),
        column(seed, np.uint64),
        column(position, np.int64),
        *off[8:],
    )


def sample(
    logits: np.ndarray, rows: npt.ArrayLike, *, masks: Masks | None = None, isa: str = "auto", **knobs: Column
) -> np.ndarray:
    """Tokens int32[R] drawn from `rows` of logits float32[N, V]."""
    at = np.array(rows, dtype=np.int32)
    return _native.sample(logits, at, *spec(len(at), **knobs), *(masks or Masks.none(len(at))), isa=isa)
