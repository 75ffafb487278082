"""Which tokens are allowed, as packed bits.

A mask is uint32[W], W = ceil(V / 32): bit t % 32 of word t // 32 says whether token t is allowed. Bits past the
vocabulary are 0 and never read.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]


def mask_width(vocab_size: int) -> int:
    """Words of a mask."""
    return (vocab_size + 31) // 32


def mask_of(token_ids: Iterable[int], vocab_size: int) -> Words:
    """The mask uint32[W] that allows `token_ids`, each in [0, vocab_size)."""
    allowed = np.zeros(vocab_size, dtype=np.bool_)
    allowed[list(token_ids)] = True
    return pack(allowed)


def pack(allowed: npt.NDArray[np.bool_]) -> Words:
    """Masks uint32[..., W] of bool[..., V]."""
    padding = -allowed.shape[-1] % 32
    padded = np.pad(allowed, [(0, 0)] * (allowed.ndim - 1) + [(0, padding)])
    return np.packbits(padded, axis=-1, bitorder="little").view("<u4").astype(np.uint32, copy=False)


def unpack(words: Words, vocab_size: int) -> npt.NDArray[np.bool_]:
    """bool[..., V] of masks uint32[..., W]."""
    octets = np.ascontiguousarray(words).astype("<u4", copy=False).view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=vocab_size, bitorder="little").view(np.bool_)
