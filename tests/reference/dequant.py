"""Every supported GGUF tensor type to float32, one weight position at a time.

Written from the byte layouts in ggml-common.h and the order of float32 operations in ggml-quants.c
(dequantize_row_*), so the values are ggml's own. Vectorised over blocks only; within a block each
weight is spelled out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.ops.types import GGMLType, row_bytes

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of every block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")[:, 0].astype(np.float32)


def _bit(blocks: Bytes, at: int, bit: int) -> npt.NDArray[np.int32]:
    """Bit `bit` of the little-endian word at byte `at` of every block."""
    return ((blocks[:, at + bit // 8] >> (bit % 8)) & 1).astype(np.int32)


def _q4_0(b: Bytes, y: Floats) -> None:
    d = _half(b, 0)
    for j in range(16):
        q = b[:, 2 + j]
        y[:, j] = ((q & 15).astype(np.int32) - 8) * d
        y[:, j + 16] = ((q >> 4).astype(np.int32) - 8) * d


def _q4_1(b: Bytes, y: Floats) -> None:
    d, m = _half(b, 0), _half(b, 2)
    for j in range(16):
        q = b[:, 4 + j]
        y[:, j] = (q & 15) * d + m
        y[:, j + 16] = (q >> 4) * d + m


def _q5_0(b: Bytes, y: Floats) -> None:
    d = _half(b, 0)
    for j in range(16):
        q = b[:, 6 + j].astype(np.int32)
        y[:, j] = ((q & 15 | _bit(b, 2, j) << 4) - 16) * d
        y[:, j + 16] = ((q >> 4 | _bit(b, 2, j + 16) << 4) - 16) * d


def _q5_1(b: Bytes, y: Floats) -> None:
    d, m = _half(b, 0), _half(b, 2)
    for j in range(16):
        q = b[:, 8 + j].astype(np.int32)
        y[:, j] = (q & 15 | _bit(b, 4, j) << 4) * d + m
        y[:, j + 16] = (q >> 4 | _bit(b, 4, j + 16) << 4) * d + m


def _q8_0(b: Bytes, y: Floats) -> None:
    d = _half(b, 0)
    for j in range(32):
        y[:, j] = b[:, 2 + j].view(np.int8) * d


def _scale_min(scales: Bytes, j: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The 6-bit scale and minimum of sub-block j, packed in 12 bytes (get_scale_min_k4)."""
    if j < 4:
        return scales[:, j] & 63, scales[:, j + 4] & 63
    low, high = scales[:, j + 4] & 15, scales[:, j + 4] >> 4
    return low | (scales[:, j - 4] >> 6) << 4, high | (scales[:, j] >> 6) << 4


def _q4_k(b: Bytes, y: Floats) -> None:
    d, dmin = _half(b, 0), _half(b, 2)
    for j in range(8):
        scale, minimum = _scale_min(b[:, 4:16], j)
        ds, dm = d * scale, dmin * minimum
        for i in range(32):
            byte = b[:, 16 + 32 * (j // 2) + i]
            q = byte >> 4 if j % 2 else byte & 15
            y[:, 32 * j + i] = ds * q - dm


def _q5_k(b: Bytes, y: Floats) -> None:
    d, dmin = _half(b, 0), _half(b, 2)
    for j in range(8):
        scale, minimum = _scale_min(b[:, 4:16], j)
        ds, dm = d * scale, dmin * minimum
        for i in range(32):
            byte = b[:, 48 + 32 * (j // 2) + i]
            q = byte >> 4 if j % 2 else byte & 15
            y[:, 32 * j + i] = ds * (q | (b[:, 16 + i] >> j & 1) << 4) - dm


def _q6_k(b: Bytes, y: Floats) -> None:
    d = _half(b, 208)
    for n in range(2):
        for part in range(4):
            for i in range(32):
                byte = b[:, 64 * n + 32 * (part % 2) + i]
                low = byte >> 4 if part >= 2 else byte & 15
                high = b[:, 128 + 32 * n + i] >> (2 * part) & 3
                q = (low | high << 4).astype(np.int32) - 32
                scale = b[:, 192 + 8 * n + 2 * part + i // 16].view(np.int8)
                y[:, 128 * n + 32 * part + i] = d * scale * q


_BLOCKS = {
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
}


def dequantize(data: Bytes, type: GGMLType, shape: tuple[int, ...]) -> Floats:
    """uint8[rows * row_bytes] to float32[shape], `shape` in NumPy order."""
    rows = int(np.prod(shape[:-1], dtype=np.int64))
    assert data.dtype == np.uint8
    assert data.shape == (rows * row_bytes(type, shape[-1]),)
    raw = np.ascontiguousarray(data)
    if type is GGMLType.F32:
        return raw.view("<f4").reshape(shape).astype(np.float32)
    if type is GGMLType.F16:
        return raw.view("<f2").reshape(shape).astype(np.float32)
    if type is GGMLType.BF16:
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    blocks = raw.reshape(-1, type.block_bytes)
    # Filled position by position: a row per position keeps those writes contiguous.
    values = np.empty((type.block_size, len(blocks)), np.float32).T
    _BLOCKS[type](blocks, values)
    return np.ascontiguousarray(values).reshape(shape)
