"""Gumbel noise as a pure function of (seed, position, token id).

Adding Gumbel(0, 1) noise to logits and taking the largest draws a token from their softmax (the
Gumbel-max trick: Gumbel 1954; Maddison, Tarlow and Minka 2014). Because the noise is computed from
its three keys and not drawn from a stream, the token drawn at a position depends on nothing else:
not on the batch, not on how often or in what order positions are evaluated.

How it is made:

1. `noise_key` hashes seed and position to 64 bits with two rounds of the SplitMix64 finaliser
   (Steele, Lea and Flood 2014; constants of Stafford's variant 13).
2. `noise_bits` hashes the token id to 32 bits with two rounds of `lowbias32` (Wellons,
   "Prospecting for hash functions", 2018), each keyed by half of the key, and keeps the upper 31.
3. `gumbel_from_bits` reads them as v in (0, 1) and returns -log(-log(1 - v)). Large noise, which
   decides who wins, comes from small v, which floats resolve finely: the noise reaches 22.2, an
   event of probability 2^-31 a token. (Forming u = 1 - v first would stop at 16.6, and give a
   token of probability 1e-8 the wrong share.) v is held below 1, so noise is at least -2.81.

Every float operation is a float32 operation in the order written here, and `log32` and `log1m32`
are our own (polynomial of the Cephes library's logf, S. Moshier): math libraries differ in the
last bit, and a bit can change a token. csrc/sample.cpp repeats this page operation by operation
and gives the same bits.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]

_MASK64: Final = 0xFFFF_FFFF_FFFF_FFFF
_STREAM_STEP: Final = 0xD1B5_4A32_D192_ED03
_GOLDEN: Final = 0x9E37_79B9_7F4A_7C15
_SQRT_HALF_BITS: Final = np.int32(0x3F35_04F3)
_LOG_POLYNOMIAL: Final = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
LN2_HIGH: Final = np.float32(0.693359375)
LN2_LOW: Final = np.float32(-2.12194440e-4)
"""ln 2 = LN2_HIGH + LN2_LOW; products of LN2_HIGH with small integers are exact."""


class NoiseKey(NamedTuple):
    """Two unsigned 32-bit numbers that stand for (seed, position), or arrays of them that broadcast with token ids."""

    first: int | npt.NDArray[np.uint32]
    second: int | npt.NDArray[np.uint32]


def _mix64(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58_476D_1CE4_E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D0_49BB_1331_11EB & _MASK64
    return x ^ (x >> 31)


class Stream(IntEnum):
    """What a position's noise is for. Draws of different streams are independent of one another."""

    TOKEN = 0
    """The target's own token: unspeculated decoding, coupled verification, the bonus token."""
    ACCEPT = 1
    """Whether `rejection` accepts a draft."""
    RESIDUAL = 2
    """The token that `rejection` takes instead."""
    DRAFT = 3
    """A drafter's tokens, where they have to be independent of the target's."""


def stream_seed(seed: int, stream: Stream) -> int:
    """The seed, in [0, 2^64), that stands for one stream of `seed`; TOKEN's is the seed itself."""
    return seed & _MASK64 if stream == Stream.TOKEN else _mix64((seed + int(stream) * _STREAM_STEP) & _MASK64)


def nth_seed(seed: int, index: int) -> int:
    """The seed, in [0, 2^64), of text `index` of several for one prompt; that of text 0 is the seed itself."""
    return seed & _MASK64 if index == 0 else _mix64((_mix64(seed & _MASK64) + index * _GOLDEN) & _MASK64)


def noise_key(seed: int, position: int) -> NoiseKey:
    """The key of one position of one request; both arguments are taken modulo 2^64."""
    seeded = _mix64((seed + _GOLDEN) & _MASK64)
    key = _mix64((seeded + position * _GOLDEN) & _MASK64)
    return NoiseKey(key & 0xFFFF_FFFF, key >> 32)


def _mix32(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB_352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846C_A68B)
    return x ^ (x >> np.uint32(16))


def noise_bits(key: NoiseKey, token_ids: npt.ArrayLike) -> Int32s:
    """31 uniform bits a token id: int32[n] in [0, 2^31). The lower, the stronger the noise."""
    ids = np.atleast_1d(np.asarray(token_ids)).astype(np.uint32)
    hashed = _mix32(_mix32(ids ^ np.uint32(key.first)) ^ np.uint32(key.second))
    return (hashed >> np.uint32(1)).astype(np.int32)


def _log_sum(f: Float32s, exponent: Float32s) -> Float32s:
    """log(1 + f) + exponent * ln 2 for f in [sqrt(1/2) - 1, sqrt(2) - 1]."""
    z = f * f
    p = np.full_like(f, _LOG_POLYNOMIAL[0])
    for coefficient in _LOG_POLYNOMIAL[1:]:
        p = p * f + np.float32(coefficient)
    p = p * f * z
    p = p + exponent * LN2_LOW
    p = p - np.float32(0.5) * z
    return (f + p) + exponent * LN2_HIGH


def _split(x: Float32s) -> tuple[Float32s, Int32s]:
    """x = m * 2^exponent with m in [sqrt(1/2), sqrt(2)), for normal positive x."""
    bits = x.view(np.int32) - _SQRT_HALF_BITS
    mantissa = (bits & np.int32(0x7F_FFFF)) + _SQRT_HALF_BITS
    return mantissa.view(np.float32), bits >> np.int32(23)


def log32(x: Float32s) -> Float32s:
    """Natural logarithm of normal positive float32[n], within 2 units in the last place."""
    mantissa, exponent = _split(np.ascontiguousarray(x, dtype=np.float32))
    return _log_sum(mantissa - np.float32(1), exponent.astype(np.float32))


def log1m32(v: Float32s) -> Float32s:
    """log(1 - v) of float32[n] in (0, 1), accurate relative to the result also where v is tiny."""
    mantissa, exponent = _split(np.float32(1) - v)
    f = np.where(exponent == 0, -v, mantissa - np.float32(1))
    return _log_sum(f, exponent.astype(np.float32))


def gumbel_from_bits(bits: Int32s) -> Float32s:
    """Gumbel(0, 1) noise float32[n] from uniform int32[n] in [0, 2^31)."""
    v = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-31)
    v = np.minimum(v, np.float32(1 - 2.0**-24))
    return -log32(-log1m32(v))


def gumbel(seed: int, position: int, token_ids: npt.ArrayLike) -> Float32s:
    """Gumbel(0, 1) noise float32[n] of `token_ids` (integers [n]) at `position` under `seed`."""
    return gumbel_from_bits(noise_bits(noise_key(seed, position), token_ids))
