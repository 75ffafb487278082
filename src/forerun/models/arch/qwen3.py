"""Qwen3, dense (arXiv 2505.09388): Llama's stack, with queries and keys normed per head before the rotation."""

from __future__ import annotations

from forerun.models.arch.base import Recorder
from forerun.ops import Buffer


def record(r: Recorder) -> Buffer:
    """Writes the forward pass on the tape; returns the residual stream before the final norm, of
    the tokens whose next one is wanted.

    The configuration's `qk_norm` adds the norms of queries and keys.
    """
    return r.pre_norm_layers()
