"""Sampling parameters of several rows as the native functions take them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.sample.noise import Float32s, Int32s
from forerun.sample.params import STAGES, SamplingParams, Stage

DEFAULT_ORDER: Final = 0
"""The order of `STAGES` without late edits."""


class LateEdits(NamedTuple):
    """Changes of single logits that don't come first: entries of one row (forerun.sample.transforms.edit_late).

    ids: int32[n], distinct. bias, factor, by_count, by_presence: float32[n]; what is off is 0, a factor 1.
    """

    ids: Int32s
    bias: Float32s
    factor: Float32s
    by_count: Float32s
    by_presence: Float32s


NO_EDITS: Final = LateEdits(np.empty(0, dtype=np.int32), *(np.empty(0, dtype=np.float32) for _ in range(4)))


class SpecArrays(NamedTuple):
    """One entry a row, in the order of the arguments of the native `sample` and `reject`.

    order: `order_code`. Row r's late edits are entries edit_start[r] to edit_start[r + 1] of the arrays after it.
    """

    temperature: Float32s
    top_k: Int32s
    top_p: Float32s
    min_p: Float32s
    typical_p: Float32s
    order: npt.NDArray[np.uint32]
    seed: npt.NDArray[np.uint64]
    position: npt.NDArray[np.int64]
    edit_start: Int32s
    edit_ids: Int32s
    edit_bias: Float32s
    edit_factor: Float32s
    edit_count: Float32s
    edit_presence: Float32s

    @classmethod
    def of(
        cls,
        params: Iterable[SamplingParams],
        seeds: Iterable[int],
        positions: Iterable[int],
        late: Iterable[LateEdits | None] = (),
    ) -> SpecArrays:
        """Rows with these parameters, seeds in [0, 2^64), and positions of the token that is chosen.

        late: of each row, what `LogitEdits.late` gives; nothing: no row has late edits.
        """
        params = list(params)
        each = list(late)
        start = np.zeros(len(params) + 1, dtype=np.int32)
        columns: tuple[npt.NDArray[Any], ...] = NO_EDITS
        if any(each):
            rows = [edits or NO_EDITS for edits in each]
            np.cumsum([len(edits.ids) for edits in rows], out=start[1:])
            columns = tuple(np.concatenate(column) for column in zip(*rows, strict=True))
        return cls(
            np.array([p.temperature for p in params], dtype=np.float32),
            np.array([p.top_k for p in params], dtype=np.int32),
            np.array([p.top_p for p in params], dtype=np.float32),
            np.array([p.min_p for p in params], dtype=np.float32),
            np.array([p.typical_p for p in params], dtype=np.float32),
            np.array([order_code(p.late_order) for p in params], dtype=np.uint32),
            np.array(list(seeds), dtype=np.uint64),
            np.array(list(positions), dtype=np.int64),
            start,
            *columns,
        )


def order_code(stages: Sequence[Stage]) -> int:
    """Stages as hexadecimal digits, the first one lowest: their places in `STAGES`, from 1. None: `DEFAULT_ORDER`."""
    return sum((STAGES.index(stage) + 1) << 4 * place for place, stage in enumerate(stages))
