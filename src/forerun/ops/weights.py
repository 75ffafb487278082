"""Weights in the kernels' layout, and raw blocks back to numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from forerun import _native
from forerun.ops.types import GGMLType, TensorData, row_bytes


def packed_bytes(tensor_type: GGMLType, n: int, k: int) -> int:
    """Bytes of an N x K matrix in packed form."""
    return _native.packed_bytes(int(tensor_type), n, k)


def pack(tensor: TensorData, out: npt.NDArray[np.uint8], threads: int) -> None:
    """Packs a matrix (N outputs, K inputs) into `out`, uint8[packed_bytes]: tiles of 16 outputs (csrc/repack.cpp)."""
    n, k = tensor.shape
    _native.pack(int(tensor.type), tensor.data, n, k, out, threads)


def dequantize(tensor: TensorData) -> npt.NDArray[np.float32]:
    """A tensor as float32 in its own shape, exactly as its format defines it."""
    k = tensor.shape[-1]
    n = tensor.data.size // row_bytes(tensor.type, k)
    return _native.dequantize(int(tensor.type), tensor.data, n, k).reshape(tensor.shape)
