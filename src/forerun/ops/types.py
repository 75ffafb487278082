"""The tensor types that Forerun reads, and a tensor's raw bytes as they lie in a model file.

Ids, block sizes and byte layouts are those of GGUF,
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and of ggml-common.h in that repository.
A quantised row is a whole number of blocks; blocks never cross rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.errors import ModelFormatError


class BlockLayout(NamedTuple):
    """`elements` weights are stored together in `nbytes` bytes."""

    elements: int
    nbytes: int


class GGMLType(IntEnum):
    """A supported tensor type; the value is its id in a GGUF file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30

    @property
    def block_size(self) -> int:
        """Weights per block: 1 for float types, 32 or 256 for quantised ones."""
        return _LAYOUTS[self].elements

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return _LAYOUTS[self].nbytes


_LAYOUTS: Final = {
    GGMLType.F32: BlockLayout(1, 4),
    GGMLType.F16: BlockLayout(1, 2),
    GGMLType.Q4_0: BlockLayout(32, 18),
    GGMLType.Q4_1: BlockLayout(32, 20),
    GGMLType.Q5_0: BlockLayout(32, 22),
    GGMLType.Q5_1: BlockLayout(32, 24),
    GGMLType.Q8_0: BlockLayout(32, 34),
    GGMLType.Q4_K: BlockLayout(256, 144),
    GGMLType.Q5_K: BlockLayout(256, 176),
    GGMLType.Q6_K: BlockLayout(256, 210),
    GGMLType.BF16: BlockLayout(1, 2),
}

_UNSUPPORTED_NAMES: Final = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    34: "TQ1_0",
    35: "TQ2_0",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}


def unsupported_type_name(type_id: int) -> str | None:
    """The name of a GGUF tensor type that is not supported; None for an id not known at all."""
    return _UNSUPPORTED_NAMES.get(type_id)


def row_bytes(type: GGMLType, n_cols: int) -> int:
    """Bytes of one row of `n_cols` weights.

    Raises ModelFormatError where `n_cols` is not a positive multiple of the type's block size.
    """
    blocks, rest = divmod(n_cols, type.block_size)
    if n_cols <= 0 or rest:
        raise ModelFormatError(
            f"a row of {n_cols} weights can't be stored as {type.name}: the length must be a "
            f"positive multiple of {type.block_size}"
        )
    return blocks * type.block_bytes


@dataclass(frozen=True)
class TensorData:
    """A tensor as stored.

    `shape` is in NumPy order, so a linear layer is (N outputs, K inputs). `data` is uint8[nbytes]:
    rows one after another, each `row_bytes(type, shape[-1])` long. It may be a read-only view of a
    memory map.
    """

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]
