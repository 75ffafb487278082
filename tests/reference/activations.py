"""What the kernels do to a linear layer's input, spelled out: int8 with one scale per row and block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.models.source import ModelSource
from forerun.ops.types import GGMLType

Array = npt.NDArray[np.floating[Any]]

FLOAT_TYPES = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)


def block_of(type: GGMLType) -> int | None:
    """Inputs that share a scale before they meet weights of this type; None: they stay float."""
    if type in FLOAT_TYPES:
        return None
    return 64 if type.block_size == 256 else 32


def quantised(x: Array, block: int) -> Array:
    """x rounded to int8 per row and block, back as numbers. Scale and rounding are float32, as in the kernels."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, block)
    top = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse = np.where(top > 1e-30, np.float32(127) / np.where(top > 0, top, 1), np.float32(0))
    scale = np.where(top > 1e-30, top / np.float32(127), np.float32(0))
    q = np.rint(blocks * inverse)
    return (q.astype(np.float64) * scale.astype(np.float64)).reshape(x.shape).astype(x.dtype)


def engine_hook(source: ModelSource) -> Callable[[str, Array], Array]:
    """For `reference.forward`: quantises what enters each linear layer and stores keys and values in 16 bits."""

    def hook(site: str, x: Array) -> Array:
        if site.endswith((".key", ".value")):
            return x.astype(np.float16).astype(x.dtype)
        name = site if source.has(site) else "token_embd.weight"
        block = block_of(source.tensor(name).type)
        return x if block is None else quantised(x, block)

    return hook
