"""Simple quantisers from float32 to every supported GGUF tensor type, and random valid blocks.

They round to the nearest level of a minimum-to-maximum grid and search for nothing better, so a
file made with them is valid but a little less exact than one made by llama.cpp.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from forerun.ops.types import GGMLType, TensorData, row_bytes

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def _half_bytes(values: Floats) -> Bytes:
    """float[n] to the bytes of its float16, uint8[n, 2]."""
    return values.astype("<f2").reshape(-1, 1).view(np.uint8)


def _rounded(values: Floats) -> Floats:
    """What a reader will see of a value that is stored as float16."""
    return values.astype(np.float16).astype(np.float32)


def _levels(x: Floats, scale: Floats, low: int, high: int) -> npt.NDArray[np.int64]:
    """round(x / scale) clipped to low..high; 0 where the scale is 0."""
    safe = np.where(scale == 0, np.float32(1), scale)
    return np.where(scale == 0, 0, np.clip(np.rint(x / safe), low, high)).astype(np.int64)


def _nibbles(q: npt.NDArray[np.int64]) -> Bytes:
    """int[n, 32] to uint8[n, 16]: byte j has weight j (low half) and weight j + 16 (high half)."""
    return (q[:, :16] & 15 | (q[:, 16:] & 15) << 4).astype(np.uint8)


def _fifth_bits(q: npt.NDArray[np.int64]) -> Bytes:
    """int[n, 32] to uint8[n, 4]: bit j is bit 4 of weight j."""
    return np.packbits((q >> 4 & 1).astype(np.uint8), axis=1, bitorder="little")


def _signed_32(x: Floats, bits: int) -> Bytes:
    top = 1 << (bits - 1)
    peak: Floats = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    d = _rounded(peak / np.float32(-top))
    q = _levels(x, d, -top, top - 1) + top
    parts = [_half_bytes(d)] + ([_fifth_bits(q)] if bits == 5 else [])
    return np.concatenate([*parts, _nibbles(q)], axis=1)


def _affine_32(x: Floats, bits: int) -> Bytes:
    m = _rounded(x.min(axis=1, keepdims=True))
    d = _rounded((x.max(axis=1, keepdims=True) - m) / ((1 << bits) - 1))
    q = _levels(x - m, d, 0, (1 << bits) - 1)
    parts = [_half_bytes(d), _half_bytes(m)] + ([_fifth_bits(q)] if bits == 5 else [])
    return np.concatenate([*parts, _nibbles(q)], axis=1)


def _q8_0(x: Floats) -> Bytes:
    d = _rounded(np.abs(x).max(axis=1, keepdims=True) / 127)
    q = _levels(x, d, -127, 127).astype(np.int8)
    return np.concatenate([_half_bytes(d), q.view(np.uint8)], axis=1)


def pack_scales(scales: npt.NDArray[np.int64], mins: npt.NDArray[np.int64]) -> Bytes:
    """Eight 6-bit scales and minimums, int[n, 8] each, to the 12 bytes of Q4_K and Q5_K."""
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = mins[:, :4] | (mins[:, 4:] >> 4) << 6
    third = scales[:, 4:] & 15 | (mins[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=1).astype(np.uint8)


def _affine_256(x: Floats, bits: int) -> Bytes:
    top = (1 << bits) - 1
    sub = x.reshape(-1, 8, 32)
    low = np.minimum(sub.min(axis=2), 0)
    step = (sub.max(axis=2).clip(min=0) - low) / top
    d = _rounded(step.max(axis=1, keepdims=True) / 63)
    dmin = _rounded((-low).max(axis=1, keepdims=True) / 63)
    scales = _levels(step, d, 0, 63)
    mins = _levels(-low, dmin, 0, 63)
    q = _levels(sub + (dmin * mins)[:, :, None], (d * scales)[:, :, None], 0, top)
    parts = [_half_bytes(d), _half_bytes(dmin), pack_scales(scales, mins)]
    if bits == 5:
        shifts = np.arange(8)[None, :, None]
        parts.append(((q >> 4 & 1) << shifts).sum(axis=1).astype(np.uint8))
    pairs = q.reshape(-1, 4, 2, 32) & 15
    parts.append((pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128).astype(np.uint8))
    return np.concatenate(parts, axis=1)


def _q6_k(x: Floats) -> Bytes:
    sub = x.reshape(-1, 16, 16)
    step = np.abs(sub).max(axis=2) / 31
    d = _rounded(step.max(axis=1, keepdims=True) / 127)
    scales = _levels(step, d, -128, 127)
    q = _levels(sub, (d * scales)[:, :, None], -32, 31) + 32
    # Half n, part p, position i holds weight 128 n + 32 p + i.
    p = q.reshape(-1, 2, 4, 32)
    low = (p[:, :, :2] & 15 | (p[:, :, 2:] & 15) << 4).reshape(-1, 128)
    shifts = 2 * np.arange(4)[None, None, :, None]
    high = (p >> 4 << shifts).sum(axis=2).reshape(-1, 64)
    parts = [low.astype(np.uint8), high.astype(np.uint8), scales.astype(np.int8).view(np.uint8)]
    return np.concatenate([*parts, _half_bytes(d)], axis=1)


def _bf16(x: Floats) -> Bytes:
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").view(np.uint8)


def quantize(array: npt.ArrayLike, type: GGMLType) -> Bytes:
    """float[..., K] to uint8[rows * row_bytes(type, K)]. Values must be finite and fit float16."""
    x = np.ascontiguousarray(array, dtype=np.float32)
    row_bytes(type, x.shape[-1])
    flat = x.reshape(-1)
    if type is GGMLType.F32:
        return flat.astype("<f4").view(np.uint8)
    if type is GGMLType.F16:
        return flat.astype("<f2").view(np.uint8)
    if type is GGMLType.BF16:
        return _bf16(flat)
    blocks = flat.reshape(-1, type.block_size)
    if type is GGMLType.Q8_0:
        out = _q8_0(blocks)
    elif type in (GGMLType.Q4_0, GGMLType.Q5_0):
        out = _signed_32(blocks, 4 if type is GGMLType.Q4_0 else 5)
    elif type in (GGMLType.Q4_1, GGMLType.Q5_1):
        out = _affine_32(blocks, 4 if type is GGMLType.Q4_1 else 5)
    elif type is GGMLType.Q6_K:
        out = _q6_k(blocks)
    else:
        out = _affine_256(blocks, 4 if type is GGMLType.Q4_K else 5)
    return np.ascontiguousarray(out).reshape(-1)


def make_tensor(name: str, array: npt.ArrayLike, type: GGMLType = GGMLType.F32) -> TensorData:
    """`array` quantised to `type` under `name`."""
    shape = tuple(int(n) for n in np.shape(array))
    return TensorData(name, type, shape, quantize(array, type))


_EXTREME_HALVES = (0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 65504.0, -65504.0, 1.0, -1.0)


def _random_halves(n: int, rng: np.random.Generator, extreme: float) -> Bytes:
    values = rng.normal(0, 0.02, n)
    chosen = rng.choice(_EXTREME_HALVES, n)
    return _half_bytes(np.where(rng.random(n) < extreme, chosen, values).astype(np.float32))


_HALF_FIELDS = {
    GGMLType.Q4_0: (0,),
    GGMLType.Q4_1: (0, 2),
    GGMLType.Q5_0: (0,),
    GGMLType.Q5_1: (0, 2),
    GGMLType.Q8_0: (0,),
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2),
    GGMLType.Q6_K: (208,),
}


def random_blocks(type: GGMLType, shape: tuple[int, ...], rng: np.random.Generator, *, extreme: float = 0.1) -> Bytes:
    """uint8[rows * row_bytes] that decode to finite weights of `shape` (NumPy order).

    Every bit pattern of quants and packed scales can occur. A share `extreme` of the blocks (of the
    weights for float types) takes extreme scales: both zeros, subnormal, one, and the largest
    float16 of either sign; as many blocks have all quant bits 0 or all 1. The other scales have a
    standard deviation of 0.02. `extreme=0` gives weights of an ordinary size.
    """
    rows = int(np.prod(shape[:-1], dtype=np.int64))
    n = rows * row_bytes(type, shape[-1]) // type.block_bytes
    if type in (GGMLType.F32, GGMLType.F16, GGMLType.BF16):
        halves = _random_halves(n, rng, extreme).view("<f2").reshape(n)
        return quantize(halves.astype(np.float32), type)
    blocks = rng.integers(0, 256, (n, type.block_bytes), dtype=np.uint8)
    blocks[rng.random(n) < extreme / 2] = 0
    blocks[rng.random(n) < extreme / 2] = 255
    for at in _HALF_FIELDS[type]:
        blocks[:, at : at + 2] = _random_halves(n, rng, extreme)
    return blocks.reshape(-1)
